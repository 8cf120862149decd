"""Loggers of other frameworks by their short names."""

from __future__ import annotations

from typing import Final

from rlplug_migrate.conversion import Draft

_ALWAYS: Final = ("console", "tensorboard", "file", "none", "all")
"""What each run has: its terminal, TensorBoard and ``metrics.jsonl``."""


def append_logger(draft: Draft, name: str, project: str, experiment: str, of: str) -> None:
    """Append a logger of Lightning's; one that it does not have is listed under the key ``of``."""
    if name in _ALWAYS:
        return
    if name == "wandb":
        options = {"project": project, "name": experiment}
        draft.append("trainer.logger", {"class_path": "WandbLogger", "init_args": options})
    elif name == "mlflow":
        options = {"experiment_name": project, "run_name": experiment}
        draft.append("trainer.logger", {"class_path": "MLFlowLogger", "init_args": options})
    else:
        draft.lacks(of, f"not there: {name}; wandb, mlflow, TensorBoard and any logger of Lightning's are")
