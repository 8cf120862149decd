"""Claims that need a GPU, by worth: for each the commands that check it, and what they need.

``benchmarks/results`` says which were run, and what came of them.
"""

from __future__ import annotations

from typing import Final

from gpu_debt import (
    LOUD,
    SHORT,
    UPDATE,
    WITHOUT_DEEP_GEMM,
    Debt,
    gradients_arguments,
    modes_command,
    rollout_command,
)
from gpu_debt_two_gpus import GATHERED, TWO_GPUS

PYTEST: Final = ("{python}", "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "150")
KIT: Final = (*PYTEST, "plugins/rollout_vllm/tests/test_vllm_conformance.py")
"""In the trainer's process vLLM starts once: each check that starts it is a command of its own."""
RESTARTS: Final = (
    *("{python}", "benchmarks/restarts.py", "--engine", "vllm", "--eager", "--shape", "{qwen3-1.7b|tiny}"),
    *("--sequences", "{64|8}", "--new", "{32|8}", "--share", "0.15", "--options", '{"kv_cache_gib": 2}'),
)
LONG: Final = ("--layers", "{4|2}", "--rows", "1", "--completion", "{65280|40}", "--max-tokens", "{65536|64}")
ALL: Final = ("plain", "fused", "entropy chunks", "checkpointing", "selective", "activation offload", "low memory")
LORA: Final = ("fused", "entropy chunks", "low memory", "selective", "compile+fused+checkpointing", "liger+fused")
GRAPHS: Final = ("--graph-sizes", "64", "128", "256")
CURVE: Final = (
    *("{python}", "benchmarks/engine_curves.py", "--out", "{out}", "--qwen3", "--steps", "{160|2}", "--engines"),
    *("{SGLangRollout|HFRollout}", "--arguments", "{SGLangRollout|HFRollout}", "model.policy.dtype=bfloat16"),
    "{model.rollout.mem_fraction_static=0.2|run.export_policy=false}",
    "{model.rollout.attention_backend=triton|run.report=false}",
)
"""Its end are the engine's own arguments, which more may follow."""
FIRST_STEP: Final = "test_first_optimizer_step_may_use_what_activations_have_left"

ONE_GPU: Final = (
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
        "restart",
        "vLLM starts again in the trainer's process after it was closed",
        ((*RESTARTS, "--ends", "working", "working"),),
        seconds=50,
        gib=20,
        engine="vllm",
    ),
    Debt(
        "restart-released",
        "the same, all references to the closed engine dropped; the second close is of an engine that sleeps",
        ((*RESTARTS, "--release", "--ends", "working", "{asleep|working}", "working"),),
        seconds=60,
        gib=20,
        engine="vllm",
    ),
    Debt(
        "vllm-many-sequences",
        "vLLM starts in the trainer's process with room for 1,280 sequences, where its warm-up failed once",
        (rollout_command("vllm", "1", "--eager", "--sequences", "{1280|8}"),),
        seconds=60,
        gib=80,
        engine="vllm",
    ),
    Debt(
        "kit-tied",
        "the kit's checks of tied embeddings pass with VLLMRollout",
        ((*PYTEST, "plugins/rollout_vllm/tests/test_vllm_conformance.py", "-k", "tied"),),
        seconds=40,
        gib=5,
        engine="vllm",
    ),
    Debt(
        "kit-adapters",
        "the kit's checks of adapters pass with VLLMRollout, in bfloat16 and after a sleep",
        tuple((*KIT, "-k", check) for check in ("adapters_are_used", "incomplete_adapters")),
        seconds=90,
        gib=20,
        engine="vllm",
    ),
    Debt(
        "judge",
        "20 steps with SmolLM2 behind vLLM as judge, a reward model on the policy's GPU, and faults: none is silent",
        ((*PYTEST, "-s", "-m", "nightly", "--timeout", "300", "plugins/rollout_vllm/tests/test_judge_run.py"),),
        seconds=120,
        gib=40,
        engine="vllm",
    ),
    Debt(
        "lora-serving",
        "adapters alone beside merged weights: bytes and seconds of a sync, mismatch, tokens per second, sleep",
        (
            (
                *("{python}", "benchmarks/lora_serving.py", "--shape", "{qwen3-1.7b|tiny}", "--batches", "{64|4}"),
                *("{256|8}", "--group", "{8|4}", "--prompt", "{256|8}", "--new", "{256|8}", "--mismatch", "{16|2}"),
                *("--repeats", "2", "--out", "{out}/lora.jsonl"),
            ),
        ),
        seconds=220,
        gib=80,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "vllm-bf16",
        "vLLM in bfloat16: what the next three are compared with",
        (rollout_command("vllm", "1", *GRAPHS),),
        seconds=70,
        gib=80,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "vllm-fp8-cache",
        "vLLM with FP8 KV caches: speed and mismatch",
        (rollout_command("vllm", "1", *GRAPHS, "--options", '{"kv_cache_dtype": "fp8"}'),),
        seconds=70,
        gib=80,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "vllm-fp8-deepgemm",
        "FP8 weights in vLLM with DeepGEMM, which compiles its kernels",
        (rollout_command("vllm", "1", *GRAPHS, "--fp8"),),
        seconds=170,
        gib=80,
        is_timed=True,
        engine="vllm",
        environment={"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"} | LOUD,
    ),
    Debt(
        "vllm-fp8-cutlass",
        "FP8 weights in vLLM without DeepGEMM",
        (rollout_command("vllm", "1", *GRAPHS, "--fp8"),),
        seconds=70,
        gib=80,
        is_timed=True,
        engine="vllm",
        environment=WITHOUT_DEEP_GEMM | LOUD,
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
        "parity",
        "logprobs of HFRollout, vLLM with a KV cache in bfloat16 and in FP8, and SGLang, beside the trainer's",
        (
            ("{python}", "benchmarks/gpu_debt_parity.py", "{large-vocabulary|tiny}", "{out}/model"),
            ("{python}", "benchmarks/parity.py", "{out}/model/parity.yaml", "--out", "{out}/parity"),
        ),
        seconds=220,
        gib=60,
        engine="vllm",
    ),
    Debt(
        "sglang-bf16-curve",
        "the quickstart as a Qwen3 learns with SGLang in bfloat16: what the next one is compared with",
        (CURVE,),
        seconds=300,
        gib=35,
        engine="sglang",
    ),
    Debt(
        "sglang-fp8-curve",
        "the same with FP8 weights in SGLang",
        ((*CURVE, "{model.weight_sync.dtype=fp8_block|model.limits.stall_s=900}"),),
        seconds=300,
        gib=35,
        engine="sglang",
        environment={"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
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
    Debt(
        "step-fixed",
        "a GRPO step of 1.7B beside its bare parts",
        (
            (
                "{python}",
                "benchmarks/step.py",
                "--workload",
                "fixed",
                "--sides",
                "rlplug",
                "parts",
                "--out",
                "{out}/step",
            ),
        ),
        seconds=260,
        gib=130,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "start",
        "a second start of the same run finds what the first compiled: from the command to the end of its first step",
        (("{python}", "benchmarks/start.py", "--workload", "{fixed|tiny}", "--out", "{out}/start"),),
        seconds=160,
        gib=130,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "lora-8b",
        "a GRPO step of 8B with LoRA on one GPU, beside TRL with LoRA, and the GPUs that all weights would need",
        (
            (
                *("{python}", "benchmarks/step.py", "--workload", "{8b-lora|tiny-lora}", "--sides", "rlplug", "trl"),
                *("plan", "--trl", "{liger|plain}", "{liger|plain}, no checkpointing, no correction"),
                *("--steps", "4", "--warm-up", "2", "--out", "{out}/step"),
            ),
        ),
        seconds=360,
        gib=130,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "step-thousand",
        "a step of 1,024 completions of up to 8,192 tokens spends under 3% outside generation and update",
        (
            (
                *("{python}", "benchmarks/step.py", "--workload", "{thousand|tiny}", "--sides", "rlplug"),
                *("--steps", "3", "--warm-up", "1", "--out", "{out}/step"),
            ),
        ),
        seconds=420,
        gib=130,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "modes-fixed",
        "stop when enough beside the synchronous step where all completions are equally long: it should not cost",
        (modes_command("fixed"),),
        seconds=520,
        gib=130,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "modes-long",
        "stop when enough beside the synchronous step, 1,500 tokens on average and 8,192 at most",
        (modes_command("long"),),
        seconds=900,
        gib=130,
        is_timed=True,
        engine="vllm",
    ),
)

DEBTS: Final = {debt.name: debt for debt in (*ONE_GPU, *TWO_GPUS)}
