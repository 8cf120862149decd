"""Our algorithms against TRL's own code: advantages, importance weights, loss, gradient and metrics of whole steps.

Where the definitions differ, this is how, and what is compared:
    - Rows without a trainable token count in TRL's mean over rows ("grpo", "dr_grpo", RLOO) and not in ours; its losses
      are multiplied by rows / num_sequences. In RLOO such a row adds -A, of ratio 1, to TRL's loss: taken off.
    - Clip fractions of sequence ratios (GSPO, RLOO) are means over rows in TRL and over tokens here: not compared.
      Where no completion is longer than a token, TRL takes the [B, 1] of any algorithm for such: not compared either.
    - TRL's "kl" is the term of its loss, ours the value of k3: compared where the term has no weight.
    - ``delta`` of TRL stops the ratio for either sign of the advantage, ``clip_dual`` for negative ones only. From
      1 + clip_high upwards, which TRL recommends, they are the same.
    - TRL's entropy bonus is always a mean over tokens; ours is aggregated as the policy term is.
    - Where the mean of equal rewards is rounded, TRL gives them advantages (in float32 of 1e-4 and more),
      we give 0: the rewards here are multiples of 1/8, of which no mean is rounded unless they differ.
TRL 1.16 has no PPO, GAE or value loss; other tests have oracles for these.
"""

from __future__ import annotations

import pytest
import torch
from algorithm_cases import advantages_of, loss_of
from random_batches import RUN, SEEDS, denominators_of, random_batch, with_garbage
from rlplug_algos.cispo import CISPO
from rlplug_algos.corrections import Correction
from rlplug_algos.dapo import DAPO
from rlplug_algos.dr_grpo import DrGRPO
from rlplug_algos.grpo import GRPO
from rlplug_algos.gspo import GSPO
from rlplug_algos.ppo import PPO
from rlplug_algos.rloo import RLOO

pytest.importorskip("trl", reason="TRL is in rlplug[dev]: it asks for a newer datasets than the oldest that is claimed")

from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl_steps import trl_step

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5}
"""TRL's n / (n - 1) of a group's deviation is float32 in any case: 1e-7 is what float64 can show."""
pytestmark = pytest.mark.nightly  # on a push test_algorithms.py compares with oracles
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def correction(mode: str, cap: float, floor: float | None = None):
    """TRL's options of a correction; its modes are our levels and modes, ``None`` is our floor of 0."""
    return {
        "use_vllm": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": cap,
        "vllm_importance_sampling_clip_min": floor,
    }


