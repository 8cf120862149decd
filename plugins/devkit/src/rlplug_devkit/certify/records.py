"""Records of certified sets: JSON files in the ``records`` folder of a plugin's package, read without importing it.

A record names an engine, a trainer, families of models, the versions that ran and what held. ``sha256`` is over all
else in it, so that a record that was changed by hand is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlplug.errors import describe
from rlplug_devkit.doctor.packages import GROUPS

FORMAT: Final = 2
"""Rises when a key changes its meaning. Records of format 1 have no ``code``: they speak of versions alone."""
FOLDER: Final = "records"
TYPES: Final[Mapping[str, type]] = {
    "format": int,
    "engine": str,
    "trainer": str,
    "families": list,
    "device": str,
    "python": str,
    "system": str,
    "packages": dict,
    "other_packages": dict,
    "code": dict,
    "began": str,
    "seconds": float,
    "measured": dict,
    "results": list,
    "conclusion": str,
    "sha256": str,
}
"""Keys of a record. ``packages`` are those whose versions must be the same for the record to speak of a set, ``code``
has digests of the code of rlplug's distributions and of the engine's and trainer's, by distribution."""


class RecordError(Exception):
    """A record is not as ``rlplug certify`` writes it; the text says how."""


@dataclass(frozen=True)
class Record:
    """What ran, with which versions, and what held."""

    values: Mapping[str, Any]
    owner: str = ""
    """Distribution that ships it; empty for a file of one's own."""

    @property
    def engine(self) -> str:
        return str(self.values["engine"])

    @property
    def trainer(self) -> str:
        return str(self.values["trainer"])

    @property
    def device(self) -> str:
        return str(self.values["device"])

    @property
    def packages(self) -> Mapping[str, str]:
        packages: Mapping[str, str] = self.values["packages"]
        return packages

    @property
    def code(self) -> Mapping[str, str]:
        """Digests of what ran, for those packages whose versions decide; empty in a record of format 1."""
        code: Mapping[str, str] = self.values.get("code", {})
        return {name: digest for name, digest in code.items() if name in self.packages}

    @property
    def is_green(self) -> bool:
        return bool(self.values["conclusion"] == "certified")

    def says(self) -> str:
        """Return in words what ran where, when, and who ships the record."""
        families = ", ".join(self.values["families"])
        return f"{families} on {self.device}, {self.values['began'][:10]}, record of {self.owner or 'a file'}"


def conclusion_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Return ``certified`` where in each part of the results something was held, and nothing failed or was skipped."""
    parts: dict[str, list[str]] = {}
    for result in results:
        parts.setdefault(result["part"], []).append(result["held"])
    held = [set(each) <= {"held", "does not apply"} and "held" in each for each in parts.values()]
    return "certified" if held and all(held) else "not certified"


def hash_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all that a record says, but for the hash itself."""
    said = {key: value for key, value in values.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_record(file: Path, owner: str = "") -> Record:
    """Read a record.

    Raises:
        RecordError: It cannot be read, has another format, was changed, or concludes what its results do not say.
    """
    remake = "Make it with rlplug certify; records are not written by hand."
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read: {describe(error)}. {remake}") from error
    if not isinstance(values, dict) or values.get("format") not in (1, FORMAT):
        raise RecordError(f"{file} has not the format {FORMAT} that this rlplug-devkit reads, or 1. {remake}")
    types = {key: kind for key, kind in TYPES.items() if key != "code" or values["format"] > 1}
    wrong = sorted(key for key, kind in types.items() if not isinstance(values.get(key), kind))
    if wrong:
        raise RecordError(f"{file} lacks {', '.join(wrong)}, or has another type there. {remake}")
    if hash_of(values) != values["sha256"]:
        raise RecordError(f"{file} was changed after it was made: its hash is of another content. {remake}")
    if conclusion_of(values["results"]) != values["conclusion"]:
        raise RecordError(f"{file} concludes {values['conclusion']!r}, which its results do not say. {remake}")
    return Record(values, owner)


def shipped_files() -> Iterator[tuple[str, Path]]:
    """Yield the records of all installed distributions with plugins or commands, each with its distribution."""
    points = [point for group in GROUPS for point in entry_points(group=group)]
    owners = {(point.module.partition(".")[0], point.dist.name) for point in points if point.dist is not None}
    for package, owner in sorted(owners):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for file in sorted((Path(folder) / FOLDER).glob("*.json")):
                yield owner, file


def shipped_records() -> tuple[list[Record], list[str]]:
    """Return the records of all installed distributions, and what is wrong with those that are refused."""
    records: list[Record] = []
    problems: list[str] = []
    for owner, file in shipped_files():
        try:
            records.append(read_record(file, owner))
        except RecordError as error:
            problems.append(f"{owner}: {error}")
    return records, problems


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution, without what follows ``+``; ``None`` where there is none."""
    try:
        return public_version(version(name))
    except PackageNotFoundError:
        return None


def public_version(text: str) -> str:
    """Return a version without its local part, which no index has: ``2.13.0`` of ``2.13.0+cpu``."""
    try:
        return Version(text).public
    except InvalidVersion:
        return text


def same_name(first: str, second: str) -> bool:
    return canonicalize_name(first) == canonicalize_name(second)
