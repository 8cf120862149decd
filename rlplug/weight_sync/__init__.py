"""Weight sync to the rollout engine: buckets, checkpoint names, FP8 quantisation, and checks on both sides."""
