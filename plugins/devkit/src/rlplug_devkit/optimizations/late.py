"""Checks of what shows late: after steps, in a second model, in long rows, in bfloat16, and in what is kept."""

from __future__ import annotations

import pytest

from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.optimizations.bench import OptimizationBench
from rlplug_devkit.optimizations.passes import VALUES, PassChecks
from rlplug_devkit.optimizations.ranks import PLAIN, PLAIN_AGAIN
from rlplug_devkit.trainers.bench import assert_close

BFLOAT16_ERROR = 2.0
"""Largest error in bfloat16, as a multiple of the plain path's."""


class LateChecks(PassChecks):
    """Checks that a single pass of a first model does not show."""

    def test_values_after_a_step_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Of passes without gradients, when a step has changed the weights."""
        found, expected = (bench.value(model, mesh, name, "step")["values"] for name in (variant, PLAIN))
        if not all(self.trains(name) for name in bench.value(model, mesh, PLAIN, "structure")["parameters"]):
            pytest.skip(f"{DOES_NOT_APPLY}trains() leaves out weights, so that steps differ")
        advice = "Keep nothing of the weights from one pass to a later one."
        what = f"values of {model} after a step with {variant} on {mesh}"
        assert_close({"": found}, {"": expected}, self.gradient_tolerance, what, advice)

    def test_two_models_do_not_share(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Policy, reference and critic live in one process, each with a copy of the optimization."""
        found, plain = (bench.value(model, mesh, name, "beside") for name in (variant, PLAIN))
        advice = "Keep what belongs to a model in self, not in the class, the module or a global table."
        what = f"values of {model} on {mesh} with {variant}, beside a second model"
        assert_close({"after": found["after"]}, {"after": found["before"]}, self.tolerance, what, advice)
        assert_close({"other": found["other"]}, {"other": plain["other"]}, self.tolerance, what, advice)
        second, unedited, again = (bench.value(model, mesh, name, "second") for name in (variant, PLAIN, PLAIN_AGAIN))
        edited = [name for name in second if unedited.get(name) == again.get(name) != second[name]]
        assert edited, f"{variant} edits the first model of the process, and no second one. {advice}"

    def test_long_rows_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Sequences of up to 1,000 tokens, in a packed row that no usual size of chunks divides."""
        found, expected = (bench.value(model, mesh, name, "long") for name in (variant, PLAIN))
        advice = "Look at the last chunk of a row, and at sizes that nothing divides."
        assert_close({"": found}, {"": expected}, self.tolerance, f"long rows of {model} with {variant}", advice)

    def test_bfloat16_is_as_exact_as_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Runs compute in bfloat16; the plain path in float32 says what is right."""
        exact = bench.value(model, mesh, PLAIN, "forward")["packed"]
        measured = [bench.value(model, mesh, name, "bfloat16") for name in (variant, PLAIN)]
        errors = [float((each["values"] - exact).abs().mean()) for each in measured]
        assert errors[0] <= BFLOAT16_ERROR * errors[1], (
            f"in bfloat16 values of {model} with {variant} are off by {errors[0]:.3g} on average, and by "
            f"{errors[1]:.3g} without: compute sums, exponentials and logarithms in float32, and round as rarely as "
            "the plain path does."
        )
        scales = [each["norms"] for each in measured]
        assert scales[0] <= BFLOAT16_ERROR * scales[1], (
            f"in bfloat16 norms of {model} with {variant} scale rows by {scales[0]:.3g} too much or too little, and by "
            f"{scales[1]:.3g} without: compute means of squares and their roots in float32."
        )

    def test_a_reference_has_the_same_values(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """One that applies to it: a frozen model that runs forward only."""
        if not any("reference" in each.applies_to for each in bench.variants[variant]):
            pytest.skip(f"{DOES_NOT_APPLY}applies_to of {variant} has no reference")
        found, plain = (bench.value(model, mesh, name, "reference") for name in (variant, PLAIN))
        assert len(found["effects"]) > len(plain["effects"]), (
            f"{variant} applies to a reference policy, and claims no effect on one: leave it out of applies_to."
        )
        what = f"values of a reference {model} on {mesh} with {variant}"
        assert_close({"": found["values"]}, {"": plain["values"]}, self.tolerance, what, "Values must be the same.")

    def test_the_plain_path_is_left_as_it_was(self, bench: OptimizationBench, model: str, mesh: str) -> None:
        """A model that the process builds later, without optimizations, computes the same bits."""
        for probe in ("forward", "gradients"):
            found, expected = (bench.value(model, mesh, name, probe) for name in (PLAIN_AGAIN, PLAIN))
            advice = "Change this model's modules, not classes or functions of a library."
            assert_close(found, expected, 0.0, f"a model without optimizations, built later: {probe}", advice)
        own, before = (bench.value(model, mesh, name, "structure")["functions"] for name in (PLAIN_AGAIN, PLAIN))
        changed = sorted(name for name, function in before.items() if own.get(name) != function)
        assert not changed, f"the functions {changed[:3]} of the library were replaced for all models. {advice}"

    def test_claimed_memory_is_saved(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """What ``plan_memory`` says that a backward pass computes again or has elsewhere, no forward pass keeps."""
        found, plain = (bench.value(model, mesh, name, "saved") for name in (variant, PLAIN))
        if not found["planned less"]:
            pytest.skip(f"{DOES_NOT_APPLY}plan_memory of {variant} says that as much is kept")
        assert found["bytes"] < plain["bytes"], (
            f"by its plan_memory {variant} keeps less for the backward pass, and {found['bytes']} bytes of {model} are "
            f"kept, {plain['bytes']} without: runs would be planned for memory that is not there."
        )
        pairs = zip(found["blocks"], plain["blocks"], strict=True)
        recomputed = sum(own < whole / 2 for own, whole in pairs)
        assert recomputed >= found["recomputed"], (
            f"by its plan_memory {variant} recomputes {found['recomputed']} blocks of {model}, and {recomputed} keep "
            "less than half of what they keep without: set recompute_every."
        )
        is_chunked = found["chunk"] is not None and found["chunk"] < plain["logits"]
        assert not is_chunked or found["logits"] < plain["logits"], (
            f"by its plan_memory {variant} has the logits of {found['chunk']} tokens at a time, and those of "
            f"{found['logits']} are kept for the backward pass: set keeps_logits, or compute them again."
        )

    def test_passes_leave_nothing_behind(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Neither tensors and hooks, which add up, nor a pass's graph, with which all its activations stay."""
        found, plain = (bench.value(model, mesh, name, "kept") for name in (variant, PLAIN))
        grown = [f"{number} {what}" for what, number in found.items() if what != "graphs" and number > plain[what]]
        assert not grown, f"each pass of {model} with {variant} leaves {' and '.join(grown)}: let go of them."
        assert found["graphs"] <= plain["graphs"], (
            f"after a backward pass of {model} with {variant} tensors of its graph are kept, and with them "
            "activations: detach() what is kept."
        )

    def test_micro_batches_of_a_row_add_up(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """A row each, of which one has a single token, which trains nothing."""
        self._assert_gradients(bench, model, mesh, variant, "single")

    def test_other_requests_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Logprobs under top-k and top-p, those of greedy sampling, and passes without entropies."""
        found, expected = (bench.value(model, mesh, name, "requests") for name in (variant, PLAIN))
        for request, values in expected.items():
            what = f"{request}: {model} on {mesh} with {variant}"
            advice = "Read all of a LogprobRequest, or leave the LM head alone."
            named = [dict(zip(VALUES, each, strict=True)) for each in (found[request], values)]
            assert_close(named[0], named[1], self.tolerance, what, advice)

    def test_measured_entropies_have_no_gradient(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """Most losses have no term of the entropy; the gradients of logprobs stay."""
        refusal = bench.value(model, mesh, variant, "measured")
        if isinstance(refusal, str):
            pytest.skip(f"{DOES_NOT_APPLY}{variant} refuses it: {refusal}")
        self._assert_gradients(bench, model, mesh, variant, "measured")
