"""Checks of what an engine gets: requests of one prompt, and objects that the core passes again."""

from __future__ import annotations

import copy
import dataclasses

from rlplug.types import SamplingParams
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import Bench, requests_for


class GivenChecks(EngineChecks):
    """Checks of requests and sampling as a run passes them."""

    def test_each_completion_of_a_prompt_has_its_own_limit(self, bench: Bench) -> None:
        """A group's requests have one prompt, which engines may take as one request for n completions."""
        bench.holding("endless")
        (prompt,) = bench.prompts("of a group", [6])
        limits = [4, None, 1, 9]
        asked = requests_for("of a group", [prompt], num_samples=len(limits))
        requests = [dataclasses.replace(each, max_new_tokens=n) for each, n in zip(asked, limits, strict=True)]
        completions = bench.generate(requests, SamplingParams(7))
        lengths = [len(completion.token_ids) for completion in completions]
        assert lengths == [4, 7, 1, 7], (
            f"requests of one prompt with max_new_tokens={limits} gave completions of {lengths} tokens for "
            f"SamplingParams(7): limits and seeds are a request's own, whichever prompt it shares."
            f"{bench.doubt(requests, completions, SamplingParams(7))}"
        )

    def test_what_it_gets_is_left_as_it_was(self, bench: Bench) -> None:
        """The core passes the same requests and sampling again: to another rank, after a fault, in the next step."""
        engine, requests = bench.holding(), bench.requests("given", [4, 11], num_samples=2)
        extra = {name: value for name, value in self.sampling_extra.items() if name in engine.sampling_extra}
        for sampling in (SamplingParams(6, temperature=0.9, top_p=0.9), SamplingParams(6, extra=extra)):
            given, before = list(requests), copy.deepcopy(sampling)
            bench.generate(given, sampling)
            assert given == requests, "generate changed its list of requests: copy it."
            assert sampling == before, f"generate changed the sampling {before} to {sampling}: copy its options."

    def test_options_of_its_own_have_an_effect(self, bench: Bench) -> None:
        """A user who writes one under ``sampling.extra`` trains on what it says."""
        engine, requests = bench.holding(), bench.requests("own options", [4, 11, 30], num_samples=4)
        plain = bench.generate(requests, SamplingParams(12))
        for name, value in self.sampling_extra.items():
            if name in engine.sampling_extra:
                assert bench.generate(requests, SamplingParams(12, extra={name: value})) != plain, (
                    f"with sampling.extra: {{{name}: {value}}}, generate returns what it returns without: pass on what "
                    "sampling_extra names, or do not name it."
                )
