"""Options that cannot be: each error names the class, the key and the value; and what the distribution registers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import rlplug_algos
from algorithm_cases import PAPERS
from random_batches import RUN
from rlplug_algos import plugin
from rlplug_algos.cispo import CISPO
from rlplug_algos.corrections import Correction
from rlplug_algos.dapo import DAPO
from rlplug_algos.dr_grpo import DrGRPO
from rlplug_algos.grpo import GRPO
from rlplug_algos.gspo import GSPO
from rlplug_algos.pf_ppo import PFPPO
from rlplug_algos.ppo import PPO
from rlplug_algos.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rlplug_algos.rloo import RLOO
from rlplug_algos.vapo import VAPO

from rlplug.errors import ConfigError
from rlplug.plugin_manager import plugins
from rlplug.registry import Registry

EVERY = [GRPO, DrGRPO, DAPO, RLOO, ReinforcePP, ReinforcePPBaseline, GSPO, CISPO, PPO, VAPO, PFPPO]
REFUSED = [
    *((GRPO, "kl_coefficient", value) for value in (-0.1, math.nan, math.inf)),
    (GRPO, "kl_estimator", "k4"),
    (GRPO, "aggregation", "mean"),
    *((GRPO, "clip_low", value) for value in (0.0, -0.2, 1.5, math.nan)),
    *((GRPO, "clip_high", value) for value in (0.0, math.nan)),
    (GRPO, "entropy_coefficient", math.inf),
    *(
        (algorithm, "epsilon", value)
        for algorithm in (GRPO, DAPO, GSPO, CISPO)
        for value in (-1e-4, math.nan, math.inf)
    ),
    *((GRPO, "k3_max", value) for value in (0.0, -1.0, math.nan, math.inf)),
    *((algorithm, "clip_dual", value) for algorithm in (GRPO, DAPO, PPO) for value in (1.0, -3.0, math.nan, math.inf)),
    *((ReinforcePP, "gamma", value) for value in (-0.1, 1.1, math.nan)),
    *((DAPO, "over_sampling", value) for value in (0.5, math.nan)),
    (DAPO, "max_refills", -1),
    (DAPO, "overlong_buffer", 0),
    (CISPO, "ratio_min", -0.5),
    *((CISPO, "ratio_max", value) for value in (0.0, math.nan)),
    *((PPO, "gamma", value) for value in (-0.1, 1.1, math.nan)),
    *((PPO, "gae_lambda", value) for value in (-0.1, 1.1)),
    *((PPO, "value_clip", value) for value in (0.0, math.nan)),
    (PPO, "kl_in", "advantages"),
    (VAPO, "alpha", 0.0),
    (VAPO, "critic_lambda", 1.5),
    (VAPO, "positive_nll_coefficient", -0.1),
    (PFPPO, "keep", "worst"),
]


@pytest.mark.parametrize(("algorithm", "key", "value"), REFUSED)
def test_refused(algorithm, key, value):
    with pytest.raises(ConfigError) as caught:
        algorithm(**{key: value})
    message = str(caught.value)
    for part in (algorithm.__name__, key, str(value)):
        assert part in message


@pytest.mark.parametrize(
    ("algorithm", "options", "parts"),
    [
        (DAPO, {"over_sampling": 2.0, "dynamic_sampling": False}, ["DAPO", "over_sampling", "2.0", "dynamic_sampling"]),
        (DAPO, {"max_refills": 2, "dynamic_sampling": False}, ["DAPO", "max_refills", "2", "dynamic_sampling"]),
        (DAPO, {"overlong_penalty": 0.5}, ["DAPO", "overlong_penalty", "0.5", "overlong_buffer"]),
        (GRPO, {"epsilon": 0.5, "normalize_std": False}, ["GRPO", "epsilon", "0.5", "normalize_std"]),
        (GRPO, {"k3_max": 10.0}, ["GRPO", "k3_max", "10.0", "kl_coefficient"]),
        (PPO, {"k3_max": 10.0, "kl_coefficient": 0.1}, ["PPO", "k3_max", "10.0", "kl_estimator"]),
        (PPO, {"kl_horizon": 500}, ["PPO", "kl_horizon", "500", "kl_target"]),
        (CISPO, {"ratio_min": 2.0, "ratio_max": 1.5}, ["CISPO", "ratio_min", "2.0"]),
        (PPO, {"kl_target": 0.1}, ["PPO", "kl_target", "0.1", "kl_coefficient"]),
        (PPO, {"kl_target": -0.1, "kl_coefficient": 0.1}, ["PPO", "kl_target", "-0.1"]),
        (PPO, {"kl_target": 0.1, "kl_coefficient": 0.1, "kl_horizon": 0}, ["PPO", "kl_horizon", "0"]),
        (Correction, {"cap": 0.5, "floor": 0.9}, ["cap", "0.5"]),
        (Correction, {"floor": -0.1}, ["floor", "-0.1"]),
        (Correction, {"floor": 2.5}, ["floor", "2.5"]),
        (Correction, {"cap": math.nan}, ["cap", "nan"]),
        (Correction, {"level": "row"}, ["level", "row"]),
        (Correction, {"mode": "clip"}, ["mode", "clip"]),
    ],
)
def test_refused_together(algorithm, options, parts):
    with pytest.raises(ConfigError) as caught:
        algorithm(**options)
    for part in parts:
        assert part in str(caught.value)


def test_a_punished_buffer_longer_than_any_completion():
    algorithm = DAPO(overlong_buffer=RUN.max_new_tokens)
    with pytest.raises(ConfigError) as caught:
        algorithm.setup(RUN)
    for part in ("DAPO", "overlong_buffer", str(RUN.max_new_tokens)):
        assert part in str(caught.value)


@pytest.mark.parametrize("algorithm", EVERY)
def test_defaults_are_legal_options_are_checked_and_rollouts_in_fp8_corrected(algorithm):
    made = algorithm()
    made.setup(RUN)
    assert made.run == RUN
    assert not made.needs.rollout_logprobs

    made.setup(dataclasses.replace(RUN, fp8_rollout=True))
    assert made.current_correction == Correction(level="token", mode="truncate", cap=2.0)
    assert made.needs.rollout_logprobs

    with pytest.raises(ConfigError, match=f"{algorithm.__name__}'s kl_coefficient is -0.1"):
        algorithm(kl_coefficient=-0.1)
    clipped = {"ratio_max": 0.0} if algorithm is CISPO else {"clip_high": -0.2}
    with pytest.raises(ConfigError, match=algorithm.__name__):
        algorithm(**clipped)


def test_the_distribution_registers_every_algorithm():
    registry = Registry()
    plugin.rlplug_register_algorithms(registry)
    assert {registry.get("algorithms", name) for name in PAPERS} == set(EVERY)
    assert {algorithm.__name__ for algorithm in EVERY} == set(PAPERS)


@pytest.mark.parametrize(("correction", "expected"), [(None, None), (Correction(cap=5.0), Correction(cap=5.0))])
def test_what_is_said_of_the_correction_holds_in_fp8_too(correction, expected):
    made = GRPO(correction=correction)
    made.setup(dataclasses.replace(RUN, fp8_rollout=True))
    assert made.current_correction == expected
    assert made.needs.rollout_logprobs == (expected is not None)


def test_every_registered_algorithm_is_a_name_of_the_package() -> None:
    """Catches an algorithm that YAML can name and ``from rlplug_algos import ...`` cannot."""
    registered = plugins().registry.by_distribution()["rlplug-algos"]
    assert {each.name for each in registered} <= {*rlplug_algos.__all__}
    for each in registered:
        assert getattr(rlplug_algos, each.name) is each.factory
    assert all(hasattr(rlplug_algos, name) for name in rlplug_algos.__all__)
