"""One claim that needs GPUs, and the commands that claims share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

UPDATE: Final = ("{python}", "benchmarks/update.py")
PYTEST: Final = ("{python}", "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "150")
RANKS: Final = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


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


def rollout_command(engine: str, ranks: str, *arguments: str, shape: str = "qwen3-1.7b") -> tuple[str, ...]:
    sizes = ("--sequences", "{256|8}", "--group", "{8|4}", "--prompt", "{256|8}", "--new", "{256|8}")
    common = ("--share", "0.4", "--repeats", "2", "--cycles", "0", "--mismatch", "{16|2}")
    start = (*RANKS, ranks, "benchmarks/rollout.py", "--engine", engine, "--shape", f"{{{shape}|tiny}}")
    return (*start, *sizes, *common, "--out", "{out}/rollout.jsonl", *arguments)


def gradients_arguments(*arguments: str) -> tuple[str, ...]:
    return ("--shape", "{llama-1.7b|tiny}", "--prompt", "{256|6}", "--phases", "gradients", *arguments)


def modes_command(workload: str, *others: str) -> tuple[str, ...]:
    """Return the command that times the synchronous mode, stop when enough, and others."""
    sizes = ("--out", "{out}/modes", "--steps", "{6|3}", "--warm-up", "{2|1}", "--workload", f"{{{workload}|tiny}}")
    return ("{python}", "benchmarks/step_modes.py", *sizes, "--modes", "synchronous", *ENOUGH, *others)


SHORT: Final = ("--rows", "{8|4}", "--completion", "{512|10}")
WITHOUT_DEEP_GEMM: Final = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}
ENOUGH: Final = tuple(f"stop when enough, {times}" for times in (1.25, 1.5, 2.0))
LOUD: Final = {"VLLM_LOGGING_LEVEL": "INFO"}
