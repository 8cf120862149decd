"""Environments out of the wheels of verifiers and TextArena, unchanged."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rlplug_envs.verifiers_environment import VerifiersEnvironment
from rlplug_envs.verifiers_source import VerifiersSource

from rlplug.data.sources import PromptRow
from rlplug.interfaces.environment import StepResult
from rlplug.types import Prompt

pytest.importorskip("verifiers", reason="the package verifiers is not installed")

WORDS = ["apple", "bread", "chair", "plant", "stone"]


@pytest.fixture(autouse=True)
def importable_cases(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def run(row: PromptRow, arguments: dict[str, Any], turns: Sequence[str]) -> list[StepResult]:
    async def play() -> list[StepResult]:
        environment = VerifiersEnvironment("published-cases", arguments, num_processes=1)
        try:
            await environment.reset(Prompt(row.uid, (), "", row.answer, row.metadata), seed=0)
            return [await environment.step(turn) for turn in turns]
        finally:
            environment.close()

    return asyncio.run(asyncio.wait_for(play(), timeout=200))


def test_reasoning_gym_of_verifiers_scores_as_reasoning_gym_does():
    import reasoning_gym

    task, number = "spell_backward", 4
    arguments = {"which": "reasoning-gym", "gym": task, "num_train_examples": number, "num_eval_examples": 1}
    rows = list(VerifiersSource("published-cases", arguments).rows())
    data = reasoning_gym.create_dataset(task, size=number + 1, seed=0)
    assert len(rows) == number
    for index, row in enumerate(rows):
        entry = data[index]
        assert row.prompt[-1]["content"] == entry["question"]
        answer = entry["answer"] if index % 2 else entry["answer"][:-1] + "?"
        [result] = run(row, arguments, [f"<answer>{answer}</answer>"])
        assert result.done
        assert result.reward == pytest.approx(data.score_answer(answer, entry))


@pytest.fixture
def word_lists(tmp_path, monkeypatch) -> None:
    """The corpora that TextArena's Wordle asks nltk for, with five words."""
    (tmp_path / "corpora" / "words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (tmp_path / "corpora" / "words" / name).write_text("\n".join(WORDS))
    tagger = tmp_path / "taggers" / "averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True)
    contents = {"weights": {}, "tagdict": dict.fromkeys([*WORDS, "test"], "NN"), "classes": ["NN"]}
    for name, content in contents.items():
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(content))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("textarena") is None, reason="the package textarena is not installed")
def test_wordle_of_textarena_plays_over_several_turns(word_lists):
    arguments = {"which": "wordle", "num_train_examples": 3}
    row = next(VerifiersSource("published-cases", arguments).rows())
    assert "Wordle" in row.prompt[-1]["content"]
    wrong = next(word for word in WORDS if word != row.answer)
    first, second = run(row, arguments, [f"<guess>[{word}]</guess>" for word in (wrong, row.answer)])
    assert not first.done
    [hint] = first.observation
    letters = hint["content"].split(" ".join(wrong.upper()))[1].split("\n")[1].split()
    assert len(letters) == 5
    assert [mark == "G" for mark in letters] == [a == b for a, b in zip(wrong, row.answer, strict=True)]
    assert second.done
    assert second.reward == 1.0
