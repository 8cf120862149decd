"""The mismatch between engine and trainer, against float64 NumPy."""

from __future__ import annotations

import numpy
import pytest
import torch

from rlplug.ops import difference_metrics


def of_one_row(differences):
    return difference_metrics(differences, differences.sum()[None])


@pytest.mark.parametrize("seed", range(10))
def test_metrics(seed):
    random = numpy.random.default_rng(seed)
    engine = -random.exponential(size=(5, 11))
    trainer = engine + random.normal(size=(5, 11)) * 0.3
    mask = random.random((5, 11)) < 0.5
    difference = (trainer - engine)[mask]
    expected = {
        "mismatch/mean": numpy.abs(difference).mean(),
        "mismatch/max": numpy.abs(difference).max(),
        "mismatch/kl": (numpy.exp(difference) - 1 - difference).mean(),
    }
    rows = [(trainer - engine)[row][mask[row]].sum() for row in range(5) if mask[row].any()]
    for q in (1, 50, 99):
        expected[f"mismatch/weight_p{q}"] = numpy.exp(numpy.percentile(difference, q))
        expected[f"mismatch/sequence_weight_p{q}"] = numpy.exp(numpy.percentile(rows, q))
    metrics = difference_metrics(torch.from_numpy(difference), torch.tensor(rows, dtype=torch.float64))
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_kl_estimates_that_of_the_engine_from_the_trainer():
    """Over many draws from the engine's distribution, k3 averages to KL(engine || trainer)."""
    random = numpy.random.default_rng(0)
    engine = random.dirichlet(numpy.ones(20))
    trainer = engine * numpy.exp(random.normal(size=20) * 0.5)
    trainer /= trainer.sum()
    tokens = random.choice(20, size=400_000, p=engine)
    metrics = of_one_row(torch.from_numpy(numpy.log(trainer)[tokens] - numpy.log(engine)[tokens]))
    assert metrics["mismatch/kl"] == pytest.approx((engine * numpy.log(engine / trainer)).sum(), rel=0.02)


def test_equal_logprobs():
    metrics = of_one_row(torch.zeros(12))
    assert {value for name, value in metrics.items() if "weight" not in name} == {0.0}
    assert {value for name, value in metrics.items() if "weight" in name} == {1.0}


def test_nan_shows():
    metrics = of_one_row(torch.tensor([0.0, float("nan")]))
    assert all(numpy.isnan(value) for value in metrics.values())


def test_kl_of_nearly_equal_logprobs():
    """Close to 0, k3 is d^2 / 2 and far below float32's resolution of exp(d)."""
    metrics = of_one_row(torch.tensor([1e-4, -1e-4, 2e-4, -3e-4]))
    assert metrics["mismatch/kl"] == pytest.approx((1 + 1 + 4 + 9) * 1e-8 / 2 / 4, rel=0.01)
