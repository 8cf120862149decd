"""TRL's GRPO: loss, clipping, KL penalty, and the correction of what vLLM sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import Key, none

_INIT: Final = "model.algorithm.init_args"
_CLASS: Final = "model.algorithm.class_path"
_MODE: Final = "vllm_importance_sampling_mode"
AGGREGATIONS: Final[Mapping[str, str]] = {
    "grpo": "sequence",
    "dapo": "token",
    "bnpo": "token",
    "dr_grpo": "constant",
    "cispo": "token",
}
"""Our aggregation of each ``loss_type`` that is there."""

KEYS: Final = (
    Key(
        "loss_type",
        "algorithm",
        f"{_INIT}.aggregation, {_CLASS}",
        "token counts a mini-batch's tokens",
        default="dapo",
        values=AGGREGATIONS,
    ),
    Key("importance_sampling_level", "algorithm", f"{_CLASS}: GSPO"),
    Key("epsilon", "algorithm", f"{_INIT}.clip_low", default=0.2),
    Key("epsilon_high", "algorithm", f"{_INIT}.clip_high"),
    Key("delta", "algorithm", f"{_INIT}.clip_dual"),
    Key("beta", "algorithm", f"{_INIT}.kl_coefficient"),
    Key("use_bias_correction_kl", "algorithm", f"{_INIT}.kl_estimator", default=True),
    Key("scale_rewards", "algorithm", f"{_INIT}.normalize_std", default="group"),
    Key("entropy_coef", "algorithm", f"{_INIT}.entropy_coefficient"),
    Key("mask_truncated_completions", "algorithm", f"{_INIT}.overlong_filter"),
    Key("vllm_importance_sampling_correction", "algorithm", f"{_INIT}.correction", default=True),
    Key(_MODE, "algorithm", f"{_INIT}.correction.level, {_INIT}.correction.mode", default="sequence_mask"),
    Key("vllm_importance_sampling_clip_max", "algorithm", f"{_INIT}.correction.cap", default=3.0),
    Key("vllm_importance_sampling_clip_min", "algorithm", f"{_INIT}.correction.floor"),
    Key("vllm_importance_sampling_cap", "algorithm", f"{_INIT}.correction.cap"),
    *none("algorithm", "not there: options of SAPO and VESPO", "sapo_*", "vespo_*"),
    *none(
        "algorithm", "not there: the coefficient is fixed", "use_adaptive_entropy", "entropy_coef_*", "entropy_target"
    ),
    *none("algorithm", "not there: a loss of tokens with high entropy alone", "top_entropy_quantile"),
    *none("algorithm", "not there: the reference policy is frozen", "sync_ref_model", "ref_model_*"),
    *none("algorithm", "not there: advantages of each reward alone", "multi_objective_aggregation"),
    *none("algorithm", "not there: `correction` masks by ratio", "off_policy_mask_threshold"),
    *none("algorithm", "not there: the balance loss of experts", "router_aux_loss_coef"),
)


def write_algorithm(given: Given, draft: Draft) -> None:
    """Choose the class, and write clipping, KL penalty and correction."""
    loss = given["loss_type"]
    name = _class_of(given)
    if loss not in AGGREGATIONS:
        draft.lacks("loss_type", f"not there: {loss}; a run will ask for an algorithm that is")
        draft.set(_CLASS, str(loss), "loss_type")
        return
    draft.set(_CLASS, name, "loss_type")
    draft.set(f"{_INIT}.aggregation", AGGREGATIONS[loss], "loss_type")
    low = float(given["epsilon"])
    high = float(given.first("epsilon_high", "epsilon"))
    if name == "CISPO":
        draft.set(f"{_INIT}.ratio_max", high, "epsilon_high")
        draft.lacks("epsilon", "not used: CISPO bounds weights from above alone")
    else:
        draft.set(f"{_INIT}.clip_low", low, "epsilon")
        draft.set(f"{_INIT}.clip_high", high, "epsilon_high" if "epsilon_high" in given else "epsilon")
        if "delta" in given:
            draft.set(f"{_INIT}.clip_dual", float(given["delta"]), "delta")
    _write_scale(given, draft, name)
    if name == "DAPO":
        draft.settings[f"{_INIT}.dynamic_sampling"] = False
        draft.set(f"{_INIT}.overlong_filter", True, "mask_truncated_completions")
    elif given["mask_truncated_completions"]:
        draft.lacks("mask_truncated_completions", f"not there with {name}; DAPO has overlong_filter")
    if given["beta"]:
        draft.set(f"{_INIT}.kl_coefficient", float(given["beta"]), "beta")
        estimator = "k3" if given["use_bias_correction_kl"] else "k3_unweighted"
        draft.set(f"{_INIT}.kl_estimator", estimator, "use_bias_correction_kl")
    if given["entropy_coef"]:
        draft.set(f"{_INIT}.entropy_coefficient", float(given["entropy_coef"]), "entropy_coef")
    if given["use_vllm"]:
        _write_correction(given, draft)


def _class_of(given: Given) -> str:
    if given["loss_type"] == "cispo":
        return "CISPO"
    if given["importance_sampling_level"] == "sequence":
        return "GSPO"
    return "DAPO" if given["mask_truncated_completions"] else "GRPO"


def _write_scale(given: Given, draft: Draft, name: str) -> None:
    scale = given["scale_rewards"] if given.values.get("scale_rewards") is not False else "none"
    if scale in ("none", "batch") and name != "CISPO":
        draft.set(f"{_INIT}.normalize_std", False, "scale_rewards")
    if scale == "batch" or (scale == "none" and name == "CISPO"):
        draft.lacks("scale_rewards", f"not there: {scale} with {name}; advantages are scaled by their group, or not")


def _write_correction(given: Given, draft: Draft) -> None:
    if given.values.get("vllm_importance_sampling_correction") is False:
        draft.set(f"{_INIT}.correction", None, "vllm_importance_sampling_correction")
        return
    level, _, mode = str(given[_MODE]).partition("_")
    draft.set(f"{_INIT}.correction.level", level, _MODE)
    draft.set(f"{_INIT}.correction.mode", mode, _MODE)
    cap = given.first("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
    draft.set(f"{_INIT}.correction.cap", float(cap), "vllm_importance_sampling_clip_max")
    if "vllm_importance_sampling_clip_min" in given:
        floor = float(given["vllm_importance_sampling_clip_min"])
        draft.set(f"{_INIT}.correction.floor", floor, "vllm_importance_sampling_clip_min")
