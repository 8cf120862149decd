"""Checks of passes whose rows, losses or models are others than those of a first pass, and of what effects count."""

from __future__ import annotations

import re
from typing import Final

from torch import Tensor

from rlplug_devkit.optimizations.bench import OptimizationBench
from rlplug_devkit.optimizations.late import LateChecks
from rlplug_devkit.optimizations.ranks import PLAIN, PLAIN_AGAIN
from rlplug_devkit.trainers.bench import assert_close

BLOCKS: Final = re.compile(r"\b(\d+)(?: of \d+)? (?:\w+ )?blocks?\b")
"""A number of blocks in the description of an effect."""


class SizeChecks(LateChecks):
    """Checks beside the plain path that rows, losses and models of the first passes do not show."""

    def test_other_rows_of_one_size_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """A micro-batch of as many tokens as the one before, whose rows begin elsewhere."""
        found, expected = (bench.value(model, mesh, name, "flipped") for name in (variant, PLAIN))
        advice = "Keep nothing of a pass by its number of tokens: masks and positions are those of its rows."
        assert_close({"": found}, {"": expected}, self.tolerance, f"rows in another order with {variant}", advice)

    def test_gradients_grow_with_the_loss(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """A loss that is ten thousand times as large has gradients that are."""
        found: dict[str, Tensor] = bench.value(model, mesh, variant, "loud")
        everything: dict[str, Tensor] = bench.value(model, mesh, PLAIN, "loud")
        expected = {name: gradient for name, gradient in everything.items() if self.trains(name)}
        advice = "Leave clipping and scaling of gradients to the run, which knows those of all micro-batches."
        what = f"gradients of {model} on {mesh} with {variant} for a large loss, divided by its size,"
        assert_close(found, expected, self.gradient_tolerance, what, advice)

    def test_passes_without_gradients_keep_nothing(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Logprobs of the old policy and of a reference are computed over more tokens than an update's."""
        found, plain = (bench.value(model, mesh, name, "saved_without_gradients") for name in (variant, PLAIN))
        assert found <= plain, (
            f"a pass of {model} with {variant} under torch.no_grad() saves {found} bytes for a backward pass, and "
            f"{plain} without: enable gradients nowhere."
        )

    def test_a_second_model_has_the_same_effects(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Policy, reference and critic have a copy of the object each, which counts on its own model."""
        first = bench.value(model, mesh, variant, "build")["effects"]
        second = bench.value(model, mesh, variant, "effects_of_the_second")
        assert first == second, (
            f"{variant} has the effects {first} on a first model, and {second} on a second one of the same kind: count "
            "on the model of the object, and keep nothing in the class."
        )

    def test_blocks_are_counted_on_the_model(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Where some blocks are edited and others are not, an effect counts no more blocks than that."""
        found, plain, again = (
            bench.value(model, mesh, name, "structure")["modules"] for name in (variant, PLAIN, PLAIN_AGAIN)
        )
        blocks: dict[str, bool] = {}
        for name, text in found.items():
            if place := re.match(r"(.*\blayers\.\d+)\b", name):
                is_edited = plain.get(name) == again.get(name) != text
                blocks[place[1]] = blocks.get(place[1], False) or is_edited
        edited = sum(blocks.values())
        for effect in bench.value(model, mesh, variant, "build")["effects"]:
            claimed = [int(number) for number in BLOCKS.findall(effect)]
            assert not 0 < edited < max(claimed, default=0), (
                f"{variant} claims {effect!r}, and {edited} of {len(blocks)} blocks of {model} are edited: count what "
                "was changed."
            )
