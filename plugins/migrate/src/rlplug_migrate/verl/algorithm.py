"""verl's algorithms: advantages, policy loss, KL penalty, rollout correction and critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import Key, none
from rlplug_migrate.verl.names import ACTOR, REF

ESTIMATORS: Final[Mapping[str, str]] = {
    "gae": "PPO",
    "grpo": "GRPO",
    "grpo_vectorized": "GRPO",
    "rloo": "RLOO",
    "rloo_vectorized": "RLOO",
    "reinforce_plus_plus": "ReinforcePP",
    "reinforce_plus_plus_baseline": "ReinforcePPBaseline",
}
LOSSES: Final[Mapping[str, str]] = {"gspo": "GSPO", "cispo": "CISPO"}
"""Policy losses that are classes of their own here, with advantages of the group."""
AGGREGATIONS: Final[Mapping[str, str]] = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}
KL: Final[Mapping[str, str]] = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3_unweighted",
    "k3": "k3_unweighted",
    "low_var_kl+": "k3",
    "k3+": "k3",
}
_OF_GROUP: Final = ("GRPO", "GSPO", "CISPO", "DAPO")
_KL_IN_LOSS: Final = (*_OF_GROUP, "ReinforcePPBaseline")
_INIT: Final = "model.algorithm.init_args"
_CLASS: Final = "model.algorithm.class_path"
_CORRECTION: Final = "algorithm.rollout_correction"
_OVERLONG: Final = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)

KEYS: Final = (
    Key("algorithm.adv_estimator", "algorithm", _CLASS, default="gae", values=ESTIMATORS),
    Key(f"{ACTOR}.policy_loss.loss_mode", "algorithm", _CLASS, values=LOSSES),
    Key(f"{ACTOR}.clip_ratio", "algorithm", f"{_INIT}.clip_low, {_INIT}.clip_high"),
    Key(f"{ACTOR}.clip_ratio_low", "algorithm", f"{_INIT}.clip_low", default=0.2),
    Key(f"{ACTOR}.clip_ratio_high", "algorithm", f"{_INIT}.clip_high", default=0.2),
    Key(f"{ACTOR}.clip_ratio_c", "algorithm", f"{_INIT}.clip_dual", default=3.0),
    Key(f"{ACTOR}.loss_agg_mode", "algorithm", f"{_INIT}.aggregation", default="token-mean", values=AGGREGATIONS),
    Key(f"{ACTOR}.entropy_coeff", "algorithm", f"{_INIT}.entropy_coefficient"),
    Key("algorithm.norm_adv_by_std_in_grpo", "algorithm", f"{_INIT}.normalize_std"),
    Key("algorithm.gamma", "algorithm", f"{_INIT}.gamma"),
    Key("algorithm.lam", "algorithm", f"{_INIT}.gae_lambda", default=1.0),
    Key("critic.cliprange_value", "algorithm", f"{_INIT}.value_clip", default=0.5),
    Key(f"{ACTOR}.use_kl_loss", "algorithm", f"{_INIT}.kl_coefficient"),
    Key(f"{ACTOR}.kl_loss_coef", "algorithm", f"{_INIT}.kl_coefficient", default=0.001),
    Key(f"{ACTOR}.kl_loss_type", "algorithm", f"{_INIT}.kl_estimator", default="low_var_kl", values=KL),
    Key("algorithm.use_kl_in_reward", "algorithm", f"{_INIT}.kl_in, {_INIT}.kl_coefficient"),
    Key("algorithm.kl_penalty", "algorithm", f"{_INIT}.kl_estimator", default="kl", values=KL),
    Key("algorithm.kl_ctrl.kl_coef", "algorithm", f"{_INIT}.kl_coefficient", default=0.001),
    Key(
        "algorithm.kl_ctrl.type", "algorithm", f"{_INIT}.kl_target", "adaptive where kl_target is set", default="fixed"
    ),
    Key("algorithm.kl_ctrl.target_kl", "algorithm", f"{_INIT}.kl_target", default=0.1),
    Key("algorithm.kl_ctrl.horizon", "algorithm", f"{_INIT}.kl_horizon", default=10000),
    Key("algorithm.filter_groups.enable", "algorithm", f"{_INIT}.dynamic_sampling"),
    Key(
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm",
        f"{_INIT}.max_refills",
        "without the first batch; a step then trains on what it has, where verl stops",
    ),
    Key(f"{_CORRECTION}.rollout_is", "algorithm", f"{_INIT}.correction.level"),
    Key(f"{_CORRECTION}.rollout_is_threshold", "algorithm", f"{_INIT}.correction.cap", default=2.0),
    Key(f"{ACTOR}.tis_imp_ratio_cap", "algorithm", f"{_INIT}.correction.cap"),
    *(Key(f"{name}.enable", "algorithm", f"{_INIT}.overlong_buffer") for name in _OVERLONG),
    *(Key(f"{name}.len", "algorithm", f"{_INIT}.overlong_buffer") for name in _OVERLONG),
    *(Key(f"{name}.penalty_factor", "algorithm", f"{_INIT}.overlong_penalty") for name in _OVERLONG),
    Key("critic.optim.lr", "algorithm", "model.critic.optimizer.init_args.lr", default=1e-5),
    Key("critic.optim.weight_decay", "algorithm", "model.critic.optimizer.init_args.weight_decay"),
    Key("critic.optim.betas", "algorithm", "model.critic.optimizer.init_args.betas"),
    Key("critic.model.path", "algorithm", "model.critic.trunk.path"),
    Key("critic.grad_clip", "algorithm", "model.critic.max_grad_norm"),
    Key("critic.ppo_epochs", "algorithm", "model.critic.num_epochs"),
    Key("trainer.critic_warmup", "algorithm", "model.critic.warmup_steps", "one less than in verl"),
    Key("critic.enable", "algorithm", "model.critic", "follows from the algorithm"),
    *none("algorithm", "not there: the metric is the reward", "algorithm.filter_groups.metric"),
    *none(
        "algorithm",
        "not there: the constant is max_new_tokens",
        f"{ACTOR}.loss_scale_factor",
        "critic.loss_scale_factor",
    ),
    *none("algorithm", "follows from the other keys of the critic", "critic.loss_agg_mode"),
    *none(
        "algorithm",
        "not there: `correction` weighs or masks tokens and sequences by their ratio",
        f"{_CORRECTION}.rollout_rs*",
        f"{_CORRECTION}.bypass_mode",
        f"{_CORRECTION}.loss_type",
        f"{_CORRECTION}.rollout_is_batch_normalize",
    ),
    *none(
        "algorithm", "PFPPO chooses within a prompt, verl over the batch", "algorithm.use_pf_ppo", "algorithm.pf_ppo.*"
    ),
    *none(
        "algorithm",
        "not there: options of losses that are not there",
        f"{ACTOR}.policy_loss.*",
        f"{ACTOR}.tau_pos",
        f"{ACTOR}.tau_neg",
    ),
    *none(
        "algorithm",
        "sets itself: it is measured in each step",
        f"{ACTOR}.calculate_entropy",
        f"{ACTOR}.calculate_sum_pi_squared",
    ),
    *none(
        "algorithm", "sets itself: a penalty above 0 keeps a reference policy", f"{REF}.rollout_n", f"{ACTOR}.rollout_n"
    ),
    *none("algorithm", "not there: distillation", "distillation.*"),
    *none("algorithm", "not there: more prompts in flight while groups are filtered", "algorithm.filter_groups.*"),
)


def write_algorithm(given: Given, draft: Draft) -> None:
    """Choose the class by estimator and loss, and write what its clip and advantages take."""
    name = class_of(given, draft)
    draft.set(_CLASS, name, "algorithm.adv_estimator")
    low, high = (given.first(f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio") for side in ("low", "high"))
    if name == "CISPO":
        draft.set(f"{_INIT}.ratio_min", round(1 - low, 6), f"{ACTOR}.clip_ratio_low")
        draft.set(f"{_INIT}.ratio_max", round(1 + high, 6), f"{ACTOR}.clip_ratio_high")
    else:
        draft.set(f"{_INIT}.clip_low", low, f"{ACTOR}.clip_ratio_low")
        draft.set(f"{_INIT}.clip_high", high, f"{ACTOR}.clip_ratio_high")
        draft.set(f"{_INIT}.clip_dual", given[f"{ACTOR}.clip_ratio_c"], f"{ACTOR}.clip_ratio_c")
    mode = given[f"{ACTOR}.loss_agg_mode"]
    if mode in AGGREGATIONS:
        draft.set(f"{_INIT}.aggregation", AGGREGATIONS[mode], f"{ACTOR}.loss_agg_mode")
    else:
        draft.lacks(f"{ACTOR}.loss_agg_mode", f"not there: {mode}; {', '.join(AGGREGATIONS)} are")
    if given[f"{ACTOR}.entropy_coeff"]:
        draft.set(f"{_INIT}.entropy_coefficient", given[f"{ACTOR}.entropy_coeff"], f"{ACTOR}.entropy_coeff")
    if name in ("GRPO", "GSPO", "DAPO") and given["algorithm.norm_adv_by_std_in_grpo"] is False:
        draft.set(f"{_INIT}.normalize_std", False, "algorithm.norm_adv_by_std_in_grpo")
    elif name in _OF_GROUP:
        draft.set(f"{_INIT}.epsilon", 1e-6, "epsilon")
    if name in ("PPO", "ReinforcePP") and "algorithm.gamma" in given:
        draft.set(f"{_INIT}.gamma", given["algorithm.gamma"], "algorithm.gamma")
    if name == "PPO":
        draft.set(f"{_INIT}.gae_lambda", given["algorithm.lam"], "algorithm.lam")
        draft.set(f"{_INIT}.value_clip", given["critic.cliprange_value"], "critic.cliprange_value")
    if name == "DAPO":
        _write_dapo(given, draft)


def class_of(given: Given, draft: Draft) -> str:
    """Return our class; where there is none, verl's own name, which a run refuses with the names that there are."""
    estimator, loss = given["algorithm.adv_estimator"], given[f"{ACTOR}.policy_loss.loss_mode"] or "vanilla"
    name = ESTIMATORS.get(estimator)
    if name is None:
        draft.lacks("algorithm.adv_estimator", f"not there: {estimator}; a run will ask for an algorithm that is")
        return str(estimator)
    if loss == "vanilla":
        filters = given["algorithm.filter_groups.enable"] or _overlong(given, "enable")
        return "DAPO" if name == "GRPO" and filters else name
    if name == "GRPO" and loss in LOSSES:
        return LOSSES[loss]
    draft.lacks(f"{ACTOR}.policy_loss.loss_mode", f"not there: {loss} with {estimator}; a run will ask for one that is")
    return str(loss)


