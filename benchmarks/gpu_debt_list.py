"""Claims that wait for a run on GPUs, by worth: for each the commands that check it, and what they need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

UPDATE: Final = ("{python}", "benchmarks/update.py")
RANKS: Final = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
PYTEST: Final = ("{python}", "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "150")
NO_MULTICAST: Final = {
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
}
"""vLLM 0.26's choice for two GPUs or more is FlashInfer's ``mnnvl``, over NVLink multicast; some hosts forbid it."""
NOT_FUSED: Final = '{"compilation_config": {"pass_config": {"fuse_allreduce_rms": false}}}'
"""vLLM's arguments that leave out FlashInfer's fusion of all-reduce and RMSNorm, which it has on two GPUs or more."""


@dataclass(frozen=True)
class Debt:
    """One claim, and the commands that check it.

    In a command ``{python}`` is the interpreter, ``{out}`` the debt's own folder, and ``{a|b}`` is ``a`` on GPUs and
    ``b`` with ``--tiny``.
    """

    name: str
    claim: str
    commands: tuple[tuple[str, ...], ...]
    """Run one after another; the first that fails ends the debt."""
    seconds: int
    """Expected of all commands, on one H200; twice as much, and a minute, is the limit."""
    gpus: int = 1
    gib: int = 40
    """Most memory that it takes of a GPU."""
    is_timed: bool = False
    """Its figures are times: nothing else may run on its GPUs."""
    engine: str = ""
    """``vllm`` or ``sglang``: the environment it needs."""
    environment: dict[str, str] = field(default_factory=dict)
    only_after_failure_of: str = ""
    """Name of a debt before it: this one asks why that failed."""


def _rollout(engine: str, ranks: str, *arguments: str) -> tuple[str, ...]:
    sizes = ("--sequences", "{256|8}", "--group", "{8|4}", "--prompt", "{256|8}", "--new", "{256|8}")
    common = (
        "--share",
        "0.4",
        "--repeats",
        "2",
        "--cycles",
        "0",
        "--mismatch",
        "{16|2}",
        "--out",
        "{out}/rollout.jsonl",
    )
    start = (*RANKS, ranks, "benchmarks/rollout.py", "--engine", engine, "--shape", "{qwen3-1.7b|tiny}")
    return (*start, *sizes, *common, "--out", "{out}/rollout.jsonl", *arguments)


def _gradients(*arguments: str) -> tuple[str, ...]:
    return ("--shape", "{llama-1.7b|tiny}", "--prompt", "{256|6}", "--phases", "gradients", *arguments)


RESTARTS: Final = (
    *("{python}", "benchmarks/restarts.py", "--engine", "vllm", "--eager", "--shape", "{qwen3-1.7b|tiny}"),
    *("--sequences", "{64|8}", "--new", "{32|8}", "--share", "0.15", "--options", '{"kv_cache_gib": 2}'),
)
LONG: Final = ("--layers", "{4|2}", "--rows", "1", "--completion", "{65280|40}", "--max-tokens", "{65536|64}")
SHORT: Final = ("--rows", "{8|4}", "--completion", "{512|10}")
ALL: Final = ("plain", "fused", "entropy chunks", "checkpointing", "selective", "activation offload", "low memory")
LORA: Final = ("fused", "entropy chunks", "low memory", "selective", "compile+fused+checkpointing", "liger+fused")
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
GRAPHS: Final = ("--graph-sizes", "64", "128", "256")
TWO_SIZES: Final = ("--graph-sizes", "64", "256")
IN_TWO: Final = ("vllm", "2", "--tensor-parallel", "2")
WITHOUT_DEEP_GEMM: Final = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}
MODES: Final = (
    "{python}",
    "benchmarks/step_modes.py",
    "--out",
    "{out}/modes",
    "--steps",
    "{6|3}",
    "--warm-up",
    "{2|1}",
)
ENOUGH: Final = tuple(f"stop when enough, {times}" for times in (1.25, 1.5, 2.0))
FIRST_STEP: Final = "test_first_optimizer_step_may_use_what_activations_have_left"
LOUD: Final = {"VLLM_LOGGING_LEVEL": "INFO"}

ONE_GPU: Final = (
    Debt(
        "gradients",
        "each optimization leaves the gradients of a bfloat16 update as far from float32's as plain torch does",
        ((*UPDATE, *_gradients(*SHORT, "--variants", "plain in float32", *ALL, "compile+fused", "liger+fused")),),
        seconds=80,
        gib=60,
    ),
    Debt(
        "lora-gradients",
        "adapters of rank 16 get plain float32 gradients from each optimization, and from Liger's kernels",
        ((*UPDATE, *_gradients("--lora", "16", *SHORT, "--dtype", "float32", "--variants", "plain", *LORA)),),
        seconds=80,
        gib=60,
    ),
    Debt(
        "gradients-64k",
        "the same of one sequence of 65,536 tokens, four blocks of the 1.7B shape",
        ((*UPDATE, *_gradients(*LONG, "--variants", "checkpointing in float32", *ALL, "compile+fused")),),
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
        (_rollout("vllm", "1", "--eager", "--sequences", "{1280|8}"),),
        seconds=60,
        gib=30,
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
        ((*PYTEST, "plugins/rollout_vllm/tests/test_vllm_conformance.py", "-k", "adapters"),),
        seconds=50,
        gib=5,
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
        seconds=140,
        gib=80,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "vllm-bf16",
        "vLLM in bfloat16: what the next three are compared with",
        (_rollout("vllm", "1", *GRAPHS),),
        seconds=70,
        gib=80,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "vllm-fp8-cache",
        "vLLM with FP8 KV caches: speed and mismatch",
        (_rollout("vllm", "1", *GRAPHS, "--options", '{"kv_cache_dtype": "fp8"}'),),
        seconds=70,
        gib=80,
        is_timed=True,
        engine="vllm",
    ),
    Debt(
        "vllm-fp8-deepgemm",
        "FP8 weights in vLLM with DeepGEMM, which compiles its kernels",
        (_rollout("vllm", "1", *GRAPHS, "--fp8"),),
        seconds=170,
        gib=80,
        is_timed=True,
        engine="vllm",
        environment={"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"} | LOUD,
    ),
    Debt(
        "vllm-fp8-cutlass",
        "FP8 weights in vLLM without DeepGEMM",
        (_rollout("vllm", "1", *GRAPHS, "--fp8"),),
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
        "logprobs of HFRollout and of vLLM, with a KV cache in bfloat16 and in FP8, beside the trainer's",
        (
            ("{python}", "benchmarks/gpu_debt_parity.py", "{large-vocabulary|tiny}", "{out}/model"),
            ("{python}", "benchmarks/parity.py", "{out}/model/parity.yaml", "--out", "{out}/parity"),
        ),
        seconds=90,
        gib=70,
        engine="vllm",
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
                *(f"plugins/optims/tests/test_{name}.py" for name in ("fused_logprobs", "block_forward", "liger")),
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
        "modes-long",
        "stop when enough beside the synchronous step, 1,500 tokens on average and 8,192 at most",
        ((*MODES, "--workload", "{long|tiny}", "--modes", "synchronous", *ENOUGH),),
        seconds=900,
        gib=130,
        is_timed=True,
        engine="vllm",
    ),
)

TWO_GPUS: Final = (
    Debt(
        "gradients-two-gpus",
        "float32 gradients over NCCL: FSDP2, HSDP, tensor parallelism, Ulysses, BackwardPrefetch, beside one GPU's",
        (
            ("env", "CUDA_VISIBLE_DEVICES=0", *UPDATE, *_gradients(*FEW, "--variants", "plain")),
            (
                *RANKS,
                "2",
                "benchmarks/update.py",
                *_gradients(*FEW, "backward prefetch", "--strategy", *AXES, GATHERED),
            ),
        ),
        seconds=70,
        gpus=2,
    ),
    Debt(
        "vllm-tp2-fp8",
        "FP8 weights in one vLLM on two GPUs, its all-reduce not fused",
        (
            _rollout(
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
        "the same with FlashInfer's fused all-reduce over CUDA IPC: it is what is left of the run that failed",
        (_rollout(*IN_TWO, "--fp8", *TWO_SIZES),),
        seconds=120,
        gpus=2,
        gib=80,
        engine="vllm",
        environment=WITHOUT_DEEP_GEMM | LOUD | NO_MULTICAST,
    ),
    Debt(
        "vllm-tp2-fp8-blocking",
        "where the first illegal access is: no CUDA graphs, each launch waited for",
        (_rollout(*IN_TWO, "--fp8", "--eager", "--repeats", "1"),),
        seconds=60,
        gpus=2,
        gib=80,
        engine="vllm",
        environment={"CUDA_LAUNCH_BLOCKING": "1"} | WITHOUT_DEEP_GEMM | LOUD | NO_MULTICAST,
        only_after_failure_of="vllm-tp2-fp8",
    ),
    Debt(
        "vllm-tp2-fp8-triton",
        "whether CUTLASS is at fault",
        (_rollout(*IN_TWO, "--fp8", "--eager", "--repeats", "1"),),
        seconds=60,
        gpus=2,
        gib=80,
        engine="vllm",
        environment={"VLLM_DISABLED_KERNELS": "CutlassFp8BlockScaledMMKernel"}
        | WITHOUT_DEEP_GEMM
        | LOUD
        | NO_MULTICAST,
        only_after_failure_of="vllm-tp2-fp8",
    ),
    Debt(
        "modes-two-gpus",
        "on two GPUs the best mode is 1.5 times as fast as the synchronous one, and the trainer waits under 15%",
        (
            (
                *(*MODES, "--workload", "{heavy-tailed|tiny}", "--modes", "synchronous", "servers", *ENOUGH),
                *("streamed", "asynchronous, K = 1", "asynchronous, K = 2", "asynchronous, K = 4"),
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
            _rollout(
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

DEBTS: Final = {debt.name: debt for debt in (*ONE_GPU, *TWO_GPUS)}
