"""Records of ``rlplug certify``: which are refused, what they say of an installed set, and what a run must show."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rlplug_devkit.certify.code import digest_of, digests_of
from rlplug_devkit.certify.command import certify_command
from rlplug_devkit.certify.installed import Verdict, verdicts_of
from rlplug_devkit.certify.learning import judged, try_learning
from rlplug_devkit.certify.records import Record, RecordError, conclusion_of, hash_of, read_record, shipped_records
from rlplug_devkit.check.subjects import Subject
from rlplug_devkit.reference import FLOAT32
from rlplug_devkit.tasks.tiny_run import TinyRun

from rlplug.errors import ConfigError
from rlplug.rollout.hf_engine import HFRollout

HELD = {"part": "kit of Engine", "check": "logprobs", "held": "held", "seconds": 0.1, "reason": ""}
FAILED = {**HELD, "check": "seeds", "held": "failed"}
HERE: dict[str, str | None] = {"rlplug": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}


def values(*results: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return what a record says, with a hash that fits."""
    made: dict[str, Any] = {
        "format": 2,
        "engine": "Engine",
        "trainer": "Trainer",
        "families": ["llama3"],
        "device": "cpu",
        "python": "3.11.7",
        "system": "Linux",
        "packages": dict(HERE),
        "other_packages": {"numpy": "2.4.6"},
        "code": {"rlplug": "c0de", "rlplug-devkit": "d1ce"},
        "began": "2026-11-28T12:00:00Z",
        "seconds": 1.0,
        "measured": {"llama3": {"1": {"mismatch/max": 1e-6}}},
        "results": list(results or [HELD]),
        "conclusion": conclusion_of(list(results or [HELD])),
        **changes,
    }
    return {**made, "sha256": hash_of(made)}


def refusal(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(RecordError) as error:
        read_record(file)
    assert "rlplug certify" in str(error.value)
    return str(error.value)


def test_a_record_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Alone catches a hash that leaves a part of the record out, and a conclusion that is believed."""
    good, file = values(HELD, FAILED), tmp_path / "record.json"
    file.write_text(json.dumps(good))
    assert not read_record(file).is_green

    for key in good.keys() - {"format", "sha256"}:
        other = {**good, key: 2.0} if key == "seconds" else {**good, key: type(good[key])()}
        assert "was changed after it was made" in refusal(file, json.dumps(other)), key
    claimed = {**good, "conclusion": "certified"}
    claimed["sha256"] = hash_of(claimed)
    assert "which its results do not say" in refusal(file, json.dumps(claimed))
    assert "lacks families, results" in refusal(file, json.dumps({**good, "families": 1, "results": None}))
    assert "has not the format 2" in refusal(file, json.dumps({**good, "format": 3}))
    assert "cannot be read" in refusal(file, "{")


@pytest.mark.parametrize(
    ("results", "conclusion"),
    [
        ([HELD, {**HELD, "held": "does not apply"}], "certified"),
        ([HELD, {**HELD, "held": "skipped"}], "not certified"),
        ([HELD, {**HELD, "part": "kit of Trainer", "held": "does not apply"}], "not certified"),
        ([], "not certified"),
    ],
)
def test_a_part_of_which_nothing_was_held_certifies_nothing(results: list[dict[str, Any]], conclusion: str) -> None:
    assert conclusion_of(results) == conclusion


def only(*records: dict[str, Any], has_gpu: bool = False, python: str = "3.11.2", code: str = "c0de") -> Verdict:
    found = [Record(record, "rlplug-owner") for record in records]
    (verdict,) = verdicts_of(found, HERE, {"rlplug": code}, has_gpu, python)
    return verdict


def test_an_installed_set_is_certified_or_the_nearest_is_named() -> None:
    """Alone catches a pip line with versions that are there already, and a record of a CPU that speaks of a GPU."""
    old = values(packages={**HERE, "torch": "2.12.0", "transformers": "5.9.0"})
    near = values(packages={**HERE, "transformers": "5.20.0"})

    same = only(old, values(), near)
    assert (same.is_certified, same.advice) == (True, "")
    assert same.text == "certified for llama3 on cpu, 2026-11-28, record of rlplug-owner"

    other = only(old, near, values(FAILED))
    assert (other.is_certified, other.advice) == (False, "pip install transformers==5.20.0")
    assert "not certified with transformers 5.23.0; the nearest certified set is of llama3 on cpu" in other.text

    assert "no record is of a GPU" in only(values(), has_gpu=True).text
    assert only(values(), values(device="NVIDIA H200"), has_gpu=True).is_certified
    assert only(values(), python="3.12.1").advice == "Python 3.11"
    assert only(values(FAILED)).text == "not certified: 1 records, none of which is green"
    assert (
        list(
            verdicts_of(
                [Record(values(packages={"torch": "2.13.0", "vllm": "0.32.0"}))], HERE | {"vllm": None}, {}, False
            )
        )
        == []
    )


def test_other_code_of_the_same_versions_is_not_certified(tmp_path: Path) -> None:
    """Alone catches a record that certifies what was changed after it, and one of kits that forbids new kits."""
    changed = only(values(), code="0ther")
    assert (changed.is_certified, changed.advice) == (False, "rlplug certify --engine Engine --trainer Trainer")
    assert "with this code of rlplug; other code of these versions is, for llama3 on cpu" in changed.text
    assert only(values(), values(code={"rlplug": "0ther"}), code="0ther").is_certified

    former = {key: value for key, value in values(format=1).items() if key != "code"}
    file = tmp_path / "former.json"
    file.write_text(json.dumps({**former, "sha256": hash_of(former)}))
    assert read_record(file).code == {}
    assert only(former, code="0ther").is_certified
    assert "lacks code" in refusal(file, json.dumps({**former, "format": 2}))


def test_a_digest_is_of_the_python_files_as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches a digest that a record beside the code, or an import of it, changes, and one that misses a file."""
    package, metadata = tmp_path / "digested_package", tmp_path / "digested-1.0.dist-info"
    (package / "part/records").mkdir(parents=True)
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: digested\nVersion: 1.0\n")
    (metadata / "top_level.txt").write_text("digested_package\ndigested_module\n")
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)

    seen = [digest_of("digested")]
    for file in (package / "part/new.py", package / "__init__.py", tmp_path / "digested_module.py"):
        file.write_text("a = 1\n")
        importlib.invalidate_caches()
        seen.append(digest_of("digested"))
    (package / "part/new.py").rename(package / "part/moved.py")
    seen.append(digest_of("digested"))
    assert len({*seen}) == len(seen)

    (package / "part/records/one.py").write_text("b = 2\n")
    (package / "part/data.json").write_text("{}")
    assert digests_of(["Digested", "none-such"]) == {"digested": seen[-1]}


