"""One of the ranks that train policies in bfloat16, as torchrun starts it: ``python decay_ranks.py FOLDER``.

``FOLDER`` has a folder of a model for each family. The first rank writes ``results.json`` there: by family, the decays
that were rounded, by where.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from family_ranks import make_strategy
from family_trials import packed_logprobs, rows_for
from rlplug_hybrids import HybridTrainer
from rlplug_hybrids.layers import stateful_layers
from rlplug_optims import GradientCheckpointing
from safetensors.torch import load_file
from torch import Tensor

from rlplug.interfaces import ModelConfig
from rlplug.interfaces.rollout import Placement, PolicySpec
from rlplug.models.build import build_policy
from rlplug.rollout.hf_engine import HFRollout
from rlplug.weight_sync.buckets import policy_buckets
from rlplug.weight_sync.hf_names import hf_views

DECAYS = ("A_log", "dt_bias")


def seen_by(policy: Any) -> list[Tensor]:
    """Return a list to which each pass adds the decays that its layers read."""
    seen: list[Tensor] = []

    def record(layer: Any, args: Any) -> None:
        own = [getattr(owner, name) for owner in layer.modules() for name in DECAYS if hasattr(owner, name)]
        seen.extend(each.detach().clone() for each in own)  # FSDP frees what it gathered

    for layer in stateful_layers(policy).values():
        layer.register_forward_pre_hook(record)
    return seen


def rounded(folder: Path, strategy: Any) -> dict[str, list[str]]:
    """Return the decays that are rounded, or have no gradient, by where, and the other weights that no sync rounds."""
    config, trainer = ModelConfig(str(folder), dtype="bfloat16"), HybridTrainer()
    policy, _ = build_policy(config, [GradientCheckpointing()], strategy, trainer)
    seen, weights = seen_by(policy), trainer.hf_weights(policy)
    strategy.set_last_micro_batch(policy, is_last=True)
    packed_logprobs(policy, rows_for(policy, 1)).sum().backward()
    grads = {weights[name][0].name: each.grad for name, each in policy.named_parameters() if name.endswith(DECAYS)}
    spec, engine = PolicySpec(str(folder), torch.bfloat16, (1,), 0, 64), HFRollout()
    engine.start(spec, Placement(torch.device("cpu"), strategy.global_rank, strategy.world_size))
    buckets = [list(bucket) for bucket in policy_buckets(policy, spec, 1 << 20, weights)]
    engine.update_weights(buckets, 1)
    sent = {name: each for bucket in buckets for name, each in bucket}
    held = hf_views(engine._model)
    files = load_file(folder / "model.safetensors")
    decays = {name: each for name, each in files.items() if name.endswith(DECAYS)}
    return {
        "passes": [name for name, each in decays.items() if not any(torch.equal(each, other) for other in seen)],
        "gradients": [name for name in decays if not grads[name].full_tensor().any()],
        "sync": [name for name, each in decays.items() if not torch.equal(sent[name], each)],
        "engine": [name for name, each in decays.items() if not torch.equal(held[name], each)],
        "others": [name for name in sent.keys() - decays.keys() if sent[name].dtype != torch.bfloat16],
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    strategy = make_strategy()
    results = {each.name: rounded(each, strategy) for each in sorted(folder.iterdir()) if each.is_dir()}
    if strategy.global_rank == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
