"""Folder of an evaluation: what was asked, every completion, and the tables; an evaluation that was killed goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from rlplug.distributed.durable_files import (
    FolderLock,
    RowFile,
    explained,
    own_bytes,
    replaced,
    require_readable,
    write_file,
)
from rlplug.errors import ConfigError
from rlplug.observability.sample_records import json_line, sample_record
from rlplug.types import Prompt, Sample, SamplingParams
from rlplug_eval.options import EvalOptions
from rlplug_eval.policies import Policy, stamp

RECORD: Final = "eval.json"
CONFIG: Final = "config.yaml"
COMPLETIONS: Final = "completions.jsonl"
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


@dataclass
class EvalRecord:
    """What was asked of an evaluation, in ``eval.json``."""

    policies: list[dict[str, str]]
    """Of each policy its ``name`` and the ``argument`` that names it, the baseline first."""
    data: list[dict[str, str]]
    """Of each source of prompts its ``name`` and the ``argument`` that names it."""
    options: EvalOptions
    sources: dict[str, str] = field(default_factory=dict)
    """Where each policy's weights came from, by name."""
    stamps: dict[str, str] = field(default_factory=dict)
    """Checksum of names, sizes and times of each policy's files, by name."""
    prompts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Number and checksum of the prompts of each policy and source, by ``policy/source``."""
    reward_notes: list[str] = field(default_factory=list)
    """What a person should know of the rewards."""
    reward_counts: dict[str, dict[str, float]] = field(default_factory=dict)
    """The rewards' own counts, such as ``judge/requests``, of each policy and source, by ``policy/source``."""
    versions: dict[str, str] = field(default_factory=dict)
    status: str = "running"


