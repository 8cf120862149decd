"""An environment as a user has it: rlplug and plugins from wheels, and the quickstart in a folder of their own."""

from __future__ import annotations

import subprocess

from distributions import ROOT, Distribution
from empty_environment import EmptyEnvironment
from forked import run_forked

PROBE = Distribution(ROOT / "tests/plugins/rlplug_probe")


class WheelEnvironment(EmptyEnvironment):
    """A virtual environment, and the folder in which its commands run."""

    def run_forked(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a console script in a fork of a process of this environment's Python that has paid for the imports."""
        command = [self.root / "bin" / "python", self.root / "bin" / program, *arguments]
        return run_forked(command, cwd=self.folder, env=self.variables(), timeout=600)
