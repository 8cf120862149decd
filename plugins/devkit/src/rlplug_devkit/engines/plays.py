"""Checks of an engine on drawn rounds: any mixture of requests, between syncs, sleeps and aborts."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from typing import Final

from rlplug.types import Completion, Request, SamplingParams
from rlplug_devkit.claims import applies_to
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import Bench, Variant

NUM_ROUNDS: Final = 24
MOST_REQUESTS: Final = 14
"""Most requests of a call."""
LEAST_TOKENS: Final = 20
"""Tokens whose logprobs are compared: of fewer a mean says little."""
SAMPLINGS: Final = (
    SamplingParams(9, temperature=0.0),
    SamplingParams(24, temperature=0.0),
    SamplingParams(1, temperature=0.0),
    SamplingParams(6),
    SamplingParams(17, temperature=0.6, top_p=0.9),
    SamplingParams(3, temperature=1.3, top_k=11),
)
ADVICE: Final = "Earlier checks passed with calls of one kind each: look at what one call leaves for the next."


class PlayChecks(EngineChecks):
    """Checks of calls that no author has written down."""

    def test_drawn_rounds_are_answered(self, bench: Bench) -> None:
        """Prompts begin alike, requests have limits of their own, and weights change in any order."""
        draw, prompts = random.Random(0), list[tuple[int, ...]]()
        bench.holding()
        for number in range(NUM_ROUNDS):
            variants: tuple[Variant, ...] = ("first", "changed")
            if bench.capabilities.sleep and draw.random() < 0.3:
                bench.sleep()
                bench.wake_and_sync(draw.choice(variants))
            elif draw.random() < 0.4:
                bench.sync(draw.choice(variants), max_bytes=draw.choice([1 << 14, 1 << 30]))
            requests, sampling = self._drawn(bench, draw, f"round {number}", prompts), draw.choice(SAMPLINGS)
            completions = bench.generate(requests, sampling)
            names = [[each.request_id for each in some] for some in (requests, completions)]
            assert names[0] == names[1], f"in round {number + 1} generate answered {names[1]} to {names[0]}. {ADVICE}"
            self._require_answers(bench, requests, completions, sampling)

    @applies_to("streaming")
    def test_drawn_streams_are_answered(self, bench: Bench) -> None:
        """Requests are submitted in portions, with samplings of their own, and some are aborted at any time."""
        draw, prompts = random.Random(1), list[tuple[int, ...]]()
        engine = bench.holding()
        for number in range(NUM_ROUNDS // 2):
            asked: dict[str, tuple[Request, SamplingParams]] = {}
            aborted, back = set[str](), list[Completion]()
            for _ in range(draw.randint(1, 4)):
                # names of an earlier round come again
                portion, sampling = self._drawn(bench, draw, f"portion {len(asked)}", prompts), draw.choice(SAMPLINGS)
                engine.submit(portion, sampling)
                asked |= {request.request_id: (request, sampling) for request in portion}
                back += engine.collect(draw.choice([0.0, 0.05])) if draw.random() < 0.7 else []
                if draw.random() < 0.5:
                    names = draw.sample(sorted(asked), draw.randint(1, len(asked)))
                    engine.abort(names)
                    aborted |= {*names}
            deadline = time.monotonic() + self.deadline_s
            while len(back) < len(asked) and time.monotonic() < deadline:
                back += engine.collect(1.0)
            names = sorted(each.request_id for each in back)
            assert names == sorted(asked), (
                f"in round {number + 1}, of {len(asked)} requests {len(back)} came back within {self.deadline_s:g} s, "
                f"{len({*names})} of them once: each comes back once, aborted or not. {ADVICE}"
            )
            for sampling in SAMPLINGS:
                some = [each for each in back if asked[each.request_id][1] is sampling]
                requests = [asked[each.request_id][0] for each in some]
                self._require_answers(bench, requests, some, sampling, aborted)
            if draw.random() < 0.5:
                bench.sync(draw.choice(["first", "changed"]))

    def _drawn(self, bench: Bench, draw: random.Random, key: str, prompts: list[tuple[int, ...]]) -> list[Request]:
        """Return requests, some with a limit, whose prompts begin alike or are earlier ones, and add new ones."""
        (common,) = bench.prompts("drawn", [64])
        special = (*bench.spec.eos_token_ids, bench.spec.pad_token_id)
        asked = []
        for _ in range(draw.randint(1, MOST_REQUESTS)):
            (own,) = bench.prompts(f"{key}/{draw.random()}", [draw.choice([1, 2, 15, 40])])
            between = (draw.choice(special),) if draw.random() < 0.3 else ()
            begun = common[: draw.choice([0, 0, 1, 16, 32, 33, 64])]
            asked.append(draw.choice(prompts) if prompts and draw.random() < 0.5 else (*begun, *between, *own))
            prompts.append(asked[-1])
        return [
            Request(f"{key}/{place}", prompt, draw.getrandbits(63), draw.choice([None, None, 1, 5, 30]))
            for place, prompt in enumerate(asked)
        ]

    def _require_answers(
        self,
        bench: Bench,
        requests: Sequence[Request],
        completions: Sequence[Completion],
        sampling: SamplingParams,
        aborted: Collection[str] = (),
    ) -> None:
        """Fail unless completions are as long as they may be, of the weights that are held, and of their prompts."""
        ends = {*bench.spec.eos_token_ids}
        for request, completion in zip(requests, completions, strict=True):
            ids = completion.token_ids.tolist()
            own = sampling.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
            longest = min(own, sampling.max_new_tokens, bench.max_context - len(request.prompt_ids))
            is_cut = request.request_id in aborted and completion.finish_reason == "abort"
            is_ended = bool(ids) and ids[-1] in ends
            is_right = len(ids) == longest or (len(ids) < longest and (is_cut or is_ended))
            reason = "abort" if is_cut else "stop" if is_ended else "length"
            assert is_right and completion.finish_reason == reason and len(completion.logprobs) == len(ids), (  # noqa: PT018
                f"{request.request_id} asked for {longest} tokens at most, and got {ids} as "
                f"{completion.finish_reason!r} with {len(completion.logprobs)} logprobs. {ADVICE}"
            )
            assert completion.policy_version == bench.version, (
                f"{request.request_id} has the version {completion.policy_version}. {ADVICE}"
            )
        some = [pair for pair in zip(requests, completions, strict=True) if len(pair[1].token_ids)]
        if not some:
            return
        requests, completions = [request for request, _ in some], [completion for _, completion in some]
        if sampling.temperature == 0:
            bench.assert_greedy(requests, completions, ADVICE)
        if bench.capabilities.logprobs and sum(len(each.token_ids) for each in completions) >= LEAST_TOKENS:
            bench.assert_logprobs(requests, completions, sampling, ADVICE)
