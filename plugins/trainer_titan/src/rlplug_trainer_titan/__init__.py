"""TorchTitan's models and parallelism as a trainer of rlplug."""

from rlplug_trainer_titan.trainer import TorchTitan

__all__ = ["TorchTitan"]
