"""What PPO's family keeps from step to step, and VAPO's two lambdas."""

from __future__ import annotations

import json

import pytest
import torch
from algorithm_cases import advantages_of
from random_batches import RUN, SEEDS, random_batch
from rlplug_algos.pf_ppo import PFPPO
from rlplug_algos.ppo import PPO
from rlplug_algos.vapo import VAPO

from rlplug.errors import ConfigError
from rlplug.interfaces import RunInfo


def adaptive(**options):
    options = {"kl_coefficient": 0.1, "kl_target": 0.05, "kl_horizon": 1000} | options
    algorithm = PPO(**options)
    algorithm.setup(RunInfo(num_completions=100, group_size=1, max_new_tokens=8))
    return algorithm


def test_the_adaptive_coefficient_follows_the_kl():
    """100 of 1000 completions: at twice the target the error is clipped to 0.2, so 2 % more; at none, 2 % less."""
    algorithm, batch = adaptive(), random_batch(1).batch
    before = advantages_of(algorithm, batch)
    assert before.metrics["policy/kl_coefficient"] == pytest.approx(0.1)
    algorithm.after_step({"loss": 0.0, "policy/kl": 0.1})
    assert algorithm.state_dict() == adaptive_state(0.102)
    changed = advantages_of(algorithm, batch)
    assert not torch.allclose(changed.advantages, before.advantages, atol=1e-5)
    assert torch.equal(changed.advantages, advantages_of(fixed(0.102), batch).advantages)
    algorithm.after_step({"loss": 0.0, "policy/kl": 0.0})
    assert algorithm.state_dict() == adaptive_state(0.102 * 0.98)


def fixed(coefficient):
    algorithm = PPO(kl_coefficient=coefficient)
    algorithm.setup(RUN)
    return algorithm


def adaptive_state(coefficient):
    return {"kl_coefficient": pytest.approx(coefficient)}


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_state_round_trip(kl_in):
    first, second, batch = adaptive(kl_in=kl_in), adaptive(kl_in=kl_in), random_batch(2).batch
    for kl in (0.06, 0.2, 0.01):
        first.after_step({"loss": 0.0, "policy/kl": kl})
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict() != adaptive(kl_in=kl_in).state_dict()
    for algorithm in (first, second):
        algorithm.after_step({"loss": 0.0, "policy/kl": 0.2})
    assert torch.equal(advantages_of(first, batch).advantages, advantages_of(second, batch).advantages)
    assert first.state_dict() == second.state_dict()


def test_without_a_target_the_coefficient_stays():
    algorithm = fixed(0.1)
    batch = random_batch(1).batch
    before = advantages_of(algorithm, batch).advantages
    algorithm.after_step({"loss": 0.0, "policy/kl": 9.0})
    assert torch.equal(advantages_of(algorithm, batch).advantages, before)


def test_a_warm_up_step_of_the_critic_leaves_the_coefficient():
    """The policy is still the reference there: a KL of 0 would lower the coefficient before it is used."""
    algorithm = adaptive()
    algorithm.after_step({"critic/loss": 1.0, "policy/kl": 0.0})
    assert algorithm.state_dict() == adaptive_state(0.1)


def test_a_horizon_shorter_than_a_step_is_refused():
    """A step of 6 horizons would multiply the coefficient by 1 - 6 * 0.2."""
    with pytest.raises(ConfigError, match="PPO's kl_horizon is 16: give at least the completions of a step, 96"):
        PPO(kl_coefficient=0.1, kl_target=0.1, kl_horizon=16).setup(RunInfo(96, 1, 8))
    PPO(kl_coefficient=0.1, kl_target=0.1, kl_horizon=96).setup(RunInfo(96, 1, 8))


@pytest.mark.parametrize("algorithm", [PPO, VAPO, PFPPO])
def test_a_step_without_kl_changes_nothing(algorithm):
    made = algorithm()
    made.setup(RUN)
    state = made.state_dict()
    made.after_step({})
    assert made.state_dict() == (state | {"steps_done": 1} if algorithm is PFPPO else state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_a_step_of_equal_rewards_has_no_variance_to_explain(reward, dtype):
    """With lambda 1 the returns are all the reward, but for what adding and subtracting values rounds off."""
    for seed in SEEDS:
        batch = random_batch(seed, dtype).batch
        algorithm = PPO(gae_lambda=1.0)
        algorithm.setup(RUN)
        result = advantages_of(algorithm, batch.replace(rewards=torch.full_like(batch.rewards, reward)))
        assert result.metrics["critic/explained_variance"] == 0, seed


def test_vapo_learns_values_with_one_lambda_and_the_policy_with_another():
    """alpha so large that the policy's lambda is nearly 1, and so small that it is 0: the returns are the same."""
    batch = random_batch(0).batch
    results = []
    for alpha in (1e9, 1e-9):
        algorithm = VAPO(alpha=alpha)
        algorithm.setup(RUN)
        results.append(advantages_of(algorithm, batch))
    returns = [result.returns for result in results]
    assert torch.equal(*returns)
    assert not torch.allclose(results[0].advantages, results[1].advantages, atol=0.1)
