"""Writes a model of random weights, and the file of engines with which ``parity.py`` compares them on it.

``python benchmarks/gpu_debt_parity.py large-vocabulary OUT`` makes the model of that workload of ``step.py`` and
``OUT/parity.yaml``: for a host that has no model. Engines run in the environment of this process, but for SGLang, which
takes its packages from the folder that the variable ``SITE_SGLANG`` names, where there is one, and not from
``SITE_VLLM``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from step_work import WORKLOADS, prepare

OF_VLLM: Final = {"gpu_memory_utilization": 0.2, "kv_cache_gib": 15, "max_num_seqs": 128, "max_model_len": 512}
"""A cache of a given size, since vLLM would otherwise measure what is free while others on the GPU come and go."""
OF_SGLANG: Final = {
    "mem_fraction_static": 0.3,
    "max_running_requests": 128,
    "context_length": 512,
    "attention_backend": "triton",
    "cuda_graph_batch_sizes": [32, 64, 128],
}
ON_GPU: Final = {"cudagraph_capture_sizes": [32, 64, 128]}


def engines() -> list[dict[str, Any]]:
    """Return the entries of the engines, each with its arguments."""
    on_gpu = torch.cuda.is_available()
    arguments = OF_VLLM | (ON_GPU if on_gpu else {})
    entries: list[dict[str, Any]] = []
    if on_gpu and (site := os.environ.get("SITE_SGLANG")):
        others = (part for part in os.environ["PYTHONPATH"].split(os.pathsep) if part != os.environ.get("SITE_VLLM"))
        path = os.pathsep.join([site, *others])
        entries.append({"engine": "SGLangRollout", "init_args": OF_SGLANG, "environment": {"PYTHONPATH": path}})
    entries += [{"engine": "HFRollout"}, {"engine": "VLLMRollout", "init_args": arguments}]
    if on_gpu:
        in_fp8 = arguments | {"kv_cache_dtype": "fp8"}
        entries.append({"engine": "VLLMRollout", "name": "VLLMRollout-fp8-cache", "init_args": in_fp8})
    return [{"python": sys.executable, **entry} for entry in entries]


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = torch.cuda.is_available()
    comparison = {
        "model": str(prepare(WORKLOADS[name], folder, with_weights=True)),
        "prompts": {"count": 32 if on_gpu else 2, "length": 128 if on_gpu else 8},
        "samples_per_prompt": 4,
        "sampling": {"max_new_tokens": 128 if on_gpu else 8},
        "deadline_s": 300,
        "engines": engines(),
    }
    (folder / "parity.yaml").write_text(yaml.safe_dump(comparison, sort_keys=False))


if __name__ == "__main__":
    main()
