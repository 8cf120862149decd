"""The memory plan: what will live on each GPU in each phase of a step, whether it fits, and what makes it fit."""
