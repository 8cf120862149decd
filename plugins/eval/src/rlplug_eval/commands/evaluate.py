"""``rlplug eval``: pass@k and rewards of finished policies on data sources, with intervals, tables and a page."""

from __future__ import annotations

import argparse
import copy
import itertools
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
from rlplug.config import RunConfig
from rlplug.data.datamodule import PromptDataModule
from rlplug.data.sources import FileSource
from rlplug.distributed.checkpoints.files import CONFIG, has_key
from rlplug.distributed.durable_files import new_numbered_folder, require_no_file, write_file
from rlplug.distributed.stop_signal import StopRequested, StopSignal, end_at_once
from rlplug.errors import ConfigError, shorten
from rlplug.interfaces.trainer import ModelConfig
from rlplug.observability.progress import RunProgress, shown
from rlplug.observability.terminal import invocation, make_table, say, show
from rlplug.recording.run_record import installed_versions
from rlplug_eval.engine import PolicyEngine, placement_of
from rlplug_eval.folder import EvalFolder, EvalRecord, read_record
from rlplug_eval.options import add_sampling_options, given_sampling, make_options
from rlplug_eval.page import PAGE, write_page
from rlplug_eval.policies import Policy, is_run, label_of, place_of, require_model, split_name
from rlplug_eval.results import TABLE, Results, compute, difference_table, result_table, turned, write_results
from rlplug_eval.runner import EvalPolicy, EvalSource, Evaluation
from rlplug_eval.sources import named_source, require_source

