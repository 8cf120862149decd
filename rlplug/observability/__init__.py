"""Observability of a run: phase timer, progress bar, metrics."""
