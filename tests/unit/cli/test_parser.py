"""A command line that cannot be read is refused with its key, what is wrong, and what to write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelConfig
from rlplug.plugin_manager import plugins
from rlplug.recording.run_folder import RunFolder

ROOT = Path(__file__).parents[3]
FIT = ["fit", "-c", "configs/quickstart.yaml"]
MODULES = {
    "a_game": "from rlplug.interfaces.environment import Environment as E\nclass SlowGame(E): pass\nclass Other: pass\n"
    "from lightning.pytorch.loggers import CSVLogger\nclass NeedsALibrary(CSVLogger):\n"
    "    def __init__(self): raise ModuleNotFoundError('pip install the_library')",
    "needs_more": "import no_such_package",
    "no_python": "x = 1\ndef f(:",
    "asks_for_a_key": "import os\nos.environ['NO_SUCH_KEY_OF_MINE']",
}
"""Modules of a user, by name."""


@pytest.fixture(scope="module", autouse=True)
def at_root(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Read paths as at the root, find the user's modules, and leave ``sys.argv`` as it was."""
    plugins()
    folder = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.syspath_prepend(folder)
        patch.syspath_prepend(ROOT)
        patch.setattr("sys.argv", ["rlplug"])
        yield


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_command(ConfiguredCLI, [*FIT, *arguments])
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.environment", "a_game.SlowGam", "a_game has no 'SlowGam'. Did you mean 'SlowGame'?"),
        ("model.algorithm", "no_module.G", "there is no module 'no_module'. Correct the path, install"),
        ("data.val", "{class_path: no_module.S}", "there is no module 'no_module'."),
        (
            "model.rewards",
            "[{class_path: needs_more.R, init_args: {weight: 0.5}}]",
            "raises ModuleNotFoundError: No module named 'no_such_package' (at needs_more.py:1). Install",
        ),
        ("model.environment", "no_python.E", "no_python.py:2: invalid syntax"),
        ("model.environment", "asks_for_a_key.E", "raises KeyError: 'NO_SUCH_KEY_OF_MINE' (at"),
        ("trainer.logger", "lightning.pytorch.loggers.WandbLoggr", "Did you mean 'WandbLogger'?"),
        ("model.lr_scheduler", "{class_path: torch.optim.lr_scheduler.CosineLR}", "has no 'CosineLR'. Did you mean"),
        ("model.algorithm.help", "no_module.G", "there is no module 'no_module'."),
        ("model.optimizer", "torch.optim.AdamX", "torch.optim has no 'AdamX'. Did you mean 'Adamax'?"),
    ],
)
def test_an_import_that_fails_is_named_with_its_reason(key: str, value: str, message: str) -> None:
    """Alone catches a class key that is refused for another reason than the import, such as options without a block."""
    text = refused(f"--{key}", value)
    assert text.startswith(f"{key.removesuffix('.help')}: '")
    assert "cannot be imported: " in text
    assert message in text


@pytest.mark.parametrize("module", ["needs_more", "no_python", "asks_for_a_key"])
def test_the_import_of_a_function_among_the_options_of_a_class_is_named_too(module: str) -> None:
    """Alone catches an exception of the user's module without the path that named it."""
    text = refused("--model.rewards", f"[{{class_path: FunctionReward, init_args: {{function: {module}.f}}}}]")
    assert f"'{module}.f' cannot be imported: " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model.environment", "a_game.Other"],
            "model.environment: 'a_game.Other' is no subclass of Environment: give",
        ),
        (["--model.algorithm", "a_game.Other"], "model.algorithm: 'a_game.Other' is no subclass of Algorithm: give"),
        (["--model.algorithm.help", "a_game.Other"], "model.algorithm: 'a_game.Other' is no subclass of Algorithm"),
        (
            ["--model.algorithm.help", "GRPOO"],
            "model.algorithm: 'GRPOO' is not a known algorithm. Did you mean 'GRPO'?",
        ),
        (["model.num_steps=3"], "write --model.num_steps 3: keys begin with --."),
        (["+model.algorithm.clip_low=3"], "write --model.algorithm.clip_low 3: keys begin with --."),
        (["model.num_stepz=3"], "there is no key 'model.num_stepz'. Did you mean 'model.num_steps'?"),
        (
            ["configs/smollm2.yaml"],
            "give the configuration configs/smollm2.yaml with -c, as in: rlplug fit -c configs/",
        ),
        (["--model.lr_scheduler", "torch.optim.AdamW"], "is no subclass of LRScheduler or ReduceLROnPlateau: give"),
        (["--model.environment", "os.getcwd"], "model.environment: 'os.getcwd' is no function that returns Environ"),
        (["--model.algorithm", "rlplug.interfaces.algorithm.Algorithm"], "is abstract: give the import path of a sub"),
        (["--model.environment", "a_game..SlowGame"], "'a_game..SlowGame' is no import path: give package.Class."),
        (["--model.environment", "os.path"], "model.environment: it takes the import path of a function or class"),
        (["--model.algorithm", "{class_path: GRPO, init_args: 5}"], "GRPO takes its options as a block under init_"),
        (["--model.optimizer", "{class_path: torch.optim.SGD, init_args: 5}"], "SGD takes its options as a block"),
        (
            ["--model", "{algorithm: 1000000}"],
            "is 1000000: give a block with the class_path of an Algorithm, or its options",
        ),
        (["--model.algorithm", "{class_path: {a: 1}}"], "class_path is {'a': 1}: give the name of a class, or packag"),
        (["--model.algorithm.clip_low", ""], "clip_low is empty: give a number."),
        (
            ["--model.algorithm", "{class_path: GRPO, clip_low: 0.1}"],
            "model.algorithm: options stand beside class_path",
        ),
    ],
)
def test_a_mistake_is_named_with_its_fix(arguments: list[str], message: str) -> None:
    """Each case alone catches the loss of its message, for which jsonargparse's own, or a false one, would come."""
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--trainer.logger", "[{class_path: a_game.NeedsALibrary}]"],
            "trainer.logger: NeedsALibrary refuses its options: pip install the_library. Correct it",
        ),
        (
            [
                "--trainer.callbacks",
                "[{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {mode: up}}]",
            ],
            "trainer.callbacks: ModelCheckpoint refuses its options: `mode` can be min, max but got up",
        ),
        (
            ["--model.optimizer", "{class_path: torch.optim.SGD, init_args: {lr: 1}, momentum: 2}"],
            "model.optimizer: options stand beside class_path: put them in a block, init_args.",
        ),
        *(
            (
                [f"--run.dir={folder}"],
                f"run.dir is '{folder}': give the path of a folder; a variable in a file is ${{NAME}}.",
            )
            for folder in ("~nobody-of-that-name/runs", "$HOME/runs", "s3://bucket/runs")
        ),
    ],
)
def test_a_constructor_s_refusal_has_the_key(options: list[str], message: str) -> None:
    """Alone catches what jsonargparse says of a list when one of its classes lacks a library, as a logger does."""
    assert message in refused(*options)


