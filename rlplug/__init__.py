"""rlplug: reinforcement-learning post-training of language models as PyTorch Lightning plugins."""

from importlib.metadata import version

__version__ = version("rlplug")
