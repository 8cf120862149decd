"""Tries a tiny policy as a run starts and trains it, and says what came of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch
from hybrid_models import enlarge
from rlplug_hybrids import HybridTrainer, PaddedTrainer
from rlplug_hybrids.layers import stateful_layers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.errors import ConfigError, describe
from rlplug.interfaces import ModelConfig
from rlplug.models.build import empty_network
from rlplug.models.forward import policy_forward
from rlplug.models.hf_files import read_config
from rlplug.models.loading import to_empty_on
from rlplug.models.packing import PackedMicroBatch, PackedTokens
from rlplug.models.packing_checks import check_loaded
from rlplug.models.shape import attention_cost
from rlplug.models.transformers_trainer import TRANSFORMERS, TransformersTrainer
from rlplug.types import MeshSizes, SamplingParams

LENGTHS: Final = (5, 11, 2, 7)
"""Tokens of the sequences of a row: more than a window, less, and one that predicts a single token."""
ONE: Final = MeshSizes(1, 1, 1, 1)
CLOSE: Final = 1e-5  # of logprobs; in gradients round-off adds up
GRADIENTS: Final = 1e-4
LARGEST: Final = 8_000_000  # parameters, so that a size that no pattern knows does not fill the memory
KEY: Final = "model.policy"
Outcome = Literal["right", "refused", "wrong", "not built"]


@dataclass(frozen=True)
class Trial:
    """What came of a policy: ``right``, ``refused`` at start, ``wrong`` later, or ``not built`` by transformers."""

    outcome: Outcome
    reason: str = ""
    trainer: str = "TransformersTrainer"
    logprobs: float = 0.0
    """Largest difference of logprobs from those of each row alone, in the largest of them where that is over 1."""
    gradients: float = 0.0
    """Largest difference of a parameter's gradient, in its norm or in 1% of the model's."""


def tried(config: Any, folder: Path) -> Trial:
    """Try the policy of a configuration: what a run checks at its start, then what training computes.

    The oracle is the model that transformers builds of the same file, in evaluation mode, on each row alone with its
    own attention; it has none of rlplug's changes.
    """
    try:
        config.save_pretrained(folder)
        read = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            size = sum(each.numel() for each in AutoModelForCausalLM.from_config(read).parameters())
        if size > LARGEST:
            return Trial("not built", f"{size:,} parameters: it is not tiny")
        torch.manual_seed(0)
        oracle: Any = AutoModelForCausalLM.from_config(read, dtype=torch.float32, attn_implementation="eager").eval()
        enlarge(oracle)
        with torch.no_grad():
            alone_logprobs(oracle, rows_for(oracle, 1)[0])  # of sizes that do not fit together
        oracle.save_pretrained(folder)
        read.save_pretrained(folder)  # that of the whole, where the policy is the text model in it
    except Exception as error:  # noqa: BLE001 - transformers builds no such model
        return Trial("not built", _line(error))
    first: TransformersTrainer = HybridTrainer() if stateful_layers(oracle) else TRANSFORMERS
    trial = _trial(first, oracle, folder)
    return trial if trial.outcome != "refused" else _trial(PaddedTrainer(), oracle, folder)


def _trial(trainer: TransformersTrainer, oracle: Any, folder: Path) -> Trial:
    """Try a policy with one trainer."""
    own, name = ModelConfig(str(folder), dtype="float32"), type(trainer).__name__
    try:
        network = _started(trainer, own)
    except ConfigError as error:
        return Trial("refused", str(error), name)
    except Exception as error:  # noqa: BLE001 - a start that ends with a traceback
        return Trial("wrong", f"start: {_line(error)}", name)
    try:
        problem, logprobs, gradients = _trained(network, oracle)
        problem = problem or _sent(network, trainer, folder)
    except Exception as error:  # noqa: BLE001 - whatever training raises
        return Trial("wrong", f"training: {_line(error)}", name)
    return Trial("wrong" if problem else "right", problem, name, logprobs, gradients)


def _started(trainer: TransformersTrainer, own: ModelConfig) -> Any:
    """Return a policy as a run has it before the first rollout."""
    trainer.check(own, KEY, ONE)
    attention_cost(read_config(own.path, KEY).get_text_config())
    network: Any = empty_network(trainer, own, KEY)
    to_empty_on(network, torch.device("cpu"))
    network.tie_weights()
    trainer.load_weights(network, own, KEY)
    trainer.hf_weights(network)
    here: Any = SimpleNamespace(
        sequence_rank=0, sequence_size=1, sequence_group=None, root_device=torch.device("cpu"), any_rank=bool
    )
    check_loaded(KEY, network, here)
    return network


def _trained(network: Any, oracle: Any) -> tuple[str, float, float]:
    """Return what is wrong with a policy's logprobs and gradients, if anything is, and how far off they are."""
    rows, others = rows_for(oracle, 1), rows_for(oracle, 2)
    alone = torch.cat([alone_logprobs(oracle, row) for row in rows])
    logprobs = packed_logprobs(network, rows)
    far = float((logprobs - alone).detach().abs().max() / max(1.0, float(alone.detach().abs().max())))
    if not far < CLOSE:
        return f"logprobs differ from each row alone by {far:.1e}", far, 0.0
    weights = torch.linspace(-1, 1, len(alone))
    (weights * alone).sum().backward()
    (weights * logprobs).sum().backward()
    off = farthest(gradients(network), gradients(oracle))
    if not off < GRADIENTS:
        return f"gradients differ from each row alone by {off:.1e}", far, off
    with torch.no_grad():
        again = packed_logprobs(network, rows)
        beside = packed_logprobs(network, [rows[0], *others[1:3], rows[3]])
    if not float((again - logprobs).detach().abs().max()) < CLOSE:  # round-off of a pass without gradients
        return "two passes in training differ", far, off
    first, last = LENGTHS[0] - 1, LENGTHS[-1] - 1
    changed = torch.cat([beside[:first] - again[:first], beside[-last:] - again[-last:]]).abs().max()
    if not float(changed) < CLOSE:
        return f"another neighbour changes logprobs by {float(changed):.1e}", far, off
    return "", far, off


