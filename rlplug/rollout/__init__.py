"""Rollouts: from prompts to completions. ``rlplug_engines.colocated`` has what authors of engines use."""
