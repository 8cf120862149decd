"""Checks of trainers, and the program of a rank that measures one: ``python -m rlplug_devkit.trainers JOB``."""
