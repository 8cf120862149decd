"""What a run shows: phase timer, profiler, progress, CSV metrics and the report."""
