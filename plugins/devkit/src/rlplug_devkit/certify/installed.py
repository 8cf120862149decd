"""What the shipped records say of the installed set: certified, by whom, or which certified set is the nearest."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlplug_devkit.certify.code import digests_of
from rlplug_devkit.certify.records import Record, installed_version, shipped_records

NVIDIA = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Verdict:
    """What records say of an engine with a trainer in this environment."""

    engine: str
    trainer: str
    is_certified: bool
    text: str
    advice: str = ""
    """How to come to the nearest certified set."""


def verdicts() -> tuple[list[Verdict], list[str]]:
    """Return a verdict for each installed engine and trainer with a record, and why records are refused."""
    records, problems = shipped_records()
    code = digests_of({name for record in records for name in record.code})
    return list(verdicts_of(records, _installed(records), code, NVIDIA.exists())), problems


def _installed(records: Iterable[Record]) -> dict[str, str | None]:
    names = {name for record in records for name in record.packages}
    return {name: installed_version(name) for name in names}


def verdicts_of(
    records: Sequence[Record],
    installed: Mapping[str, str | None],
    code: Mapping[str, str],
    has_gpu: bool,
    python: str = platform.python_version(),
) -> Iterator[Verdict]:
    """Yield the verdicts, by engine and trainer.

    Args:
        records: All that are to be had.
        installed: Version of each package that a record names, ``None`` for one that is not installed.
        code: Digests of the code that is installed, by distribution.
        has_gpu: Whether this machine has a GPU, of which a record of a CPU says nothing.
        python: Version of Python here.
    """
    pairs: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if all(installed.get(name) is not None for name in record.packages):
            pairs.setdefault((record.engine, record.trainer), []).append(record)
    for (engine, trainer), own in sorted(pairs.items()):
        green = [record for record in own if record.is_green]
        same = [record for record in green if not _differences(record, installed) and _same_python(record, python)]
        if has_gpu and (on_gpu := [record for record in same if record.device != "cpu"]):
            same = on_gpu
        elif same and has_gpu:
            says = "; ".join(record.says() for record in same)
            yield Verdict(engine, trainer, False, f"certified for {says}; no record is of a GPU")
            continue
        if ran := [record for record in same if not _other_code(record, code)]:
            yield Verdict(engine, trainer, True, f"certified for {'; '.join(record.says() for record in ran)}")
        elif same:
            record = min(same, key=lambda record: len(_other_code(record, code)))
            names = ", ".join(_other_code(record, code))
            text = f"not certified with this code of {names}; other code of these versions is, for {record.says()}"
            yield Verdict(engine, trainer, False, text, f"rlplug certify --engine {engine} --trainer {trainer}")
        elif green:
            yield _nearest(engine, trainer, green, installed, python)
        else:
            yield Verdict(engine, trainer, False, f"not certified: {len(own)} records, none of which is green")


def _nearest(
    engine: str, trainer: str, green: Sequence[Record], installed: Mapping[str, str | None], python: str
) -> Verdict:
    newest_first = sorted(green, key=lambda record: str(record.values["began"]), reverse=True)
    record = min(
        newest_first, key=lambda record: (not _same_python(record, python), len(_differences(record, installed)))
    )
    wanted = _differences(record, installed)
    here = ", ".join(f"{name} {installed[name]}" for name in wanted)
    text = f"not certified{f' with {here}' if here else ''}; the nearest certified set is of {record.says()}"
    line = f"pip install {' '.join(f'{name}=={version}' for name, version in wanted.items())}" if wanted else ""
    on_python = "" if _same_python(record, python) else f"Python {_minor(record.values['python'])}"
    return Verdict(engine, trainer, False, text, ", and ".join(filter(None, (line, on_python))))


def _differences(record: Record, installed: Mapping[str, str | None]) -> dict[str, str]:
    """Return the versions that a record names and that are not installed."""
    return {name: version for name, version in sorted(record.packages.items()) if installed.get(name) != version}


def _other_code(record: Record, code: Mapping[str, str]) -> list[str]:
    """Return the distributions whose installed code is not what ran; a record of format 1 does not say what ran."""
    return [name for name, digest in sorted(record.code.items()) if code.get(name) != digest]


def _same_python(record: Record, python: str) -> bool:
    return _minor(record.values["python"]) == _minor(python)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
