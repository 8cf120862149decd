"""Checks of other networks than a plain policy: with adapters, of large activations, with a bias; and of a critic."""

from __future__ import annotations

from typing import Final

import pytest

from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.optimizations.bench import OptimizationBench
from rlplug_devkit.optimizations.passes import VALUES
from rlplug_devkit.optimizations.ranks import PLAIN
from rlplug_devkit.optimizations.sizes import SizeChecks
from rlplug_devkit.trainers.bench import assert_close

HEAD_ERROR: Final = 1e-3
"""Largest error of an output layer alone, in nats: logits that are rounded to bfloat16 cost a fifth of it there."""


class NetworkChecks(SizeChecks):
    """Checks beside the plain path of other networks than the policy of the first passes."""

    def test_adapters_learn_alike(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """With ``model.lora``: adapters alone train, and a block's input has no gradient before the first adapter."""
        found, expected = (bench.value(model, mesh, name, "adapters") for name in (variant, PLAIN))
        if refusal := next((each for each in (expected, found) if isinstance(each, str)), None):
            pytest.skip(f"{DOES_NOT_APPLY}a policy with adapters is refused: {refusal}")
        if not all(self.trains(name) for name in bench.value(model, mesh, PLAIN, "structure")["parameters"]):
            pytest.skip(f"{DOES_NOT_APPLY}trains() leaves out weights")
        advice = "Leave requires_grad as it is, and recompute with use_reentrant=False."
        what = f"gradients of {model} with adapters on {mesh} with {variant}"
        assert_close(found, expected, self.gradient_tolerance, what, advice)

    def test_a_critic_learns_alike(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """One that applies to it: a trunk without an output layer, under a value head."""
        if not any("critic" in each.applies_to for each in bench.variants[variant]):
            pytest.skip(f"{DOES_NOT_APPLY}applies_to of {variant} has no critic")
        found, plain = (bench.value(model, mesh, name, "critic") for name in (variant, PLAIN))
        if isinstance(found, str):
            pytest.fail(f"{variant} applies to a critic, and refuses one: {found}", pytrace=False)
        assert len(found["effects"]) > len(plain["effects"]), (
            f"{variant} applies to a critic, and claims no effect on one: leave it out of applies_to."
        )
        what = f"of a critic of {model} on {mesh} with {variant}"
        assert_close(
            {"": found["values"]}, {"": plain["values"]}, self.tolerance, f"values {what}", "Values must be the same."
        )
        if all(self.trains(name) for name in bench.value(model, mesh, PLAIN, "structure")["parameters"]):
            advice = "A backward pass must see what the forward pass did."
            assert_close(found["gradients"], plain["gradients"], self.gradient_tolerance, f"gradients {what}", advice)

    def test_large_activations_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Hidden states of trained models have entries in the thousands, which those of a tiny one have not."""
        found, expected = (
            dict(zip(VALUES, bench.value(model, mesh, name, "large"), strict=True)) for name in (variant, PLAIN)
        )
        advice = "Neither clamp nor scale hidden states: dtypes and norms are the model's."
        what = f"values of {model} on {mesh} with {variant} where hidden states are large"
        assert_close(found, expected, self.tolerance, what, advice)

    def test_the_process_is_left_as_it_was(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Nor the files of the model's folder, from which engines and later runs load."""
        found, plain = (bench.value(model, mesh, name, "process") for name in (variant, PLAIN))
        changes = [text for name, text in found.items() if name not in plain and name not in self.changes_of_process]
        assert not changes, (
            f"with {variant} {'; '.join(changes)}. The run and all other plugins share them: restore what a call sets."
        )

    def test_a_bias_of_the_output_layer_counts(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Some models have one, such as Phi: what takes the place of the layer gets it beside the weight."""
        found, expected = (
            dict(zip(VALUES, bench.value(model, mesh, name, "biased"), strict=True)) for name in (variant, PLAIN)
        )
        what = f"values of {model} on {mesh} with {variant} where the output layer has a bias"
        assert_close(found, expected, self.tolerance, what, "Add the bias to the logits, if there is one.")

    def test_drawn_passes_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Rows of any length, with and without gradients, in micro-batches of any size, between steps."""
        found, expected = (bench.value(model, mesh, name, "drawn") for name in (variant, PLAIN))
        if not all(self.trains(name) for name in bench.value(model, mesh, PLAIN, "structure")["parameters"]):
            pytest.skip(f"{DOES_NOT_APPLY}trains() leaves out weights, so that steps differ")
        what = f"values of {model} on {mesh} with {variant}, of passes and steps in turn"
        advice = "Keep nothing of rows, weights or gradients from one pass to a later one."
        assert_close(found, expected, self.gradient_tolerance, what, advice)

    def test_an_output_layer_in_bfloat16_is_as_exact(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """The output layer alone: in a whole model, what bfloat16 costs in the blocks hides what it costs here."""
        for name, error in bench.value(model, mesh, variant, "head_alone").items():
            assert error <= HEAD_ERROR, (
                f"in bfloat16 {name} of an output layer with {variant} are off by {error:.3g} nats, and by less than "
                f"{HEAD_ERROR:g} without: convert logits to float32 before the softmax."
            )

    def test_what_it_marks_is_read(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Attributes that an optimization adds to modules, where it changes nothing else."""
        unread = bench.value(model, mesh, variant, "unread")
        assert not unread, f"{variant} sets {unread[0]}, and no pass of {model} reads it: nothing was changed."
