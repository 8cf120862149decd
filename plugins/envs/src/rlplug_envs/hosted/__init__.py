"""Code of a verifiers environment's process. It imports nothing of rlplug, so that torch is not loaded."""
