"""Answers: which part of a completion is one, what it means, and whether two mean the same.

Nothing here imports rlplug: the processes that score samples need neither torch nor its memory.
"""
