"""Twenty thousand completions of one prompt are distributed as the policy says."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from rlplug.rollout.requests import make_requests
from rlplug.types import Prompt, SamplingParams

PROMPT, NUM_SAMPLES, END = (3, 4, 5), 20_000, 1


def logits_after(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].double().numpy()


def softmax(logits):
    weights = numpy.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.fixture(scope="module")
def policy(model_folder, load_policy):
    return load_policy(model_folder("llama"))


@pytest.fixture
def sample(policy, model_folder, start_engine):
    engine = start_engine(model_folder("llama"), policy, max_batch_size=NUM_SAMPLES)
    requests = make_requests([Prompt(uid="p", token_ids=PROMPT, text="")], [0], NUM_SAMPLES, "run")
    return lambda sampling: engine.generate(requests, sampling)


def chi_square(counts, probabilities):
    """Return Pearson's statistic over cells that expect 5 or more, and what it exceeds once in a million.

    The bound on chi-square's tail is that of Laurent and Massart (2000), lemma 1:
    P(X >= k + 2 sqrt(k x) + 2 x) <= exp(-x).
    """
    expected = counts.sum() * probabilities
    cells = expected >= 5
    observed, expected = (numpy.append(part[cells], part[~cells].sum()) for part in (counts, expected))
    free, tail = cells.sum(), math.log(1e6)
    statistic = ((observed - expected) ** 2 / numpy.maximum(expected, 5)).sum()
    return statistic, free + 2 * math.sqrt(free * tail) + 2 * tail


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, top_p=0.8),
        SamplingParams(1, temperature=1.5, top_p=0.7, top_k=9),
    ],
    ids=str,
)
def test_one_token(sampling, policy, sample):
    completions = sample(sampling)
    probabilities = softmax(logits_after(policy, PROMPT) / sampling.temperature)
    order = numpy.argsort(-probabilities)
    kept = order[: sampling.top_k or None]
    share = numpy.cumsum(probabilities[kept]) / probabilities[kept].sum()
    kept = kept[: 1 + int((share < sampling.top_p).sum())]
    expected = numpy.zeros_like(probabilities)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    counts = numpy.bincount([c.token_ids[0] for c in completions], minlength=len(expected))
    assert len(kept) >= 3
    assert counts[expected == 0].sum() == 0
    statistic, bound = chi_square(counts, expected)
    assert statistic < bound
    for token in kept[:3]:
        named = next(c.logprobs[0] for c in completions if c.token_ids[0] == token)
        assert named == pytest.approx(math.log(expected[token]), abs=1e-5)


def test_two_tokens(policy, sample):
    """Draws of successive steps are independent: pairs occur as often as the product of probabilities says."""

    def top_four(tokens):
        logits = logits_after(policy, tokens)
        best = numpy.argsort(-logits)[:4]
        return dict(zip(best.tolist(), softmax(logits[best]), strict=True))

    expected = {
        (a, b): p * q
        for a, p in top_four(PROMPT).items()
        for b, q in ({None: 1.0} if a == END else top_four((*PROMPT, a))).items()
    }
    pairs = [(*completion.token_ids, None)[:2] for completion in sample(SamplingParams(2, top_k=4))]
    assert set(pairs) <= set(expected)
    statistic, bound = chi_square(
        numpy.array([pairs.count(pair) for pair in expected]), numpy.array(list(expected.values()))
    )
    assert statistic < bound
