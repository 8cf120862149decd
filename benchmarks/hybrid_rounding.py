"""Measures what bfloat16 alone changes in a hybrid and in a dense policy of the same sizes, on a CPU.

    python benchmarks/hybrid_rounding.py --out OUT
    python benchmarks/hybrid_rounding.py --shape tiny --rows 4 --tokens 32 --out OUT

Both policies are those of hybrid_learning.py, with random weights that bfloat16 holds exactly. A line says how far
logprobs in bfloat16 are from those in float32, in nats: what an engine and a trainer in bfloat16 cannot both keep. For
the hybrid, ``states`` is generation token by token, all in float32 but the recurrent states, which are rounded after
each token: with decays as drawn, which forget within a few tokens, and with ``--decay`` in all heads.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from hybrid_learning import write_model
from hybrids import SHAPES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache


class RoundedStates(DynamicCache):
    """Keeps recurrent states in bfloat16."""

    def update_recurrent_state(self, recurrent_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        rounded = recurrent_states.bfloat16().to(recurrent_states.dtype)
        state: Tensor = super().update_recurrent_state(rounded, *arguments, **named)
        return state


def build(folder: Path, shape: dict[str, Any], is_hybrid: bool) -> Any:
    """Return a policy in float32, with random weights that were rounded to bfloat16."""
    config = AutoConfig.from_pretrained(write_model(folder, shape, is_hybrid))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


def forget_slowly(model: Any, decay: float) -> None:
    """Give all heads about this decay a token: ``exp(-exp(A_log) softplus(a + dt_bias))``, with ``a`` near zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(math.log(-math.log(decay) / math.log1p(math.e)))
        elif name.endswith("dt_bias"):
            parameter.fill_(1.0)


def in_one_pass(model: Any, ids: Tensor) -> Tensor:
    """Return the logprobs of every token but the first, float32 [S, T - 1]."""
    return chosen(model(input_ids=ids, use_cache=False).logits, ids)


def by_tokens(model: Any, ids: Tensor, cache: DynamicCache) -> Tensor:
    """Return the same of tokens that come one after another."""
    tokens = torch.split(ids, 1, dim=1)
    logits = [model(input_ids=each, past_key_values=cache, use_cache=True).logits for each in tokens]
    return chosen(torch.cat(logits, 1), ids)


def chosen(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def say(lines: list[dict[str, Any]], facts: dict[str, Any], first: Tensor, second: Tensor) -> None:
    """Print and keep how far logprobs are apart: all on average, the last eighth of each row, and the largest."""
    gaps = (first - second).abs()
    last = gaps[:, -max(gaps.shape[1] // 8, 1) :]
    found = {"nats": gaps.mean(), "of the last eighth": last.mean(), "largest": gaps.max()}
    lines.append(facts | {name: float(f"{value:.3g}") for name, value in found.items()})
    print(json.dumps(lines[-1]), flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=16, help="of a row")
    parser.add_argument("--generated", type=int, default=256, help="tokens of each of two rows that are generated")
    parser.add_argument("--decay", type=float, default=0.999)
    parser.add_argument("--out", type=Path, help="folder for rounding.jsonl")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 12, (options.rows, options.tokens), generator=generator)
    long = torch.randint(1, 12, (2, options.generated), generator=generator)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("dense", "hybrid"):
            model = build(Path(folder) / policy, SHAPES[options.shape], policy == "hybrid")
            exact = in_one_pass(model, ids)
            say(lines, {"policy": policy, "in bfloat16": "all"}, in_one_pass(model.bfloat16(), ids), exact)
        for decay in (None, options.decay):
            model = build(Path(folder) / "hybrid", SHAPES[options.shape], True)
            if decay is not None:
                forget_slowly(model, decay)
            facts = {"policy": "hybrid", "decay": decay or "drawn"}
            exact = by_tokens(model, long, DynamicCache(config=model.config))
            say(lines, facts | {"in bfloat16": "nothing, one pass"}, in_one_pass(model, long), exact)
            rounded = by_tokens(model, long, RoundedStates(config=model.config))
            say(lines, facts | {"in bfloat16": "states"}, rounded, exact)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "rounding.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
