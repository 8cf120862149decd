"""rlplug: reinforcement-learning post-training of language models as PyTorch Lightning plugins."""

from importlib.metadata import version

__version__ = version("rlplug")

import sys

from rlplug.plugin_names import MovedModules

sys.meta_path.append(MovedModules())
