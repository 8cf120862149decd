"""Files of checkpoints, their reader and their writers."""
