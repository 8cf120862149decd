"""What the tests of the double share: an environment, an engine, weights and how they travel."""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import pickle
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trtllm_double.contract import CONTRACT
from trtllm_double.llm import AsyncLLM
from trtllm_double.memory import SleepConfig
from trtllm_double.sampling import SamplingParams
from trtllm_double.wire import reduce_tensor
from trtllm_double.worker import get_device_uuid

PROMPT = [5, 9, 13, 21]
SIMPLE = {"logprobs": 0, "logprobs_simple_format": True}


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an ``async`` test."""

    @functools.wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        asyncio.run(test(*arguments, **keywords))

    return run


def prepare_environment(monkeypatch: Any) -> None:
    """Make the environment the contract's, with pytest's ``monkeypatch``."""
    for name in list(os.environ):
        if re.match(CONTRACT["environment"]["unset_before_start"], name):
            monkeypatch.delenv(name)
    for setting in CONTRACT["environment"]["set"]:
        name, _, value = setting.partition("=")
        monkeypatch.setenv(name, value)


def make_engine(folder: Path, **kwargs: Any) -> AsyncLLM:
    """Return an engine with dummy weights in float32, whose weights and KV cache are lost when they are released."""
    lost = SleepConfig(restore_modes={"model_weights": "NONE", "kv_cache": "NONE"})
    given = {"dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True, "sleep_config": lost}
    return AsyncLLM(model=str(folder), **(given | kwargs))


def weights_of(folder: Path, factor: float = 1.0) -> dict[str, Tensor]:
    """Return a folder's weights in float32, each times ``factor``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() * factor for name, parameter in model.named_parameters()}


def encode(items: Any) -> str:
    """Return what one worker gets."""
    return base64.b64encode(pickle.dumps(items)).decode()


def payload(weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], num_workers: int = 1) -> dict[str, str]:
    """Return an update with the same weights for each worker."""
    named = dict(weights)
    handed = ([(name, reduce_tensor(value.clone())) for name, value in named.items()] for _ in range(num_workers))
    return {get_device_uuid(device): encode(items) for device, items in enumerate(handed)}


async def sync(llm: AsyncLLM, weights: Mapping[str, Tensor], num_workers: int = 1) -> None:
    """Send all weights in one update, and finalise."""
    await llm.update_weights(payload(weights, num_workers))
    await llm.update_weights(None)


async def ready_engine(folder: Path, **kwargs: Any) -> AsyncLLM:
    """Return an engine that is set up and has the folder's weights."""
    llm = await make_engine(folder, **kwargs)
    await sync(llm, weights_of(folder))
    return llm


def params(**given: Any) -> SamplingParams:
    """Return greedy sampling of 6 tokens without an end, or what is ``given``."""
    return SamplingParams(**({"max_tokens": 6, "end_id": -1, "detokenize": False} | given))


async def complete(llm: AsyncLLM, prompt: list[int] | None = None, **sampling: Any) -> Any:
    """Return the first completion of a prompt."""
    result = await llm.generate_async(prompt or PROMPT, params(**sampling))
    return result.outputs[0]
