"""Mutants of this repository's own optimizations, and how many of them the kit catches.

    python -m benchmarks.optimization_kit_mutants --kind optimization --most 60 --out survivors.json

As ``algorithm_kit_mutants``: each mutant is a class or function with one small change. The kit measures it on one rank,
in this process, beside a model without it that was measured once, so that the check of a library that is left as it was
has nothing to compare. Those of prefetch, which need two ranks, and of what needs a GPU are not made.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from rlplug_devkit import OptimizationConformance
from rlplug_devkit.optimizations import ranks
from rlplug_devkit.optimizations.bench import MESHES, OptimizationBench
from rlplug_devkit.trainers.cases import TINY_MODELS, Case, write_model
from rlplug_devkit.trainers.ranks import make_strategy

from benchmarks.algorithm_kit_mutants import is_of_a_message
from benchmarks.mutant_checks import first_failure
from benchmarks.task_kit_checks import Subject
from benchmarks.task_kit_mutants import main
from rlplug.interfaces.memory import ActivationTraits

MODEL: Final = "llama"
MESH: Final = "1 rank"
NEVER: Final = ("test_the_plain_path_is_left_as_it_was",)
NUM_FIRST: Final = [probe.__name__ for probe in ranks.PROBES].index("gradients") + 1
"""Probes that find most, and take little time."""
Outcomes = dict[str, dict[str, Any]]


class NotMeasured(Exception):
    """A check asks for a probe that has not run yet."""


class Bench(OptimizationBench):
    """A bench that measures what it is told to."""

    def outcome(self, model: str, mesh: str, variant: str, probe: str) -> dict[str, Any]:
        if probe not in self._outcomes[model, mesh][variant]:
            raise NotMeasured
        return super().outcome(model, mesh, variant, probe)


class Laboratory:
    """The folder of a tiny model, the process group, and what is measured of the model without an optimization."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="optimization-mutants-"))
        write_model(TINY_MODELS[MODEL], self._folder / "model")
        self._numbers = itertools.count()
        self._strategy = make_strategy(MESHES[MESH])
        self.plain: Mapping[str, Outcomes] = {name: self.measure([]) for name in (ranks.PLAIN, ranks.PLAIN_AGAIN)}

    def measure(self, optimizations: Sequence[Any]) -> Outcomes:
        out = self._folder / str(next(self._numbers))
        out.mkdir()
        case = Case(MODEL, self._folder / "model", MESHES[MESH], out)
        return ranks._outcomes(ranks.Optimized(case, self._strategy, optimizations))

    def first_failure(self, checks: Any) -> str | None:
        """Return the first check that fails, or ``None``; variants are measured one by one."""
        try:
            variants = checks().make_optimizations()
        except Exception as error:  # noqa: BLE001 - the change broke a constructor
            return f"its constructor: {type(error).__name__}"
        for name, optimizations in variants.items():
            bench = Bench({name: optimizations}, [MODEL], False, lambda *_: None, self._folder)
            for probes in (ranks.PROBES[:NUM_FIRST], ranks.PROBES):
                with mock.patch.object(ranks, "PROBES", probes):
                    found = self.measure(checks().make_optimizations()[name])
                bench._outcomes[MODEL, MESH] = {**self.plain, name: found}
                given = {"bench": bench, "model": MODEL, "mesh": MESH, "variant": name}
                failed = first_failure(checks, given, never=NEVER, ignored=NotMeasured)
                if failed:
                    return failed
        return None


# ---- subjects -----------------------------------------------------------------------------------------------------

_ORIGINALS: Final[dict[tuple[ModuleType, str], Any]] = {}


def _put(made: Mapping[str, Any], parts: Mapping[str, tuple[str, ...]]) -> None:
    """Let modules have what was made of their parts, as pickle wants it, and all else as it was."""
    for (module, name), value in _ORIGINALS.items():
        setattr(module, name, value)
    for place, names in parts.items():
        module = importlib.import_module(place)
        for name in names:
            _ORIGINALS.setdefault((module, name), getattr(module, name))
            setattr(module, name, made[name])


@dataclass(frozen=True)
class Variant:
    """Options of an optimization, and what its documentation states of it with them."""

    options: Mapping[str, Any]
    effect: str
    plan: ActivationTraits = ActivationTraits()
    claims: Mapping[str, Any] = field(default_factory=dict)


