"""Curriculum by pass rate: what is drawn, the same on any number of ranks, and exactly resumed."""

from __future__ import annotations

import io
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rlplug_data.curriculum import CurriculumPrompts, PassRateCurriculum
from rlplug_data.hf_datasets import HFDatasetSource
from rlplug_data.mixture import MixtureSource, WeightedSource
from rlplug_data.pass_rates import PassRates, Window
from rlplug_devkit import DataSourceConformance, make_sample
from unit.data.prompt_cases import ListSource, set_up, setup_error

from rlplug.data.datamodule import PromptDataModule
from rlplug.data.prompt_stream import PromptStream
from rlplug.data.sources import FileSource
from rlplug.errors import ConfigError
from rlplug.types import Prompt, RewardError, Sample

WINDOW = Window(low=0.2, high=0.8, outside=0.25, smoothing=0.5)


def sample(prompt: Prompt, reward: float | RewardError) -> Sample:
    return replace(
        make_sample(""), prompt=prompt, rewards={"r": reward}, reward=reward if isinstance(reward, float) else math.nan
    )


def source(seed: int = 1) -> PromptStream:
    return PromptStream([Prompt(f"p{index}", (index, 1), str(index)) for index in range(60)], seed=seed)


def stream() -> CurriculumPrompts:
    return CurriculumPrompts(source(), WINDOW, 1)


def samples_of(prompts: list[Prompt]) -> list[Sample]:
    """Four completions of each prompt: of an easy one all pass, of a hard one none, of another two."""
    found = []
    for prompt in prompts:
        num_passed = {0: 4, 1: 0, 2: 2}[int(prompt.text) // 20]
        found += [sample(prompt, float(number < num_passed)) for number in range(4)]
    return found


def step(prompts: CurriculumPrompts, count: int = 8) -> list[str]:
    taken = prompts.take(count)
    prompts.observe(samples_of(taken), lambda array: array)
    return [prompt.uid for prompt in taken]


def test_prompts_outside_the_window_are_drawn_as_often_as_said() -> None:
    """Alone catches a window that is turned round, and prompts that never come back."""
    prompts = stream()
    first = [uid for _ in range(15) for uid in step(prompts, 4)]
    assert len(set(first)) == 60, "each is drawn once before anything is known"
    metrics = prompts.metrics()
    assert {name: metrics[f"curriculum/{name}"] for name in ("below", "within", "above", "unknown")} == pytest.approx(
        {"below": 1 / 3, "within": 1 / 3, "above": 1 / 3, "unknown": 0}
    )
    assert (metrics["curriculum/skipped_share"], metrics["curriculum/effective_share"]) == (0, pytest.approx(1 / 3))
    counts = Counter(int(uid[1:]) // 20 for _ in range(300) for uid in step(prompts))
    share = 1 / (1 + 2 * WINDOW.outside)  # of a pass over as many easy, hard and other prompts
    assert counts[2] / counts.total() == pytest.approx(share, abs=0.03)
    assert counts[0] == pytest.approx(counts[1], rel=0.2)
    metrics = prompts.metrics()
    assert metrics["curriculum/effective_share"] == pytest.approx(share, abs=0.03)
    assert metrics["curriculum/skipped_share"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("low", "high", "passed"), [(0.0, 0.8, 4), (0.6, 1.0, 3)])
def test_a_pass_rate_at_the_border_is_within(low: float, high: float, passed: int) -> None:
    """Alone catches a rate that float32 rounds past the border it is equal to: 4 of 5 are 0.8."""
    rates = PassRates(Window(low, high, outside=0.0), 1, 0)
    prompt = Prompt("p0", (0,), "0")
    rates.observe([sample(prompt, float(number < passed)) for number in range(5)], {"p0": 0}, lambda array: array)
    assert rates.accepts(0)
    assert rates.metrics()["curriculum/within"] == 1


def test_a_curriculum_resumes_exactly_at_every_step() -> None:
    whole, first = stream(), stream()
    expected = [step(whole) for _ in range(40)]
    for number in range(30):
        saved = io.BytesIO()
        torch.save(first.state_dict(), saved)
        saved.seek(0)
        second = stream()
        step(second)
        second.load_state_dict(torch.load(saved, weights_only=True))
        assert [step(second) for _ in range(8)] == expected[number : number + 8]
        assert step(first) == expected[number]


def rates_of(prompts: CurriculumPrompts) -> torch.Tensor:
    return prompts.state_dict()["pass rates"]["rates"]


def sent_by(samples: list[Sample]) -> NDArray[Any]:
    """Return what a rank with these samples tells the others."""
    sent: list[NDArray[Any]] = []
    stream().observe(samples, lambda array: sent.append(array) or array)
    return sent[0]


def test_ranks_with_parts_of_the_groups_learn_the_same() -> None:
    """Alone catches pass rates that depend on which rank has a group, or on the order of ranks."""
    one, two = stream(), stream()
    shuffled = random.Random(0)
    for _ in range(20):
        samples = samples_of(one.take(8))
        assert [sample.prompt for sample in samples[::4]] == two.take(8)
        one.observe(samples, lambda array: array)
        groups = [samples[start : start + 4] for start in range(0, 32, 4)]
        shuffled.shuffle(groups)
        parts = [[sample for group in groups[rank::2] for sample in group] for rank in range(2)]
        sent = np.concatenate([sent_by(part) for part in parts])
        two.observe(parts[0], lambda _, sent=sent: sent)
    assert torch.equal(rates_of(one), rates_of(two))


def test_the_average_moves_and_errors_do_not_count() -> None:
    prompts = stream()
    (prompt,) = [each for each in prompts.take(60) if each.uid == "p7"]

    def rate(*rewards: float | RewardError) -> float:
        samples = [sample(prompt, reward) for reward in rewards]
        prompts.observe([*samples, sample(Prompt("other", (1,), ""), 1.0)], lambda array: array)
        return float(rates_of(prompts)[7])

    assert rate(1.0, 0.0) == 0.5
    assert rate(1.0, RewardError("late")) == 0.75
    assert rate(RewardError("late")) == 0.75
    assert rate(0.99, 0.0) == 0.375


def test_states_that_do_not_fit() -> None:
    """Alone catches a state that is taken in part: pass rates without their place, or a place without its rates."""
    prompts = stream()
    step(prompts)
    state, rates = prompts.state_dict(), rates_of(prompts)
    step(prompts)
    before = prompts.state_dict()
    wrong = [{"rates": each, "turn": 8} for each in (torch.zeros(3), torch.full((60,), 2.0), [0.5] * 60)]
    for saved in (*wrong, {"rates": rates}, [0.5]):
        with pytest.raises(ConfigError, match="damaged"):
            prompts.load_state_dict({**state, "pass rates": saved})
    with pytest.raises(ConfigError, match=r"data\.seed: 2 then, 1 now"):
        prompts.load_state_dict(CurriculumPrompts(source(2), WINDOW, 2).state_dict())
    after = prompts.state_dict()
    assert torch.allclose(rates_of(prompts), before["pass rates"]["rates"], equal_nan=True)
    assert (after["position"], after["pass rates"]["turn"]) == (before["position"], before["pass rates"]["turn"])


def test_a_curriculum_comes_and_goes_and_the_place_stays() -> None:
    prompts, plain = stream(), source()
    step(prompts)
    with pytest.warns(UserWarning, match="does not use the checkpoint's pass rates"):
        plain.load_state_dict(prompts.state_dict())
    assert plain.take(1) == source().take(9)[-1:]
    with pytest.warns(UserWarning, match="no pass rates are known"):
        prompts.load_state_dict(plain.state_dict())
    assert prompts.metrics()["curriculum/unknown"] == 1


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"low": 0.9, "high": 0.1}, "low"),
        ({"outside": 0.0}, "outside"),
        ({"smoothing": 1.5}, "smoothing"),
        ({"source": MixtureSource({"a": WeightedSource(ListSource("a"))})}, "source"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"PassRateCurriculum\.{key} is"):
        PassRateCurriculum(**{"source": ListSource("a"), **options})


