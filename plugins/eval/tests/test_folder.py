"""Folder, tables and page of an evaluation, from samples that are made by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rlplug_eval.folder import COMPLETIONS, EvalFolder, EvalRecord, fingerprint
from rlplug_eval.options import EvalOptions, make_options
from rlplug_eval.page import write_page
from rlplug_eval.policies import Policy, label_of, place_of, split_name
from rlplug_eval.results import compute, markdown, write_results
from rlplug_eval.runner import batches

from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelConfig
from rlplug.training.validation.config import ValidationConfig, ValidationSampling
from rlplug.types import Prompt, RewardError, Sample, SamplingParams

HOSTILE = "</pre><script>alert(1)</script>\x1b[31m\u202e| a `b` <img src=x onerror=alert(2)>{{ 1 }}"
OPTIONS = EvalOptions(2, (1, 2), 1.0, SamplingParams(8, 1.0), seed=0, batch_size=4)


def prompts(number):
    return [Prompt(f"{index}", (3, index), f"prompt {index}", index) for index in range(number)]


def samples(prompt, group, *rewards, text="done"):
    return [
        Sample(
            prompt=prompt,
            group=group,
            token_ids=[*prompt.token_ids, 5],
            response_mask=[False, False, True],
            rollout_logprobs=[0.0] * 3,
            completion=text,
            finish_reason="length",
            policy_version=1,
            rewards={"r": RewardError(text) if reward is None else reward},
            reward=float("nan") if reward is None else reward,
        )
        for reward in rewards
    ]


def record(*names, data="val"):
    return EvalRecord([{"name": name, "argument": name} for name in names], [{"name": data, "argument": data}], OPTIONS)


def test_a_killed_evaluation_goes_on_behind_the_last_whole_prompt(tmp_path):
    given = prompts(4)
    folder = EvalFolder(tmp_path, record("a", "b"))
    folder.check_prompts("a", "val", given)
    folder.append("a", "val", [*samples(given[1], 1, 0.0, 1.0), *samples(given[0], 0, 1.0, None)])
    folder.append("a", "val", samples(given[2], 2, 1.0))  # one of two
    folder.add_counts("a", "val", {"judge/requests": 3.0, "judge/cost": 0.25})
    folder.close()
    whole = (tmp_path / COMPLETIONS).read_bytes().splitlines(keepends=True)[:4]
    with (tmp_path / COMPLETIONS).open("ab") as file:
        file.write(b'{"policy": "a", "data"')
    again = EvalFolder(tmp_path)
    assert (tmp_path / COMPLETIONS).read_bytes() == b"".join(whole)
    assert [again.missing(*key, given) for key in (("a", "val"), ("b", "val"))] == [[2, 3], [0, 1, 2, 3]]
    again.check_prompts("a", "val", given)
    with pytest.raises(ConfigError, match="completions of other prompts"):
        again.check_prompts("a", "val", given[:3])
    found = compute(again.record, again.rows()).groups["a", "val"]["0"]
    assert [row.reward for row in found.rows] == [1.0, None]
    again.add_counts("a", "val", {"judge/requests": 2.0, "odd/count": float("nan")})
    results = compute(again.record, again.rows())
    table = markdown(again.record, results)
    assert "judge/cost | judge/requests | odd/count |" in table
    assert "| 0.25 | 5 | - |" in table
    assert "| 0 | 0 | 0 |" in table
    write_results(again, results)
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["reward_counts"]["odd/count"] is None
    again.close()


def test_damage_in_the_middle_loses_no_prompt_and_doubles_none(tmp_path):
    """Alone catches an evaluation that goes on by count, which left one prompt out and asked another twice."""
    given = prompts(6)
    folder = EvalFolder(tmp_path, record("a"))
    for group in range(4):
        folder.append("a", "val", samples(given[group], group, 1.0, 0.0))
    folder.close()
    lines = (tmp_path / COMPLETIONS).read_bytes().splitlines(keepends=True)
    lines[2] = bytes(len(lines[2]) - 1) + b"\n"  # zeros, as a power cut leaves them
    (tmp_path / COMPLETIONS).write_bytes(b"".join(lines))
    for expected in ([range(1, 2), range(4, 6)], []):
        again = EvalFolder(tmp_path)
        found = batches(again.missing("a", "val", given), 4)
        assert found == expected
        for group in (group for batch in found for group in batch):
            again.append("a", "val", samples(given[group], group, 1.0, 0.0))
        rows = again.rows()["a", "val"]
        assert Counter(row.uid for row in rows) == dict.fromkeys("012345", 2)
        again.close()
    assert batches([0, 1, 2, 3, 4, 7], 2) == [range(2), range(2, 4), range(4, 5), range(7, 8)]


def test_corrected_answers_and_tests_are_other_prompts():
    """Alone catches an evaluation that goes on with completions which were judged by other answers."""
    judged = [
        Prompt("0", (3, 0), "p", "41", {"tests": ["f(1) == 1"], "image": image}) for image in (object(), object())
    ]
    first = fingerprint(judged[:1])
    assert first == fingerprint(judged[1:]), "where an object lies in memory is no change"
    assert first != fingerprint([Prompt("0", (3, 0), "p", "42", judged[0].metadata)])
    assert first != fingerprint([Prompt("0", (3, 0), "p", "41", {"tests": ["f(1) == 2"], "image": object()})])


def test_an_answer_whose_keys_are_cells_of_a_grid_is_written(tmp_path):
    """It catches an evaluation that such keys, which JSON has not, end at their first prompt."""
    folder = EvalFolder(tmp_path, record("a"))
    folder.append("a", "val", samples(Prompt("0", (3, 0), "Solve it.", {(0, 1): 5}), 0, 1.0, 0.0))
    assert [row.answer for row in folder.rows()["a", "val"]] == ["{(0, 1): 5}"] * 2
    folder.close()


def test_files_that_change_are_refused(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("1")
    out = tmp_path / "out"
    out.mkdir()
    folder = EvalFolder(out, record("a"))
    policy = Policy("a", ModelConfig(str(model)))
    folder.check_policy(policy)
    folder.check_policy(policy)
    (model / "weights").write_text("22")
    with pytest.raises(ConfigError, match="have changed since"):
        folder.check_policy(policy)
    folder.close()


def test_differences_are_paired_and_a_failed_completion_is_an_error_and_no_pass(tmp_path):
    """Alone catches a prompt that vanishes from pass@k with its errors, and lengths of completions that failed."""
    given = prompts(6)
    folder = EvalFolder(tmp_path, record("old", "new"))
    for name, better in (("old", 0.0), ("new", 1.0)):
        for group, prompt in enumerate(given):
            rewards = (None, None) if group == 0 and name == "new" else (better, 1.0 if group % 2 else better)
            found = samples(prompt, group, *rewards)
            if rewards[0] is not None:
                found = [replace(sample, finish_reason="stop") for sample in found]
            folder.append(name, "val", found)
    results = compute(folder.record, folder.rows())
    old, new = results.results
    assert (old.num_errors, new.num_errors, new.num_samples) == (0, 2, 12)
    assert old.reward.mean == pytest.approx(0.25)
    assert (new.reward.mean, new.reward.num_prompts, new.length.num_prompts) == (1.0, 5, 5)
    assert (new.pass_at[1].mean, new.pass_at[1].num_prompts) == (pytest.approx(5 / 6), 6)
    assert old.pass_at[2].mean == pytest.approx(0.5)
    (difference,) = results.differences
    assert difference.reward.mean == pytest.approx((3 * 0.5 + 2 * 1.0) / 5)
    assert (difference.reward.num_prompts, difference.pass_at[1].num_prompts) == (5, 6)
    assert (difference.num_better, difference.num_worse) == (5, 0)
    assert (old.truncated_share, new.truncated_share) == (0.0, 0.0)
    write_results(folder, results)
    assert json.loads((tmp_path / "results.json").read_text())["results"][1]["num_errors"] == 2
    folder.close()


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_hostile_text_stays_text_on_the_page_and_in_the_tables(tmp_path):
    prompt = Prompt(HOSTILE, (3, 4), HOSTILE, HOSTILE)
    folder = EvalFolder(tmp_path, record("base", HOSTILE, data=HOSTILE))
    folder.append("base", HOSTILE, samples(prompt, 0, 0.0, None, text=HOSTILE))
    folder.append(HOSTILE, HOSTILE, samples(prompt, 0, 1.0, 1.0, text=HOSTILE))
    folder.record.sources[HOSTILE] = HOSTILE
    results = compute(folder.record, folder.rows())
    page = write_page(folder, results).read_text()
    folder.close()
    parser = Tags()
    parser.feed(page)
    assert not {"script", "img"} & {tag for tag, _ in parser.tags}
    assert not [name for _, attributes in parser.tags for name in attributes if name.startswith("on")]
    assert page.count("alert(1)") >= 8, "all of it is there, as text"
    assert "\x1b" not in page
    assert "\u202e" not in page
    table = markdown(folder.record, results)
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") == rows[0].count("|") for line in rows[:3])
    assert "<script>" not in table.replace("\\<script\\>", "")


def test_options_that_are_not_given_are_the_runs():
    training = SamplingParams(64, 0.8, 0.9, 5)
    assert make_options(ValidationConfig(), training, 3).sampling == SamplingParams(64, 0.0)
    several = make_options(ValidationConfig(), training, 3, num_samples=4)
    assert (several.sampling, several.ks, several.prompts_per_batch) == (training, (1, 2, 4), 64)
    validation = ValidationConfig(num_samples=2, sampling=ValidationSampling(temperature=0.5))
    own = make_options(validation, training, 3, sampling={"max_new_tokens": 99, "extra": {"min_p": 0.1}})
    assert (own.num_samples, own.sampling) == (2, SamplingParams(99, 0.5, extra={"min_p": 0.1}))
    assert "temperature 0.5, min_p 0.1, at most 99 tokens" in own.sentence()
    with pytest.raises(ConfigError, match="greedy completions"):
        make_options(ValidationConfig(), training, 3, num_samples=2, sampling={"temperature": 0.0})
    with pytest.raises(ConfigError, match="pass@k needs k from 1 to -n"):
        make_options(ValidationConfig(), training, 3, num_samples=2, ks=(4,))


def test_what_names_a_policy(tmp_path):
    run = tmp_path / "runs" / "q" / "001"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="without an exported policy"):
        place_of(str(run))
    (run / "policy").mkdir()
    (run / "policy" / "config.json").write_text("{}")
    assert place_of(str(run)) == (str(run / "policy"), None)
    assert place_of("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)
    assert split_name("old=runs/a/001") == ("old", "runs/a/001")
    assert split_name("runs/a/001") == (None, "runs/a/001")
    assert label_of("runs/q/001") == "q/001"
    assert label_of("/x/runs/q/001/checkpoints/step-00000050") == "q/001/step-00000050"
