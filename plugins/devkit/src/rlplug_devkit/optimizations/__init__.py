"""Checks of optimizations: tiny policies with and without them, on one rank and on two."""