EVAL_DESCRIPTION: Final = """evaluate finished policies: pass@k, rewards and lengths with intervals, paired differences

  rlplug eval runs/quickstart/001 --base                        a trained policy and the one that it began from
  rlplug eval runs/a/001 runs/b/001 --data val.jsonl -n 8       two runs, on a file of prompts, 8 samples each
  rlplug eval -c CONFIG --policy Qwen/Qwen3-0.6B --policy old=runs/a/001/checkpoints/step-00000050
  rlplug eval --resume evals/003                                go on with an evaluation that was stopped

A policy is a run's folder (its exported policy, else its newest whole checkpoint), a checkpoint, a Hugging Face folder
or a name on the Hub; NAME=PLACE names it in the tables. The first one is the baseline of the differences. Rewards,
environment, prompts, sampling and engine are those of -c, else of the first run; keys such as --model.rollout override
them. It runs in one process, on the CPU or one GPU; engines with servers use the GPUs that their options name.
"""
TAKES_CONFIGURATION: Final = True
_KEY: Final = re.compile(r"--[a-z_]+\.")
LINE_S: Final = 5.0
"""Shortest time between two lines of progress, in seconds."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of what is not a key of the configuration."""
    parser = argparse.ArgumentParser(
        "rlplug eval",
        usage="rlplug eval [POLICY ...] [-c CONFIG] [--data SOURCE] [-n N] [--KEY VALUE] ...",
        description=EVAL_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("policies", nargs="*", metavar="POLICY", help="a policy; see above")
    add("--policy", action="append", default=[], metavar="POLICY", help="one more policy")
    add("--base", action="store_true", help="evaluate also the policy from which the run began, as the baseline")
    add(
        "-c", "--config", action="append", default=[], help="configuration, as for rlplug fit; default: the first run's"
    )
    add(
        "--data",
        action="append",
        default=[],
        metavar="SOURCE",
        help="val (the default), train, a file of prompts, or {class_path: ..., init_args: ...}; NAME=SOURCE "
        "names it; several are evaluated one after another",
    )
    add("-n", "--samples", type=int, metavar="N", help="samples per prompt; default: model.validation.num_samples")
    add("-k", type=_numbers, default=(), metavar="K,K", help="the k of pass@k; default: 1, 2, 4, ... up to N")
    add(
        "--pass-threshold",
        type=float,
        metavar="R",
        help="a sample passes with a reward of R; default: model.validation's",
    )
    add_sampling_options(parser, "model.validation's, or model.sampling's where that is greedy and N > 1")
    add("--seed", type=int, help="seed of the samples; default: model.seed")
    add("--engine", metavar="NAME", help="another engine, such as HFRollout or VLLMRollout; short for --model.rollout")
    add("--batch-size", type=int, default=256, metavar="N", help="completions generated, scored and written together")
    add(
        "--out",
        type=Path,
        default=Path("evals"),
        metavar="FOLDER",
        help="parent of the numbered folder; default: evals",
    )
    add("--resume", type=Path, metavar="FOLDER", help="go on with the evaluation in this folder; stands alone")
    return parser


def eval_command(arguments: list[str]) -> int:
    """Evaluate finished policies, pass@k with intervals, and compare them: RUN --base.

    The exit status is 1 when no completion has a reward, and 130 after Ctrl-C.

    Raises:
        RLPlugError: The message names the option and the fix.
    """
    arguments, keys = split_keys(arguments)
    options = make_parser().parse_intermixed_args(arguments)
    if options.resume is not None:
        if len(arguments) > 2 or keys:
            raise ConfigError("--resume FOLDER stands alone: the evaluation goes on as it was asked for.")
        record = read_record(options.resume)  # refuse another folder before its configuration is missed
        given = ["--config", str(options.resume / CONFIG)]
        cli = _read(given)
        return _evaluate(cli, _sources(cli, given, record), EvalFolder(options.resume))
    named = [split_name(argument) for argument in [*options.policies, *options.policy]]
    first_run = next((Path(place) for _, place in named if is_run(Path(place))), None)
    if not options.config and first_run is None:
        wrong = f"{named[0][1]!r} is no folder of a run, and " if named else ""
        raise ConfigError(
            f"{wrong}rlplug eval needs rewards and prompts: name the folder of a run, or a configuration with -c "
            "CONFIG."
        )
    files = options.config or [str(first_run / CONFIG)]  # type: ignore[operator]
    engine = [] if options.engine is None else ["--model.rollout", options.engine]
    given = [*(part for file in files for part in ("--config", file)), *engine, *keys]
    cli = _read(given)
    config: RunConfig = cli.model.config
    policies = [{"name": name or label_of(place), "argument": place_of(place)[0]} for name, place in named]
    if options.base:
        policies.insert(0, {"name": "base", "argument": ""})
    if not policies:
        raise ConfigError("rlplug eval needs a policy: a run's folder, a model's folder or a name on the Hub.")
    data = [named_source(argument) for argument in options.data or [_usual_source(cli.datamodule)]]
    _require_different_names("policies", policies)
    _require_different_names("sources", data)
    asked = make_options(
        config.validation,
        config.sampling,
        config.seed if options.seed is None else options.seed,
        options.samples,
        options.k,
        given_sampling(options),
        options.pass_threshold,
        options.batch_size,
    )
    config.engine.check_sampling(asked.sampling, "sampling")
    record = EvalRecord(policies, data, asked, versions=installed_versions())
    _policies(record, config)  # refuse what is not there before a folder is made
    for each in data:
        require_source(each["argument"], cli.datamodule)
    sources = _sources(cli, given, record)
    placement_of(str(cli.trainer_options.accelerator))
    require_no_file(options.out, "--out")
    path = new_numbered_folder(options.out)
    write_file(path / CONFIG, cli.config_yaml, has_key(cli.config_yaml))
    return _evaluate(cli, sources, EvalFolder(path, record))


def _evaluate(cli: Any, sources: list[EvalSource], folder: EvalFolder) -> int:
    config, accelerator = cli.model.config, str(cli.trainer_options.accelerator)
    record = folder.record
    record.status = "running"
    end_at_once()
    stop = StopSignal()
    progress = RunProgress(0, 0)
    newest_s = time.monotonic()
    say(f"evaluation: {folder.path} | {record.options.sentence()}", wraps=True)
    if config.weight_sync.dtype is not None:
        say(f"weights go to the engine in {config.policy.dtype}: model.weight_sync.dtype is of training")
    engine = PolicyEngine(config, placement_of(accelerator), stop.poll, lambda: stop.agree(list))
    with shown(progress) as lines:

        def note(line: str) -> None:
            nonlocal newest_s
            progress.status = line
            if lines is not None and time.monotonic() - newest_s >= LINE_S:
                newest_s = time.monotonic()
                lines.write(line)

        evaluation = Evaluation(config, _policies(record, config), sources, engine, folder, note)
        stop.install()
        record.status = "failed"
        try:
            with suppress(StopRequested):
                evaluation.run()
                record.status = "finished"
            if stop.number is not None:
                record.status = "interrupted"
        finally:
            stop.uninstall()
            try:
                results = _write(folder)
            finally:
                evaluation.close()
                folder.close()
    _print(folder, results)
    if record.status == "interrupted":
        say(f"Stopped by {stop.name}. Go on with: {invocation()} eval --resume {folder.path}")
        return stop.exit_status
    return 0 if any(result.reward is not None for result in results.results) else 1


def _write(folder: EvalFolder) -> Results:
    results = compute(folder.record, folder.rows())
    folder.save()
    write_results(folder, results)
    write_page(folder, results)
    return results


def _print(folder: EvalFolder, results: Results) -> None:
    for data in folder.record.data:
        mine = [result for result in results.results if result.data == data["name"]]
        show(make_table(*turned(*result_table(mine)), data["name"]))
        differences = [each for each in results.differences if each.data == data["name"]]
        if differences:
            title = f"less {differences[0].baseline}, on the same prompts"
            show(make_table(*turned(*difference_table(differences)), title))
        for result in mine:
            if result.first_error:
                say(f"first error of {result.policy}: {shorten(result.first_error)}")
    say(f"tables: {folder.path / TABLE}")
    say(f"page: {folder.path / PAGE}")


# ---- what is asked ------------------------------------------------------------------------------------------------


def _require_different_names(kind: str, found: Sequence[dict[str, str]]) -> None:
    name, count = Counter(each["name"] for each in found).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"{count} {kind} are named {name!r}: name them apart, as in NAME={found[-1]['argument']}.")


