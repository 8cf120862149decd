"""The scored samples of a step: which of them train, and what they say of the policy."""
