"""Streamed steps: passes over complete groups while others of the same step are generated."""
