"""Reads the documentation as a user does: takes each code block, and plans the steps that it asks for."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from command_line import ROOT
from distributions import all_distributions, plugin_distributions
from forked import ForkedProcess
from packaging.requirements import Requirement
from rlplug_devkit.new_plugin import new_plugin_command
from rlplug_watch.commands.watch import make_parser as watch_parser

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"plugins/{distribution.folder.name}/README.md" for distribution in plugin_distributions()),
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
)
CLONE = ("Makefile", "configs", "constraints.txt", "examples", "plugins", "pyproject.toml", "scripts", "tests")
"""What a reader's folder has of the repository."""
SHELL = ("cat", "ls", "touch")
"""Programs whose commands the shell runs as they are."""
PYTHON = {"rlplug": ["-m", "rlplug"], "python": [], "pytest": ["-m", "pytest", "-p", "no:cacheprovider"]}
"""What comes before a step's arguments, by its kind."""

_FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.M | re.S)
_FILE_NAME = re.compile(r"# (\S+\.(?:py|toml|yaml))\n")
_EXIT_CODE = re.compile(r"# exits with (\d+)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.language}"


@dataclass
class Step:
    """Something to run for a block."""

    kind: str
    """``rlplug``, ``python``, ``pytest`` or ``shell``"""
    arguments: list[str]
    folder: str
    """The folder to be in"""
    site: str
    """A folder that plugins were installed into"""
    variables: dict[str, str] = field(default_factory=dict)
    expected_code: int = 0
    expected_output: str = ""
    exit_code: int | None = None
    """``None`` until it has run"""
    output: str = ""

    @property
    def only_prints(self) -> bool:
        """Whether it shows a configuration, for which nothing else must have run."""
        return "--print_config" in self.arguments


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2]) for found in _FENCE.finditer(text)]