KL = {"kl_coefficient": 0.3}
GSPO_OPTIONS = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
GRPO_CASES = {
    "token": (GRPO(), {}),
    "sequence": (GRPO(aggregation="sequence"), {"loss_type": "grpo"}),
    "clip": (GRPO(clip_low=0.1, clip_high=0.05), {"epsilon_low": 0.1, "epsilon_high": 0.05}),
    "no std": (GRPO(normalize_std=False), {"scale_rewards": "none"}),
    "k3 of the paper": (GRPO(**KL, kl_estimator="k3_unweighted"), {"beta": 0.3}),
    "k3": (GRPO(**KL, kl_estimator="k3"), {"beta": 0.3, "use_bias_correction_kl": True}),
    "k3 sequence": (
        GRPO(**KL, kl_estimator="k3", aggregation="sequence"),
        {"beta": 0.3, "use_bias_correction_kl": True, "loss_type": "grpo"},
    ),
    "entropy": (GRPO(entropy_coefficient=0.1), {"_entropy_bonus_enabled": True, "entropy_coef": 0.1}),
    "dr_grpo": (DrGRPO(), {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": (DAPO(), {"epsilon_high": 0.28}),
    "overlong filter": (DAPO(overlong_filter=True), {"epsilon_high": 0.28, "mask_truncated_completions": True}),
    "gspo": (GSPO(), {**GSPO_OPTIONS, "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "gspo wide": (GSPO(clip_low=0.1, clip_high=0.2), {**GSPO_OPTIONS, "epsilon_low": 0.1}),
    "gspo k3": (GSPO(clip_low=0.2, clip_high=0.2, **KL), {**GSPO_OPTIONS, "beta": 0.3}),
    "cispo": (CISPO(), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo tight": (CISPO(ratio_max=1.1), {"loss_type": "cispo", "epsilon_high": 1.1}),
    "token truncate": (GRPO(correction=Correction(cap=1.5)), correction("token_truncate", 1.5)),
    "token mask": (
        GRPO(correction=Correction(mode="mask", cap=1.5, floor=0.6)),
        correction("token_mask", 1.5, floor=0.6),
    ),
    "sequence truncate": (
        GRPO(correction=Correction(level="sequence", cap=1.5, floor=0.6)),
        correction("sequence_truncate", 1.5, floor=0.6),
    ),
    "sequence mask": (
        GRPO(correction=Correction(level="sequence", mode="mask", cap=3.0)),
        correction("sequence_mask", 3.0),
    ),
    "correction spares kl": (
        GRPO(**KL, correction=Correction(mode="mask", cap=1.1), aggregation="sequence"),
        {"beta": 0.3, "loss_type": "grpo", **correction("token_mask", 1.1)},
    ),
    "cispo corrected": (
        CISPO(correction=Correction(cap=1.5)),
        {"loss_type": "cispo", "epsilon_high": 5.0, **correction("token_truncate", 1.5)},
    ),
}
RLOO_CASES = {
    "plain": (RLOO(), {}),
    "clip": (RLOO(clip_low=0.1, clip_high=0.4), {"epsilon_low": 0.1, "epsilon_high": 0.4}),
    "kl in the reward": (RLOO(kl_coefficient=0.3), {"beta": 0.3}),
}


def draw(seed, dtype):
    """Return a random batch, logprobs (a leaf) and entropy (a function of it), with garbage outside the mask."""
    drawn = random_batch(seed, dtype)
    batch, mask = drawn.batch, drawn.batch.response_mask
    logprobs = with_garbage(drawn.logprobs, mask)
    finite = torch.where(mask, logprobs, 0.0)
    names = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    batch = batch.replace(**{name: with_garbage(getattr(batch, name), mask) for name in names})
    return batch.replace(rewards=(batch.rewards * 8).round() / 8), logprobs, -finite * finite.exp()


def our_step(algorithm, batch, logprobs, entropy):
    """Return the batch that trains, with its advantages, and the loss."""
    algorithm.setup(RUN)
    result = advantages_of(algorithm, batch)
    batch = batch.replace(advantages=result.advantages, response_mask=result.response_mask)
    return batch, loss_of(algorithm, batch, logprobs, entropy, denominators_of(batch))


def assert_close(what, ours, theirs, tolerance):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def assert_same_loss(seed, ours, theirs, logprobs):
    tolerance = TOLERANCE[logprobs.dtype]
    assert_close(f"loss, seed {seed}", ours, theirs, tolerance)
    gradients = [torch.autograd.grad(loss, logprobs, retain_graph=True)[0] for loss in (ours, theirs)]
    assert_close(f"gradient, seed {seed}", *gradients, tolerance)


def assert_same_advantages(seed, batch, theirs):
    expected = torch.where(batch.response_mask, theirs.advantages, 0.0)
    assert_close(f"advantages, seed {seed}", batch.advantages, expected, TOLERANCE[expected.dtype])


def assert_same_metrics(seed, options, ours, theirs):
    names = {}
    if options.get("loss_type") != "cispo" and "importance_sampling_level" not in options:
        names = {f"policy/clip_fraction_{side}": f"clip_ratio/{side}_mean" for side in ("low", "high")}
    if "beta" in options and "use_bias_correction_kl" not in options:
        names["policy/kl"] = "kl"
    for mine, trls in names.items():
        assert_close(f"{mine}, seed {seed}", ours[mine].float(), torch.tensor(theirs[trls]), 1e-5)


@dtypes
@pytest.mark.parametrize("case", GRPO_CASES)
def test_a_step_is_that_of_grpo_trainer(case, dtype):
    algorithm, options = GRPO_CASES[case]
    for seed in SEEDS:
        batch, logprobs, entropy = draw(seed, dtype)
        theirs = trl_step(GRPOTrainer, batch, logprobs, entropy, **options)
        batch, ours = our_step(algorithm, batch, logprobs, entropy)
        assert_same_advantages(seed, batch, theirs)
        by_rows = options.get("loss_type") in ("grpo", "dr_grpo")
        factor = theirs.num_rows / max(denominators_of(batch).num_sequences, 1) if by_rows else 1.0
        assert_same_loss(seed, ours.loss, theirs.loss * factor, logprobs)
        if theirs.max_length > 1:
            assert_same_metrics(seed, options, ours.metrics, theirs.metrics)


@dtypes
@pytest.mark.parametrize("case", RLOO_CASES)
def test_a_step_is_that_of_rloo_trainer(case, dtype):
    algorithm, options = RLOO_CASES[case]
    for seed in SEEDS:
        batch, logprobs, entropy = draw(seed, dtype)
        theirs = trl_step(RLOOTrainer, batch, logprobs, entropy, **options)
        batch, ours = our_step(algorithm, batch, logprobs, entropy)
        assert_same_advantages(seed, batch, theirs)
        factor = theirs.num_rows / max(denominators_of(batch).num_sequences, 1)
        assert_same_loss(seed, ours.loss, (theirs.loss - theirs.loss_of_empty_rows) * factor, logprobs)


@dtypes
def test_the_overlong_punishment_of_dapo_is_trls_reward_function(dtype):
    algorithm = DAPO(overlong_buffer=4, overlong_penalty=0.5)
    punishment = get_soft_overlong_punishment(RUN.max_new_tokens, 4)
    for seed in SEEDS:
        batch, logprobs, entropy = draw(seed, dtype)
        punished = punishment([[0] * length for length in batch.response_mask.sum(dim=1).tolist()])
        rewards = batch.rewards + 0.5 * batch.rewards.new_tensor(punished)
        theirs = trl_step(GRPOTrainer, batch, logprobs, entropy, rewards, epsilon_high=0.28)
        batch, ours = our_step(algorithm, batch, logprobs, entropy)
        assert_same_advantages(seed, batch, theirs)
        assert_same_loss(seed, ours.loss, theirs.loss, logprobs)


@dtypes
@pytest.mark.parametrize("algorithm", [GRPO, DAPO, PPO])
def test_the_dual_clip_is_trls_delta(algorithm, dtype):
    algorithm = algorithm(clip_low=0.2, clip_high=0.2, clip_dual=1.3)
    algorithm.setup(RUN)
    for seed in SEEDS:
        batch, logprobs, entropy = draw(seed, dtype)
        theirs = trl_step(GRPOTrainer, batch, logprobs, entropy, delta=1.3)
        batch = batch.replace(advantages=theirs.advantages)
        ours = loss_of(algorithm, batch, logprobs, entropy, denominators_of(batch))
        assert_same_loss(seed, ours.loss, theirs.loss, logprobs)
