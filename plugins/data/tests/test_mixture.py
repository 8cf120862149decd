"""Mixtures: shares, epochs of each source, exact resume, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from rlplug_data import curriculum  # noqa: F401 - a parser finds classes that are imported
from rlplug_data.mixture import MixedPrompts, MixtureSource, WeightedSource
from rlplug_devkit import DataSourceConformance
from unit.data.prompt_cases import ListSource, set_up, setup_error

from rlplug.data.datamodule import PromptDataModule
from rlplug.data.prompt_stream import PromptStream
from rlplug.data.sources import FileSource
from rlplug.errors import ConfigError
from rlplug.types import Prompt

SIZES = {"many": 50, "few": 3, "one": 1}


def streams(sizes: dict[str, int]) -> dict[str, PromptStream]:
    return {
        name: PromptStream([Prompt(f"{name}/{index}", (index, len(name)), "") for index in range(size)], seed=name)
        for name, size in sizes.items()
    }


def mixture(**weights: float) -> MixtureSource:
    sources = {"many": ListSource(*"abcdefgh"), "few": ListSource("xx", "yyyy"), "none": ListSource()}
    return MixtureSource({name: WeightedSource(sources[name], weight) for name, weight in weights.items()})


class TestMixture(DataSourceConformance):
    is_part = False

    def make_source(self) -> MixtureSource:
        return mixture(many=1, few=2)

    def make_broken_source(self) -> MixtureSource:
        return MixtureSource({"gone": WeightedSource(FileSource("gone.jsonl"))})


@given(
    weights=st.fixed_dictionaries({name: st.floats(0.001, 1000) for name in SIZES}),
    before=st.integers(0, 60),
    after=st.lists(st.integers(0, 9), max_size=4),
)
@settings(max_examples=50)
def test_shares_are_exact_and_a_resumed_mixture_equals_the_undisturbed_one(weights, before, after):
    """Alone catches a source whose place is lost, and shares that drift."""
    whole = MixedPrompts(streams(SIZES), weights).take(before + sum(after))
    first, second = MixedPrompts(streams(SIZES), weights), MixedPrompts(streams(SIZES), weights)
    drawn = first.take(before)
    second.take(7)  # somewhere else
    second.load_state_dict(first.state_dict())
    assert drawn + [prompt for part in after for prompt in second.take(part)] == whole
    for number in range(len(whole) + 1):
        counts = Counter(prompt.uid.partition("/")[0] for prompt in whole[:number])
        for name, weight in weights.items():
            assert abs(counts[name] - number * weight / sum(weights.values())) < len(SIZES)


def test_each_source_has_epochs_of_its_own():
    taken = MixedPrompts(streams({"few": 3, "many": 50}), {"few": 1, "many": 1}).take(60)
    of_few = [prompt.uid for prompt in taken if prompt.uid.startswith("few")]
    assert len(of_few) == 30
    assert all(len(set(of_few[start : start + 3])) == 3 for start in range(0, 30, 3))
    assert set(Counter(of_few).values()) == {10}


def test_other_weights_count_from_the_checkpoint_on_and_sources_come_and_go(recwarn):
    """Alone catches a source that is drawn exclusively until it has made up for the weights of before."""
    first = MixedPrompts(streams(SIZES), {"many": 9, "few": 1, "one": 1})
    first.take(110)
    state = first.state_dict()
    second = MixedPrompts(streams({"many": 50, "few": 3, "new": 2}), {"many": 1, "few": 1, "new": 2})
    second.load_state_dict(state)
    taken = second.take(40)
    assert Counter(prompt.uid.partition("/")[0] for prompt in taken) == {"many": 10, "few": 10, "new": 20}
    assert [prompt for prompt in taken if prompt.uid.startswith("many")] == first._streams["many"].take(10)


def test_a_state_that_does_not_fit_changes_nothing():
    first = MixedPrompts(streams(SIZES), dict.fromkeys(SIZES, 1))
    state = first.state_dict()
    other = MixedPrompts(streams({**SIZES, "one": 2}), dict.fromkeys(SIZES, 1))
    other.take(9)
    before = other.state_dict()
    with pytest.raises(ConfigError, match=r"sources\.one: .* number of prompts"):
        other.load_state_dict(state)
    assert other.state_dict() == before
    with pytest.raises(ConfigError, match="one source in"):
        other.load_state_dict(streams({"a": 1})["a"].state_dict())
    with pytest.raises(ConfigError, match="such as a mixture"):
        streams({"a": 1})["a"].load_state_dict(state)


def test_names_reach_the_prompts_and_counts_are_by_source(recwarn):
    train = MixtureSource(
        {"a": WeightedSource(ListSource("abc", "abcdefg")), "b": WeightedSource(ListSource("abc"), 3)}
    )
    data = set_up(PromptDataModule(train, val=mixture(many=1, few=0), max_prompt_tokens=5, too_long="filter"))
    taken = data.train_stream.take(8)
    assert Counter((prompt.source, prompt.uid) for prompt in taken) == {("a", "a/p0"): 2, ("b", "b/p0"): 6}
    assert data.counts["train"] == {"read": 3, "too_long": 1, "kept": 2}
    assert data.counts["train/a"] == {"read": 2, "too_long": 1, "kept": 1}
    assert (data.val_sources, len(data.val_prompts)) == (("many",), 8)
    assert data.train_stream.num_prompts == 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"many": 1, "none": 1}, r"data\.train\.init_args\.sources\.none\.source: ListSource has no prompts"),
        ({"few": 1, "many": 1}, r"sources\.few\.source: 2 of 2 prompts are .*too_long: filter leaves none"),
    ],
)
def test_a_source_without_prompts_is_refused(weights, message):
    assert re.search(message, setup_error(PromptDataModule(mixture(**weights), max_prompt_tokens=2, too_long="filter")))


def test_a_source_without_prompts_is_refused_in_validation_too():
    """Alone catches a mixture whose rows say nothing of a source that is empty, or of which none is left."""
    val = mixture(many=1, none=1)
    assert "data.val: sources.none: ListSource has no prompts" in setup_error(PromptDataModule(ListSource("a"), val))
    data = PromptDataModule(ListSource("a"), mixture(many=1, few=1), max_prompt_tokens=2, too_long="filter")
    assert "filter leaves none of 'few'" in setup_error(data)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_and_names_that_cannot_be_are_refused(weight):
    with pytest.raises(ConfigError, match=r"WeightedSource\.weight is .*: give a (finite )?number"):
        mixture(many=weight)
    with pytest.raises(ConfigError, match="weight above 0"):
        mixture(many=0)
    with pytest.raises(ConfigError, match="names metrics"):
        MixtureSource({"a/b": WeightedSource(ListSource("a"))})


def test_a_mixture_from_yaml(tmp_path: Path) -> None:
    """Alone catches options of an inner source that jsonargparse does not make."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "Hi"}')
    (tmp_path / "a.yaml").write_text(
        "data:\n  train:\n    class_path: MixtureSource\n    init_args:\n      sources:\n"
        "        file: {weight: 3, source: {class_path: FileSource, init_args: "
        f"{{path: {tmp_path}/train.jsonl}}}}}}\n"
        "        rated: {source: {class_path: PassRateCurriculum, init_args: {low: 0.2, source: "
        f"{{class_path: FileSource, init_args: {{path: {tmp_path}/train.jsonl}}}}}}}}}}\n"
    )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PromptDataModule, "data")
    parser.add_argument("--config", action="config")
    data: Any = parser.instantiate(parser.parse_args(["--config", str(tmp_path / "a.yaml")])).data
    set_up(data, max_context=300)
    assert Counter(prompt.source for prompt in data.train_stream.take(8)) == {"file": 6, "rated": 2}
