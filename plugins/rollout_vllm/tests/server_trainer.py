"""A rank of a trainer that syncs weights to its servers, generates, and stays: run by ``test_server.py``.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1234 python server_trainer.py MODEL_FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rlplug_rollout_vllm import VLLMServerRollout
from transformers import AutoModelForCausalLM

from rlplug.interfaces import Placement, PolicySpec
from rlplug.types import Request, SamplingParams


def main() -> None:
    folder = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = VLLMServerRollout(max_model_len=512, kv_cache_gib=0.25)
    spec = PolicySpec(folder, torch.float32, (1, 7), 0, 2048)
    engine.start(spec, Placement(torch.device("cpu"), rank, dist.get_world_size()))
    tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    report = engine.update_weights(iter([tensors[:3], tensors[3:]]), 4)
    requests = [Request(f"{rank}/{i}", (5, 6 + i), i) for i in range(3)]
    completions = engine.generate(requests, SamplingParams(5, temperature=0.0))
    result = {
        "token_ids": [completion.token_ids.tolist() for completion in completions],
        "versions": [completion.policy_version for completion in completions],
        "num_tensors": report.num_tensors,
        "stats": engine.stats(),
        "has_imported_vllm": "vllm" in sys.modules,
        "processes": [process.pid for process in psutil.Process().children(recursive=True)],
    }
    print(json.dumps(result), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
