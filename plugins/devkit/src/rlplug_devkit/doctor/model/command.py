"""The checks of ``rlplug doctor --model`` in their order."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Final

from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.transformers_trainer import TRANSFORMERS
from rlplug.types import MeshSizes
from rlplug_devkit.doctor.host import gib
from rlplug_devkit.doctor.model import chat, weights
from rlplug_devkit.doctor.model.passes import Passes
from rlplug_devkit.doctor.model.results import Result, Verdict, lines_of, result_of
from rlplug_devkit.doctor.model.subject import KEY, Options, Subject, device_of, size_of_files

ONE_RANK: Final = MeshSizes(1, 1, 1, 1)


def model_command(options: argparse.Namespace) -> int:
    """Check the model that the options name, print the table, and return the exit status.

    Raises:
        ConfigError: There is no such device, or an option is out of range.
    """
    config = ModelConfig(options.model, dtype=options.dtype, attn_implementation=options.attn_implementation)
    asked = Options(config, device_of(options.device), options.layers)
    results = []
    for result in results_of(Subject(asked)):
        print(f"{result.check}: {result.held}", file=sys.stderr, flush=True)
        results.append(result)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(f"{options.model}, {config.dtype}, {asked.device}")
        print("\n".join(lines_of(results)))
    return 1 if any(result.held == "no" for result in results) else 0


def results_of(subject: Subject) -> Iterator[Result]:
    """Yield the result of each check when it has run."""
    passes = Passes(subject)
    checks: dict[str, Callable[[], Verdict]] = {
        "tokenizer and embeddings": lambda: chat.sizes_fit(subject),
        "chat template": lambda: chat.conversations_render(subject),
        "first layers": lambda: _first_layers(subject),
        "names of weights": lambda: weights.names_are_the_files(subject),
        "loading": lambda: _loading(subject),
        "values of weights": lambda: weights.sync_sends_the_files(subject),
        "packed equals alone": passes.packed_equals_alone,
        "neighbours change nothing": passes.neighbours_change_nothing,
        "training passes repeat": passes.passes_repeat,
        "checkpointing": passes.checkpointing_changes_nothing,
        "export opens again": lambda: weights.export_opens_again(subject),
    }
    for name, check in checks.items():
        yield result_of(name, check)


def _first_layers(subject: Subject) -> Verdict:
    """Try the first layers with short windows, as the start of a run does."""
    subject.whole  # noqa: B018 - what config.json cannot build is said by this check
    TRANSFORMERS.check(subject.config, KEY, ONE_RANK)
    return Verdict("packed rows stay apart with random weights and short windows")


def _loading(subject: Subject) -> Verdict:
    tried, every = subject.num_layers
    print(f"loading {size_of_files(subject)}", file=sys.stderr, flush=True)
    effect, name = subject.loaded[1], type(subject.model).__name__
    found = f"{effect.description}: {name}, {every} layers, {gib(subject.bytes_of(tried))} as {subject.config.dtype}"
    if tried == every:
        return Verdict(found)
    return Verdict(
        f"{found}; only the first {tried} layers are tried", "note", "Leave --layers out to try all of them."
    )
