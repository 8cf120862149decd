"""Rollouts of several turns: trajectories that grow, the environments that answer them, and the loop between both."""