def _sent(network: Any, trainer: TransformersTrainer, folder: Path) -> str:
    """Return what is wrong with the names and values that engines and checkpoints get, against the files."""
    files = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    weights, parameters = trainer.hf_weights(network), dict(network.named_parameters())
    sent = {weight.name: weight.of(parameters[name].detach()) for name, own in weights.items() for weight in own}
    lost = {name for name, _ in network.named_parameters()} - weights.keys()
    wrong = [name for name, value in sent.items() if name not in files or not torch.equal(value, files[name])]
    return f"sends {[*lost, *wrong][0]} otherwise than transformers saves it" if lost or wrong else ""


def rows_for(model: Any, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in LENGTHS]


def alone_logprobs(model: Any, row: Tensor) -> Tensor:
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
    found: Tensor = logits.float().log_softmax(-1).gather(1, row[1:, None])[:, 0]
    return found


def packed_logprobs(model: Any, rows: list[Tensor]) -> Tensor:
    """Return the logprobs of every token but each row's first."""
    lengths = torch.tensor([len(row) for row in rows])
    ids, borders = torch.cat(rows), torch.tensor([0, *lengths.cumsum(0)])
    places = torch.tensor([i for i in range(len(ids)) if i not in borders])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    packed = PackedTokens(
        ids[None],
        positions[None],
        borders.to(torch.int32),
        int(lengths.max()),
        places - 1,
        ids[places],
        torch.arange(len(places)),
        len(places),
    )
    nothing: Any = None  # models read the row alone
    return policy_forward(model, PackedMicroBatch(nothing, packed), SamplingParams(), "none").tokens.logprobs


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def farthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a gradient; infinity where a parameter has one in only one of the models."""
    if expected.keys() != found.keys():
        return float("inf")
    scale = 1e-2 * torch.stack([each.norm() for each in expected.values()]).norm()
    return max(float((found[name] - each).norm() / max(each.norm(), scale)) for name, each in expected.items())


def _line(error: Exception) -> str:
    return re.sub(r"\s+", " ", describe(error))[:300]