class TestCurriculum(DataSourceConformance):
    def make_source(self) -> PassRateCurriculum:
        return PassRateCurriculum(ListSource(*"abcdefgh"))

    def make_broken_source(self) -> PassRateCurriculum:
        return PassRateCurriculum(FileSource("gone.jsonl"))


def test_a_source_that_cannot_be_read_is_named_where_it_is() -> None:
    assert setup_error(PromptDataModule(PassRateCurriculum(ListSource()))).startswith(
        "data.train.init_args.source: ListSource has no prompts"
    )


def test_each_source_of_a_mixture_has_pass_rates() -> None:
    parts = {name: WeightedSource(PassRateCurriculum(ListSource(*"abcd"))) for name in ("a", "b")}
    data = set_up(PromptDataModule(MixtureSource(parts)))
    taken = data.train_stream.take(8)
    samples = [sample(prompt, float(prompt.source == "a")) for prompt in taken]
    data.train_stream.observe(samples, lambda array: array)
    metrics = data.train_stream.metrics()
    assert (metrics["source/a/curriculum_above"], metrics["source/b/curriculum_below"]) == (1, 1)


def test_a_streamed_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "train.jsonl").write_text('{"prompt": "a"}\n')
    streamed = HFDatasetSource(str(tmp_path / "letters"), streaming=True)
    assert "data.train is a PassRateCurriculum" in setup_error(PromptDataModule(PassRateCurriculum(streamed)))
