"""Claims of the update that need a GPU, by worth: gradients, kernels, time and memory."""

from __future__ import annotations

from typing import Final

from gpu_debt import PYTEST, SHORT, UPDATE, Debt, gradients_arguments
from gpu_debt_two_gpus import GATHERED

LONG: Final = ("--layers", "{4|2}", "--rows", "1", "--completion", "{65280|40}", "--max-tokens", "{65536|64}")
ALL: Final = ("plain", "fused", "entropy chunks", "checkpointing", "selective", "activation offload", "low memory")
LORA: Final = ("fused", "entropy chunks", "low memory", "selective", "compile+fused+checkpointing", "liger+fused")
FIRST_STEP: Final = "test_first_optimizer_step_may_use_what_activations_have_left"

UPDATES: Final = (
    Debt(
        "gradients",
        "each optimization leaves the gradients of a bfloat16 update as far from float32's as plain torch does",
        (
            (
                *UPDATE,
                *gradients_arguments(*SHORT, "--variants", "plain in float32", *ALL, "compile+fused", "liger+fused"),
            ),
        ),
        seconds=80,
        gib=60,
    ),
    Debt(
        "lora-gradients",
        "adapters of rank 16 get plain float32 gradients from each optimization, and from Liger's kernels",
        ((*UPDATE, *gradients_arguments("--lora", "16", *SHORT, "--dtype", "float32", "--variants", "plain", *LORA)),),
        seconds=80,
        gib=60,
    ),
    Debt(
        "gradients-64k",
        "the same of one sequence of 65,536 tokens, four blocks of the 1.7B shape",
        ((*UPDATE, *gradients_arguments(*LONG, "--variants", "checkpointing in float32", *ALL, "compile+fused")),),
        seconds=110,
        gib=90,
    ),
    Debt(
        "output-layer",
        "logprobs, entropies and gradients of the output layer in bfloat16, beside float64",
        (("{python}", "benchmarks/logprob_accuracy.py", "--tokens", "{8192|64}", "--vocabulary", "{151936|300}"),),
        seconds=40,
        gib=30,
    ),
    Debt(
        "memory",
        "time and memory of an update with ActivationOffload, EntropyChunking and checkpointing",
        (
            (
                *(*UPDATE, "--shape", "{llama-1.7b|tiny}", "--rows", "{16|4}", "--prompt", "{256|6}", "--completion"),
                *("{512|10}", "--phases", "update", "--warm-up", "1", "--variants", *ALL),
            ),
            (
                *(*UPDATE, "--shape", "{qwen-vocabulary|tiny}", "--rows", "{32|4}", "--prompt", "{256|6}"),
                *("--completion", "{512|10}", "--warm-up", "1", "--variants", "plain", "entropy chunks", "fused"),
            ),
        ),
        seconds=120,
        gib=90,
        is_timed=True,
    ),
    Debt(
        "offload",
        "the optimizer's state and the weights wait on the host while an engine works",
        (
            (
                *(*UPDATE, "--shape", "{llama-1.7b|tiny}", "--rows", "{32|4}", "--phases", "offload"),
                *("--variants", "fused", "--warm-up", "1"),
            ),
        ),
        seconds=70,
        gib=80,
        is_timed=True,
    ),
    Debt(
        "attention",
        "FlashAttention-4 beside FlashAttention-2 and cuDNN: speed, outputs and gradients",
        (("{python}", "benchmarks/attention.py", "--out", "{out}"),),
        seconds=60,
        gib=10,
        is_timed=True,
        engine="sglang",
    ),
    Debt(
        "update-kernels",
        "a whole update with FlashAttention-4, and with logits that are kept, beside the same without",
        tuple(
            (
                *(*UPDATE, "--phases", "update", "--strategy", GATHERED, "--shape", shape, "--rows", "{128|4}"),
                *("--prompt", "{256|6}", "--completion", "{512|10}", "--longest", "{768|16}", "--variants"),
                *("compile+fused", "{compile+fused+fa4|compile+fused}", "compile+fused, logits kept"),
                "{compile+fused+fa4, logits kept|compile+fused}",
            )
            for shape in ("{llama-1.7b|tiny}", "{qwen3-1.7b|tiny}")
        ),
        seconds=220,
        gib=90,
        is_timed=True,
        engine="sglang",
    ),
    Debt(
        "kernel-tests",
        "tests that take a GPU where there is one",
        (
            (
                *(
                    *PYTEST,
                    "tests/unit/weight_sync/test_fp8_kernel.py",
                    f"tests/unit/training/test_update.py::{FIRST_STEP}",
                ),
                *(
                    f"plugins/optims/tests/test_{name}.py"
                    for name in ("fused_logprobs", "block_forward", "compile_blocks", "liger", "flash_attention")
                ),
            ),
        ),
        seconds=90,
        gib=5,
    ),
)
