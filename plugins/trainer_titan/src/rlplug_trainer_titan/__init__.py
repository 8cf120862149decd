"""TorchTitan's models and parallelism as a trainer of rlplug."""
