"""Requests of rewards to servers: JSON over HTTP, with retries, deadlines, counts and a cache on disk."""
