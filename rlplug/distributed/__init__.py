"""FSDP2 strategy, device mesh, tensor parallelism, offload and checkpoints."""
