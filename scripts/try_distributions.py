"""Installs the wheels of a folder in empty environments and uses them: the core alone, then ``rlplug[full]``.

``python scripts/try_distributions.py dist``. Third parties are those that are installed beside this Python, which
``make try-dist`` has from constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from distributions import ROOT, all_distributions, plugin_distributions
from empty_environment import EmptyEnvironment

STEPS: Final = 2
ALGORITHM: Final = ROOT / "tests" / "plugins" / "rlplug_probe" / "src" / "rlplug_probe" / "algorithm.py"
"""A module with the class ``MeanBaseline``, which imports nothing of ours but the core."""
NEEDED_BY_PLUGINS: Final = ("aiohttp", "msgspec", "shtab")
"""Modules that the core does without, though Lightning brings one of them."""
_COMMAND: Final = re.compile(r"^  ([a-z][\w-]*)  ", re.M)
_LOAD: Final = """
import json
from rlplug.plugin_manager import describe, plugins
plugins().registry.import_all()
print(json.dumps(describe(plugins().records)))
"""
"""Imports all registered classes, and prints plugins' records."""


def try_wheels(dist: Path, folder: Path) -> None:
    """Install and use them in ``folder``.

    Raises:
        SystemExit: A wheel is missing, or something is not as a user expects it.
        CalledProcessError: An installation fails.
    """
    distributions = all_distributions()
    if len(wheels := [*dist.glob("*.whl")]) != len(distributions):
        raise SystemExit(f"{dist} has {len(wheels)} wheels of {len(distributions)}: run make dist.")
    for name, attempt in (("the core alone", try_core), ("rlplug[full] and all plugins", try_full)):
        start = time.monotonic()
        attempt(EmptyEnvironment.make(folder / attempt.__name__, dist))
        print(f"{name}: {STEPS} steps, and all else as it should be, {time.monotonic() - start:.0f} s", flush=True)


def try_core(environment: EmptyEnvironment) -> None:
    """Train with the core alone, and ask for what other distributions bring.

    Raises:
        SystemExit: A run fails, or a message does not say what to install.
    """
    core, *others = all_distributions()
    environment.install(core.name)
    environment.hide(NEEDED_BY_PLUGINS)
    _expect_commands(environment, core.commands)
    packages = [package for other in others for package in other.packages]
    found = f"import importlib.util; print([name for name in {packages} if importlib.util.find_spec(name)])"
    _expect(environment, ("python", "-c", found), 0, "[]\n")

    for name, published in _index(environment).items():
        for command in published["commands"]:
            _expect(environment, ("rlplug", command), 2, f"{command!r} comes with {name}: pip install {name}\n")
        if "GRPO" in published["classes"]:
            _expect(environment, _fit("quickstart.yaml"), 2, f"'GRPO' is not a known algorithm. It comes with {name}:")

    shutil.copy(ALGORITHM, environment.folder / "baseline.py")
    configuration = (environment.folder / "quickstart.yaml").read_text()
    (environment.folder / "own.yaml").write_text(configuration.replace("GRPO", "baseline.MeanBaseline"))
    _expect(environment, _fit("own.yaml"), 0)
    _expect_files(environment, ["policy/model.safetensors"])


def try_full(environment: EmptyEnvironment) -> None:
    """Train with ``rlplug[full]``, and import all classes of all plugins beside it.

    Raises:
        SystemExit: A command is missing, the run fails, or a plugin does not bring the classes that the index has.
    """
    environment.install("rlplug[full]")
    _expect_commands(environment, [command for each in all_distributions() for command in each.commands])
    _expect(environment, _fit("quickstart.yaml"), 0)
    _expect_files(environment, ["policy/model.safetensors", "policy/README.md", "report.html"])
    _expect(environment, ("rlplug", "new-plugin", "acme", "--kind", "reward"), 0)
    for name in (".gitignore", ".github/workflows/test.yml", "pyproject.toml"):
        if not (environment.folder / "rlplug-acme" / name).is_file():
            raise SystemExit(f"rlplug new-plugin wrote no {name}")

    environment.install(*(each.name for each in plugin_distributions()))
    records = json.loads(_expect(environment, ("python", "-c", _LOAD), 0))
    if problems := list(differences(records, _index(environment), environment.root)):
        raise SystemExit("\n".join(problems))


def differences(records: Iterable[dict[str, Any]], index: dict[str, Any], root: Path) -> Iterator[str]:
    """Yield how plugins' records differ from what the index of published names says of our distributions."""
    by_plugin = {record["name"]: record for record in records}
    for each in plugin_distributions():
        brought: list[str] = []
        for name in each.plugins:
            record = by_plugin[name]
            if record["state"] != "loaded" or not Path(record["file"]).is_relative_to(root):
                yield f"plugin {name} does not load from its wheel: {record}"
            brought += [registered.partition("/")[2] for registered in record["registers"]]
        if sorted(brought) != index[each.name]["classes"]:
            yield f"{each.name} registers {sorted(brought)}, and the index has {index[each.name]['classes']}"


def _index(environment: EmptyEnvironment) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((environment.site / "rlplug" / "plugin_index.json").read_text())
    return index


def _fit(configuration: str) -> tuple[str, ...]:
    return ("rlplug", "fit", "--config", configuration, "--model.num_steps", str(STEPS))


def _expect_commands(environment: EmptyEnvironment, names: Iterable[str]) -> None:
    shown = _expect(environment, ("rlplug", "--help"), 0)
    if sorted(_COMMAND.findall(shown)) != sorted(names):
        raise SystemExit(f"rlplug --help does not have the commands {', '.join(sorted(names))}:\n{shown}")


def _expect_files(environment: EmptyEnvironment, names: Iterable[str]) -> None:
    (file,) = environment.folder.glob("runs/*/*/metrics.jsonl")
    steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
    missing = [name for name in names if not (file.parent / name).is_file()]
    if missing or steps != list(range(STEPS + 1)):
        raise SystemExit(f"the run logged steps {steps}, and lacks {', '.join(missing) or 'no file'}")


def _expect(environment: EmptyEnvironment, command: Sequence[str], exit_code: int, message: str = "") -> str:
    """Run a command, and return its stdout."""
    done = environment.run(*command)
    if done.returncode != exit_code or message not in done.stdout + done.stderr:
        asked = f"{' '.join(command)} should have exited with {exit_code}, and said {message!r}"
        raise SystemExit(f"{asked}. It exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder of the wheels")
    with tempfile.TemporaryDirectory() as temporary:
        try_wheels(parser.parse_args().dist, Path(temporary))