def test_an_option_without_a_value_is_named() -> None:
    """Alone catches argparse's own words, which say no remedy."""
    assert refused("--model.batch.group_size") == "--model.batch.group_size has no value: write one behind it."


def test_an_optimizer_has_no_options_of_the_default_one(tmp_path: Path) -> None:
    """Alone catches an SGD with AdamW's weight decay and ``fused: true``, which nobody wrote."""
    file = tmp_path / "sgd.yaml"
    file.write_text("model: {optimizer: {class_path: torch.optim.SGD, init_args: {momentum: 0.9}}}")
    for more in (["-c", str(file)], ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.momentum=0.9"]):
        cli: Any = read_command(ConfiguredCLI, ["fit", "-c", "configs/smollm2.yaml", *more])
        written = cli.config.fit.model.optimizer.init_args
        assert (written.lr, written.momentum, written.weight_decay, written.fused) == (1e-5, 0.9, 0.0, None)
    cli = read_command(ConfiguredCLI, [*FIT, "--model.optimizer.lr=0.5"])
    assert cli.config.fit.model.optimizer.init_args.fused is True
    assert refused("--model.optimizer={class_path: [").startswith("model.optimizer: ")


def test_a_class_has_no_defaults_of_the_one_that_it_replaces(tmp_path: Path) -> None:
    """Alone catches a GRPO that clips at DAPO's default of 0.28, and loses what a file wrote for both."""
    file = tmp_path / "dapo.yaml"
    file.write_text(
        "model: {algorithm: {class_path: DAPO, init_args: {clip_low: 0.07}}}\n"
        "trainer: {logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}}"
    )
    other = ["--model.algorithm", "GRPO", "--trainer.logger", "lightning.pytorch.loggers.TensorBoardLogger"]
    cli: Any = read_command(ConfiguredCLI, [*FIT, "-c", str(file), *other])
    algorithm, logger = cli.config.fit.model.algorithm.init_args, cli.config.fit.trainer.logger.init_args

    assert (algorithm.clip_low, algorithm.clip_high) == (0.07, 0.2)
    assert (logger.save_dir, logger.name) == ("logs", "lightning_logs")


def test_a_list_has_nothing_of_the_one_that_it_replaces(tmp_path: Path) -> None:
    """Alone catches a reward with the weight of the one whose position it takes, of its own class or another."""
    first = "{class_path: FunctionReward, init_args: {function: tests.integration.parts.raises, weight: 0.3}}"
    file = tmp_path / "rewards.yaml"
    file.write_text(f"model: {{rewards: [{first}]}}")
    line = [*FIT, "-c", str(file)]
    for reward in ("MathVerify", "tests.integration.parts.hangs"):
        cli: Any = read_command(ConfiguredCLI, [*line, "--reward", reward])
        assert cli.config.fit.model.rewards[0].init_args.weight == 1.0
    cli = read_command(ConfiguredCLI, [*line, "--model.rewards+", "MathVerify"])
    assert [each.init_args.weight for each in cli.config.fit.model.rewards] == [0.3, 1.0]


def test_modules_of_the_current_folder_come_after_all_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a command that imports a stranger's file, in the folder where it is called, for a library's."""
    monkeypatch.setattr(sys, "path", libraries := [*sys.path])
    former = [*libraries]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        read_command(ConfiguredCLI, ["fit", "-c", "nowhere.yaml"])
    assert sys.path == [*former, str(tmp_path)]


def test_a_leading_tilde_is_the_home_folder() -> None:
    """Alone catches a folder named ``~``, or a model that is sought on the Hub by that name."""
    home = str(Path.home())
    assert [RunFolder("~/runs").dir, ModelConfig("~/model").path] == [f"{home}/runs", f"{home}/model"]
