"""All claims that need GPUs, in their order; here those of engines and whole steps on one GPU, by worth.

``benchmarks/results`` says which were run, and what came of them.
"""

from __future__ import annotations

from typing import Final

from gpu_debt import LOUD, PYTEST, WITHOUT_DEEP_GEMM, Debt, modes_command, rollout_command
from gpu_debt_two_gpus import TWO_GPUS
from gpu_debt_updates import UPDATES

KIT: Final = (*PYTEST, "plugins/rollout_vllm/tests/test_vllm_conformance.py")
"""In the trainer's process vLLM starts once: each check that starts it is a command of its own."""
RESTARTS: Final = (
    *("{python}", "benchmarks/restarts.py", "--engine", "vllm", "--eager", "--shape", "{qwen3-1.7b|tiny}"),
    *("--sequences", "{64|8}", "--new", "{32|8}", "--share", "0.15", "--options", '{"kv_cache_gib": 2}'),
)
GRAPHS: Final = ("--graph-sizes", "64", "128", "256")
CURVE: Final = (
    *("{python}", "benchmarks/engine_curves.py", "--out", "{out}", "--qwen3", "--steps", "{160|2}", "--engines"),
    *("{SGLangRollout|HFRollout}", "--arguments", "{SGLangRollout|HFRollout}", "model.policy.dtype=bfloat16"),
    "{model.rollout.mem_fraction_static=0.2|run.export_policy=false}",
    "{model.rollout.attention_backend=triton|run.report=false}",
)
"""Its end are the engine's own arguments, which more may follow."""

ENGINES_AND_STEPS: Final = (
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
        "server-delivery",
        "tokens/s that a vLLM server hands over with 1, 2 and 4 API processes, beside vLLM in the trainer's process",
        (
            rollout_command("vllm", "1"),
            (
                *("{python}", "benchmarks/server_delivery.py", "--shape", "{qwen3-1.7b|tiny}"),
                *("--sequences", "{256|8}", "--group", "{8|4}", "--prompt", "{256|8}", "--new", "{256|8}"),
                *("--api-servers", "1", "2", "{4|2}", "--out", "{out}/delivery.jsonl"),
            ),
        ),
        seconds=220,
        gib=80,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "vllm-many-sequences",
        "vLLM 0.26 starts with room for 1,280 sequences of 512 tokens, where its warm-up read past its block table",
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
        "vllm-8b-fp8",
        "FP8 weights of 8B in vLLM, with DeepGEMM and without",
        tuple(
            ("env", f"VLLM_USE_DEEP_GEMM={use}", *rollout_command("vllm", "1", *GRAPHS, "--fp8", shape="qwen3-8b"))
            for use in "10"
        ),
        seconds=280,
        gib=110,
        is_timed=True,
        engine="vllm",
        environment={"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"} | LOUD,
    ),
    Debt(
        "sglang-fp8",
        "FP8 weights in SGLang, with DeepGEMM, compiled where it is first used, and without",
        tuple(
            (
                *("env", f"SGLANG_ENABLE_JIT_DEEPGEMM={use}", "SGLANG_JIT_DEEPGEMM_PRECOMPILE=0"),
                *rollout_command("sglang", "1", *GRAPHS, "--fp8", "--options", '{"attention_backend": "triton"}'),
            )
            for use in "10"
        ),
        seconds=240,
        gib=110,
        is_timed=True,
        engine="sglang",
    ),
    Debt(
        "parity",
        "logprobs of HFRollout, vLLM with a KV cache in bfloat16 and in FP8, and SGLang, beside the trainer's",
        (
            ("{python}", "benchmarks/gpu_debt_parity.py", "{large-vocabulary|tiny}", "{out}/model"),
            ("{python}", "benchmarks/parity.py", "{out}/model/parity.yaml", "--out", "{out}/parity"),
        ),
        seconds=240,
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

DEBTS: Final = {debt.name: debt for debt in (*UPDATES, *ENGINES_AND_STEPS, *TWO_GPUS)}
