"""Arguments of published examples, and conversions of a few arguments."""

from __future__ import annotations

from pathlib import Path

from rlplug_migrate.conversion import Draft, Given, convert
from rlplug_migrate.frameworks import FRAMEWORKS
from rlplug_migrate.inputs import read_command, read_file

EXAMPLES = Path(__file__).parent / "examples"
PROGRAMS = {
    "verl": "python3 -m verl.trainer.main_ppo",
    "trl": "trl grpo",
    "openrlhf": "python3 -m openrlhf.cli.train_ppo_ray",
}


def example_script(name: str, folder: Path) -> Path:
    """Write an example as a shell script with its arguments on lines of their own, as they are published."""
    lines = [line for line in (EXAMPLES / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    script = folder / f"{name}.sh"
    script.write_text("set -x\n\n" + " \\\n    ".join([PROGRAMS[name.partition("_")[0]], *lines]) + ' "$@"\n')
    return script


def converted_example(name: str, folder: Path) -> Draft:
    framework = FRAMEWORKS[name.partition("_")[0]]
    return convert(Given(framework, read_file(framework, example_script(name, folder))[0], num_gpus=8))


def converted(framework: str, *arguments: str, num_gpus: int | None = None) -> Draft:
    return convert(Given(FRAMEWORKS[framework], read_command(FRAMEWORKS[framework], arguments), num_gpus))
