"""``rlplug audit-reward``: attacks on a reward before a policy finds them."""
