"""``rlplug doctor --model``: a sound model holds, and each that is broken on purpose fails the check for that."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlplug_devkit.doctor import doctor_command
from rlplug_devkit.doctor.model import results, subject
from rlplug_devkit.doctor.model.results import Verdict, result_of
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlplug.models import attention

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"

Check = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Return the results of a folder's checks by their names, and compare the exit status with them."""

    def run(folder: Path, *options: str) -> dict[str, dict[str, Any]]:
        status = doctor_command(["--model", str(folder), "--device", "cpu", "--json", *options])
        found = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
        assert status == any(each["held"] == "no" for each in found.values())
        return found

    return run


def failed(found: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, each in found.items() if each["held"] == "no"]


@pytest.fixture
def chat_folder(copied_folder: Callable[..., Path]) -> Path:
    """A sound model with a chat template."""
    folder = copied_folder("llama_tied")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_sound_model_holds_everywhere(check: Check, chat_folder: Path) -> None:
    found = check(chat_folder)

    assert failed(found) == []
    assert {name for name, each in found.items() if each["held"] == "skipped"} == set()
    assert found["chat template"]["found"].endswith("answers end with '<eos>'")


def test_the_first_layers_of_a_deep_model_can_be_tried(check: Check, model_folder: Callable[[str], Path]) -> None:
    """Per-layer lists of the configuration are cut too: gemma3 has a type for each layer."""
    found = check(model_folder("gemma3"), "--layers", "1")

    assert failed(found) == []
    assert "3 layers" in found["loading"]["found"]
    assert "only the first 1 layers" in found["loading"]["found"]


def test_attention_that_leaks_fails_the_checks_of_rows(
    check: Check, chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole_row(*arguments: Any, **options: Any) -> Any:
        borders = options["cu_seq_lens_q"]
        length = int(borders[-1])
        ends = torch.tensor([0, length], dtype=borders.dtype)
        changes = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": length, "max_length_k": length}
        return attention.packed_attention(*arguments, **options | changes)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, attention.NAME, whole_row)

    assert failed(check(chat_folder)) == ["first layers", "packed equals alone", "neighbours change nothing"]


def test_a_pass_that_remembers_the_last_one_fails(
    check: Check, chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not seen by the check of the first layers, whose borders and lengths are others."""
    calls: list[int] = []

    def tired(*arguments: Any, **options: Any) -> Any:
        output, weights = attention.packed_attention(*arguments, **options)
        if options["cu_seq_lens_q"].numel() > 3:
            calls.append(1)
            output = output * (1 + len(calls) / 1000)
        return output, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, attention.NAME, tired)

    assert "training passes repeat" in failed(check(chat_folder))


def test_a_weight_under_a_name_that_is_not_trained_is_said(check: Check, chat_folder: Path) -> None:
    weights = load_file(chat_folder / "model.safetensors")
    save_file(weights | {"draft.weight": torch.zeros(2)}, chat_folder / "model.safetensors")

    found = check(chat_folder)["names of weights"]
    assert (found["held"], "draft.weight" in found["found"]) == ("note", True)


def test_a_missing_weight_leaves_the_passes_untried(check: Check, chat_folder: Path) -> None:
    weights = load_file(chat_folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, chat_folder / "model.safetensors")

    found = check(chat_folder)
    assert failed(found) == ["names of weights", "loading"]
    assert found["packed equals alone"]["held"] == "skipped"


@pytest.mark.parametrize(
    ("template", "held", "words"),
    [
        (TEMPLATE.replace("<eos>", "\n"), "no", "which is no end token"),
        (TEMPLATE.replace("message['content']", "'?'"), "no", "leaves out"),
        ("{{ raise_exception('no') }}", "no", "refuses"),
        (REFUSES_SYSTEM + TEMPLATE, "note", "question"),
        (
            TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
            "yes",
            "enable_thinking changes prompts",
        ),
    ],
)
def test_templates_are_judged(check: Check, chat_folder: Path, template: str, held: str, words: str) -> None:
    (chat_folder / "model.safetensors").unlink()  # this check needs none, and the others are not tried
    (chat_folder / "chat_template.jinja").write_text(template)

    found = check(chat_folder)["chat template"]
    assert (found["held"], words in found["found"]) == (held, True), found


def test_a_folder_that_is_no_model_is_refused_once(check: Check, tmp_path: Path) -> None:
    shutil.copy(__file__, tmp_path)
    found = check(tmp_path)

    assert "no model folder" in found["tokenizer and embeddings"]["found"]
    assert not {each["held"] for each in found.values()} & {"yes", "note"}


def test_what_the_memory_does_not_hold_is_refused(
    check: Check, chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = subject.Subject(
        subject.Options(subject.ModelConfig(str(chat_folder), dtype="float32"), torch.device("cpu"), None)
    )
    monkeypatch.setattr(subject, "available_memory", lambda: 3 * whole.bytes_of(1))

    found = check(chat_folder)["loading"]
    assert (found["held"], "--layers 1 fits" in found["found"]) == ("no", True)


def test_a_check_that_takes_long_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(results, "STILL_RUNS_S", 0.01)

    def slow() -> Verdict:
        time.sleep(0.1)
        return Verdict("done")

    assert result_of("loading", slow, "14.2 GiB").held == "yes"
    assert "  loading (14.2 GiB): 0 s" in capsys.readouterr().err


def test_the_table_says_what_to_do(chat_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (chat_folder / "model.safetensors").unlink()

    assert doctor_command(["--model", str(chat_folder), "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["check", "held", "seconds"]
    assert lines[-1] == "3 of 11 checks held, 1 failed, 7 not tried"
