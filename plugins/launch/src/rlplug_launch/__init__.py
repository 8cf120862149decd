"""Launching a run on one or many hosts: what runs where, in which order it starts, who watches it, how it ends."""
