"""An environment as a user has it: rlplug and plugins from wheels, and the quickstart in a folder of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from distributions import Distribution
from forked import run_forked

REPOSITORY = Path(__file__).parents[2]
PROBE = Distribution(REPOSITORY / "tests/plugins/rlplug_probe")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
HIDDEN_VARIABLES = ("PYTHON", "RLPLUG", "VIRTUAL_ENV", "PYTEST", "COV")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the folder in which its commands run."""

    root: Path
    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a console script in a process of its own, which imports all that it needs."""
        options = {"env": self._variables(), "capture_output": True, "text": True, "timeout": 600, "check": False}
        return subprocess.run([self.root / "bin" / program, *arguments], cwd=self.folder, **options)

    def run_forked(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a console script in a fork of a process of this environment's Python that has paid for the imports."""
        command = [self.root / "bin" / "python", self.root / "bin" / program, *arguments]
        return run_forked(command, cwd=self.folder, env=self._variables(), timeout=600)

    def _variables(self) -> dict[str, str]:
        shown = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN_VARIABLES)}
        return {**shown, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def make_environment(tmp: Path, wheels: list[Path]) -> Environment:
    """Install wheels in a new virtual environment in ``tmp``, beside a user's folder."""
    root = tmp / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    into_root = [*PIP, "--python", root / "bin/python", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*into_root, *wheels], check=True)
    (site,) = root.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{_dependencies(tmp / 'dependencies')}\n")
    return Environment(root, _user_folder(tmp / "user"))


def _dependencies(folder: Path) -> Path:
    """Make a folder that shows all that this Python has installed, but for rlplug and its plugins."""
    folder.mkdir()
    for site in (Path(path) for path in sys.path if path.endswith("-packages")):
        for entry in site.iterdir():
            own = entry.name.startswith(("rlplug", "__editable__")) or entry.suffix == ".pth"
            if not own and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


def _user_folder(folder: Path) -> Path:
    """Make a folder with the quickstart's configuration and files, at the paths that it names."""
    shutil.copytree(REPOSITORY / "examples/quickstart", folder / "examples/quickstart")
    shutil.copy(REPOSITORY / "configs/quickstart.yaml", folder)
    return folder
