"""TRL's trainers as functions: one step of TRL's own code on a batch of ours, with given logprobs and rewards.

A trainer is made without its ``__init__`` and is told what its models say. From there on everything runs as it is in
TRL, in two calls: ``_generate_and_score_completions`` (advantages, weights that correct for the engine, filtering of
truncated completions, token counts) and ``_compute_loss``. Only generation, the rewards and the forward pass are
replaced.

TRL wants the rows of a group side by side, groups of one size, and no prompt or other turns between the tokens that
train. So its rows are ours in order of groups, each with its trainable tokens only, and short groups are filled up with
rows of no token whose reward failed. Gradients flow back through this to our [B, T].
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from random_batches import RUN
from rlplug_devkit.padded_rows import PaddedRows
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

PAD, WORD, END = 0, 5, 1
OPTIONS = {
    **dict.fromkeys(
        ("environment_factories", "environments", "tools", "pad_to_multiple_of", "reward_clip_range"), None
    ),
    **dict.fromkeys(("use_vllm", "mask_truncated_completions", "_entropy_bonus_enabled", "aux_loss_enabled"), False),
    **dict.fromkeys(("use_adaptive_entropy", "normalize_advantages"), False),
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "vllm_importance_sampling_correction": True,
    "max_completion_length": RUN.max_new_tokens,
    "num_iterations": 2,  # more than 1, so that TRL asks for old logprobs
    "current_gradient_accumulation_steps": 1,
    "eos_token_ids": [END],
    "reward_weights": torch.ones(1),
    "reward_func_names": [],
}
"""What the methods read of a trainer, and below of its ``args``; tests change some."""
ARGS = {
    **dict.fromkeys(("steps_per_generation", "gradient_accumulation_steps", "per_device_train_batch_size"), 1),
    "delta": None,
    "use_bias_correction_kl": False,
    "gradient_checkpointing_kwargs": None,
}


@dataclass(frozen=True)
class Layout:
    """Our batch as TRL's rows."""

    batch: PaddedRows
    rows: list[int | None]
    """Our row of each of TRL's; ``None`` for those that only fill up a group."""
    group_size: int

    @staticmethod
    def of(batch: PaddedRows) -> Layout:
        groups = [torch.nonzero(batch.group_index == group).flatten().tolist() for group in batch.group_index.unique()]
        size = max(2, *map(len, groups))
        return Layout(batch, [row for group in groups for row in [*group, *[None] * (size - len(group))]], size)

    def tokens(self, values: Tensor) -> list[Tensor]:
        """The trainable tokens of each row, from [B, T]."""
        mask = self.batch.response_mask
        return [values.new_zeros(0) if row is None else values[row][mask[row]] for row in self.rows]

    def padded(self, values: Tensor) -> Tensor:
        return pad_sequence(self.tokens(values), batch_first=True)

    def rewards(self, rewards: Tensor) -> Tensor:
        """From [B]; NaN is TRL's for a reward that failed."""
        valid = self.batch.reward_valid
        return torch.stack(
            [rewards[row] if row is not None and valid[row] else rewards.new_tensor(torch.nan) for row in self.rows]
        )

    def token_ids(self, stand_in: list[int]) -> list[list[int]]:
        """Ids that end with the end token unless the row is truncated; ``stand_in`` for a row without tokens."""
        lengths = [len(tokens) for tokens in self.tokens(self.batch.input_ids)]
        last = [WORD if row is None or self.batch.truncated[row] else END for row in self.rows]
        return [
            [WORD] * (length - 1) + [end] if length else stand_in for length, end in zip(lengths, last, strict=True)
        ]

    def ours(self, values: Tensor) -> Tensor:
        """TRL's value of each row, on the trainable tokens of ours: [B, T]."""
        per_row = values.new_zeros(self.batch.num_sequences)
        for row, value in zip(self.rows, values, strict=True):
            if row is not None:
                per_row[row] = value
        return torch.where(self.batch.response_mask, per_row[:, None], 0.0)


@dataclass(frozen=True)
class Step:
    """What TRL makes of a batch."""

    advantages: Tensor
    """[B, T] of ours"""
    loss: Tensor
    metrics: dict[str, float]
    num_rows: int
    """What TRL divides a mean over rows by."""
    loss_of_empty_rows: Tensor
    """RLOO's: a row without tokens has ratio 1."""
    max_length: int


def trl_step(
    trainer_class: type, batch: PaddedRows, logprobs: Tensor, entropy: Tensor, rewards: Tensor | None = None, **options
) -> Step:
    """Run TRL on the whole batch, with ``rewards`` [B] in the place of the batch's own."""
    layout = Layout.of(batch)
    trainer = _trainer(trainer_class, layout.group_size, options)
    # the filter of truncated completions reads the last token of each: one that is cut off stands for none
    ids = layout.token_ids(stand_in=[WORD] if trainer.mask_truncated_completions else [])
    prompts, texts = [[WORD]] * len(ids), [""] * len(ids)
    sampling = [tokens.tolist() for tokens in layout.tokens(batch.rollout_logprobs)]
    generated = {
        GRPOTrainer: (prompts, ids, None, texts, sampling, {}, None, None),
        RLOOTrainer: (prompts, ids, texts),
    }

    def before_the_update(model, *_, **__):
        return layout.padded(batch.ref_logprobs if model is trainer.ref_model else batch.old_logprobs), None, None

    def now(*_, **__):
        return layout.padded(logprobs), layout.padded(entropy), None

    trainer._generate = lambda _: generated[trainer_class]
    trainer._calculate_rewards = lambda *_: layout.rewards(batch.rewards if rewards is None else rewards)[:, None]
    trainer._get_per_token_logps_and_entropies = before_the_update
    inputs = trainer._generate_and_score_completions([{"prompt": ""}] * len(ids))
    trainer._get_per_token_logps_and_entropies = now
    loss = trainer._compute_loss(trainer.model, inputs)
    lengths, advantages = inputs["completion_mask"].sum(dim=1), inputs["advantages"]
    return Step(
        advantages=layout.ours(advantages),
        loss=loss,
        metrics={name: values[0] for name, values in trainer._metrics["train"].items()},
        num_rows=len(ids),
        loss_of_empty_rows=-(advantages * (lengths == 0)).mean(),
        max_length=inputs["completion_mask"].shape[1],
    )


def _trainer(trainer_class, group_size, options):
    trainer = trainer_class.__new__(trainer_class)
    args = SimpleNamespace(**ARGS | {name: value for name, value in options.items() if name in ARGS})
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        process_index=0,
        num_processes=1,
        sync_gradients=True,
        gather=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
    )
    vars(trainer).update(
        OPTIONS | {name: value for name, value in options.items() if name not in ARGS},
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model=SimpleNamespace(),
        num_generations=group_size,
        _tokenizer=SimpleNamespace(pad_token_id=PAD),
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    return trainer
