"""Claims that need two GPUs, by worth."""

from __future__ import annotations

from typing import Final

from gpu_debt import (
    LOUD,
    PYTEST,
    RANKS,
    SHORT,
    UPDATE,
    WITHOUT_DEEP_GEMM,
    Debt,
    gradients_arguments,
    modes_command,
    rollout_command,
)

NO_MULTICAST: Final = {
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
}
"""vLLM 0.26's choice for two GPUs or more is FlashInfer's ``mnnvl``, over NVLink multicast; some hosts forbid it."""
NOT_FUSED: Final = '{"compilation_config": {"pass_config": {"fuse_allreduce_rms": false}}}'
"""vLLM's arguments that leave out FlashInfer's fusion of all-reduce and RMSNorm, which it has on two GPUs or more."""
FEW: Final = (
    "--layers",
    "{4|2}",
    *SHORT,
    "--dtype",
    "float32",
    "--reference",
    "{out}/gradients.pt",
    "--variants",
    "plain",
)
AXES: Final = ("{}", "{replicate: 2}", "{tensor: {2|1}}", "{sequence: 2}")
GATHERED: Final = "{reshard_after_forward: false, reshard_after_backward: false}"
TWO_SIZES: Final = ("--graph-sizes", "64", "256")
IN_TWO: Final = ("vllm", "2", "--tensor-parallel", "2")
WHOLE_KIT: Final = (*PYTEST, "-vv", "-rs", "-m", "nightly or not nightly")

TWO_GPUS: Final = (
    Debt(
        "gradients-two-gpus",
        "float32 gradients over NCCL: FSDP2, HSDP, tensor parallelism, Ulysses, BackwardPrefetch, beside one GPU's",
        (
            ("env", "CUDA_VISIBLE_DEVICES=0", *UPDATE, *gradients_arguments(*FEW, "--variants", "plain")),
            (
                *RANKS,
                "2",
                "benchmarks/update.py",
                *gradients_arguments(*FEW, "backward prefetch", "--strategy", *AXES, GATHERED),
            ),
        ),
        seconds=70,
        gpus=2,
    ),
    Debt(
        "vllm-tp2-fp8",
        "FP8 weights in one vLLM on two GPUs, its all-reduce not fused",
        (
            rollout_command(
                "vllm", "2", "--tensor-parallel", "2", "--fp8", "--graph-sizes", "64", "256", "--engine-args", NOT_FUSED
            ),
        ),
        seconds=90,
        gpus=2,
        gib=80,
        is_timed=True,
        engine="vllm",
        environment=WITHOUT_DEEP_GEMM | LOUD | NO_MULTICAST,
    ),
    Debt(
        "vllm-tp2-fp8-fused",
        "the same with FlashInfer's fused all-reduce over CUDA IPC, whose kernels a first start compiles for 200 s",
        (rollout_command(*IN_TWO, "--fp8", *TWO_SIZES),),
        seconds=340,
        gpus=2,
        gib=80,
        engine="vllm",
        environment=WITHOUT_DEEP_GEMM | LOUD | NO_MULTICAST,
    ),
    Debt(
        "kit-vllm-servers",
        "the whole kit passes with VLLMServerRollout: weights over NCCL, in FP8 and tied too, two API processes",
        ((*WHOLE_KIT, "plugins/rollout_vllm/tests/test_server_conformance.py"),),
        seconds=420,
        gpus=2,
        engine="vllm",
        environment=WITHOUT_DEEP_GEMM,
    ),
    Debt(
        "kit-sglang-servers",
        "the whole kit passes with SGLangServerRollout: weights over NCCL, in FP8 and tied too",
        ((*WHOLE_KIT, "plugins/rollout_sglang/tests/test_server_conformance_sglang.py"),),
        seconds=200,
        gpus=2,
        engine="sglang",
        environment={"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
    ),
    Debt(
        "modes-two-gpus",
        "on two GPUs the best mode is 1.5 times as fast as the synchronous one, and the trainer waits under 15%",
        (
            modes_command(
                "heavy-tailed",
                *("servers", "streamed", "asynchronous, K = 1", "asynchronous, K = 2", "asynchronous, K = 4"),
            ),
        ),
        seconds=900,
        gpus=2,
        gib=130,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "update-two-gpus",
        "time and memory of an update with each axis, and with prefetch",
        (
            (
                *(*RANKS, "2", "benchmarks/update.py", "--shape", "{llama-1.7b|tiny}", "--rows", "{64|4}", "--prompt"),
                *("{256|6}", "--completion", "{512|10}", "--phases", "update", "--warm-up", "1", "--variants", "fused"),
                *("--strategy", *AXES, GATHERED),
            ),
            (
                *(*RANKS, "2", "benchmarks/update.py", "--shape", "{llama-1.7b|tiny}", "--rows", "{64|4}", "--prompt"),
                *("{256|6}", "--completion", "{512|10}", "--phases", "update", "--warm-up", "1", "--variants", "fused"),
                "backward prefetch",
            ),
        ),
        seconds=80,
        gpus=2,
        gib=90,
        is_timed=True,
    ),
    Debt(
        "sglang-tp2",
        "one SGLang on two GPUs: weight sync and generation",
        (
            rollout_command(
                *("sglang", "2", "--tensor-parallel", "2", "--graph-sizes", "64", "256"),
                *("--options", '{"attention_backend": "triton"}'),
                *("--engine-args", '{"enforce_disable_flashinfer_allreduce_fusion": true}'),
            ),
        ),
        seconds=150,
        gpus=2,
        gib=80,
        is_timed=True,
        engine="sglang",
        environment=NO_MULTICAST,
    ),
)
