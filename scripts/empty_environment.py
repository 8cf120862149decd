"""Virtual environments with wheels of this repository, and of third parties what those wheels ask for, and no more.

Third parties are links to what this Python has installed, so that an environment takes seconds and no network. pip sees
them as installed and resolves with them: a requirement that no wheel declares is missing, and a range that does not
admit what is here fails.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final, Self

from distributions import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

HIDDEN_VARIABLES: Final = ("PIP", "PYTHON", "RLPLUG", "VIRTUAL_ENV", "PYTEST", "COV")


@dataclass(frozen=True)
class EmptyEnvironment:
    """A virtual environment.

    Attributes:
        root: Its folder.
        dist: The folder of the wheels that are installed in it.
        folder: The folder of its user, in which programs run.
    """

    root: Path
    dist: Path
    folder: Path

    @classmethod
    def make(cls, folder: Path, dist: Path) -> Self:
        """Make one in ``folder`` in which nothing is installed, with the quickstart's files in its user's folder."""
        root, user = folder.resolve() / "venv", folder.resolve() / "user"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
        shutil.copytree(ROOT / "examples" / "quickstart", user / "examples" / "quickstart")
        shutil.copy(ROOT / "configs" / "quickstart.yaml", user)
        return cls(root, dist.resolve(), user)

    @property
    def site(self) -> Path:
        """The folder of its packages."""
        (site,) = self.root.glob("lib/python*/site-packages")
        return site

    def install(self, *requirements: str) -> None:
        """Install wheels of ``dist`` with all that they require, and have pip check the result.

        Raises:
            SystemExit: A third party that they require is not installed here.
            CalledProcessError: pip finds no solution, or a conflict.
        """
        for distribution in third_parties(requirements, self.dist):
            _link(distribution, self.site)
        pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
        pip += ["--python", str(self.root / "bin" / "python")]
        from_dist = ["--quiet", "--no-index", "--find-links", str(self.dist)]
        subprocess.run([*pip, "install", *from_dist, *requirements], check=True)
        subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)

    def hide(self, modules: Iterable[str]) -> None:
        """Make imports of ``modules`` fail in all its processes, though a third party brings them."""
        (self.site / "sitecustomize.py").write_text(f"import sys\n\nsys.modules.update(dict.fromkeys({[*modules]}))\n")

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in the user's folder, in a process that imports all that it needs."""
        options = {"env": self.variables(), "capture_output": True, "text": True, "timeout": 600, "check": False}
        return subprocess.run([self.root / "bin" / program, *arguments], cwd=self.folder, **options)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of its processes, in which nothing leads to this repository's sources."""
        shown = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN_VARIABLES)}
        return {**shown, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def third_parties(requirements: Iterable[str], dist: Path) -> list[importlib.metadata.Distribution]:
    """Return what a user gets with ``requirements`` besides wheels of ``dist``.

    Raises:
        SystemExit: One is not installed here.
    """
    wheels = dict(_wheels(dist))
    found: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "what is tried") for text in requirements]
    while waiting:
        requirement, asked_by = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in wheels and name not in found:
            found[name] = _installed(requirement, asked_by)
        distribution = wheels.get(name) or found[name]
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                needed = map(Requirement, distribution.requires or ())
                waiting += [(r, name) for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})]
    return [found[name] for name in sorted(found)]


def _wheels(dist: Path) -> Iterator[tuple[str, importlib.metadata.Distribution]]:
    """Yield each wheel's name and metadata."""
    for wheel in sorted(dist.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(wheel.name)
        folder = f"{name.replace('-', '_')}-{version}.dist-info/"
        yield name, importlib.metadata.PathDistribution(zipfile.Path(wheel, folder))


def _installed(requirement: Requirement, asked_by: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{asked_by} requires {requirement}, which is not installed here.") from None


def _link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Link what a distribution has installed: packages as a whole, and files of a folder that others may share."""
    for unit in dict.fromkeys(_unit(distribution, file) for file in distribution.files or ()):
        link = site / unit
        if unit.parts[0] != ".." and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(_place(distribution, unit))


def _unit(distribution: importlib.metadata.Distribution, file: PurePath) -> PurePath:
    """Return the outermost folder of ``file`` that belongs to one distribution, or the file itself."""
    for folder in [*reversed(file.parents)][1:]:
        if folder.suffix == ".dist-info" or (_place(distribution, folder) / "__init__.py").is_file():
            return folder
    return file


def _place(distribution: importlib.metadata.Distribution, path: PurePath) -> Path:
    return Path(str(distribution.locate_file(path))).absolute()
