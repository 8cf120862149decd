"""Checks that the parts of a run agree, made before anything is loaded."""
