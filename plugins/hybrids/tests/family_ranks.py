"""One of the ranks that train tiny families, as torchrun starts it: ``python family_ranks.py FOLDER [PADDED ...]``.

``FOLDER`` has a folder of a model for each family. The first rank writes ``results.json`` there: by family, what is
wrong with the gradients of all ranks, with checkpointing, and with those of adapters; empty where nothing is. Those
named are ``PaddedTrainer``'s.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from family_trials import CLOSE, GRADIENTS, KEY, alone_logprobs, farthest, packed_logprobs, rows_for
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from rlplug_hybrids import HybridTrainer, PaddedTrainer
from rlplug_hybrids.decays import own_name
from rlplug_hybrids.layers import read_weights, stateful_layers
from rlplug_optims import GradientCheckpointing
from transformers import AutoModelForCausalLM

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces import ModelConfig
from rlplug.models.build import build_policy
from rlplug.models.loading import copy_part
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.packing_checks import check_loaded
from rlplug.models.transformers_trainer import TransformersTrainer
from rlplug.weight_sync.hf_names import adapters_of


def make_strategy() -> Any:
    """Set a strategy up as the trainer does."""
    strategy: Any = RLFSDP2Strategy(timeout_s=120)
    strategy.accelerator = CPUAccelerator()
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * strategy.cluster_environment.world_size()
    strategy._lightning_module = SimpleNamespace()
    strategy.setup_environment()
    return strategy


def oracle_of(folder: Path) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def loss_of(logprobs: list[torch.Tensor], first: int, step: int) -> Any:
    """Return a loss of rows ``first``, ``first + step`` and so on, with a weight for each token."""
    parts = [
        (own * (first + step * index + torch.linspace(1, 2, len(own)))).sum() for index, own in enumerate(logprobs)
    ]
    return torch.stack(parts).sum()


def full_gradients(policy: Any) -> dict[str, Any]:
    return {own_name(name): p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}


def gradients_are_those_of_one(folder: Path, strategy: Any, trainer: TransformersTrainer) -> str:
    """Say what is wrong with gradients that ranks share, each of which had other rows, with checkpointing."""
    config = ModelConfig(str(folder), dtype="float32")
    policy, _ = build_policy(config, [GradientCheckpointing()], strategy, trainer)
    check_loaded(KEY, policy, strategy)
    rows, rank, size = rows_for(policy, 1), strategy.global_rank, strategy.world_size
    own = rows[rank::size]
    strategy.set_last_micro_batch(policy, is_last=True)
    logprobs = packed_logprobs(policy, own).split([len(row) - 1 for row in own])
    loss_of(list(logprobs), rank, size).backward()
    oracle = oracle_of(folder)
    loss_of([alone_logprobs(oracle, row) for row in rows], 0, 1).backward()
    expected = {name: each.grad for name, each in oracle.named_parameters() if each.grad is not None}
    off = farthest(full_gradients(policy), expected)
    return "" if off < GRADIENTS else f"gradients of {size} ranks differ by {off:.1e}"


def adapters_are_merged_and_train(folder: Path, strategy: Any, trainer: TransformersTrainer) -> str:
    """Say which adapter adds nothing, or something else than its update of the matrix."""
    config = ModelConfig(str(folder), dtype="float32")
    oracle = oracle_of(folder)
    lost = {f"{name}.{part}" for name, layer in stateful_layers(oracle).items() for part in read_weights(layer)}
    linear = {name for name, each in oracle.named_modules() if isinstance(each, torch.nn.Linear)}
    routers = {name for name in linear if hasattr(oracle.get_submodule(name.rpartition(".")[0]), "experts")}
    ends = {name for name, each in oracle.named_modules() if each is oracle.get_output_embeddings()}
    lora = LoRAConfig(rank=2, targets=sorted(linear - lost - routers - ends))
    policy, _ = build_policy(config, [], strategy, trainer, lora=lora)
    adapters, generator = adapters_of(policy), torch.Generator().manual_seed(2)
    assert adapters is not None
    parameters = dict(oracle.named_parameters())
    with torch.no_grad():
        for name, update in adapters.updates.items():
            copy_part(update.up.weight, torch.randn(update.up.weight.shape, generator=generator) * 0.05)
            up, down = update.up.weight.full_tensor(), update.down.weight.full_tensor()
            parameters[adapters.plain_names.get(name, name)].add_(update.scale * up @ down)
    rows = rows_for(policy, 1)
    logprobs = packed_logprobs(policy, rows)
    expected = torch.cat([alone_logprobs(oracle, row) for row in rows])
    off = float((logprobs - expected).detach().abs().max() / max(1.0, float(expected.detach().abs().max())))
    if not off < CLOSE:
        return f"adapters change logprobs otherwise than their matrices would, by {off:.1e}"
    logprobs.square().sum().backward()
    expected.square().sum().backward()
    used = [name for name in adapters.updates if parameters[adapters.plain_names.get(name, name)].grad is not None]
    grads = {name: adapters.updates[name].up.weight.grad for name in used}
    without = [name for name, grad in grads.items() if grad is None or not float(grad.full_tensor().norm())]
    return f"the adapter of {without[0]} has no gradient" if without else ""


def main(folder: Path, padded: Sequence[str]) -> None:
    torch.set_num_threads(1)
    strategy, results = make_strategy(), {}
    for family in sorted(path for path in folder.iterdir() if path.is_dir()):
        problems, trainer = [], PaddedTrainer() if family.name in padded else HybridTrainer()
        for check in (gradients_are_those_of_one, adapters_are_merged_and_train):
            try:
                problems.append(check(family, strategy, trainer))
            except Exception as error:  # noqa: BLE001 - the other families are tried too
                where = traceback.extract_tb(error.__traceback__)[-1]
                problems.append(f"{check.__name__}: {type(error).__name__}: {error} at {where.filename}:{where.lineno}")
        results[family.name] = problems
    if strategy.global_rank == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
