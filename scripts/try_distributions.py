"""Installs the wheels of a folder in a new environment and trains the quickstart's policy with them for two steps.

``python scripts/try_distributions.py dist``. The environment sees no source of this repository; what rlplug depends on
comes from where pip is set up to look, in the versions of constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from distributions import ROOT, all_distributions

STEPS: Final = 2
HIDDEN_VARIABLES: Final = ("PYTHON", "RLPLUG", "VIRTUAL_ENV")


def try_wheels(dist: Path, folder: Path) -> None:
    """Install and run them in ``folder``.

    Raises:
        SystemExit: A wheel is missing, or a plugin does not load from them.
        CalledProcessError: Installation, ``pip check`` or the run fails.
    """
    wheels = sorted(dist.resolve().glob("*.whl"))
    if len(wheels) != len(all_distributions()):
        raise SystemExit(f"{dist} has {len(wheels)} wheels of {len(all_distributions())}: run make dist.")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", *wheels], check=True)
    subprocess.run([*pip, "check"], check=True)

    variables = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN_VARIABLES)}
    user = folder / "user"
    shutil.copytree(ROOT / "examples" / "quickstart", user / "examples" / "quickstart")
    shutil.copy(ROOT / "configs" / "quickstart.yaml", user)
    listed = subprocess.run(
        [programs / "rlplug", "plugins", "--json"], cwd=user, env=variables, stdout=subprocess.PIPE, check=True
    )
    records = {record["name"]: record for record in json.loads(listed.stdout)}
    for name in (plugin for distribution in all_distributions() for plugin in distribution.plugins):
        if records[name]["state"] != "loaded" or not Path(records[name]["file"]).is_relative_to(folder.resolve()):
            raise SystemExit(f"plugin {name} does not load from its wheel: {records[name]}")
    fit = [programs / "rlplug", "fit", "--config", "quickstart.yaml", "--model.num_steps", str(STEPS)]
    subprocess.run(fit, cwd=user, env=variables, check=True)
    (metrics,) = user.glob("runs/**/metrics.csv")
    num_rows = len(metrics.read_text().splitlines()) - 1
    if num_rows < STEPS:
        raise SystemExit(f"the quickstart logged {num_rows} rows of {STEPS}")
    print(f"{len(wheels)} wheels: all plugins load, and the quickstart takes {STEPS} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder of the wheels")
    with tempfile.TemporaryDirectory() as temporary:
        try_wheels(parser.parse_args().dist, Path(temporary))
