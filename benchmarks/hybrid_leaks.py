"""Tries the leak check on policies of several families, as it runs on a GPU in bfloat16.

    python benchmarks/hybrid_leaks.py --out OUT
    python benchmarks/hybrid_leaks.py --families qwen3_5_text lfm2_moe --widths 1 --dtype float32

Builds small policies as a run does and tries them with ``check_loaded``. A line says how far a sequence changed, in the
part that the check allows, so that 1 and more is a refusal: with the layers as they run, where one would be false, and
without what keeps sequences apart, where it should be one. hybrids.py times updates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from hybrids import COMMON, FAMILIES, Measured, run, say, start
from rlplug_hybrids import HybridTrainer
from torch import Tensor
from transformers import AutoConfig

from rlplug.errors import ConfigError
from rlplug.interfaces import ModelConfig
from rlplug.models import packing_checks
from rlplug.models.transformers_trainer import TransformersTrainer
from rlplug.types import MeshSizes

TRIED: Final = ("qwen3_5_text", "qwen3_next", "kimi_linear", "nemotron_h", "falcon_h1", "jamba", "lfm2_moe", "gpt_oss")
"""Families of the leak check: each kind of layer with a state, most with experts, where round-off changes a choice."""
WIDTHS: Final = ("hidden_size", "intermediate_size", "head_dim", "d_head", "d_ssm", "state_size", "d_state", "dt_rank")
"""Ends of the names of options that widen a tiny model."""


def wider(family: str, by: int) -> Any:
    """Return the configuration of a tiny model whose widths are ``by`` times as large."""
    tiny = COMMON | FAMILIES[family]
    grown = {name: value * by for name, value in tiny.items() if name.endswith(WIDTHS) and type(value) is int}
    return AutoConfig.for_model(family, **tiny | grown | {"vocab_size": 4096})


@contextlib.contextmanager
def logprobs_seen() -> Iterator[list[Tensor]]:
    """Collect the logprobs of the passes of ``check_loaded``."""
    seen: list[Tensor] = []
    own = packing_checks.policy_forward

    def forward(*arguments: Any) -> Any:
        output = own(*arguments)
        seen.append(output.tokens.logprobs[-2 * packing_checks.LENGTH :].detach())
        return output

    packing_checks.policy_forward = forward
    try:
        yield seen
    finally:
        packing_checks.policy_forward = own


def try_loaded(line: dict[str, Any], dtype: str, module: Measured) -> None:
    """Fill in what ``check_loaded`` says of a policy, and how close to a refusal it came."""
    with logprobs_seen() as seen:
        try:
            packing_checks.check_loaded("model.policy", module.policy, module.trainer.strategy)
            line["refused"] = ""
        except ConfigError as error:
            line["refused"] = str(error)[:300]
    beside, other, alone = seen
    allowed = (packing_checks.TOLERANCE if dtype == "float32" else packing_checks.ROUNDING) * alone.std()
    line["of allowed, other neighbour"] = round(float((beside - other).abs().mean() / allowed), 4)
    line["of allowed, none"] = round(float((beside - alone).abs().mean() / (2 * allowed)), 4)


def leaks(options: argparse.Namespace, folder: Path, say: Callable[[dict[str, Any]], None]) -> None:
    """Try the check on each family and size, with what keeps sequences apart and without."""
    for family in options.families:
        for by in options.widths:
            for trainer in (HybridTrainer(), TransformersTrainer()):
                line: dict[str, Any] = {"phase": "leaks", "family": family, "times as wide": by}
                line["trainer"] = type(trainer).__name__
                inner = folder / f"{family}-{by}"
                config = ModelConfig(str(inner), init="random", dtype=options.dtype)
                try:
                    wider(family, by).save_pretrained(inner)
                    if isinstance(trainer, HybridTrainer):
                        trainer.check(config, "model.policy", MeshSizes(1, 1, 1, 1))
                    run(Measured(config, trainer, partial(try_loaded, line, options.dtype)))
                except Exception as error:  # noqa: BLE001 - of a configuration or a layer; the others are tried too
                    line["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                say(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--families", nargs="+", choices=FAMILIES, default=list(TRIED))
    add("--widths", nargs="+", type=int, default=[4, 16], help="times the widths of the tests' tiny models")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--out", type=Path, help="folder for hybrids.jsonl")
    options = parser.parse_args()
    _, facts = start()
    print(f"# {json.dumps(facts)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        leaks(options, Path(folder), partial(say, options.out, facts))


if __name__ == "__main__":
    main()
