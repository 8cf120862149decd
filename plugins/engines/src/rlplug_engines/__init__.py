"""What authors of rollout engines share: engines on the trainer's GPUs, servers, and models in child processes."""
