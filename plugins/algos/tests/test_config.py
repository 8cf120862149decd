"""Options that cannot be: each error names the class, the key and the value; and what the distribution registers."""

from __future__ import annotations

import dataclasses
import math

import pytest
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
from rlplug.registry import Registry

EVERY = [GRPO, DrGRPO, DAPO, RLOO, ReinforcePP, ReinforcePPBaseline, GSPO, CISPO, PPO, VAPO, PFPPO]
CLIPPED = [algorithm for algorithm in EVERY if algorithm is not CISPO]
WITH_CRITIC = [PPO, VAPO, PFPPO]

REFUSED = [
    *((algorithm, "kl_coefficient", value) for algorithm in EVERY for value in (-0.1, math.nan, math.inf)),
    *((algorithm, "kl_estimator", "k4") for algorithm in (GRPO, GSPO, PPO)),
    *((algorithm, "aggregation", "mean") for algorithm in (GRPO, DAPO, PPO)),
    *((algorithm, "clip_low", value) for algorithm in CLIPPED for value in (0.0, -0.2, 1.5, math.nan)),
    *((algorithm, "clip_high", value) for algorithm in CLIPPED for value in (0.0, -0.2, math.nan)),
    *((GRPO, "entropy_coefficient", value) for value in (math.nan, math.inf)),
    *((GRPO, "epsilon", value) for value in (-1e-4, math.nan)),
    *((DAPO, "over_sampling", value) for value in (0.5, math.nan)),
    (DAPO, "max_refills", -1),
    *((DAPO, "overlong_buffer", value) for value in (0, -4)),
    (CISPO, "ratio_min", -0.5),
    *((CISPO, "ratio_max", value) for value in (0.0, math.nan)),
    *((PPO, "gamma", value) for value in (-0.1, 1.1, math.nan)),
    *((PPO, "gae_lambda", value) for value in (-0.1, 1.1, math.nan)),
    *((algorithm, "value_clip", value) for algorithm in WITH_CRITIC for value in (0.0, -0.2, math.nan)),
    *((PPO, "clip_dual", value) for value in (1.0, 0.5, math.nan)),
    (PPO, "kl_in", "advantages"),
    *((VAPO, "alpha", value) for value in (0.0, -0.05, math.nan)),
    *((VAPO, "critic_lambda", value) for value in (-0.1, 1.5)),
    *((VAPO, "positive_nll_coefficient", value) for value in (-0.1, math.nan)),
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


@pytest.mark.parametrize("buffer", [RUN.max_new_tokens, RUN.max_new_tokens + 5])
def test_a_punished_buffer_longer_than_any_completion(buffer):
    algorithm = DAPO(overlong_buffer=buffer)
    with pytest.raises(ConfigError) as caught:
        algorithm.setup(RUN)
    for part in ("DAPO", "overlong_buffer", str(buffer), str(RUN.max_new_tokens)):
        assert part in str(caught.value)


@pytest.mark.parametrize("algorithm", EVERY)
def test_defaults_are_legal(algorithm):
    made = algorithm()
    made.setup(RUN)
    assert made.run == RUN


def test_the_distribution_registers_every_algorithm():
    registry = Registry()
    plugin.rlplug_register_algorithms(registry)
    assert {registry.get("algorithms", name) for name in PAPERS} == set(EVERY)
    assert {algorithm.__name__ for algorithm in EVERY} == set(PAPERS)


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize(
    ("correction", "in_fp8", "expected"),
    [
        ("auto", False, None),
        ("auto", True, Correction(level="token", mode="truncate", cap=2.0)),
        (None, True, None),
        (Correction(cap=5.0), True, Correction(cap=5.0)),
    ],
)
def test_rollouts_in_fp8_are_corrected_by_default(algorithm, correction, in_fp8, expected):
    made = algorithm(correction=correction)
    made.setup(dataclasses.replace(RUN, fp8_rollout=in_fp8))
    assert made.current_correction == expected
    assert made.needs.rollout_logprobs == (expected is not None)
