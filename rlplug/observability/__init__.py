"""Observability of a run: phase timer, profiler, progress bar, CSV metrics and report."""
