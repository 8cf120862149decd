"""Updates that need the whole step, which a run that trains on groups one by one refuses."""

from __future__ import annotations

import pytest
from rlplug_async.option_checks import check_streaming

from rlplug.errors import ConfigError
from rlplug.interfaces import Algorithm, Needs
from rlplug.training.batch_plan import BatchPlan, BatchSizes


class Learner(Algorithm):
    def __init__(self, **needs):
        self._needs = Needs(**needs)

    @property
    def needs(self):
        return self._needs

    def advantages(self, batch):
        raise NotImplementedError

    def loss(self, micro_batch, logprobs, entropy, denominators):
        raise NotImplementedError


class Streamable(Learner):
    streamed_divisor = "num_tokens"


@pytest.mark.parametrize(
    ("algorithm", "sizes", "editors", "words"),
    [
        (Streamable(critic=True), {}, [], ["Streamable trains a critic on the whole step", "max_staleness to 1"]),
        (Learner(), {}, [], ["Learner does not say that its advantages need no other group", "whitening"]),
        (Streamable(), {"num_epochs": 2}, [], ["model.batch.num_epochs asks for 2 a rollout: remove it"]),
        (Streamable(), {"mini_batch_size": 2}, [], ["model.batch.mini_batch_size asks for 4 a rollout: remove it"]),
        (Streamable(), {}, ["probe"], ["probe may edit the batch of a whole step", "--block probe"]),
    ],
)
def test_what_needs_the_whole_step_is_not_streamed(algorithm, sizes, editors, words):
    """It catches a run whose gradients would not be those of the configured update."""
    plan = BatchPlan(BatchSizes(prompts_per_step=2, group_size=4, **sizes), world_size=1)
    with pytest.raises(ConfigError) as error:
        check_streaming(algorithm, (plan.num_epochs, plan.num_mini_batches), editors)
    for word in ["model.partial_rollout.max_staleness is 0", *words]:
        assert word in str(error.value)
    check_streaming(Streamable(), (1, 1), [])
