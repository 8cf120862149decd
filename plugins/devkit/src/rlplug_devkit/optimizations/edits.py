"""Checks of an optimization as an object, and of what building a model with it changes."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Final, get_args

import pytest

from rlplug.errors import describe
from rlplug.interfaces.memory import ActivationTraits
from rlplug.interfaces.optimization import Network
from rlplug_devkit.optimizations.base import OptimizationChecks
from rlplug_devkit.optimizations.bench import OptimizationBench
from rlplug_devkit.optimizations.ranks import PLAIN, PLAIN_AGAIN
from rlplug_devkit.trainers.bench import assert_close

OF_OTHERS: Final = ActivationTraits(
    fused_pointwise=True, fused_norms=True, activations_on_host=True, logits_chunk=77, sequence_parallel=True
)
"""What others say of a step; no optimization sets all of it."""


class EditChecks(OptimizationChecks):
    """Checks of the object, of its claims, and of the model that a run builds with it."""

    # ---- the object ------------------------------------------------------------------------------------------------

    def test_it_can_be_copied(self, variant: str) -> None:
        """Each model of a run has a copy, and each rank another."""
        for each in self.make_optimizations()[variant]:
            try:
                copied = copy.deepcopy(each)
                pickle.dumps(each)
            except Exception as error:  # noqa: BLE001 - the optimization's own
                pytest.fail(
                    f"{type(each).__name__} cannot be copied: {describe(error)}. Make what cannot in before_shard.",
                    pytrace=False,
                )
            assert copied is not each, f"a copy of {type(each).__name__} is the object itself, which models then share."

    def test_without_a_model_it_claims_no_effect(self, variant: str) -> None:
        for each in self.make_optimizations()[variant]:
            try:
                found = each.effects()
            except Exception:  # noqa: BLE001 - a run asks after both edits
                continue
            assert found == [], (
                f"{type(each).__name__} claims {[effect.description for effect in found]} before it saw a model: "
                "look at the model in effects(), as a person would who doubts it."
            )

    def test_its_claims_are_well_formed(self, variant: str) -> None:
        """``applies_to``, ``conflicts``, ``only_if_needed`` and ``plan_memory`` are read before there is a model."""
        for each in self.make_optimizations()[variant]:
            name = type(each).__name__
            unknown = sorted({*each.applies_to} - {*get_args(Network)})
            assert each.applies_to and not unknown, (  # noqa: PT018
                f"applies_to of {name} is {each.applies_to}: give one or more of {get_args(Network)}."
            )
            for other, reason in each.conflicts.items():
                assert other != name, f"{name} conflicts with itself: name other classes."
                assert other.isidentifier(), f"{name} conflicts with {other!r}, which names no class."
                assert isinstance(reason, str), f"conflicts of {name} has no reason for {other}: say why in a sentence."
                assert reason.strip(), f"conflicts of {name} has no reason for {other}: say why in a sentence."
            assert isinstance(each.only_if_needed, bool), f"only_if_needed of {name} is {each.only_if_needed!r}."
            given = ActivationTraits()
            try:
                first, second = (each.plan_memory(given) for _ in range(2))
            except Exception as error:  # noqa: BLE001 - the optimization's own
                pytest.fail(f"plan_memory of {name} raised {describe(error)} before there was a model.", pytrace=False)
            assert isinstance(first, ActivationTraits), f"plan_memory of {name} returned a {type(first).__name__}."
            assert given == ActivationTraits(), f"plan_memory of {name} changed its argument: return replace(...)."
            assert first == second, f"plan_memory of {name} returned {second} in a second call, and {first} before."
            assert each.plan_memory(OF_OTHERS) != first, (
                f"plan_memory of {name} returns {first} whatever it gets: what the trainer and other optimizations say "
                "of the step is lost. Return replace(traits, ...)."
            )
            assert not each.only_if_needed or first != given, (
                f"{name} is used only if memory is needed, and by its plan_memory it saves none."
            )

    # ---- building --------------------------------------------------------------------------------------------------

    def test_it_takes_effect(self, bench: OptimizationBench, model: str, variant: str) -> None:
        """On one of the meshes at least; a variant may refuse the other."""
        built = {mesh: bench.outcome(model, mesh, variant, "build") for mesh in self.meshes}
        refusals = [outcome["refused"] for outcome in built.values() if "refused" in outcome]
        assert len(refusals) < len(built), f"{variant} is refused on every mesh: {refusals[0]}"
        for mesh, outcome in built.items():
            if "refused" in outcome:
                continue
            effects = bench.value(model, mesh, variant, "build")["effects"]
            assert effects, f"{variant} has no effect on {model}."
            unclear = [text for text in effects if not isinstance(text, str) or not text.strip()]
            assert not unclear, f"{variant} describes an effect as {unclear[0]!r}: say what was changed, and how often."

    def test_building_changes_nothing_else(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Neither random generators, nor the process."""
        built, plain = (bench.value(model, mesh, name, "build") for name in (variant, PLAIN))
        assert not built["moved"], f"{variant} moves the global random generators {built['moved']}."
        changed = sorted({*built["changed"]} - {*plain["changed"]})
        assert not changed, f"{variant} changes {changed} of the process, for all others too."

    def test_an_effect_is_in_the_model(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """What ``effects`` reports is an edit of modules, attributes, hooks or sharding, which can be seen."""
        found, plain, again = (
            bench.value(model, mesh, name, "structure")["modules"] for name in (variant, PLAIN, PLAIN_AGAIN)
        )
        edited = [name for name in found if plain.get(name) == again.get(name) != found[name]]
        claims = bench.value(model, mesh, variant, "build")["effects"]
        assert edited, f"{variant} claims {claims}, and the model is as it is without: nothing was changed."

    def test_each_rank_reports_the_same(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        of_ranks = bench.value(model, mesh, variant, "build")["of ranks"]
        assert all(effects == of_ranks[0] for effects in of_ranks), (
            f"{variant} reports {of_ranks} on the ranks of {mesh}: edit the model alike on each, or ranks wait for "
            "each other for ever."
        )

    def test_a_sync_sends_the_same_weights(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        found, expected = (dict(bench.value(model, mesh, name, "sync")) for name in (variant, PLAIN))
        advice = "Wrap forward methods rather than modules, so that names of parameters stay, and leave values alone."
        assert_close(found, expected, 0.0, f"weights of {model} on {mesh} with {variant}", advice)

    def test_parameters_and_checkpoints_are_the_same(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """A run may resume with the optimization or without it."""
        found, plain = (dict(bench.value(model, mesh, name, "structure")) for name in (variant, PLAIN))
        weights = {name: text if self.trains(name) else f"{text}, frozen" for name, text in plain["parameters"].items()}
        plain["parameters"] = weights
        plain["checkpoint"] = [name for name in plain["checkpoint"] if self.trains(name)]
        plain["optimizer"] = [[name for name in group if self.trains(name)] for group in plain["optimizer"]]
        for part in ("parameters", "buffers", "checkpoint", "optimizer", "training"):
            assert found[part] == plain[part], (
                f"{part} of {model} on {mesh} with {variant} differ: {_first_difference(found[part], plain[part])}. "
                "Names, dtypes, shapes and what trains stay; override trains() for weights that do not train."
            )


def _first_difference(found: Any, expected: Any) -> str:
    """Return in words where two descriptions differ."""
    if isinstance(found, dict):
        names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        return f"{names[0]} is {found.get(names[0])}, and without {expected.get(names[0])}"
    if isinstance(found, list):
        others = sorted(map(str, [name for name in [*found, *expected] if (name in found) != (name in expected)]))
        return f"{others[:1]} is in one of them" if others else "another order"
    return f"{found}, and without {expected}"
