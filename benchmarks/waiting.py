"""Rewards, tools and a judge with more calls than places: does a call that only waits for its turn fail?

``python benchmarks/waiting.py [kind ...]`` prints for each kind of work the right answers that failed, and the time as
a ratio to what the work takes: calls / places times the time of one call, measured before.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from rlplug_rewards.code import CodeReward
from rlplug_rewards.judges import PairwiseJudge
from rlplug_rewards.judges.endpoint import Endpoint
from rlplug_rewards.verifiers import MathVerify
from rlplug_sandbox.tool_environment import ToolEnvironment

from rlplug.interfaces.reward import Reward
from rlplug.rewards.runner import RewardRunner
from rlplug.rollout.config import TurnOptions
from rlplug.timeouts import TimeoutExecutor
from rlplug.types import Prompt, Sample, Segment

HANGS: Final = r"\boxed{\sum_{k=1}^{9^{9^{9}}} k^{9^{9}}}"
SUM: Final = r"\int_0^n k\,dk"
"""Its reference: both are notation that math-verify compares."""
SLEEPS: Final = "```python\nimport time\ntime.sleep(3600)\n```"
DOUBLES: Final = "```python\nprint(2 * int(input()))\n```"
CASES: Final = [{"input": str(number), "output": str(2 * number)} for number in range(60)]
JUDGE_S: Final = 0.5
TOOL: Final = '''
import time

def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    time.sleep(1)
    return word
'''


@dataclass(frozen=True)
class Work:
    """What one kind did."""

    num_calls: int
    num_places: int
    num_right: int
    num_failed: int
    """Right ones that got no reward, or less than 1."""
    seconds: float
    work_s: float
    """What the work takes: the sum of its calls, each as long as it was alone, on all places."""


def make_sample(completion: str, group: int, answer: str | None = None, **metadata: Any) -> Sample:
    prompt = Prompt(uid=f"p{group}", text="?", token_ids=[1, 2], answer=answer, metadata=metadata)
    return Sample(
        prompt=prompt,
        group=group,
        token_ids=[1, 2, 3],
        response_mask=[False, False, True],
        rollout_logprobs=[0.0, 0.0, -1.0],
        completion=completion,
        finish_reason="stop",
        policy_version=0,
        segments=(Segment(2, 3, 0, True),),
        last_turn=completion,
    )


def scored(reward: Reward, samples: Sequence[Sample]) -> tuple[list[Sample], float]:
    """Return scored samples and the seconds that it took, at the defaults of ``model.limits``."""
    began = time.monotonic()
    return RewardRunner([reward]).score(samples), time.monotonic() - began


def measured(reward: Reward, num_places: int, slow: Sequence[Sample], right: Sequence[Sample]) -> Work:
    """Score slow samples before right ones."""
    reward.notes()
    alone_s = [scored(reward, samples[:1])[1] for samples in (slow, right) if samples]
    counts = [len(samples) for samples in (slow, right) if samples]
    found, seconds = scored(reward, [*slow, *right])
    num_failed = sum(sample.reward != 1.0 for sample in found[len(slow) :])
    work_s = sum(count * each for count, each in zip(counts, alone_s, strict=True)) / num_places
    return Work(len(found), num_places, len(right), num_failed, seconds, work_s)


def sleeping_code() -> Work:
    cases = CASES[:1]
    slow = [make_sample(SLEEPS, index, cases=cases) for index in range(20)]
    return measured(CodeReward(), 4, slow, [make_sample(DOUBLES, index, cases=cases) for index in range(20, 40)])


def many_cases() -> Work:
    return measured(CodeReward(), 4, [], [make_sample(DOUBLES, index, cases=CASES) for index in range(64)])


def hanging_answers() -> Work:
    slow = [make_sample(HANGS, index, SUM) for index in range(32)]
    return measured(MathVerify(), 4, slow, [make_sample(r"\boxed{42}", index, "42") for index in range(32, 64)])


def slow_tool() -> Work:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slow_tool.py").write_text(TOOL)
        sys.path.insert(0, folder)
        options = TurnOptions()
        environments = [ToolEnvironment(["slow_tool.look_up"], num_workers=2) for _ in range(256)]
        environments[0].tools()
        turn = '<tool_call>{"name": "look_up", "arguments": {"word": "a"}}</tool_call>'

        def step(chosen: Sequence[ToolEnvironment]) -> tuple[list[Any], float]:
            for each in chosen:
                each.reset(make_sample("", 0).prompt, 0)
            began = time.monotonic()
            calls: list[Callable[[], Any]] = [functools.partial(each.step, turn) for each in chosen]
            executor = TimeoutExecutor(options.step_deadline_s, options.max_concurrency)
            done = executor.run(calls, [lambda result: result.observation[0]["content"]] * len(calls))
            return done, time.monotonic() - began

        alone_s = step(environments[:1])[1]
        done, seconds = step(environments)
    num_failed = sum(bool(call.error) or call.value != "a" for call in done)
    return Work(256, 2, 256, num_failed, seconds, 256 * alone_s / 2)


def pairwise_judge() -> Work:
    """Have 64 prompts of 8 completions compared: 3,584 questions, 32 at once, each ``JUDGE_S``."""
    port: list[int] = []
    loop = asyncio.new_event_loop()

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(JUDGE_S)
        message = {"content": '{"reason": "", "winner": "first"}'}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    async def listen() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", answer), web.get("/v1/models", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.append(runner.addresses[0][1])

    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(listen(), loop).result()
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "pair.j2"
        template.write_text("{{ prompt }} A: {{ first }} B: {{ second }}")
        judge = PairwiseJudge(Endpoint(f"http://127.0.0.1:{port[0]}/v1", "model"), str(template))
        samples = [make_sample(f"completion {index}", group) for group in range(64) for index in range(8)]
        found, seconds = scored(judge, samples)
    num_failed = sum(bool(sample.errors) for sample in found)
    num_questions = 64 * 8 * 7
    return Work(num_questions, 32, 512, num_failed, seconds, num_questions * JUDGE_S / 32)


KINDS: Final[dict[str, tuple[str, Callable[[], Work]]]] = {
    "code": ("`CodeReward`: 20 that sleep, 20 right", sleeping_code),
    "cases": ("`CodeReward`: 64 right, of 60 cases each", many_cases),
    "answers": ("`MathVerify`: 32 that hang, 32 right", hanging_answers),
    "tools": ("`ToolEnvironment`: 256 calls of 1 s", slow_tool),
    "judge": ("`PairwiseJudge`: 512 samples, questions of 0.5 s", pairwise_judge),
}


def main(names: Sequence[str]) -> None:
    print("| work | calls | at once | right ones that failed | time / the work's | calls a second, of those possible |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in names or KINDS:
        text, run = KINDS[name]
        work = run()
        ratio = work.seconds / work.work_s
        failed = f"{work.num_failed} of {work.num_right}"
        print(
            f"| {text} | {work.num_calls:,} | {work.num_places} | {failed} | {ratio:.2f} | {1 / ratio:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