def commands_of(script: str) -> list[str]:
    """Split a shell script into commands; a here-document stays with its command."""
    commands: list[str] = []
    lines = iter(script.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        command = line
        while command.endswith("\\"):
            command = command[:-1] + next(lines)
        if here := re.search(r"<<'(\w+)'", line):
            while not command.endswith(f"\n{here[1]}"):
                command += "\n" + next(lines)
        commands.append(command)
    return commands


class Reader:
    """Follows the blocks of one page in a folder of its own, which has what a clone of the repository has.

    What a block asks for is made smaller, or only checked:

    - ``rlplug fit`` takes one step, and with ``--resume`` a second one; checkpoints are named accordingly
    - a policy that is no folder here (a hub's name, or SmolLM2) becomes ``stand_in``, a tiny random model with a chat
      template, on the CPU, with few and short completions
    - ``make X``: ``make -n X`` must work, and the ``rlplug`` commands that it would run are followed
    - ``pip install`` of a folder or wheel goes into a folder that only this page's steps see, without dependencies;
      of rlplug's own distributions, the extras must exist
    - ``rlplug watch``, which serves a page until it is ended: its arguments must be right
    - ``python -m pytest`` on the repository's own tests must name what exists
    - YAML that no later block uses is laid over the quickstart's configuration, and the parser must take it
    - ``rlplug new-plugin`` writes its folder at once, and a block that names a file of it must have its text
    - a block whose first line names a file in a comment is written there; a later block must use it. Any other Python
      is run
    - ``# exits with 2`` behind a command says how it ends; the next ``text`` block must be part of its output

    Anything else is an error.
    """

    def __init__(self, folder: Path, stand_in: Path) -> None:
        folder.mkdir(parents=True)
        for name in CLONE:
            (folder / name).symlink_to(ROOT / name)
        self.folder = folder
        self.site = folder / ".site"
        self.stand_in = stand_in
        self.steps: list[Step] = []
        self.unused: set[str] = set()
        """Files that the page has the reader write, and that no later block names."""
        self.made: set[str] = set()
        """Folders of plugins that the page has the reader make with ``rlplug new-plugin``."""
        self.failing: Step | None = None
        """The step that was said to fail last; its message comes next."""
        self.num_steps = 0
        """RL steps that the newest run has taken."""

    def follow(self, block: Block) -> list[Step]:
        """Write the block's file, if it is one, and return the steps to run.

        Raises:
            ValueError: The block asks for what there is no rule for, or is wrong on its face.
        """
        self.steps = []
        known = {"bash": self._bash, "yaml": self._yaml, "python": self._python, "toml": self._toml, "text": self._text}
        if block.language not in known:
            raise ValueError(f"{block}: there is no rule for {block.language!r}; use {', '.join(known)}")
        text = _FILE_NAME.sub("", block.text)
        # of a package, its folder is what is installed or tested
        self.unused -= {name for name in self.unused if Path(name).parts[0].partition(".")[0] in text}
        known[block.language](block)
        return self.steps

    # ---- languages ------------------------------------------------------------------------------------------------

    def _bash(self, block: Block) -> None:
        for command in commands_of(block.text):
            before = len(self.steps)
            self._command(command)
            if code := _EXIT_CODE.search(command):
                (self.failing,) = self.steps[before:]
                self.failing.expected_code = int(code[1])

    def _text(self, block: Block) -> None:
        """Output of what stands before it; of errors, all of it is compared."""
        if self.failing is not None:
            self.failing.expected_output = " ".join(block.text.split())
            self.failing = None

    def _yaml(self, block: Block) -> None:
        yaml.safe_load(block.text)
        if not self._write(block):
            file = self._write(block, f"block-{block.line}.yaml")
            self._step("rlplug", ["fit", "-c", "configs/quickstart.yaml", "-c", str(file), "--print_config"])

    def _python(self, block: Block) -> None:
        compile(block.text, str(block), "exec")
        if not self._write(block):
            self._step("python", [str(self._write(block, f"block-{block.line}.py"))])

    def _toml(self, block: Block) -> None:
        tomllib.loads(block.text)
        self._write(block)

    def _write(self, block: Block, name: str | None = None) -> Path | None:
        named = _FILE_NAME.match(block.text)
        if name is None and named is None:
            return None
        if named is not None and Path(named[1]).parts[0] in self.made:
            if (self.folder / named[1]).read_text() != _FILE_NAME.sub("", block.text, count=1):
                raise ValueError(f"{block}: {named[1]} is not what rlplug new-plugin writes: run make docs")
            return self.folder / named[1]
        if named is not None:
            self.unused.add(named[1])
        file = self.folder / (name or named[1])  # type: ignore[index]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
        return file

    # ---- commands -------------------------------------------------------------------------------------------------

    def _command(self, command: str) -> None:
        words = shlex.split(command.splitlines()[0], comments=True)
        variables: dict[str, str] = {}
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, variables[name] = words.pop(0).partition("=")
        program = words[0].removeprefix(".venv/bin/")
        if program == "rlplug" and words[1] == "new-plugin":
            folder = f"rlplug-{words[2]}"
            new_plugin_command([*words[2:], "--folder", str(self.folder / folder)])
            self.made.add(folder)
        elif program == "rlplug" and words[1] == "watch":
            watch_parser().parse_args(words[2:])
        elif program == "rlplug":
            self._step("rlplug", self._smaller(words[1:]), variables)
        elif program in SHELL:
            self._step("shell", [command], variables)
        elif program == "make":
            self._make(words[1])
        elif program == "pip":
            self._pip(words[1], words[2:])
        elif words[:3] == ["python", "-m", "pytest"]:
            self._pytest(words[3:])
        elif words[0] == "eval" and words[1].startswith("$(rlplug "):  # the shell reads what the command prints
            self._step("rlplug", words[1][2:-1].split()[1:], variables)
        elif words != ["source", ".venv/bin/activate"]:
            raise ValueError(f"there is no rule for the command {command!r}")

    def _step(self, kind: str, arguments: list[str], variables: dict[str, str] | None = None) -> None:
        self.steps.append(Step(kind, arguments, str(self.folder), str(self.site), variables or {}))

    def _smaller(self, arguments: list[str]) -> list[str]:
        if arguments[0] not in ("fit", "validate") or any("help" in word for word in arguments):
            return arguments
        if arguments[0] == "fit" and "--print_config" not in arguments:
            self.num_steps = 2 if "--resume" in arguments else 1
            arguments = [*arguments, "--model.num_steps", str(self.num_steps)]
        path = self._policy_path(arguments)
        if path is not None and not (self.folder / path).is_dir():
            arguments = [
                *(*arguments, "--model.policy.path", str(self.stand_in), "--model.policy.init", "random"),
                *("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--model.sampling.max_new_tokens", "8"),
                *("--model.limits.max_reward_error_share", "1"),  # a busy machine may take longer than a reward may
                *("--model.batch.prompts_per_step", "4", "--model.batch.group_size", "2"),
            ]
        return [re.sub(r"/step-\d{8}$", f"/step-{self.num_steps:08d}", word) for word in arguments]

    def _policy_path(self, arguments: list[str]) -> str | None:
        """Return the policy that a command line names, in its files or by itself."""
        path = None
        for option, value in itertools.pairwise(arguments):
            if option in ("-c", "--config"):
                config: Any = yaml.safe_load((self.folder / value).read_text())
                path = config.get("policy", config.get("model", {}).get("policy", {}).get("path", path))
            elif option in ("--policy", "--model.policy.path"):
                path = value
        return path

    def _make(self, target: str) -> None:
        done = subprocess.run(["make", "-n", target], cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"make {target}: {done.stderr}")
        for line in done.stdout.splitlines():
            if line.startswith(".venv/bin/rlplug "):
                self._command(line)

    def _pip(self, operation: str, words: list[str]) -> None:
        if not any("/" in word for word in words):
            for requirement in map(Requirement, words):
                _check_own(requirement)
            return
        words = [word for word in words if word not in ("-e", "--editable")]
        options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
        if operation == "install":
            options += ["--upgrade", "--target", str(self.site)]
        self._step("shell", [shlex.join([sys.executable, "-m", "pip", operation, *options, *words])])

    def _pytest(self, words: list[str]) -> None:
        if all((ROOT / word).exists() for word in words):
            return
        self._step("pytest", words)


def _check_own(requirement: Requirement) -> None:
    own = {distribution.name: distribution for distribution in all_distributions()}
    if requirement.name not in own:
        raise ValueError(f"pip install {requirement}: the distributions here are {', '.join(own)}")
    if unknown := requirement.extras - own[requirement.name].project.get("optional-dependencies", {}).keys():
        raise ValueError(f"{requirement.name} has no extra {', '.join(unknown)}")


def make_stand_in(folder: Path) -> Path:
    """Write the quickstart's model with room for real prompts, and a chat template."""
    shutil.copytree(ROOT / "examples/quickstart/model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}>{% endfor %}")
    return folder


def carry_out(step: Step, log: Path) -> None:
    """Run a step, and fill in how it ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120", **step.variables}
    if step.kind == "shell":
        with log.open("w") as output:
            command = ["bash", "-euc", *step.arguments]
            options = {"cwd": step.folder, "env": environment, "stdout": output, "stderr": subprocess.STDOUT}
            step.exit_code = subprocess.run(command, timeout=300, check=False, **options).returncode
    else:
        environment["PYTHONPATH"] = os.pathsep.join((step.site, step.folder))
        process = ForkedProcess(
            [sys.executable, *PYTHON[step.kind], *step.arguments], env=environment, cwd=step.folder, output=log
        )
        try:
            step.exit_code = process.wait(timeout=600)
        finally:
            process.kill()
    step.output = log.read_text()
