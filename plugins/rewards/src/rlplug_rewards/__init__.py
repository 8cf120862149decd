"""Rewards that judge, model, verify or run what a policy wrote; each class in a module of its own."""
