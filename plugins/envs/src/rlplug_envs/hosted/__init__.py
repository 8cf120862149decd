"""What runs in the process of a verifiers environment. Imports nothing of rlplug, so that torch is not loaded."""
