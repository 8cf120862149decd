"""Twenty thousand pairs of tokens are distributed as the policy says; single ones are in test_conformance.py."""

from __future__ import annotations

import numpy
import pytest
import torch
from rlplug_devkit.reference import chi_square

from rlplug.rollout.trajectory import new_trajectories
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
    trajectories = new_trajectories([Prompt(uid="p", token_ids=PROMPT, text="")], [0], NUM_SAMPLES, "run")
    requests = [trajectory.request(None) for trajectory in trajectories]
    return lambda sampling: engine.generate(requests, sampling)


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
    pairs = [(*completion.token_ids.tolist(), None)[:2] for completion in sample(SamplingParams(2, top_k=4))]
    assert set(pairs) <= set(expected)
    statistic, bound = chi_square(
        numpy.array([pairs.count(pair) for pair in expected]), numpy.array(list(expected.values()))
    )
    assert statistic < bound


nightly = [pytest.param(*each, marks=pytest.mark.nightly) for each in (("epsilon_cutoff", 0.05), ("typical_p", 0.6))]


@pytest.mark.parametrize(("name", "value"), [("min_p", 0.4), *nightly])
def test_an_extra_option_of_transformers_is_sampled_and_in_the_logprobs(policy, sample, name, value):
    """Alone catches an option that is accepted and ignored, comes before the temperature, or is not in the logprobs.

    So the gate sees it: those logprobs less the trainer's are minus the log of the probability that is kept.
    """
    temperature = 2.0
    probabilities = softmax(logits_after(policy, PROMPT) / temperature)
    surprise = numpy.abs(-numpy.log(probabilities) - -(probabilities * numpy.log(probabilities)).sum())
    order = numpy.argsort(surprise)
    num_typical = int((numpy.cumsum(probabilities[order]) < value).sum()) + 1
    kept = {
        "min_p": probabilities >= value * probabilities.max(),
        "epsilon_cutoff": probabilities >= value,
        "typical_p": numpy.isin(numpy.arange(len(probabilities)), order[:num_typical]),
    }[name]
    assert 1 < kept.sum() < len(probabilities)
    completions = sample(SamplingParams(1, temperature=temperature, extra={name: value}))
    tokens = numpy.array([completion.token_ids[0] for completion in completions])
    expected = numpy.where(kept, probabilities, 0) / probabilities[kept].sum()
    assert set(tokens) == set(numpy.flatnonzero(kept))
    statistic, bound = chi_square(numpy.bincount(tokens, minlength=len(expected))[kept], expected[kept])
    assert statistic < bound
    logprobs = numpy.array([completion.logprobs[0] for completion in completions])
    numpy.testing.assert_allclose(logprobs, numpy.log(expected[tokens]), atol=1e-5)


@pytest.mark.nightly
def test_a_greedy_completion_keeps_the_logprobs_of_the_whole_distribution(sample):
    plain, cut = (sample(SamplingParams(2, 0.0, extra=extra))[0] for extra in ({}, {"min_p": 0.9}))
    assert plain.token_ids.tolist() == cut.token_ids.tolist()
    assert plain.logprobs.tolist() == cut.logprobs.tolist()
