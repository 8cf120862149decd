"""Checks that a model with an optimization computes, learns and exports what the plain one does."""

from __future__ import annotations

from typing import Final

import pytest
from torch import Tensor

from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.optimizations.base import OptimizationChecks
from rlplug_devkit.optimizations.bench import OptimizationBench
from rlplug_devkit.optimizations.partners import WITH_PARTNER
from rlplug_devkit.optimizations.ranks import PLAIN
from rlplug_devkit.trainers.bench import assert_close

VALUES: Final = ("logprobs", "entropies", "logprobs as sampled")
"""What a pass returns of each token."""


class PassChecks(OptimizationChecks):
    """Checks of values, gradients and steps, beside the plain path."""

    @pytest.mark.parametrize("packing", ["packed", "alone"])
    def test_values_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str, packing: str
    ) -> None:
        """Logprobs and entropies of passes without gradients, of a packed row and of single sequences."""
        self._assert_values(bench, model, mesh, variant, packing)

    def test_gradients_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        self._assert_gradients(bench, model, mesh, variant, "gradients")

    def test_micro_batches_add_up(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Two of them."""
        self._assert_gradients(bench, model, mesh, variant, "split")

    def test_a_step_changes_the_weights_alike(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        found, before, expected = (
            bench.value(model, mesh, variant, "step")["weights"],
            dict(bench.value(model, mesh, PLAIN, "sync")),
            bench.value(model, mesh, PLAIN, "step")["weights"],
        )
        expected = {name: tensor if self.trains(name) else before[name] for name, tensor in expected.items()}
        advice = "The optimizer must have the parameters that the model computes with."
        what = f"weights of {model} after a step with {variant} on {mesh}"
        assert_close(found, expected, self.gradient_tolerance, what, advice)

    def test_a_resume_repeats_the_next_step(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        resumed = bench.value(model, mesh, variant, "resume")
        advice = "A checkpoint has parameters and optimizer states under the names that the plain model has."
        what = f"weights of {model} after a resume with {variant} on {mesh}"
        assert_close(dict(resumed["resumed"]), dict(resumed["went on"]), self.gradient_tolerance, what, advice)

    def test_later_steps_change_the_weights_alike(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """The second step, after a sync and a checkpoint."""
        found, expected = (dict(bench.value(model, mesh, name, "resume")["went on"]) for name in (variant, PLAIN))
        before = dict(bench.value(model, mesh, PLAIN, "sync"))
        expected = {name: tensor if self.trains(name) else before[name] for name, tensor in expected.items()}
        advice = "Keep nothing of a pass, of a sync or of the weights for a later step."
        what = f"weights of {model} after two steps with {variant} on {mesh}"
        assert_close(found, expected, self.gradient_tolerance, what, advice)

    def test_an_export_is_the_same(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Configuration, generation configuration and tokenizer; weights may differ by round-off of a step."""
        found, expected = (bench.value(model, mesh, name, "exported") for name in (variant, PLAIN))
        assert found.keys() == expected.keys(), f"with {variant} an export has the files {sorted(found)}."
        wrong = [name for name in found if name.endswith(".json") and found[name] != expected[name]]
        assert not wrong, (
            f"with {variant} the exported {wrong} differ from those of the plain model: an engine would load another "
            "one. Leave model.config and model.generation_config alone."
        )

    def test_a_pass_of_no_tokens_adds_nothing(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """A rank without rows left takes passes in which no token trains, so that all ranks take as many."""
        found, plain = (bench.value(model, mesh, name, "nothing") for name in (variant, PLAIN))
        assert not bool(found["values"].any()), f"{variant} has logprobs of tokens that do not train."
        wrong = [name for name, gradient in found["gradients"].items() if not bool((gradient == 0).all())]
        assert not wrong, f"with {variant} a pass in which no token trains has gradients to {wrong[:3]}."
        assert found["gradients"].keys() <= plain["gradients"].keys(), f"{variant} adds gradients to a pass of nothing."

    def test_it_works_with_another_optimization(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """With one before it that wraps blocks, and one after it that computes them again in the backward pass."""
        if not self.with_partner:
            pytest.skip(f"{DOES_NOT_APPLY}with_partner is False")
        both = f"{variant}{WITH_PARTNER}"
        self._assert_values(bench, model, mesh, both, "packed")
        self._assert_gradients(bench, model, mesh, both, "gradients")
        lost = [blocks for blocks in bench.value(model, mesh, both, "not_called").values() if blocks]
        assert not lost, (
            f"with {variant} the blocks {lost[0]} of {model} do not call the forward method that another optimization "
            "has put in place: wrap block.forward as it is, not the class's."
        )

    def _assert_values(self, bench: OptimizationBench, model: str, mesh: str, variant: str, packing: str) -> None:
        found, expected = (
            dict(zip(VALUES, bench.value(model, mesh, name, "forward")[packing], strict=True))
            for name in (variant, PLAIN)
        )
        what = f"{packing}: {model} on {mesh} with {variant}"
        assert_close(found, expected, self.tolerance, what, "Values must be the same.")

    def _assert_gradients(self, bench: OptimizationBench, model: str, mesh: str, variant: str, probe: str) -> None:
        found: dict[str, Tensor] = bench.value(model, mesh, variant, probe)
        everything: dict[str, Tensor] = bench.value(model, mesh, PLAIN, probe)
        expected = {name: gradient for name, gradient in everything.items() if self.trains(name)}
        advice = "A backward pass must see what the forward pass did. Override trains() for weights that do not train."
        what = f"gradients of {model} on {mesh} with {variant} ({probe})"
        assert_close(found, expected, self.gradient_tolerance, what, advice)
