"""Loggers get the resolved configuration, and samples that stay text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from rlplug_watch.loggers.experiment_log import (
    COLUMNS,
    FORMER_REPORT,
    LoggedExperiment,
    is_due,
    log_configuration,
    log_histograms,
    log_samples,
)
from unit.observability.test_terminal import sample_of

CONFIG = {"model": {"num_steps": 3, "policy": {"path": "tests/model"}, "critic": None}, "seed_everything": 0}
HOSTILE = "**bold** <b>x</b> [/INST] \x1b[2J \ud800"


class Recorder(WandbLogger):
    """W&B's logger without W&B: what it was given."""

    def __init__(self) -> None:
        Logger.__init__(self)
        self.tables: list[tuple[Any, ...]] = []
        self.configs: list[Any] = []

    def log_hyperparams(self, params: Any) -> None:
        self.configs.append(params)

    def log_table(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: Any = None
    ) -> None:
        self.tables.append((key, columns, data, step))


def test_a_logger_gets_the_configuration_and_a_table_of_samples() -> None:
    logger = Recorder()
    log_configuration([logger], yaml.safe_dump(CONFIG))
    log_samples([logger], [sample_of("one"), sample_of(HOSTILE)], step=7, phase="train")
    assert logger.configs == [CONFIG]
    ((key, columns, rows, step),) = logger.tables
    assert (key, columns, step) == ("train/samples", list(COLUMNS), 7)
    assert rows[0] == [7, 1.0, "one", "one", "one", "stop", 1, ""]
    json.dumps(rows, ensure_ascii=False).encode()  # no half of a surrogate pair
    assert "\\x1b[2J" in rows[1][2]


def test_tensorboard_shows_samples_as_they_are(tmp_path: Path) -> None:
    """Catches Markdown that a model wrote and TensorBoard renders, and a text that its file cannot hold."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="tensorboard")
    log_configuration([logger], yaml.safe_dump(CONFIG))
    log_samples([logger], [sample_of(HOSTILE)], step=2, phase="validate")
    log_histograms([logger], VALUES, step=2)
    logger.save()
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0}).Reload()
    (histogram,) = events.Histograms("histogram/reward")
    assert (histogram.histogram_value.num, events.Tags()["histograms"]) == (3, ["histogram/reward"])
    (event,) = events.Tensors("validate/samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert all(line.startswith("    ") for line in text.split("\n"))  # a block of code
    assert "**bold**" in text
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())["model"]["num_steps"] == 3


@pytest.mark.parametrize("values", [[1.0, 0.7 + 0.2 + 0.1], [0.3, 0.1 + 0.2], [1e15, 1e15 + 1], [0, 5e-324]])
def test_values_that_differ_by_rounding_have_a_histogram(values: list[float]) -> None:
    """NumPy refuses 64 bins between them, which ended a run whose rewards all were 1."""
    log_histograms([], {"reward": np.array(values)}, step=1)


VALUES = {"reward": np.array([0.0, 1.0, 1.0, math.nan]), "advantage": np.empty(0, np.float32)}
"""Values of a step: three finite rewards, and no advantage."""


def log_everything(logger: Logger) -> None:
    """Give a logger what a run gives it in a step."""
    secret = {"trainer": {"logger": {"api_key": "s3cr3t", "tracking_uri": "http://me:s3cr3t@host"}}}
    log_configuration([logger], yaml.safe_dump({**CONFIG, **secret}))
    log_samples([logger], [sample_of("one"), sample_of(HOSTILE)], step=2, phase="train")
    log_histograms([logger], VALUES, step=2)
    logger.log_metrics({"reward/mean": 0.5, "validate/pass@1": 1.0}, step=2)


@pytest.mark.kit
def test_wandb_takes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real W&B, without a network: the files that it would send."""
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="test")
    log_everything(logger)
    run = logger.experiment
    assert run.config["model"]["num_steps"] == 3
    summary, config = dict(run.summary), json.dumps(dict(run.config))
    run.finish()
    assert sum(summary["histogram/reward"]["values"]) == 3
    (table,) = tmp_path.rglob("*.table.json")
    written = json.loads(table.read_text())
    assert (written["columns"], len(written["data"])) == (list(COLUMNS), 2)
    assert (summary["reward/mean"], summary["validate/pass@1"]) == (0.5, 1.0)
    assert "s3cr3t" not in config


@pytest.mark.kit
def test_mlflow_takes_all(tmp_path: Path) -> None:
    """The real MLflow, on sqlite and a folder of artifacts."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    logger = MLFlowLogger("test", tracking_uri=uri, artifact_location=str(tmp_path / "artifacts"))
    log_everything(logger)
    logger.finalize("success")
    run = mlflow.tracking.MlflowClient(uri).get_run(logger.run_id)
    assert run.data.metrics["reward/mean"] == 0.5
    assert run.data.params["model/num_steps"] == "3"
    artifacts = tmp_path / "artifacts" / logger.run_id / "artifacts"
    assert yaml.safe_load((artifacts / "config.yaml").read_text())["model"] == CONFIG["model"]
    table = json.loads((artifacts / "train/samples/step-00000002.json").read_text())
    assert (table["columns"], len(table["data"])) == (list(COLUMNS), 2)
    bins = json.loads((artifacts / "histogram/reward/step-00000002.json").read_text())
    assert sum(bins["counts"]) == 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """Alone catches a curve with the repeated steps twice, and a run of W&B or MLflow of which nobody is told so."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    existing: list[Any] = [Recorder(), Recorder(), MLFlowLogger.__new__(MLFlowLogger)]
    existing[0]._id, existing[1]._id, existing[2]._run_id = None, "w1", "m1"
    for first, last, value in ((1, 10, 0.0), (6, 12, 1.0)):
        trainer: Any = SimpleNamespace(loggers=[] if first == 1 else existing)
        log = LoggedExperiment(tmp_path, trainer)
        (tensorboard,) = log.loggers
        if first > 1:
            tensorboard.log_hyperparams({"a": 1})
            with pytest.warns(UserWarning, match="keeps what the run logged after step 5") as said:
                log.resumed(5)
            assert [str(each.message).split(" keeps")[0] for each in said] == ["W&B's run w1", "MLflow's run m1"]
            assert not (tmp_path / "report.html").exists()
            assert (tmp_path / FORMER_REPORT).read_text() == "of step 10"
        for step in range(first, last + 1):
            tensorboard.log_metrics({"reward/mean": value}, step)
        (tmp_path / "report.html").write_text(f"of step {last}")
        tensorboard.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(step, float(step > 5)) for step in range(1, 13)]


def test_a_long_run_has_few_tables() -> None:
    assert sum(is_due(step, 10_000) for step in range(1, 10_001)) == 21
    assert all(is_due(step, 5) for step in range(1, 6))
