"""Checks of trainers, and the program of a rank that measures one: ``python -m rlplug.testing.trainers JOB``."""
