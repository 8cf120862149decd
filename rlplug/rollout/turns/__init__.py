"""Turns of trajectories: those of the policy, and the steps of environments between them."""