@dataclass(frozen=True)
class Row:
    """One completion, as the tables read it."""

    uid: str
    prompt: str
    completion: str
    answer: Any
    reward: float | None
    """``None`` where a reward or the environment failed."""
    error: str
    finish_reason: str
    num_tokens: int
    num_turns: int


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a checksum of prompts: their names, tokens, answers and metadata, by which rewards judge."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        judged = _plain([prompt.answer, prompt.metadata])
        digest.update(json.dumps([prompt.uid, list(prompt.token_ids), judged]).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Return a value as lists and text that are the same in each process."""
    if isinstance(value, Mapping):
        return [[str(name), _plain(part)] for name, part in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return _ADDRESS.sub("", repr(value))


class EvalFolder:
    """Reader and writer of an evaluation's folder.

    ``completions.jsonl`` has the completions of a prompt together. What a kill or damage has left of a prompt is
    removed when the folder is opened again, and generated again.

    Args:
        path: The folder, which exists.
        record: What is asked; ``None`` to go on with what the folder has.

    Raises:
        RunError: Another process uses the folder, or a file cannot be read or written.
        ConfigError: It is no folder of an evaluation.
    """

    def __init__(self, path: Path, record: EvalRecord | None = None) -> None:
        self.path = path
        self._lock = FolderLock(path)
        require_readable(path / name for name in (RECORD, CONFIG, COMPLETIONS))
        self.record = record or read_record(path)
        self._file = RowFile(path / COMPLETIONS)
        self._done: dict[tuple[str, str], set[str]] = {}
        """Names of complete prompts by policy and source."""
        if record is None:
            self._cut_back()
        self.save()

    def save(self) -> None:
        """Write ``eval.json``."""
        write_file(self.path / RECORD, json.dumps(asdict(self.record), indent=2))

    def check_prompts(self, policy: str, source: str, prompts: Sequence[Prompt]) -> None:
        """Note the prompts of a source, and refuse others than those of an evaluation that goes on.

        Raises:
            ConfigError: They differ, or two have one name.
        """
        if len({prompt.uid for prompt in prompts}) < len(prompts):
            raise ConfigError(f"--data {source}: two prompts have the same uid, so that policies cannot be compared.")
        found = {"number": len(prompts), "checksum": fingerprint(prompts)}
        before = self.record.prompts.setdefault(f"{policy}/{source}", found)
        if before != found:
            raise ConfigError(
                f"{self.path} has completions of other prompts: those of {source} with the tokenizer of {policy}, or "
                "their answers or metadata, have changed. Start a new evaluation, without --resume."
            )
        self.save()

    def check_policy(self, policy: Policy) -> None:
        """Note a policy's files, and refuse others than those of an evaluation that goes on.

        Raises:
            ConfigError: They have changed.
        """
        found = stamp(policy)
        if self.record.stamps.setdefault(policy.name, found) != found:
            raise ConfigError(
                f"{self.path} has completions of {policy.name}, and the files in {policy.source} have changed since. "
                "Start a new evaluation, without --resume."
            )
        self.record.sources[policy.name] = policy.source

    def missing(self, policy: str, source: str, prompts: Sequence[Prompt]) -> list[int]:
        """Return the indices of the prompts of a source that lack completions."""
        done = self._done.get((policy, source), set())
        return [index for index, prompt in enumerate(prompts) if prompt.uid not in done]

    def add_counts(self, policy: str, source: str, counts: Mapping[str, float]) -> None:
        """Add to the rewards' counts, and write them: what was asked and paid for counts also where a kill loses it."""
        if not counts:
            return
        sums = self.record.reward_counts.setdefault(f"{policy}/{source}", {})
        for name, value in counts.items():
            sums[name] = sums.get(name, 0.0) + value
        self.save()

    def append(self, policy: str, source: str, samples: Sequence[Sample]) -> None:
        """Write the completions of whole prompts."""
        records = [_record_of(sample, policy, source) for sample in sorted(samples, key=lambda each: each.group)]
        self._file.append("".join(map(json_line, records)))
        self._done.setdefault((policy, source), set()).update(sample.prompt.uid for sample in samples)

    def rows(self) -> dict[tuple[str, str], list[Row]]:
        """Return all completions by policy and source."""
        self._file.sync()
        found: dict[tuple[str, str], list[Row]] = {
            (policy["name"], source["name"]): [] for policy in self.record.policies for source in self.record.data
        }
        for record, _ in _records(self.path / COMPLETIONS):
            if record is not None and (key := (record["policy"], record["data"])) in found:
                found[key].append(_row_of(record))
        return found

    def close(self) -> None:
        """Sync the completions, and let another process have the folder."""
        self._file.sync()
        self._lock.close()

    def _cut_back(self) -> None:
        """Remove torn lines, and those of prompts that lack some."""
        path, number = self.path / COMPLETIONS, self.record.options.num_samples
        groups: dict[tuple[str, str, str], int] = {}
        is_torn = False
        for record, _ in _records(path):
            is_torn |= record is None
            if record is not None:
                key = (record["policy"], record["data"], record["prompt_uid"])
                groups[key] = groups.get(key, 0) + 1
        whole = {key for key, count in groups.items() if count == number}
        if is_torn or len(whole) < len(groups):
            with replaced(path) as partial, partial.open("wb") as kept:
                for record, line in _records(path):
                    if record is not None and (record["policy"], record["data"], record["prompt_uid"]) in whole:
                        kept.write(line)
        for policy, data, uid in whole:
            self._done.setdefault((policy, data), set()).add(uid)


def read_record(path: Path) -> EvalRecord:
    """Read ``eval.json``.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    try:
        found = json.loads(own_bytes(path / RECORD))
        options = found["options"]
        options = EvalOptions(
            **{**options, "ks": tuple(options["ks"]), "sampling": SamplingParams(**options["sampling"])}
        )
        return EvalRecord(**{**found, "options": options})
    except FileNotFoundError:
        raise ConfigError(f"{path} is no folder of an evaluation: it has no {RECORD}.") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path / RECORD} is damaged, so this evaluation cannot go on: {error}.") from error


def _records(path: Path) -> Iterator[tuple[Mapping[str, Any] | None, bytes]]:
    """Yield the object of each line, ``None`` for a damaged one, and the line."""
    if not path.exists():
        return
    with explained(path, "read"), path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
                yield (
                    (
                        record
                        if isinstance(record, dict) and {"policy", "data", "prompt_uid"} <= record.keys()
                        else None
                    ),
                    line,
                )
            except (ValueError, RecursionError):
                yield None, line


def _record_of(sample: Sample, policy: str, source: str) -> dict[str, Any]:
    record = sample_record(sample, 0, "eval")
    del record["step"], record["phase"]
    return {"policy": policy, "data": source, **record, "num_turns": sample.num_turns}


def _row_of(record: Mapping[str, Any]) -> Row:
    errors = [value["error"] for value in record["rewards"].values() if isinstance(value, dict)]
    return Row(
        uid=record["prompt_uid"],
        prompt=record["prompt"],
        completion=record["completion"],
        answer=record["answer"],
        reward=record["reward"],
        error=str(errors[0]) if errors else "",
        finish_reason=record["finish_reason"],
        num_tokens=record["num_tokens"],
        num_turns=record["num_turns"],
    )
