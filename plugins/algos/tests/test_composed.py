"""Algorithms of named functions: the same numbers as the classes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from algorithm_cases import advantages_of, loss_of
from random_batches import RUN, denominators_of, random_batch
from rlplug_algos.cispo import CISPO
from rlplug_algos.composed import Composed
from rlplug_algos.functions import POLICY_LOSSES, advantage, policy_loss
from rlplug_algos.grpo import GRPO
from rlplug_algos.gspo import GSPO
from rlplug_algos.reinforce_pp import ReinforcePP
from rlplug_algos.rloo import RLOO
from rlplug_devkit import AlgorithmConformance

from rlplug.errors import ConfigError, PluginError, RunError


class TestComposed(AlgorithmConformance):
    def make_algorithm(self) -> Composed:
        return Composed()


def made(algorithm):
    algorithm.setup(RUN)
    return algorithm


@pytest.mark.parametrize(
    ("composed", "other"),
    [
        (Composed(), GRPO()),
        (Composed(advantage="group", advantage_options={"normalize_std": False}), GRPO(normalize_std=False)),
        (Composed(policy_loss="sequence_clipped", aggregation="sequence"), GSPO()),
        (Composed(policy_loss="bounded_weight", policy_loss_options={"ratio_max": 2.0}), CISPO(ratio_max=2.0)),
        (Composed(advantage="returns", advantage_options={"gamma": 0.9}), ReinforcePP(gamma=0.9)),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_named_functions_are_the_classes(composed, other):
    for seed in range(10):
        draw = random_batch(seed)
        found, expected = (advantages_of(made(each), draw.batch) for each in (composed, other))
        assert torch.equal(found.advantages, expected.advantages)
        batch = draw.batch.replace(advantages=expected.advantages)
        losses = [
            loss_of(each, batch, draw.logprobs, draw.entropy, denominators_of(batch)).loss for each in (composed, other)
        ]
        assert torch.equal(*losses)
    others = advantages_of(made(Composed(advantage="others")), random_batch(1).batch).advantages
    assert torch.equal(others, advantages_of(made(RLOO()), random_batch(1).batch).advantages)


def test_a_function_of_ones_own():
    """A plain function that returns the loss of each token: REINFORCE, weighted."""

    @policy_loss
    def weighted(logprobs, batch, weight=1.0):
        return -weight * batch.advantages * logprobs

    draw = random_batch(3)
    batch = draw.batch.replace(advantages=torch.ones_like(draw.batch.old_logprobs))
    algorithm = made(Composed(policy_loss="weighted", policy_loss_options={"weight": 2.0}))
    output = loss_of(algorithm, batch, draw.logprobs, draw.entropy, denominators_of(batch))
    expected = -2.0 * batch.trained(draw.logprobs).sum() / denominators_of(batch).num_tokens
    assert torch.equal(output.loss, expected)
    del POLICY_LOSSES["weighted"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy_loss": "cliped"}, r"policy_loss is 'cliped': there is no such function. Did you mean 'clipped'"),
        ({"advantage": "no.such"}, r"advantage is 'no.such', which cannot be imported: .*no"),
        ({"policy_loss": "math.pi"}, r"policy_loss is 'math.pi': there is no such function"),
        (
            {"policy_loss_options": {"clip_hihg": 0.3}},
            r"'clip_hihg', which clipped does not take. Did you mean 'clip_high'",
        ),
        (
            {"advantage": "others", "advantage_options": {"epsilon": 1}},
            r"'epsilon', which others does not take. It takes none",
        ),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Composed(**options)


def test_functions_that_return_something_else():
    algorithm = made(Composed())
    draw = random_batch(1)
    algorithm._advantage = lambda batch: [1.0]
    with pytest.raises(RunError, match="group must return a tensor"):
        advantages_of(algorithm, draw.batch)
    algorithm._policy_loss = lambda logprobs, batch: logprobs.sum()
    with pytest.raises(
        RunError, match=r"clipped must return the loss of each token, \[K\]; it returned a loss of shape"
    ):
        loss_of(algorithm, draw.batch, draw.logprobs, draw.entropy, denominators_of(draw.batch))


def test_registering_refuses_what_cannot_be_called_so():
    with pytest.raises(PluginError, match="must take logprobs and the batch"):
        policy_loss(lambda logprobs: logprobs)
    with pytest.raises(PluginError, match=r"has the name of a function in rlplug_algos\.functions"):

        @advantage
        def group(batch):
            return batch.rewards
