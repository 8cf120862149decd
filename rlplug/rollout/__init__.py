"""The engine that ships with the core, and the buckets in which weights travel to any engine."""
