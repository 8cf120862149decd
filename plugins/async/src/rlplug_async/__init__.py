"""Partial, over-provisioned and asynchronous rollouts: groups that are generated over several steps."""
