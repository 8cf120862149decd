"""The configuration of a run: its files and options read, short forms written out, and all of it checked."""
