"""Rollouts: engine driver and states, agent loop, generator, partial rollouts, and the built-in HF engine."""
