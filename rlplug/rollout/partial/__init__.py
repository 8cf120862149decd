"""Partial rollouts: groups that go on in the next step, which of them train, and when a step has enough."""
