"""A server of a reward model in this process, which answers as vLLM's or SGLang's does, or as it is told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from judge_server import JudgeServer, Reply, judge_server
from rlplug_rewards.requests.limits import RequestLimits
from rlplug_rewards.reward_model import RemoteRewardModel
from rlplug_rewards.reward_model.endpoint import RewardEndpoint
from transformers import AutoTokenizer

TINY_MODEL = Path(__file__).parents[3] / "tests/model"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}={% endfor %}{{ eos_token }}"
NAME = "reward-model"


def score_of(ids: Sequence[int]) -> float:
    """Return a score that depends on each token and its place, and is no probability."""
    return 2.0 + sum((place + 1) * token for place, token in enumerate(ids)) / 100


def vllm(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    rows = body["input"]
    scores = [score_of(row) for row in rows]
    if body["use_activation"]:
        scores = [1 / (1 + math.exp(-score)) for score in scores]
    data = [
        {"index": index, "label": "LABEL_0", "probs": [score], "num_classes": 1} for index, score in enumerate(scores)
    ]
    return {"model": NAME, "data": data, "usage": {"prompt_tokens": sum(map(len, rows))}} | changes


def sglang(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"embedding": [score_of(row)], "meta_info": {"prompt_tokens": len(row)}} for row in body["input_ids"]]


class RewardReplies:
    """Replies of a server; ``answer`` makes those of the route ``/classify``, and ``fail`` may put a failure before."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any] = vllm) -> None:
        self.answer = answer
        self.fail: Callable[[], Reply | None] = lambda: None
        self.tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
        self.num_scored: list[int] = []
        """Conversations of each request that was not failed."""

    def __call__(self, body: dict[str, Any]) -> Reply:
        if "prompt" in body:
            tokens = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return Reply(json.dumps({"tokens": tokens, "count": len(tokens)}).encode())
        failure = self.fail()
        if failure is not None:
            return failure
        self.num_scored.append(len(body.get("input", body.get("input_ids"))))
        answer = self.answer(body)
        return Reply(answer if isinstance(answer, bytes) else json.dumps(answer).encode())


def card(name: str = NAME, **fields: Any) -> dict[str, Any]:
    return {"id": name, "root": "/models/reward", "max_model_len": 64} | fields


@contextmanager
def reward_server(replies: RewardReplies) -> Iterator[JudgeServer]:
    with judge_server(replies) as server:
        server.models = json.dumps({"data": [card()]}).encode()
        yield server


def remote(server: JudgeServer, folder: Path, /, **options: Any) -> RemoteRewardModel:
    """Return a reward that asks a server, without waits."""
    limits = {"first_backoff_s": 0.001, "max_backoff_s": 0.001, "max_retries": 2} | options.pop("limits", {})
    of_endpoint = {name: options.pop(name) for name in tuple(options) if name in RewardEndpoint.__dataclass_fields__}
    url = server.url.removesuffix("/v1")
    endpoint = RewardEndpoint(**{"url": url, "model": NAME, "limits": RequestLimits(**limits)} | of_endpoint)
    return RemoteRewardModel(str(folder), endpoint, **options)