def test_records_are_found_in_packages_that_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, metadata = tmp_path / "certified_package", tmp_path / "rlplug_certified-1.0.dist-info"
    (package / "records").mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    (package / "records/one.json").write_text(json.dumps(values()))
    (package / "records/two.json").write_text(json.dumps(values() | {"device": "NVIDIA H200"}))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rlplug-certified\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rlplug.plugins]\ncertified = certified_package.plugin\n")
    monkeypatch.syspath_prepend(tmp_path)

    records, problems = shipped_records()

    assert [record.owner for record in records if record.engine == "Engine"] == ["rlplug-certified"]
    assert [problem.split(":")[0] for problem in problems] == ["rlplug-certified"]


def test_a_run_must_learn_and_agree() -> None:
    """Alone catches a metric that is missing or no number, and a second step that nobody looks at."""
    right = {"policy/grad_norm": 1.0, "mismatch/mean": 1e-7, "mismatch/max": 1e-6}

    def failed(*steps: dict[str, float]) -> list[str]:
        results = judged("run", TinyRun(Path(), list(steps), {}), FLOAT32, 1.0)
        return [result["check"] for result in results if result["held"] == "failed"]

    assert failed(right, right) == []
    assert failed(right, {**right, "mismatch/max": 1e-3}) == ["engine_and_trainer_agree_in_step_2"]
    assert failed({"policy/grad_norm": 1.0}, right) == ["engine_and_trainer_agree_in_step_1"]
    assert failed(right, {**right, "policy/grad_norm": 0.0}) == ["gradients_are_finite_and_not_zero"]
    assert failed(right) == ["gradients_are_finite_and_not_zero"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "HFRolout"], "Did you mean 'HFRollout'?"),
        (["--family", "lama3"], "--family lama3 is none of llama, llama3"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        certify_command(arguments)
    assert says in str(error.value)


class KeepsFirstWeights(HFRollout):
    """Takes weights once, and says that it takes them always."""

    def update_weights(self, buckets: Any, version: int) -> Any:
        if version == 0:
            return super().update_weights(buckets, version)
        kept = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        report = super().update_weights(buckets, version)
        self._model.load_state_dict(kept)
        return report


@pytest.mark.nightly
def test_an_engine_that_takes_weights_once_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches an update so small that the logprobs of old weights would pass; HFRollout itself has a record."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    engine = Subject("engine", "test_certify.KeepsFirstWeights", "")
    trainer = Subject("trainer", "TransformersTrainer", "")

    (result,), measured = try_learning(engine, trainer, "llama3", FLOAT32, "cpu", 600.0)

    assert (result["check"], result["held"], measured) == ("two_steps_end", "failed", {})
    assert "step 2: KeepsFirstWeights and the trainer disagree" in result["reason"]