def optimization(
    name: str,
    parts: Mapping[str, tuple[str, ...]],
    variants: Sequence[Variant],
    defaults: Mapping[str, Any],
    wrong: Sequence[Mapping[str, Any]],
) -> Subject:
    """Return a class with its parts by module of ``rlplug_optims``, its variants, defaults and wrong options."""
    whole = {f"rlplug_optims.{module}": names for module, names in parts.items()}

    def checks(made: Mapping[str, Any]) -> type:
        _put(made, whole)
        named = {str(number): each for number, each in enumerate(variants)}
        refused = [(next(iter(each)), lambda each=each: made[name](**each)) for each in wrong]
        body = {
            "make_optimizations": lambda _: {number: [made[name](**each.options)] for number, each in named.items()},
            "broken_options": lambda _: {"0": refused},
            "expected_defaults": lambda _: {"0": defaults},
            "expected_claims": lambda _: {number: each.claims for number, each in named.items()},
            "expected_effects": lambda _: {number: [each.effect] for number, each in named.items()},
            "expected_plans": lambda _: {number: each.plan for number, each in named.items()},
            "models": (MODEL,),
            "meshes": (MESH,),
            "with_partner": False,
        }
        return type("Checks", (OptimizationConformance,), body)

    return Subject(name, whole, checks)


BLOCKS: Final = ("WrapOrder", "wrap_forward", "num_wrapped")
ENTROPY: Final = ("ChunkedLogprobs", "RecomputedEntropy", "EntropyChunking", "EntropyCheckpointing")
OPTIMIZATIONS: Final = [
    optimization(
        "FusedLogprobs",
        {
            "chunk_logprobs": ("chunk_logprobs", "logits_gradient", "truncated_logprobs"),
            "fused_logprobs": ("FusedLogprobs", "ChunkedLMHead", "_Logits", "_FusedLogprobs", "_add_product"),
        },
        [
            Variant(
                {"chunk_size": 5},
                "output layer fused with logprobs, 5 tokens at a time, not compiled",
                ActivationTraits(logits_chunk=5),
            ),
            Variant(
                {"chunk_size": 1, "recompute": False},
                "output layer fused with logprobs, 1 tokens at a time, not compiled, logits kept for the backward pass",
                ActivationTraits(logits_chunk=1, keeps_logits=True),
            ),
            Variant(
                {"chunk_size": 5, "compile": True},
                "output layer fused with logprobs, 5 tokens at a time, compiled",
                ActivationTraits(logits_chunk=5),
            ),
        ],
        {"chunk_size": 4096, "compile": None, "recompute": True},
        [{"chunk_size": 0}],
    ),
    optimization(
        "EntropyChunking",
        {"entropy_memory": ENTROPY},
        [
            Variant(
                {"chunk_size": 1},
                "logprobs computed from logits 1 tokens at a time",
                claims={"applies_to": ("policy", "reference")},
            )
        ],
        {"chunk_size": 2048},
        [{"chunk_size": 0}],
    ),
    optimization(
        "EntropyCheckpointing",
        {"entropy_memory": ENTROPY},
        [Variant({}, "entropies recomputed in the backward pass", claims={"applies_to": ("policy",)})],
        {},
        [],
    ),
    optimization(
        "GradientCheckpointing",
        {"block_forward": BLOCKS, "gradient_checkpointing": ("GradientCheckpointing", "checkpointed")},
        [
            Variant(
                {"every_n_blocks": 2},
                "gradient checkpointing of 2 of 3 blocks",
                ActivationTraits(recompute="all", recompute_every=2),
            ),
            Variant(
                {"only_if_needed": True, "networks": ["critic", "policy"]},
                "gradient checkpointing of 3 of 3 blocks",
                ActivationTraits(recompute="all"),
                {"only_if_needed": True, "applies_to": ("policy", "critic")},
            ),
        ],
        {"every_n_blocks": 1, "only_if_needed": False, "networks": None},
        [{"every_n_blocks": 0}, {"networks": ["reference"]}],
    ),
    optimization(
        "SelectiveCheckpointing",
        {
            "block_forward": BLOCKS,
            "gradient_checkpointing": ("checkpointed",),
            "selective_checkpointing": ("SelectiveCheckpointing", "OPERATORS"),
        },
        [
            Variant(
                {"only_if_needed": True, "networks": ["policy"]},
                "selective checkpointing of 3 blocks keeps matrix_products, attention",
                ActivationTraits(recompute="all_but_products"),
                {"only_if_needed": True, "applies_to": ("policy",)},
            )
        ],
        {"save": None, "only_if_needed": False, "networks": None},
        [{"save": []}, {"save": ["norms"]}, {"networks": ["reference"]}],
    ),
    optimization(
        "CompileBlocks",
        {
            "block_forward": BLOCKS,
            "compiler": ("stop_when_not_compiled", "let_lengths_vary", "dynamic_dims"),
            "compile_blocks": ("CompileBlocks",),
        },
        [Variant({"backend": "eager"}, "torch.compile on 3 blocks (eager)", ActivationTraits(fused_pointwise=True))],
        {"dynamic": True, "mode": "default", "backend": "inductor", "networks": None},
        [{"networks": ["actor"]}],
    ),
]


if __name__ == "__main__":
    torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment] # not Inductor's time
    laboratory = Laboratory()
    main(
        __doc__,
        {"optimization": OPTIMIZATIONS},
        laboratory.first_failure,
        lambda site: not is_of_a_message(site),
    )
