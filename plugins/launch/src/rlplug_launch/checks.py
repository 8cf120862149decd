"""Checks of all nodes before anything is loaded, with one message for all that is wrong."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlplug.errors import ConfigError, RunError
from rlplug_launch import probe
from rlplug_launch.launcher import Launcher, Place, TaskNeeds

PROBE_S: Final = 120.0
CLOCK_S: Final = 5.0
"""Largest difference between two clocks, in seconds; the time that a question takes is taken off."""


@dataclass(frozen=True)
class NodeQuestion:
    """What is asked of one node."""

    index: int
    """A task that runs there."""
    place: Place
    gpus: int
    """Number that its tasks take."""
    num_tasks: int
    ports: list[int]


def check_nodes(
    launcher: Launcher, tasks: Sequence[TaskNeeds], places: Sequence[Place], paths: Sequence[str], ports: Sequence[int]
) -> list[int]:
    """Ask all nodes what they have, and return a free port for each task, or the one that it wants.

    Args:
        paths: Files and folders that each node must have, as seen from the current folder: the run folder, a file that
            was just written there, and the model where it is a folder.
        ports: The port that each task wants; 0 for any.

    Raises:
        ConfigError: Something is missing or differs; each line of the message begins with a node's name.
    """
    questions = questions_of(tasks, places, ports)
    with ThreadPoolExecutor(len(questions)) as threads:
        answers = list(threads.map(lambda question: _ask(launcher, question, paths), questions))
    problems = [line for _, lines in answers for line in lines]
    if problems:
        raise ConfigError("the run cannot start:\n" + "\n".join(problems))
    free = {
        question.place.node: iter(found["free_ports"]) for question, (found, _) in zip(questions, answers, strict=True)
    }
    return [port or next(free[place.node]) for port, place in zip(ports, places, strict=True)]


def check_node(launcher: Launcher, index: int, need: TaskNeeds, place: Place, paths: Sequence[str], port: int) -> int:
    """Ask the node of one task, as :func:`check_nodes` does, while others run; return a free port, or ``port``.

    Raises:
        ConfigError: Something is missing or differs.
    """
    question = NodeQuestion(index, place, need.gpus, 1, [port] if port else [])
    found, problems = _ask(launcher, question, paths)
    if problems:
        raise ConfigError("\n".join(problems))
    return port or int(found["free_ports"][0])


def questions_of(tasks: Sequence[TaskNeeds], places: Sequence[Place], ports: Sequence[int]) -> list[NodeQuestion]:
    """Return one question for each node."""
    questions = []
    for name in dict.fromkeys(place.node for place in places):
        there = [index for index, place in enumerate(places) if place.node == name]
        needed = [ports[index] for index in there if ports[index]]
        gpus = sum(tasks[index].gpus for index in there)
        questions.append(NodeQuestion(there[0], places[there[0]], gpus, len(there), needed))
    return questions


def _ask(launcher: Launcher, question: NodeQuestion, paths: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a node's answer, and what is wrong with it."""
    place = question.place
    asked = {
        "paths": list(paths),
        "address": place.address,
        "ports": question.ports,
        "free_ports": question.num_tasks,
    }
    command = [sys.executable, "-m", "rlplug_launch.probe", json.dumps(asked)]
    before = time.time()
    try:
        found = json.loads(launcher.call(question.index, command, PROBE_S).strip().splitlines()[-1])
    except RunError as error:
        return {}, [f"{place.node}: {error}"]
    except (ValueError, IndexError) as error:
        return {}, [f"{place.node}: its answer cannot be read: {error}"]
    return found, [f"{place.node}: {line}" for line in problems_of(found, question, (before, time.time()))]


def problems_of(
    found: Mapping[str, Any],
    question: NodeQuestion,
    asked_between: tuple[float, float],
    expected: Mapping[str, str] | None = None,
) -> list[str]:
    """Return what is wrong with a node's answer.

    Args:
        asked_between: This host's time before and after.
        expected: Versions to have; by default those of this process.
    """
    lines = []
    expected = {"python": sys.version.split()[0], **probe.versions()} if expected is None else expected
    # a launcher that shows each task its own GPUs has reserved them
    if question.place.gpus is not None and found["gpus"] < question.gpus:
        lines.append(f"too few GPUs: it has {found['gpus']}, and its tasks take {question.gpus}.")
    for path in found["missing"]:
        kind = "is not there" if Path(path).is_absolute() else f"is not there (in {found['folder']})"
        lines.append(f"{path} {kind}: it must be on a file system that all nodes share, or be copied to each.")
    for port in found["used_ports"]:
        lines.append(f"port {port} of {question.place.address} is in use: change launch.servers.port, or set it to 0.")
    if len(found["free_ports"]) < question.num_tasks:
        lines.append(
            f"its address {question.place.address} is not one of its own: correct its name's entry in the DNS."
        )
    versions = found["versions"]
    for name in sorted(expected.keys() | versions.keys()):
        if versions.get(name) != expected.get(name):
            there, here = versions.get(name, "not installed"), expected.get(name, "not installed")
            lines.append(f"{name} is {there} there and {here} here: install the same on all nodes.")
    before, after = asked_between
    skew = max(before - found["time"], found["time"] - after)
    if skew > CLOCK_S:
        lines.append(f"its clock is {skew:.0f} s off: have NTP set the clocks of all nodes.")
    return lines
