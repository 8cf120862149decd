"""Rollouts: from prompts to completions. ``rlplug.rollout.engines`` has what authors of engines use."""
