"""Checks of what an author writes down of an optimization: its options, its effects, and its memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from rlplug.interfaces.memory import ActivationTraits
from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.kit import check_refused
from rlplug_devkit.optimizations.base import OptimizationChecks
from rlplug_devkit.optimizations.bench import OptimizationBench


class StatedChecks(OptimizationChecks):
    """Checks beside what a subclass states, each by the name of a variant."""

    def broken_options(self) -> Mapping[str, Sequence[tuple[str, Callable[[], Any]]]]:
        """Return makers of optimizations with one wrong option each, behind the option that the message has to name."""
        return {}

    def expected_defaults(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the defaults of the options of a variant's first optimization that users rely on."""
        return {}

    def expected_claims(self) -> Mapping[str, Mapping[str, Any]]:
        """Return ``applies_to`` and ``only_if_needed`` of a variant's first optimization, or one of them."""
        return {}

    def expected_effects(self) -> Mapping[str, Sequence[str]]:
        """Return what a variant's effects say of a model of three blocks."""
        return {}

    def expected_plans(self) -> Mapping[str, ActivationTraits]:
        """Return the properties of the training step with a variant."""
        return {}

    def test_wrong_options_are_refused(self, variant: str) -> None:
        """By the constructor, and the message names what is wrong."""
        for name, make in _stated("broken_options", self.broken_options(), variant):
            check_refused(name, make)

    def test_defaults_are_the_documented_ones(self, variant: str) -> None:
        """A default that changes, changes what users train who never wrote it."""
        expected = _stated("expected_defaults", self.expected_defaults(), variant)
        parameters = inspect.signature(type(self.make_optimizations()[variant][0])).parameters
        found = {name: parameters[name].default for name in expected if name in parameters}
        assert found == dict(expected), f"defaults are {found}, and documented are {dict(expected)}."

    def test_claims_are_the_expected_ones(self, variant: str) -> None:
        """An option may set them."""
        expected = _stated("expected_claims", self.expected_claims(), variant)
        found = {name: getattr(self.make_optimizations()[variant][0], name) for name in expected}
        assert found == dict(expected), f"{variant} claims {found}, and expected is {dict(expected)}."

    def test_effects_are_the_expected_ones(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """What they count is what was edited."""
        expected = _stated("expected_effects", self.expected_effects(), variant)
        found = bench.value(model, mesh, variant, "build")["effects"]
        assert found == [*expected], f"effects of {variant} on {model} are {found}, and expected are {[*expected]}."

    def test_plans_are_the_expected_ones(self, variant: str) -> None:
        """A plan that is wrong stops runs that fit, or starts those that do not."""
        expected = _stated("expected_plans", self.expected_plans(), variant)
        found = ActivationTraits()
        for each in self.make_optimizations()[variant]:
            found = each.plan_memory(found)
        assert found == expected, f"plan_memory of {variant} returns {found}, and expected is {expected}."


def _stated(method: str, values: Mapping[str, Any], variant: str) -> Any:
    """Return what is stated of a variant; skip the check where that is nothing."""
    if variant not in values:
        pytest.skip(f"{DOES_NOT_APPLY}{method} has nothing of {variant}")
    return values[variant]
