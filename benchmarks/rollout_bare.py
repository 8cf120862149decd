"""The rollout benchmark's other side: vLLM's ``LLM`` and SGLang's ``Engine`` on the same requests, without rlplug.

``rollout.py --phases bare`` starts it: each engine has a process of its own, as SGLang must, and nothing else is on the
GPU. Arguments are those that the plugin would give it, but for SGLang's sampler, which is its own here, and for what
lets an engine sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rollout_work import Record, engine_options, make_requests, make_spec, timed
from transformers import AutoConfig

from rlplug.interfaces import PolicySpec
from rlplug.types import Request


def vllm(arguments: argparse.Namespace, spec: PolicySpec, requests: Sequence[Request], record: Record) -> None:
    """Generate with vLLM's ``LLM`` in this process; with ``--seeded`` also with each request's seed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # as the plugin has it: the other compiles at every start
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    began = time.perf_counter()
    from rlplug_rollout_vllm.options import VLLMOptions
    from vllm import LLM
    from vllm import SamplingParams as VLLMSamplingParams

    device = torch.device(arguments.device)
    keywords = VLLMOptions(**engine_options(arguments)).arguments(spec, device) | arguments.bare_args
    engine = LLM(**keywords)
    record.say("start", seconds=time.perf_counter() - began, keywords=keywords)
    prompts: Any = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]

    def generate(seeded: bool) -> int:
        sampling = [
            VLLMSamplingParams(
                max_tokens=request.max_new_tokens,
                temperature=1.0,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                seed=request.seed if seeded else None,
            )
            for request in requests
        ]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    record.say("generate", **timed(lambda: generate(seeded=False), arguments.repeats))
    if arguments.seeded:
        record.say("generate, seeded", **timed(lambda: generate(seeded=True), arguments.repeats))
    if arguments.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            generate(seeded=arguments.seeded)
        print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=arguments.profile), flush=True)


def sglang(arguments: argparse.Namespace, spec: PolicySpec, requests: Sequence[Request], record: Record) -> None:
    """Generate with SGLang's ``Engine`` and its own sampler, without seeds."""
    from rlplug_rollout_sglang.options import ENVIRONMENT, SGLangOptions
    from rlplug_rollout_sglang.sampler import FLAG

    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name != FLAG})
    keywords = SGLangOptions(**engine_options(arguments)).arguments(spec)
    del keywords["sampling_backend"]
    keywords |= arguments.bare_args
    began = time.perf_counter()
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**keywords)
    about = engine.get_server_info()
    used = {name: about.get(name) for name in ("version", "sampling_backend", "attention_backend")}
    record.say(
        "start",
        seconds=time.perf_counter() - began,
        kv_cache_tokens=about["max_total_num_tokens"],
        keywords=keywords,
        **used,
    )
    prompts = [list(request.prompt_ids) for request in requests]
    sampling = [
        {"max_new_tokens": request.max_new_tokens, "temperature": 1.0, "ignore_eos": True} for request in requests
    ]

    def generate() -> int:
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        assert all(len(a["meta_info"]["output_token_logprobs"]) == len(a["output_ids"]) for a in answers)
        return sum(len(answer["output_ids"]) for answer in answers)

    record.say("generate", **timed(generate, arguments.repeats))
    engine.shutdown()


def main() -> None:
    arguments = argparse.Namespace(**json.loads(sys.argv[1]))
    record = Record(arguments.engine, "bare", arguments.out and Path(arguments.out), arguments.rank == 0)
    folder = Path(arguments.folder)
    requests = make_requests(arguments, AutoConfig.from_pretrained(folder).vocab_size)
    try:
        {"vllm": vllm, "sglang": sglang}[arguments.engine](arguments, make_spec(folder, in_fp8=False), requests, record)
    except Exception as problem:
        traceback.print_exc()
        record.say("failed", reason=f"{type(problem).__name__}: {problem}")
        raise SystemExit(1) from problem


if __name__ == "__main__":  # SGLang's processes import this file
    main()
