"""Compares rollout engines with the trainer and with each other: same weights, same prompts, one table.

``python benchmarks/parity.py benchmarks/parity.yaml --out OUT`` runs each engine that the file lists in a process of
its own, in the environment that the file names for it. Weights go into it in buckets, as the trainer sends them. What
it says of the tokens that it sampled is compared with the trainer's forward pass over them, in the policy's dtype. The
table is printed, and is in ``OUT/report.md`` and ``OUT/report.json``; each engine's log is beside it. The exit status
is 1 when some engine could not run, and its row says why.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from rlplug.errors import ConfigError, did_you_mean
from rlplug.interfaces import ModelConfig
from rlplug.models.config import load_tokenizer
from rlplug.types import SamplingParams

LOG_LINES = 3
COLUMNS = ("engine", "mean", "max", "KL", "tokens", "tokens/s", "sync, s", "start, s", "where")


@dataclass(frozen=True)
class Prompts:
    """Which prompts: ``count`` of ``length`` random tokens, or the rows of a JSONL ``file``, the first ``count``."""

    count: int | None = None
    length: int | None = None
    file: str | None = None
    chat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.file is None and (self.count is None or self.length is None):
            raise ConfigError("prompts: give count and length, for random tokens, or file, a JSONL with 'prompt'.")
        if self.file is not None and self.length is not None:
            raise ConfigError(
                f"prompts.length is {self.length}: leave it out, the prompts of prompts.file have theirs."
            )
        if self.file is None and self.chat:
            raise ConfigError("prompts.chat is true: leave it out, random tokens are no messages.")


@dataclass(frozen=True)
class Entry:
    """One engine of the list."""

    engine: str
    init_args: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.engine


@dataclass(frozen=True)
class Comparison:
    """Content of the YAML file."""

    model: str
    prompts: Prompts
    engines: list[Entry]
    sampling: SamplingParams = SamplingParams()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    samples_per_prompt: int = 1
    bucket_mib: int = 1024
    deadline_s: float = 1200.0

    def __post_init__(self) -> None:
        for key, choices in (("dtype", ("bfloat16", "float32")), ("device", ("auto", "cpu", "cuda"))):
            if getattr(self, key) not in choices:
                raise ConfigError(f"{key} is {getattr(self, key)!r}: give one of {', '.join(choices)}.")
        for key in ("samples_per_prompt", "bucket_mib", "deadline_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} is {getattr(self, key)}: give a positive number.")
        labels = [entry.label for entry in self.engines]
        if not labels or len({*labels}) < len(labels):
            raise ConfigError(f"engines are {labels}: list at least one, and give those that come twice a name.")


def read_comparison(path: Path) -> Comparison:
    """Read the YAML file.

    Raises:
        ConfigError: A key is unknown or missing, or a value is not possible.
    """
    values = _checked(Comparison, yaml.safe_load(path.read_text()), "")
    values["prompts"] = Prompts(**_checked(Prompts, values["prompts"], "prompts."))
    values["engines"] = [Entry(**_checked(Entry, entry, "engines.")) for entry in values["engines"]]
    if "sampling" in values:
        values["sampling"] = SamplingParams(**_checked(SamplingParams, values["sampling"], "sampling."))
    return Comparison(**values)


def _checked(cls: Any, values: Any, prefix: str) -> dict[str, Any]:
    """Return ``values`` if they are arguments of ``cls``."""
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'the file'} is {values!r}: give keys with values.")
    known = {each.name: each for each in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise ConfigError(f"{prefix}{key} is no key here.{did_you_mean(str(key), known)}")
    for name, each in known.items():
        no_default = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if no_default and name not in values:
            raise ConfigError(f"{prefix}{name} is missing: add it.")
    return values


def make_prompts(comparison: Comparison) -> list[list[int]]:
    """Return the token ids of the prompts, which every engine gets as they are."""
    prompts = comparison.prompts
    tokenizer: Any = load_tokenizer(ModelConfig(comparison.model), "model")
    if prompts.file is None:
        assert prompts.count is not None
        assert prompts.length is not None
        plain = sorted({*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids})
        draw = random.Random(prompts.seed)
        return [draw.choices(plain, k=prompts.length) for _ in range(prompts.count)]
    rows = [json.loads(line) for line in Path(prompts.file).read_text().splitlines() if line.strip()]
    texts = [row["prompt"] if isinstance(row, dict) and "prompt" in row else None for row in rows[: prompts.count]]
    if not texts or None in texts:
        raise ConfigError(f"prompts.file {prompts.file!r}: each line must be an object with the key 'prompt'.")
    if prompts.chat:
        messages = [[{"role": "user", "content": text}] for text in texts]
        rendered = [tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in messages]
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
    return [tokenizer(text)["input_ids"] for text in texts]


def run_engine(entry: Entry, comparison: Comparison, prompts: list[list[int]], out: Path) -> dict[str, Any]:
    """Run one engine in its environment; return what it measured, or ``failure`` with the reason."""
    job, result, log = (out / f"{entry.label}.{suffix}" for suffix in ("job.json", "result.json", "log"))
    described = dataclasses.asdict(comparison) | {"engine": entry.engine, "init_args": entry.init_args}
    job.write_text(json.dumps(described | {"prompts": prompts}))
    result.unlink(missing_ok=True)
    worker = Path(__file__).with_name("parity_worker.py")
    environment = os.environ | {name: str(value) for name, value in entry.environment.items()}
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                [entry.python, worker, job, result],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as problem:
            return {"failure": f"python {entry.python!r} of this entry does not start: {problem.strerror}"}
        try:
            ended = f"its process ended with exit code {process.wait(comparison.deadline_s)}"
        except subprocess.TimeoutExpired:
            ended = f"it was not done within deadline_s {comparison.deadline_s:g}"
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    job.unlink()
    if result.exists():
        return json.loads(result.read_text())  # type: ignore[no-any-return]
    tail = " / ".join(log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:])
    return {"failure": f"{ended}; its log ends: {tail}" if tail else f"{ended}, and its log is empty"}


def markdown(comparison: Comparison, prompts: list[list[int]], rows: dict[str, dict[str, Any]]) -> str:
    """Return the report."""
    lengths = sorted({min(map(len, prompts)), max(map(len, prompts))})
    asked = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(comparison.sampling).items())
    lines = [
        f"`{comparison.model}` in {comparison.dtype}: {len(prompts)} prompts of {' to '.join(map(str, lengths))} "
        f"tokens, {comparison.samples_per_prompt} completions each; {asked}.",
        "",
        "`mean` and `max` are of |engine's logprob - trainer's logprob| in nats, over the tokens that the engine "
        "sampled; `KL` is the k3 estimate.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'-|' * len(COLUMNS)}",
    ]
    for label, row in rows.items():
        if "failure" in row:
            reason = " ".join(str(row["failure"]).split()).replace("|", "\\|")
            lines.append(f"| {label} | {' | ' * (len(COLUMNS) - 3)} | did not run: {reason} |")
            continue
        numbers = [f"{row[name]:.2e}" for name in ("mean", "max", "kl")]
        speeds = [f"{row['tokens']:,}", f"{row['tokens_per_s']:,.0f}", f"{row['sync_s']:.3f}", f"{row['start_s']:.1f}"]
        where = f"{row['device']}; {', '.join(f'{name} {version}' for name, version in row['versions'].items())}"
        lines.append(f"| {label} | {' | '.join([*numbers, *speeds, where])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    options = parser.parse_args()
    try:
        comparison = read_comparison(options.config)
        prompts = make_prompts(comparison)
    except (ConfigError, OSError) as problem:
        parser.exit(2, f"{options.config}: {problem}\n")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    for entry in comparison.engines:
        print(f"{entry.label} ...", file=sys.stderr, flush=True)
        rows[entry.label] = run_engine(entry, comparison, prompts, options.out)
        (options.out / "report.json").write_text(
            json.dumps({"comparison": dataclasses.asdict(comparison), "engines": rows}, indent=1)
        )
        (options.out / "report.md").write_text(markdown(comparison, prompts, rows))
    print((options.out / "report.md").read_text())
    raise SystemExit(any("failure" in row for row in rows.values()))


if __name__ == "__main__":
    main()
