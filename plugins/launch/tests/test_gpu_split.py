"""The split of GPUs between engines and trainer, from the files of a run."""

from __future__ import annotations

import json

import pytest
from rlplug_launch.gpu_split import GPURates, rates_of_run

from rlplug.cli.main import main
from rlplug.errors import ConfigError

SYNCHRONOUS = "step,completion/num_tokens,time/step,time/sync,time/rollout,time/validate"
ASYNCHRONOUS = "step,completion/num_tokens,time/step,time/rollout,partial/engine_idle_s"


def write_run(folder, header, rows, rollout):
    names = header.split(",")
    records = [dict(zip(names, json.loads(f"[{row}]"), strict=True)) for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.json").write_text(json.dumps({"world_size": 2}))
    (folder / "config.yaml").write_text(f"model:\n  rollout: {json.dumps(rollout)}\n")
    return folder


@pytest.mark.parametrize(
    ("header", "row", "rollout", "rates"),
    [  # 1,200 tokens: 4 s of weight sync and rollout on 2 GPUs, 6 s of training on 2
        (SYNCHRONOUS, "1200,13,1,3,3", {"class_path": "VLLMRollout"}, GPURates(150.0, 100.0)),
        # 10 s, in which engines on 3 GPUs generate 8, and the trainer on 2 waits or syncs for 4
        (
            ASYNCHRONOUS,
            "1200,10,4,2",
            {"class_path": "VLLMServerRollout", "init_args": {"gpus": [2, 3, 4]}},
            GPURates(50.0, 100.0),
        ),
    ],
)
def test_rates_follow_from_the_steps_of_a_run(header, row, rollout, rates, tmp_path):
    rows = [
        *(f"{step},9999,1{',1' * (header.count(',') - 2)}" for step in (1, 2)),
        *(f"{step},{row}" for step in range(3, 6)),
    ]
    assert rates_of_run(write_run(tmp_path, header, rows, rollout)) == rates


@pytest.mark.parametrize(
    ("rows", "rollout", "message"),
    [
        (["1,9,1,0,1,0", "2,9,1,0,1,0"], {"class_path": "VLLMRollout"}, "no steps after the first 2"),
        (
            [f"{step},9,1,0,1,0" for step in (1, 2, 3)],
            {"class_path": "VLLMServerRollout"},
            "on how many GPUs the engines were",
        ),
    ],
)
def test_rates_are_never_invented(rows, rollout, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        rates_of_run(write_run(tmp_path, SYNCHRONOUS, rows, rollout))


def test_the_best_split_is_the_fastest_of_all():
    for engine, trainer, num_gpus in ((1.0, 3.0, 8), (5.0, 1.0, 2), (1.0, 1.0, 7)):
        rates = GPURates(engine, trainer)
        speeds = [min(count * engine, (num_gpus - count) * trainer) for count in range(1, num_gpus)]
        assert rates.speed(rates.best(num_gpus), num_gpus) == max(speeds)


RATES = ["--engine-tokens-s", "100", "--trainer-tokens-s", "300"]


def test_the_command_divides_gpus_by_given_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split-gpus", "8", *RATES]) == 0
    said = capsys.readouterr().out
    assert "split of 8 GPUs: 6 for engines, 2 for the trainer" in said
    assert "6 : 2  600 tokens/s, no side waits" in said
    assert "5 : 3  500 tokens/s, the trainer waits 44% of the time" in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["8", *RATES[:2]], "split-gpus needs measured rates: --rates with the folder of a run, or both"),
        (["8", *RATES, "--rates", "runs/a/001"], "needs measured rates"),
        (["1", *RATES], "N is 1: give a whole number, at least 2"),
        (["many", *RATES], "N is 'many': say how many GPUs to divide"),
        (["8", "--engine-tokens-s", "-1", "--trainer-tokens-s", "nan"], "--engine-tokens-s is '-1'"),
        (["--rates", "runs/a/001"], "the following arguments are required: N. See rlplug split-gpus --help"),
    ],
)
def test_a_mistake_names_the_option(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split-gpus", *arguments]) == 2
    assert problem in capsys.readouterr().err
