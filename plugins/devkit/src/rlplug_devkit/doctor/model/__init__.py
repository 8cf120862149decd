"""``rlplug doctor --model``: whether a user's own model trains as it should, shown on its own weights."""
