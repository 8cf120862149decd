"""Checks of the weight sync: all weights arrive, none of the former ones stays, and an incomplete sync is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault
from rlplug.interfaces.weight_sync import Bucket
from rlplug.types import SamplingParams
from rlplug_devkit.claims import applies_to
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import ADAPTERS, GREEDY, Bench, Variant, requests_for
from rlplug_devkit.models import Family

ALL_ARRIVE = (
    "Copy every tensor of every bucket to where the model reads it, also inside fused or re-packed weights, and do so "
    "before taking the next bucket: a bucket is valid only until then."
)

ADAPTERS_ARE_ADDED = (
    "A layer with an adapter computes W x + alpha / rank * B A x, with the newest A and B and the W of the first sync."
)

VARIANTS: tuple[Variant, ...] = ("changed", "first", "changed", "first")


class RefusalChecks(EngineChecks):
    """Base class of checks of refused syncs."""

    def assert_refuses_sync(self, bench: Bench, buckets: Iterator[Bucket], name: str, what: str) -> None:
        """Fail unless the sync raises and a complete one works afterwards."""
        with pytest.raises(RunError) as refusal:  # noqa: PT012 - says what was expected
            bench.update_weights(buckets)
            pytest.fail(f"update_weights accepted a sync with {what}: it must raise RunError.")
        assert name in str(refusal.value), f"the error must name the weight {name!r}: {refusal.value}"
        self.assert_goes_on(bench, refusal.value, f"a sync with {what}")

    def assert_goes_on(self, bench: Bench, refusal: Exception, what: str) -> None:
        """Fail unless a complete sync works after one that was refused."""
        assert not isinstance(refusal, EngineFault), (
            f"{what} must leave the engine usable, and no EngineFault: {refusal}"
        )
        bench.sync("first")
        bench.assert_holds("first", f"complete after {what}", [3, 20], ALL_ARRIVE)


class WeightChecks(RefusalChecks):
    """Checks of ``update_weights``."""

    def test_new_weights_are_used(self, bench: Bench) -> None:
        bench.holding("first")
        bench.sync("changed")
        bench.assert_holds("changed", "new weights", [2, 30], ALL_ARRIVE)
        bench.sync("first")
        bench.assert_holds("first", "former weights", [2, 30], ALL_ARRIVE)

    def test_a_small_update_arrives(self, bench: Bench) -> None:
        """The update has a learning rate's size, and moves logprobs by more than round-off: see ``nudged``."""
        bench.holding("first")
        bench.sync("nudged")
        requests = requests_for("nudged", bench.nudged_prompts())
        sampling = SamplingParams(1, temperature=0.0)
        advice = (
            f"Each weight moved by about {bench.nudge:.0e}: take every weight of every sync, however little it changed."
        )
        completions = bench.generate(requests, sampling)
        bench.assert_greedy(requests, completions, advice)
        if bench.capabilities.logprobs:
            bench.assert_logprobs(requests, completions, sampling, advice)

    def test_former_versions_come_back(self, bench: Bench) -> None:
        """A run that resumes, or goes back to its best checkpoint, sends weights that an engine may have seen."""
        bench.holding("first")
        for variant in VARIANTS:
            bench.sync(variant)
            bench.assert_holds(variant, f"comes back as {variant}", [2, 30], ALL_ARRIVE)

    def test_sync_of_the_same_version_is_taken(self, bench: Bench) -> None:
        """The core sends a version again after a restart, and its weights may differ after a resume."""
        bench.holding("first")
        advice = "A version says nothing of what the engine holds, nor of what it has answered before."
        bench.assert_holds("first", "same version", [2, 30], advice)
        bench.sync("changed", version=bench.version)
        bench.assert_holds("changed", "same version", [2, 30], advice)

    def test_sync_of_a_lower_version_is_taken(self, bench: Bench) -> None:
        """A run that goes back to a checkpoint counts on from there."""
        bench.holding("first")
        highest = bench.version
        bench.sync("changed", version=0)
        bench.assert_holds("changed", "lower version", [2, 30], "Take every sync, also one of a lower version.")
        versions = {c.policy_version for c in bench.generate(bench.requests("lower", [3]), GREEDY)}
        assert versions == {0}, f"completions carry {versions} after a sync of version 0, which came after {highest}."

    def test_sync_is_complete_when_it_returns(self, bench: Bench) -> None:
        bench.holding("first")
        for variant in VARIANTS:
            bench.sync(variant)
            requests = bench.requests(f"at once {variant}", [2])
            sampling = SamplingParams(1, temperature=0.0)
            advice = "generate may come at once after update_weights: return when all weights are in their places."
            bench.assert_greedy(requests, bench.generate(requests, sampling), advice)

    def test_buckets_are_left_as_they_are(self, bench: Bench) -> None:
        """An engine may read a bucket until it asks for the next; what it changes, it copies."""
        bench.holding("first")
        for max_bytes in (1 << 30, 1):
            bench.sync("first", max_bytes)
        written = bench.policy("first").written
        assert not written, (
            f"update_weights wrote to {len(written)} tensors of its buckets, such as {min(written)!r}: it may only "
            "read them. Copy first."
        )

    def test_buckets_smaller_than_the_largest_tensor(self, bench: Bench) -> None:
        bench.holding("first")
        bench.sync("changed", max_bytes=bench.policy().largest_bytes() // 3)
        bench.assert_holds("changed", "small buckets", [3, 20], ALL_ARRIVE)

    def test_buckets_of_one_tensor(self, bench: Bench) -> None:
        """Weights that engines fuse, such as q, k and v, then come in different buckets."""
        bench.holding("first")
        bench.sync("changed", max_bytes=1)
        bench.assert_holds("changed", "one tensor", [3, 20], ALL_ARRIVE)

    def test_prompt_seen_before_the_sync_is_computed_anew(self, bench: Bench) -> None:
        """The prompt is longer than a block of any engine's prefix cache."""
        bench.holding("first")
        bench.assert_holds("first", "seen", [400, 400], ALL_ARRIVE)
        bench.sync("changed")
        bench.assert_holds(
            "changed",
            "seen",
            [400, 400],
            "This prompt was also used before the sync: update_weights must reset a prefix or KV cache with keys and "
            "values of the former weights.",
        )

    def test_every_bucket_is_consumed_and_reported(self, bench: Bench) -> None:
        bench.holding()
        policy = bench.policy()
        num_bytes = policy.num_bytes()
        sent = list(map(len, policy.buckets(self.placement().device, num_bytes // 4)))
        is_exhausted = False

        def watched() -> Iterator[Bucket]:
            nonlocal is_exhausted
            yield from policy.buckets(self.placement().device, num_bytes // 4)
            is_exhausted = True

        began = time.perf_counter()
        report = bench.update_weights(watched())
        seconds = time.perf_counter() - began
        assert is_exhausted, (
            "update_weights must consume all buckets: producing one is a collective operation, and the other ranks "
            "would wait for ever."
        )
        assert (report.num_buckets, report.num_tensors) == (len(sent), sum(sent)), (
            f"{report} does not count the {len(sent)} buckets of {sum(sent)} tensors that were sent."
        )
        assert report.num_bytes == num_bytes, f"{report} has another num_bytes than the {num_bytes} that were sent."
        assert report.policy_version == bench.version, f"{report} has another version than {bench.version}."
        assert 0 < report.seconds <= seconds, f"{report} says it took longer than the {seconds:.3f} s of the call."

    def test_unknown_name_is_refused(self, bench: Bench) -> None:
        def misnamed() -> Iterator[Bucket]:
            for bucket in bench.policy("changed").buckets(self.placement().device, max_bytes=1):
                yield [(name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upp_roj"), value) for name, value in bucket]

        bench.holding()
        self.assert_refuses_sync(bench, misnamed(), "upp_roj", "a name that the engine does not know")

    @pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
    def test_additional_name_is_refused(self, bench: Bench, place: int) -> None:
        """All of the engine's own weights come too, so that only the name itself can give it away."""

        def extended() -> Iterator[Bucket]:
            buckets = list(bench.policy("changed").buckets(self.placement().device, max_bytes=1))
            name, value = buckets[-1][0]
            stray = [(name.replace(".weight", ".weight_of_another_model"), value.clone())]
            yield from [stray, *buckets] if place == 0 else [*buckets, stray]

        bench.holding()
        what = f"all weights and a name that the engine does not know, which comes {'last' if place else 'first'}"
        self.assert_refuses_sync(bench, extended(), "weight_of_another_model", what)

    @pytest.mark.parametrize("missing", ["embed_tokens", "layers.1.self_attn.k_proj", "layers.0.mlp.gate_proj", "norm"])
    def test_missing_name_is_refused(self, bench: Bench, missing: str) -> None:
        """The missing weight may be one part of a weight that engines fuse."""

        def incomplete() -> Iterator[Bucket]:
            for bucket in bench.policy("changed").buckets(self.placement().device):
                yield [(name, value) for name, value in bucket if f"{missing}.weight" not in name]

        bench.holding()
        self.assert_refuses_sync(bench, incomplete(), missing, f"no {missing}.weight")

    def test_sync_that_breaks_off_is_refused(self, bench: Bench) -> None:
        def broken() -> Iterator[Bucket]:
            yield from list(bench.policy("changed").buckets(self.placement().device, max_bytes=1))[:3]
            raise ConnectionError("the trainer is gone")

        bench.holding()
        what = "buckets that break off with an exception"
        with pytest.raises((ConnectionError, RunError)) as refusal:  # noqa: PT012 - says what was expected
            bench.update_weights(broken())
            pytest.fail(f"update_weights accepted {what}: it must raise that exception, or RunError.")
        self.assert_goes_on(bench, refusal.value, what)


class AdapterChecks(RefusalChecks):
    """Checks of ``PolicySpec.adapters``: an engine of their own serves low-rank adapters beside frozen weights."""

    @applies_to("adapters")
    def test_adapters_are_used_as_they_were_sent(self, bench: Bench) -> None:
        """The prompts are always the same, so that keys and values of former adapters in a cache would show."""
        bench.holding("first", family="adapters")
        for variant in VARIANTS:
            report = bench.sync(variant)
            assert report.num_tensors == 2 * len(ADAPTERS.modules), f"adapters alone were sent, and counted: {report}"
            bench.assert_holds(variant, "adapters", [2, 200], ADAPTERS_ARE_ADDED)
        if bench.capabilities.sleep:
            bench.sleep()
            bench.wake_and_sync("first")
            bench.assert_holds("first", "adapters", [2, 200], f"The engine slept. {ADAPTERS_ARE_ADDED}")

    @applies_to("adapters")
    def test_incomplete_adapters_are_refused(self, bench: Bench) -> None:
        bench.holding("first", family="adapters")
        (bucket,) = bench.policy("changed").buckets(self.placement().device, has_frozen=True)
        name, _ = bucket[-1]
        self.assert_refuses_sync(bench, iter([bucket[:-1]]), name, "adapters that lack a tensor")


class OtherModelChecks(EngineChecks):
    """Checks of ``update_weights`` on other models. They come last, since they need engines of their own."""

    @pytest.mark.parametrize("max_bytes", [1 << 30, 1], ids=["one bucket", "one tensor"])
    def test_tied_embeddings_are_sent_once(self, bench: Bench, max_bytes: int) -> None:
        advice = "Tied weights are sent once, under the first name: the LM head must follow the embedding."
        self._assert_follows(bench, "qwen2", max_bytes, advice)

    @pytest.mark.parametrize("max_bytes", [1 << 30, 1], ids=["one bucket", "one parameter"])
    def test_weights_of_experts_are_used(self, bench: Bench, max_bytes: int) -> None:
        advice = "Each expert's matrices have the names of Hugging Face checkpoints: experts.0.gate_proj.weight."
        self._assert_follows(bench, "experts", max_bytes, advice)

    def _assert_follows(self, bench: Bench, family: Family, max_bytes: int, advice: str) -> None:
        """Fail unless the engine uses new weights after a sync, and the former ones after another."""
        bench.holding("first", family=family)
        bench.sync("changed", max_bytes)
        bench.assert_holds("changed", f"{family}/{max_bytes}", [2, 30], f"{advice} {ALL_ARRIVE}")
        bench.sync("first", max_bytes)
        bench.assert_holds("first", f"{family} again/{max_bytes}", [2, 30], ALL_ARRIVE)
