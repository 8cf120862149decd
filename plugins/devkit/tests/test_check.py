"""``rlplug check`` on an installed package of which one class is right, one is wrong, and others cannot be checked."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rlplug_devkit.check import check_command, runs
from rlplug_devkit.check.results import SHARE, Result, pytest_collection_modifyitems
from rlplug_devkit.check.runs import run_again
from rlplug_devkit.check.subjects import Subject, package_of
from rlplug_devkit.claims import STARTS_ONCE
from rlplug_devkit.engines.conformance import EngineConformance
from rlplug_devkit.hooks.conformance import HooksConformance

from rlplug.errors import ConfigError
from rlplug.rollout.hf_engine import HFRollout

PLUGIN = """
from rlplug.plugin_manager import hookimpl

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_register_algorithms(registry):
    registry.add("algorithms", "made_package.parts:Right")
    registry.add("algorithms", "made_package.parts:Wrong")


@hookimpl
def rlplug_register_rewards(registry):
    for name in ("AsksForMore", "Dies", "Scores", "Waits"):
        registry.add("rewards", f"made_package.parts:{name}")


@hookimpl
def rlplug_register_classes(registry):
    registry.add("classes", "made_package.parts:Logger")
"""
PARTS = """
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from rlplug.interfaces import Advantages, Algorithm, LossOutput, Reward


class Right(Algorithm):
    sign = 1

    def __init__(self, scale):
        self.scale = scale

    def advantages(self, batch):
        mean = batch.step.mean(batch.rewards, batch.reward_valid)
        return Advantages(torch.where(batch.reward_valid, self.scale * (batch.rewards - mean), 0.0))

    def loss(self, micro_batch, logprobs, entropy, denominators):
        ratio = (logprobs - micro_batch.old_logprobs).clamp(max=10).exp()
        return LossOutput(-self.sign * (ratio * micro_batch.advantages).sum() / max(denominators.num_tokens, 1))


class Wrong(Right):
    sign = -1


class Scores(Reward):
    def score(self, samples):
        return [float(sample.completion.endswith("4")) for sample in samples]


class AsksForMore(Scores):
    def __init__(self, template):
        super().__init__()


class Dies(Scores):
    def score(self, samples):
        os._exit(3)


class Waits(Scores):
    def score(self, samples):
        pool = ThreadPoolExecutor(1)
        return pool.submit(lambda: pool.submit(list, samples).result()).result()


class Logger:
    pass
"""
SETTINGS = """
Right: {init_args: {scale: 2.0}, settings: {zero_advantages: step}}
Wrong: {init_args: {scale: 2.0}, settings: {zero_advantages: step}}
Waits: {settings: {deadline_s: 0.5}}
"""


@dataclass
class Checked:
    """What a run of the command left."""

    status: int
    printed: str
    record: dict[str, Any]

    def of(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the results of a class, by the check's name."""
        return {result["check"]: result for result in self.record["results"] if result["class"] == name}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder on ``sys.path`` with the package and its metadata, as pip leaves them."""
    folder = tmp_path_factory.mktemp("installed")
    files = {
        "made_package/__init__.py": "",
        "made_package/plugin.py": PLUGIN,
        "made_package/parts.py": PARTS,
        "made_package/conformance.yaml": SETTINGS,
        "rlplug_made-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: rlplug-made\nVersion: 1.2\n",
        "rlplug_made-1.2.dist-info/entry_points.txt": "[rlplug.plugins]\nmade = made_package.plugin\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def checked(package: Path) -> Checked:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(package)
        printed: list[str] = []
        patch.setattr("rlplug_devkit.check.say", lambda *parts, **_: printed.append("".join(map(str, parts))))
        status = check_command(["rlplug-made", "--limit", "1800"])
        return Checked(status, "\n".join(printed), json.loads((package / "rlplug-check.json").read_text()))


pytestmark = [pytest.mark.kit, pytest.mark.timeout(1800)]


def test_what_is_right_is_held_and_what_is_wrong_is_named(checked: Checked) -> None:
    right, wrong = checked.of("Right"), checked.of("Wrong")
    assert {result["held"] for result in right.values()} == {"held", "does not apply"}
    assert len(right) > 40
    assert wrong["test_better_completions_become_more_likely"]["held"] == "failed"
    assert "the sign -A" in wrong["test_better_completions_become_more_likely"]["reason"]
    assert checked.status == 1
    assert checked.record["conclusion"] == "not held"


def test_a_class_that_cannot_be_made_is_not_passed_over(checked: Checked) -> None:
    (result,) = checked.of("AsksForMore").values()
    assert result["held"] == "failed"
    assert "its constructor needs template" in result["reason"]
    assert checked.record["not_checked"] == ["Logger"]


def test_a_class_that_ends_the_process_hides_no_other(checked: Checked) -> None:
    """Would miss the classes of the same process that come after it."""
    died = [result for result in checked.of("Dies").values() if result["held"] == "failed"]
    assert "ended with status 3" in died[0]["reason"]
    assert {result["held"] for result in checked.of("Scores").values()} == {"held", "does not apply"}


def test_a_call_that_never_ends_does_not_keep_the_process(checked: Checked) -> None:
    """Would wait for --limit: Python joins the threads of the reward's own pool when it ends."""
    failed = [result for result in checked.of("Waits").values() if result["held"] == "failed"]
    assert "took longer than 0.5 s" in failed[0]["reason"]
    assert not any("--limit" in result["reason"] for result in failed)


