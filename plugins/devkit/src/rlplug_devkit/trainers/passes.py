"""Checks of forward and backward passes: logprobs, packing, gradients and their norm."""

from __future__ import annotations

import pytest

from rlplug_devkit.trainers.base import TrainerChecks
from rlplug_devkit.trainers.bench import TrainerBench, assert_close
from rlplug_devkit.trainers.cases import CHANGED_ROW, LENGTHS, LONG_LENGTHS, MAX_NORM, rows
from rlplug_devkit.trainers.measured import NUM_PASSES

SEQUENCES = (
    "The borders of the sequences are in cu_seq_lens_q, int32 [S + 1]: attention must be causal within each of them, "
    "and position_ids begin at 0 in each. What a trainer fills a row up with must not reach a sequence."
)
REDUCED = (
    "RLFSDP2Strategy sums gradients over ranks, so a module must neither average nor sum them again; a parameter that "
    "ranks of an axis share needs the sum of what each of them computes."
)


class PassChecks(TrainerChecks):
    """Checks of passes over packed rows, beside transformers' model on one sequence at a time."""

    @pytest.mark.parametrize("packing", ["packed", "backwards", "alone"])
    def test_logprobs_equal_transformers(self, bench: TrainerBench, model: str, mesh: str, packing: str) -> None:
        """``packed`` and ``backwards`` have all sequences of a rank in one row, ``alone`` one: a single token too."""
        found, expected = bench.value(model, mesh, "forward")[packing], bench.reference(model).logprobs
        difference = (found - expected).abs()
        row, token = divmod(int(difference.argmax()), difference.shape[1])
        assert not bool((difference > self.tolerance).any()) and bool(found.isfinite().all()), (  # noqa: PT018
            f"logprobs of {model} on {mesh} are off by up to {difference.max():.3g} nats, at token {token} of row "
            f"{row} of lengths {[sum(lengths) for lengths in LENGTHS]}: compare weights (which a sync shows), rotary "
            "embeddings, epsilons of norms and the scale of attention with transformers' configuration. "
            + (SEQUENCES if packing != "alone" else "This row has one sequence, so its borders are not the reason.")
        )

    def test_sequences_do_not_see_each_other(self, bench: TrainerBench, model: str, mesh: str) -> None:
        passes = bench.value(model, mesh, "forward")
        others = [row for row in range(rows().num_sequences) if row != CHANGED_ROW]
        difference = (passes["packed"] - passes["changed"]).abs().amax(dim=1)
        assert float(difference[CHANGED_ROW]) > 0, "the row that was changed has the same logprobs."
        leaks = [row for row in others if not float(difference[row]) <= self.tolerance / 10]
        assert not leaks, (
            f"other tokens in row {CHANGED_ROW} change the logprobs of rows {leaks}, by up to "
            f"{float(difference[others].max()):.3g} nats. {SEQUENCES}"
        )

    def test_long_rows_equal_transformers(self, bench: TrainerBench, model: str, mesh: str) -> None:
        difference = (bench.value(model, mesh, "long") - bench.reference(model).long_logprobs).abs()
        wrong = (difference > 10 * self.tolerance).any(dim=0).nonzero()  # angles of late positions round more
        assert not len(wrong), (
            f"logprobs of {model} on {mesh} in rows of {[sum(lengths) for lengths in LONG_LENGTHS]} tokens are off by "
            f"up to {difference.max():.3g} nats, first at token {int(wrong[0])}: a packed row has any number of tokens."
        )

    def test_passes_leave_nothing_behind(self, bench: TrainerBench, model: str, mesh: str) -> None:
        kept = bench.value(model, mesh, "kept_tensors")
        assert kept < NUM_PASSES, (
            f"{kept} more tensors of {model} on {mesh} are alive after {NUM_PASSES} passes than before: keep none of a "
            "pass, or memory fills up."
        )

    def test_training_passes_repeat(self, bench: TrainerBench, model: str, mesh: str) -> None:
        first, again = bench.value(model, mesh, "twice")
        difference = float((first - again).abs().max())
        assert difference <= self.tolerance / 10, (
            f"logprobs of a training pass of {model} on {mesh} differ by up to {difference:.3g} nats when it is "
            "repeated. Dropout, noise of routers and state of earlier passes must be off in training too: ratios of "
            "probabilities would be of another policy than the one that generated."
        )

    def test_gradients_equal_transformers(self, bench: TrainerBench, model: str, mesh: str) -> None:
        found, expected = bench.value(model, mesh, "gradients"), bench.reference(model).gradients
        advice = (
            "every weight of the checkpoint gets the gradient that transformers gives it, also where a parameter is "
            f"read twice (tied embeddings), and none at the embedding of the padding token. {REDUCED}"
        )
        assert_close(found, expected, self.gradient_tolerance, f"gradients of {model} on {mesh}", advice)

    def test_gradients_do_not_depend_on_micro_batches(self, bench: TrainerBench, model: str, mesh: str) -> None:
        found, whole = bench.value(model, mesh, "split"), bench.value(model, mesh, "gradients")
        advice = (
            "gradients of micro-batches add up, and ranks exchange them in the last one. A forward pass must leave "
            "nothing in the network that the next one reads, and nothing may be divided by a number of tokens."
        )
        what = f"gradients of {model} on {mesh} in several micro-batches and in one"
        assert_close(found, whole, self.gradient_tolerance, what, advice)

    def test_gradient_norm_is_that_of_whole_tensors(self, bench: TrainerBench, model: str, mesh: str) -> None:
        clip, reference = bench.value(model, mesh, "clip"), bench.reference(model)
        expected = reference.gradient_norm
        assert expected > MAX_NORM
        advice = (
            "Gradients must be DTensors whose placements say over which ranks they are sharded (Shard) or equal "
            "(Replicate): the norm sums squares over the former alone, and takes no Partial."
        )
        assert clip["norms"] == pytest.approx([expected] * len(clip["norms"]), rel=self.gradient_tolerance), (
            f"the norms of {model}'s gradients on the ranks of {mesh} are {clip['norms']}, and of the whole tensors "
            f"{expected:.6g}. {advice}"
        )
        scaled = {name: gradient * (MAX_NORM / (expected + 1e-6)) for name, gradient in reference.gradients.items()}
        what = f"clipped gradients of {model} on {mesh}"
        assert_close(clip["clipped"], scaled, self.gradient_tolerance, what, advice)

    def test_output_layer_can_be_fused(self, bench: TrainerBench, model: str, mesh: str) -> None:
        """The optimization ``FusedLogprobs`` replaces the output layer's forward method as this check does."""
        known = bench.trainer.claims.optimizations
        if known is not None and "FusedLogprobs" not in known:
            pytest.skip(f"does not apply: {bench.name} does not claim FusedLogprobs")
        advice = (
            "forward must call get_output_embeddings() once, as a module, with hidden states [1, K, D] at "
            "logits_to_keep, and return its result itself as logits: no cast, scale, slice or copy. Or leave "
            "FusedLogprobs out of claims.optimizations."
        )
        found, expected = bench.value(model, mesh, "fused"), bench.reference(model).gradients
        what = f"gradients of {model} on {mesh} through an output layer that returns logprobs"
        assert_close(found, expected, self.gradient_tolerance, what, advice)
