"""Checks of what an engine reads: prompts as they are, long ones whole, and limits near the context."""

from __future__ import annotations

import pytest

from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault
from rlplug.types import SamplingParams
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import GREEDY, Bench, requests_for


class PromptChecks(EngineChecks):
    """Checks of particular prompts. Ordinary ones are those of the distribution's checks, which come before."""

    def test_prompts_are_used_as_they_are(self, bench: Bench) -> None:
        """Special and padding ids inside prompts are tokens like all others."""
        bench.holding()
        end, pad = bench.spec.eos_token_ids[0], bench.spec.pad_token_id
        plain = bench.prompts("as they are", [5, 2])
        special = [(pad, *plain[0], pad), (*plain[0], end, *plain[1], end), (pad,), (end,), (end, pad, end, pad)]
        requests = requests_for("as they are", [*special, (pad, pad, pad, *plain[0]), (*plain[0], pad, pad)])
        bench.assert_greedy(
            requests,
            bench.generate(requests, GREEDY),
            "The engine must continue prompt_ids: do not add a BOS, strip or mask special or padding ids, truncate, or "
            "convert to text. Only the end tokens of the model's generation_config.json may have an effect.",
        )

    def test_prompts_with_a_common_prefix_are_told_apart(self, bench: Bench) -> None:
        """Prompts of a chat share their first tokens; a prefix cache must compare all that it shares."""
        bench.holding()
        (long,) = bench.prompts("common", [210])
        prompts = [long]
        for place in (209, 208, 150, 70, 0):
            prompts.append((*long[:place], 5 if long[place] != 5 else 6, *long[place + 1 :]))
        requests = requests_for("common", [*prompts, long[:200], long[:208]])
        advice = "These prompts differ in one token: a cache of prefixes must compare every token of what it shares."
        for batch in (requests, requests[::-1]):  # the second time, all are cached
            bench.assert_greedy(batch, bench.generate(batch, GREEDY), advice)

    def test_a_conversation_goes_on(self, bench: Bench) -> None:
        """The next turn's prompt is prompt, completion and observation: its end tokens included."""
        bench.holding("ending")
        requests = bench.requests("conversation", [30, 41, 3, 50], num_samples=3)
        said = bench.generate(requests, SamplingParams(30))
        bench.sync("first")
        observed = bench.prompts("observed", [6] * len(said))
        turns = [(*r.prompt_ids, *c.token_ids.tolist(), *o) for r, c, o in zip(requests, said, observed, strict=True)]
        following = requests_for("next turn", turns)
        advice = "A turn's prompt has the completion before it, token by token: do not strip its end token."
        bench.assert_greedy(following, bench.generate(following, GREEDY), advice)

    def test_long_prompts_are_read_whole(self, bench: Bench) -> None:
        bench.holding()
        context = bench.max_context
        requests = bench.requests("long", [context - GREEDY.max_new_tokens])
        completions = bench.generate(requests, GREEDY)
        advice = (
            f"Every token of a prompt up to max_context={context} less 1 is read: look for a window or a truncation."
        )
        bench.assert_greedy(requests, completions, advice)
        if bench.capabilities.logprobs:
            bench.assert_logprobs(requests, completions, GREEDY, advice)

    def test_context_ends_a_completion(self, bench: Bench) -> None:
        """A request that reaches the end of the context does not shorten the others."""
        bench.holding("endless")
        context, long = bench.max_context, min(200, bench.max_context // 2)
        requests = bench.requests("context", [context - 1, 5, context - 3, context - long])
        completions = bench.generate(requests[:3], SamplingParams(10))
        completions += bench.generate(requests[3:], SamplingParams(long + 10))
        lengths = [len(c.token_ids) for c in completions]
        assert lengths == [1, 10, 3, long], (
            f"prompts that leave 1, 10 of many, 3 and {long} tokens of max_context={context} gave completions of "
            f"{lengths} tokens."
        )
        assert {c.finish_reason for c in completions} == {"length"}, "the end of the context is finish_reason 'length'."

    def test_prompt_beyond_the_context_is_refused_by_request_id(self, bench: Bench) -> None:
        bench.holding()
        context = bench.max_context
        for length in (context, context + 5):
            requests = bench.requests("beyond", [3, length])
            with pytest.raises(RunError) as refusal:
                bench.generate(requests, GREEDY)
            assert not isinstance(refusal.value, EngineFault), (
                f"a prompt that does not fit is no EngineFault, after which the core would ask again: {refusal.value}"
            )
            assert requests[1].request_id in str(refusal.value), (
                f"the error must name the request {requests[1].request_id!r}: {refusal.value}"
            )
        bench.assert_holds("first", "after a refusal", [4], "A refused request must leave the engine usable.")
