"""rlplug: reinforcement-learning post-training of language models as PyTorch Lightning plugins.

A run from Python takes ``RLModule``, ``PromptDataModule`` and ``fit``; plugins are made from ``rlplug.interfaces`` and
``rlplug.types``.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug.data.datamodule import PromptDataModule as PromptDataModule
    from rlplug.data.sources import FileSource as FileSource
    from rlplug.interfaces.trainer import ModelConfig as ModelConfig
    from rlplug.module import RLModule as RLModule
    from rlplug.rewards.function import FunctionReward as FunctionReward
    from rlplug.training.batch_plan import BatchSizes as BatchSizes
    from rlplug.training.validation.config import ValidationConfig as ValidationConfig
    from rlplug.training_run import FitResult as FitResult
    from rlplug.training_run import fit as fit
    from rlplug.types import SamplingParams as SamplingParams

__version__ = version("rlplug")
_LATE = {
    "BatchSizes": "training.batch_plan",
    "FileSource": "data.sources",
    "FitResult": "training_run",
    "FunctionReward": "rewards.function",
    "ModelConfig": "interfaces.trainer",
    "PromptDataModule": "data.datamodule",
    "RLModule": "module",
    "SamplingParams": "types",
    "ValidationConfig": "training.validation.config",
    "fit": "training_run",
}
__getattr__ = late_names("rlplug", _LATE)
__all__ = [*_LATE]
