"""Export of the policy as a plain Hugging Face folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from rlplug.distributed.checkpoints.files import EXPORTED
from rlplug.distributed.durable_files import of_user, remove, replace_folder
from rlplug.interfaces.trainer import ModelTrainer
from rlplug.weight_sync.buckets import weight_buckets

MAX_FILE_BYTES: Final = 1 << 30
"""Largest safetensors file, unless a single tensor is larger."""


def export_policy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    folder: Path,
    rank: int,
    trainer: ModelTrainer,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` opens. Collective; rank 0 writes.

    Weights are gathered and written one file after another, so that no rank ever holds the whole model.

    Args:
        model: The policy, sharded or not.
        dtype: Dtype of the weights in the files.
        max_bytes: Largest file, unless a single tensor is larger.
    """
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _save_configs(model, tokenizer, dtype, folder, trainer.architecture(model))
    buckets = weight_buckets(model, dtype, max_bytes, weights=trainer.hf_weights(model))
    files: list[dict[str, Tensor]] = []
    for number, bucket in enumerate(buckets, start=1):
        if rank == 0:
            weights = {name: tensor.cpu().contiguous() for name, tensor in bucket}
            weights |= _saved_buffers(model) if number == 1 else {}
            with of_user(path := folder / _file_name(number)):
                save_file(weights, path, metadata={"format": "pt"})
            files.append({name: tensor.to("meta") for name, tensor in weights.items()})
    if rank == 0:
        _finish(folder, files)


def export_run(module: Any, run_dir: Path) -> list[Path]:
    """Write a run's policy and, where one was trained, its adapter; return the folders that rank 0 wrote. Collective.

    Args:
        module: The :class:`RLModule`.
        run_dir: Folder of the run.
    """
    config, inputs, rank = module.config, module.inputs, module.global_rank
    partial = {name: run_dir / f"{name}.partial" for name in EXPORTED}
    for folder in partial.values() if rank == 0 else ():
        remove(folder)
    by = config.model_trainer
    export_policy(module.models.policy, inputs.tokenizer, inputs.spec.dtype, partial["policy"], rank, by)
    if config.lora is not None:
        from rlplug.models.lora.files import export_adapter

        export_adapter(module.models.policy, config.lora, config.policy, partial["adapter"], rank)
    written = [name for name, folder in partial.items() if rank == 0 and folder.exists()]
    for name in written:
        replace_folder(partial[name], run_dir / name)
    return [run_dir / name for name in written]


def _save_configs(
    model: Any, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, folder: Path, architecture: str
) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [architecture]
    config.save_pretrained(folder)
    if model.generation_config is not None:  # its file is optional
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _saved_buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, by their names there; only some models of transformers have any."""
    if not isinstance(model, PreTrainedModel):
        return {}
    saved = model.state_dict()
    buffers = {name: buffer.cpu() for name, buffer in model.named_buffers() if name in saved}
    renamed: dict[str, Tensor] = revert_weight_conversion(model, buffers) if buffers else {}
    return renamed


def _finish(folder: Path, files: list[dict[str, Tensor]]) -> None:
    """Rename the files as transformers expects, and write their index where there are several."""
    if len(files) == 1:
        (folder / _file_name(1)).rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, weights in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / _file_name(number)).rename(folder / name)
        weight_map |= dict.fromkeys(weights, name)
    total = sum(tensor.nbytes for weights in files for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _file_name(number: int) -> str:
    """Return the name of a file while the number of files is unknown."""
    return f"part-{number:05d}.safetensors"
