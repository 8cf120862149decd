"""The update: batch plan, losses, forward and backward passes, validation and the memory plan."""