def test_the_record_says_what_was_checked(checked: Checked) -> None:
    record = checked.record
    assert (record["format"], record["distribution"], record["version"]) == (1, "rlplug-made", "1.2")
    assert {"python", "rlplug", "torch"} <= record["versions"].keys()
    assert {result["kind"] for result in record["results"]} == {"algorithm", "reward"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rlplug-mode"], "no installed plugin has that name. Did you mean 'rlplug-made'?"),
        (["made", "--only", "Left"], "--only Left is not in rlplug-made"),
        (["made_package", "--tests", "none.py"], "--tests none.py is no file"),
    ],
)
def test_a_wrong_argument_is_named(package: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_command(arguments)
    assert says in str(error.value)


def test_settings_are_checked(package: Path, tmp_path: Path) -> None:
    for text, says in (
        ("Right: {scale: 2}", "must have, by the name of a class"),
        ("Left: {}", "does not register"),
        ("Right: {settings: {test_advantages_repeat: null}}", "Right.settings.test_advantages_repeat replaces a check"),
    ):
        (tmp_path / "settings.yaml").write_text(text)
        with pytest.raises(ConfigError, match=says):
            check_command(["made", "--settings", str(tmp_path / "settings.yaml")])


def test_arguments_on_a_gpu_replace_others_there(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone catches servers that no certification on a GPU could start, since theirs are named on GPUs alone."""
    file = tmp_path / "settings.yaml"
    file.write_text("Right: {init_args: {scale: 1, shift: 2}, on_gpu: {scale: 3}}")

    for has_gpu, arguments in ((False, {"scale": 1, "shift": 2}), (True, {"scale": 3, "shift": 2})):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        subjects = {subject.name: subject for subject in package_of("made", file).subjects}
        assert subjects["Right"].init_args == arguments


class StartsOnce(HFRollout):
    """An engine of which a process can have one."""

    capabilities = dataclasses.replace(HFRollout.capabilities, restart=False)


@pytest.mark.nightly
def test_checks_that_want_another_engine_get_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone catches a record of an engine such as vLLM's in one process that never ran half of the kit."""
    monkeypatch.syspath_prepend(Path(__file__).parent)

    subject = Subject("engine", "StartsOnce", "test_check:StartsOnce")
    checks = ("test_stats_are_finite", "test_tied_embeddings_are_sent_once", "test_weights_of_experts_are_used")
    one_engine = [Result("TestStartsOnce", each, "skipped", 0.0, f"StartsOnce {STARTS_ONCE}") for each in checks]

    results = run_again(subject, one_engine, tmp_path, time.monotonic() + 600.0, {})

    assert [(each.check, each.held) for each in results] == [(check, "held") for check in checks], results
    assert len(list(tmp_path.iterdir())) == 3, "each has one engine"


def test_processes_on_gpus_share_the_checks_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches a check of an engine that no process runs, or two do, and kits that meet on one GPU."""
    ran: list[tuple[list[str], Mapping[str, str]]] = []

    def run_part(
        subjects: Sequence[Subject], tests: object, folder: Path, deadline: float, variables: Mapping[str, str]
    ) -> list[Result]:
        ran.append(([subject.name for subject in subjects], variables))
        return []

    monkeypatch.setattr(runs, "visible_gpus", lambda: ["4", "7"])
    monkeypatch.setattr(runs, "_run_part", run_part)
    runs.run_kits([Subject("trainer", "T", "t:T"), Subject("engine", "E", "e:E")], (), tmp_path, None, 1.0)

    assert sorted(names for names, _ in ran) == [["E"], ["E", "T"]]
    assert {variables["CUDA_VISIBLE_DEVICES"] for _, variables in ran} == {"4", "7"}
    checks = {"a": EngineConformance, "b[1]": EngineConformance, "b[2]": EngineConformance, "c": HooksConformance}
    kept = []
    for _, variables in ran:
        monkeypatch.setenv(SHARE, variables[SHARE])
        items: list[Any] = [type("Item", (), {"cls": kit, "nodeid": f"file::{each}"})() for each, kit in checks.items()]
        pytest_collection_modifyitems(items)
        kept.append([item.nodeid.removeprefix("file::") for item in items])
    assert sorted(kept) == [["a", "c"], ["b[1]", "b[2]", "c"]]