def split_keys(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments in those of the command, and keys of the configuration with their values: ``--model.seed 3``."""
    own: list[str] = []
    keys: list[str] = []
    words = iter(arguments)
    for word in words:
        if not _KEY.match(word):
            own.append(word)
            continue
        keys.append(word)
        if "=" not in word:
            keys.extend(itertools.islice(words, 1))
    return own, keys


def _read(arguments: Sequence[str]) -> Any:
    """Read a run's configuration, and keep compiled code where it says, or refuse it, before a folder is made."""
    cli = read_command(ConfiguredCLI, ["fit", *arguments])
    cli.use_compile_cache()
    return cli


def _policies(record: EvalRecord, config: RunConfig) -> list[EvalPolicy]:
    """Return the policies, with the options of the runs whose checkpoints they are."""
    found = []
    for each in record.policies:
        if not each["argument"]:
            found.append(EvalPolicy(Policy(each["name"], config.policy)))
            continue
        place, checkpoint = place_of(each["argument"])
        if checkpoint is None:
            require_model(place)
            own = config.policy
            model = ModelConfig(
                place,
                dtype=own.dtype,
                attn_implementation=own.attn_implementation,
                chat_template_kwargs=own.chat_template_kwargs,
            )
            found.append(EvalPolicy(Policy(each["name"], model)))
            continue
        run: RunConfig = _read(["--config", str(checkpoint / CONFIG)]).model.config
        kwargs = config.policy.chat_template_kwargs or run.policy.chat_template_kwargs
        model = replace(run.policy, dtype=config.policy.dtype, chat_template_kwargs=kwargs)
        found.append(EvalPolicy(Policy(each["name"], model, checkpoint), run))
    return found


def _usual_source(data: PromptDataModule) -> str:
    return "train" if data.val is None else "val"


def _sources(cli: Any, given: list[str], record: EvalRecord) -> list[EvalSource]:
    return [EvalSource(each["name"], _data(cli, given, each["argument"])) for each in record.data]


def _data(cli: Any, given: list[str], argument: str) -> PromptDataModule:
    """Return a data module whose validation prompts are those of a source, and which renders as the run's does.

    Args:
        given: The arguments that the configuration was read from.
        argument: The source, as :func:`make_parser` says.

    Raises:
        ConfigError: There is no such class, or it refuses its arguments.
    """
    if argument.startswith("{"):
        data: PromptDataModule = _read([*given, f"--data.val={argument}"]).datamodule
        return data
    data = copy.copy(cli.datamodule)
    if argument == "train":
        data.val = data.train
    elif argument != "val":
        data.val = FileSource(argument)
    return data


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))
