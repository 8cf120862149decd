"""verl's sizes of a step: prompts, completions, mini-batches, and what one pass of a GPU takes."""

from __future__ import annotations

from typing import Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import Key, none, positive, same
from rlplug_migrate.verl.names import ACTOR, REF, ROLLOUT

_TOKENS: Final = f"{ACTOR}.ppo_max_token_len_per_gpu"
_FORWARD_ROWS: Final = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
_OF_CRITIC: Final = {
    "critic.ppo_max_token_len_per_gpu": "model.critic.max_tokens_per_gpu",
    "critic.forward_max_token_len_per_gpu": "model.critic.max_tokens_per_gpu_forward",
}

KEYS: Final = (
    same("data.train_batch_size", "tuning", "model.batch.prompts_per_step", default=1024),
    same(f"{ROLLOUT}.n", "tuning", "model.batch.group_size", default=1),
    Key(
        f"{ACTOR}.ppo_mini_batch_size",
        "tuning",
        "model.batch.mini_batch_size",
        "counts completions; verl's counts prompts",
        default=256,
    ),
    same(f"{ACTOR}.ppo_epochs", "tuning", "model.batch.num_epochs"),
    Key(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "tuning", "model.batch.micro_batch_size_per_gpu"),
    Key(
        f"{ACTOR}.ppo_micro_batch_size", "tuning", "model.batch.micro_batch_size_per_gpu", "is per GPU; this was of all"
    ),
    Key(f"{ACTOR}.use_dynamic_bsz", "tuning", "model.batch.max_tokens_per_gpu", "is the default here"),
    Key(_TOKENS, "tuning", "model.batch.max_tokens_per_gpu", "is never exceeded; verl's can be"),
    *(Key(theirs, "tuning", ours, "is never exceeded; verl's can be") for theirs, ours in _OF_CRITIC.items()),
    Key(_FORWARD_ROWS, "tuning", "model.batch.micro_batch_size_per_gpu_forward", "holds for the reference too"),
    Key(
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        "tuning",
        "model.batch.max_tokens_per_gpu_forward",
        "holds for old logprobs, the reference and, by default, the critic",
    ),
    same("data.max_prompt_length", "data", "data.max_prompt_tokens", "drops or refuses prompts, and cuts none", 512),
    same("data.max_response_length", "data", "model.sampling.max_new_tokens", default=512),
    same(f"{ROLLOUT}.temperature", "engine", "model.sampling.temperature"),
    same(f"{ROLLOUT}.top_p", "engine", "model.sampling.top_p"),
    Key(f"{ROLLOUT}.top_k", "engine", "model.sampling.top_k", read=lambda value: max(0, int(value))),
    *none(
        "tuning",
        "one budget for all passes without gradients: model.batch.max_tokens_per_gpu_forward",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        f"{ROLLOUT}.log_prob_micro_batch_size*",
        f"{REF}.log_prob_*",
        "critic.forward_*",
        "reward_model.micro_batch_size*",
        "reward_model.forward_max_token_len_per_gpu",
        "reward_model.use_dynamic_bsz",
    ),
    *none(
        "tuning",
        "the critic takes the budget of the policy, or model.critic.max_tokens_per_gpu",
        "critic.ppo_micro_batch_size*",
        "critic.use_dynamic_bsz",
        "critic.ppo_mini_batch_size",
    ),
    *none("tuning", "sets itself: mini-batches are drawn anew in each epoch", f"{ACTOR}.shuffle", "critic.shuffle"),
    *none("tuning", "follows seed_everything", f"{ACTOR}.data_loader_seed", "critic.data_loader_seed"),
    *none(
        "data",
        "follows from data.max_prompt_tokens and model.sampling.max_new_tokens",
        f"{ROLLOUT}.prompt_length",
        f"{ROLLOUT}.response_length",
    ),
    *none("tuning", "a step generates what it trains on", "data.gen_batch_size"),
    *none("data", "sets itself: all validation prompts at once", "data.val_batch_size"),
)


def write_batch(given: Given, draft: Draft) -> None:
    """Write sizes that follow from several keys: mini-batch, micro-batch and budgets of tokens."""
    prompts, group = given["data.train_batch_size"], given[f"{ROLLOUT}.n"]
    mini = given[f"{ACTOR}.ppo_mini_batch_size"]
    if mini < prompts:
        draft.set("model.batch.mini_batch_size", mini * group, f"{ACTOR}.ppo_mini_batch_size")
    if given[f"{ACTOR}.use_dynamic_bsz"]:
        if _TOKENS in given:
            draft.set("model.batch.max_tokens_per_gpu", given[_TOKENS], _TOKENS)
        for theirs, ours in _OF_CRITIC.items():
            if theirs in given and "model.critic.warmup_steps" in draft.settings:
                draft.set(ours, given[theirs], theirs)
        for name in (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size", _FORWARD_ROWS):
            draft.lacks(name, "not used: use_dynamic_bsz is on, and a pass is limited by its tokens")
    else:
        _write_micro_batch(given, draft)
    forward = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
    uses_tokens = given.first(f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz")
    if forward in given and uses_tokens and "model.batch.micro_batch_size_per_gpu" not in draft.settings:
        draft.set("model.batch.max_tokens_per_gpu_forward", given[forward], forward)


def _write_micro_batch(given: Given, draft: Draft) -> None:
    per_gpu, total = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"
    num_gpus = given["trainer.n_gpus_per_node"] * given["trainer.nnodes"]
    size = positive(given[per_gpu])
    if isinstance(size, int):
        draft.set("model.batch.micro_batch_size_per_gpu", size, per_gpu)
    elif total in given:
        draft.set("model.batch.micro_batch_size_per_gpu", max(1, given[total] // num_gpus), total)
    rows = positive(given[_FORWARD_ROWS])
    if isinstance(rows, int) and "model.batch.micro_batch_size_per_gpu" in draft.settings:
        draft.set("model.batch.micro_batch_size_per_gpu_forward", rows, _FORWARD_ROWS)
    for name in (_TOKENS, *_OF_CRITIC):
        draft.lacks(name, "not used: use_dynamic_bsz is off")