def _overlong(given: Given, name: str) -> Any:
    return given.first(*(f"{block}.{name}" for block in _OVERLONG))


def _write_dapo(given: Given, draft: Draft) -> None:
    filters = bool(given["algorithm.filter_groups.enable"])
    draft.set(f"{_INIT}.dynamic_sampling", filters, "algorithm.filter_groups.enable")
    if filters and (most := given["algorithm.filter_groups.max_num_gen_batches"]):
        draft.set(f"{_INIT}.max_refills", max(0, most - 1), "algorithm.filter_groups.max_num_gen_batches")
    if _overlong(given, "enable"):
        draft.settings[f"{_INIT}.overlong_buffer"] = _overlong(given, "len")
        if (penalty := _overlong(given, "penalty_factor")) is not None:
            draft.settings[f"{_INIT}.overlong_penalty"] = penalty


# ---- KL penalty and correction --------------------------------------------------------------------------------------


def write_kl(given: Given, draft: Draft) -> None:
    """Write the KL penalty: in the loss or in the reward, wherever the class has it."""
    name = draft.settings[_CLASS]
    in_loss, in_reward = bool(given[f"{ACTOR}.use_kl_loss"]), bool(given["algorithm.use_kl_in_reward"])
    if in_reward and name not in _KL_IN_LOSS:
        _write_penalty(given, draft, "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
        if name == "PPO" and given["algorithm.kl_ctrl.type"] == "adaptive":
            draft.set(f"{_INIT}.kl_target", given["algorithm.kl_ctrl.target_kl"], "algorithm.kl_ctrl.target_kl")
            draft.set(f"{_INIT}.kl_horizon", given["algorithm.kl_ctrl.horizon"], "algorithm.kl_ctrl.horizon")
        if in_loss:
            draft.lacks(f"{ACTOR}.use_kl_loss", "not there: two KL penalties; that in the reward is kept")
    elif in_loss and (name in _KL_IN_LOSS or name == "PPO"):
        _write_penalty(given, draft, f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
        if name == "PPO":
            draft.set(f"{_INIT}.kl_in", "loss", f"{ACTOR}.use_kl_loss")
        if in_reward:
            draft.lacks("algorithm.use_kl_in_reward", "not there: two KL penalties; that in the loss is kept")
    elif in_loss:
        draft.lacks(f"{ACTOR}.use_kl_loss", f"not there: the KL penalty of {name} is in the reward")
    elif in_reward:
        draft.lacks("algorithm.use_kl_in_reward", f"not there: the KL penalty of {name} is in the loss")


def _write_penalty(given: Given, draft: Draft, coefficient: str, kind: str) -> None:
    estimator = KL.get(given[kind])
    if estimator is None:
        draft.lacks(kind, f"not there: {given[kind]}; {', '.join(KL)} are")
        return
    draft.set(f"{_INIT}.kl_coefficient", given[coefficient], coefficient)
    draft.set(f"{_INIT}.kl_estimator", estimator, kind)
    if estimator.startswith("k3"):
        draft.set(f"{_INIT}.k3_max", 10.0, "k3_max")


def write_correction(given: Given, draft: Draft) -> None:
    """Write the weights between engine and trainer; a threshold ``"F_C"`` masks."""
    level, threshold = given[f"{_CORRECTION}.rollout_is"], given[f"{_CORRECTION}.rollout_is_threshold"]
    old = given[f"{ACTOR}.tis_imp_ratio_cap"]
    if level is None and isinstance(old, (int, float)) and old > 0:
        level, threshold = "token", old
    if level not in ("token", "sequence"):
        return
    draft.set(f"{_INIT}.correction.level", level, f"{_CORRECTION}.rollout_is")
    floor, masks, cap = str(threshold).partition("_")
    if masks:
        draft.set(f"{_INIT}.correction.mode", "mask", f"{_CORRECTION}.rollout_is_threshold")
        draft.set(f"{_INIT}.correction.floor", float(floor), f"{_CORRECTION}.rollout_is_threshold")
    draft.set(f"{_INIT}.correction.cap", float(cap if masks else threshold), f"{_CORRECTION}.rollout_is_threshold")


def write_critic(given: Given, draft: Draft) -> None:
    """Write the critic of PPO; the keys of one that no algorithm has are listed."""
    if draft.settings[_CLASS] != "PPO":
        for name in given.below("critic."):
            draft.lacks(f"critic.{name}", f"not used: {draft.settings[_CLASS]} has no critic")
        return
    path = given["critic.model.path"]
    if path is not None and path != given["actor_rollout_ref.model.path"]:
        draft.set("model.critic.trunk.path", path, "critic.model.path")
    for name, key in (("grad_clip", "max_grad_norm"), ("ppo_epochs", "num_epochs")):
        if f"critic.{name}" in given:
            draft.set(f"model.critic.{key}", given[f"critic.{name}"], f"critic.{name}")
    draft.set("model.critic.warmup_steps", max(0, (given["trainer.critic_warmup"] or 0) - 1), "trainer.critic_warmup")
    draft.from_defaults.pop("model.critic.warmup_steps", None)
