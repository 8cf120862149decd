"""Runs the real update on real processes: one rank, started by the fixture ``updated`` with torchrun's variables.

``python update_worker.py FOLDER WORLD_SIZE SPLIT...`` reads ``model/`` and ``batch.safetensors`` there, and cuts the
rows into passes by each split. Rank 0 writes ``results.pt``: what came out, by name, and nothing of what should have.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from critics import load_critic
from lightning.pytorch import LightningModule
from ranks import fit_and_save
from rlplug_algos.cispo import CISPO
from rlplug_algos.dapo import DAPO
from rlplug_algos.dr_grpo import DrGRPO
from rlplug_algos.grpo import GRPO
from rlplug_algos.gspo import GSPO
from rlplug_algos.rloo import RLOO
from rlplug_async.streamed_step import StreamedStep
from rlplug_devkit.padded_rows import PaddedRows
from rlplug_watch.token_log.capture import TokenCapture
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode

from rlplug.distributed.fsdp_units import transformer_units
from rlplug.errors import RunError
from rlplug.interfaces import Advantages, LossOutput, Needs, RunInfo
from rlplug.models.config import ModelConfig, load_tokenizer
from rlplug.models.critic import CriticConfig
from rlplug.models.critic.network import ValueHead
from rlplug.models.export import export_policy
from rlplug.models.loading import load_model
from rlplug.models.transformers_trainer import TRANSFORMERS
from rlplug.observability.sample_records import sample_rows
from rlplug.training.actor_critic import ActorCritic, TrainableModel
from rlplug.training.advantages import compute_advantages
from rlplug.training.batch_plan import BatchPlan, BatchSizes
from rlplug.training.critic_losses import losses_with_critic
from rlplug.training.passes import MicroBatchRunner
from rlplug.training.step_rows import StepRows
from rlplug.training.update import NonFiniteUpdate, PolicyUpdate, policy_losses
from rlplug.types import Prompt, Rollout, Sample, SamplingParams, StepBatch
from rlplug.weight_sync.buckets import weight_buckets


class WithValues(GRPO):
    """GRPO, and the mean squared error of a critic."""

    needs = Needs(critic=True)

    def value_loss(self, micro_batch, values, denominators):
        squares = (values - micro_batch.returns) ** 2
        metrics = {"critic/mean": values.sum() / denominators.num_tokens}
        return LossOutput(squares.sum() / denominators.num_tokens, metrics)


class DividesByOthers(GRPO):
    """GRPO that is wrong about what divides its loss."""

    streamed_divisor = "num_sequences"


def with_given_advantages(algorithm):
    """Return the algorithm with the batch's own advantages, which a whole step and its parts have alike."""
    algorithm.advantages = lambda batch: Advantages(of_tokens=batch.tokens.advantages)
    algorithm.setup(RunInfo(num_completions=12, group_size=3, max_new_tokens=16))
    return algorithm


def centred_over_the_step(batch):
    return Advantages(of_tokens=batch.tokens.advantages - batch.step.mean(batch.rewards))


LOSSES = {
    "token": GRPO(),
    "sequence": GRPO(aggregation="sequence", kl_coefficient=0.1, clip_low=0.1, clip_high=0.1),
    "entropy": GRPO(entropy_coefficient=0.1),
    "value": WithValues(),
}
STREAMED = {
    **{name: LOSSES[name] for name in ("token", "sequence", "entropy")},
    "gspo": GSPO(),
    "cispo": CISPO(),
    "dapo": DAPO(),
    "dr_grpo": DrGRPO(),
    "rloo": RLOO(),
    "divides by others": DividesByOthers(),
    "centres": GRPO(),
}
PARTS = [[8, 3, 0], [10], [1, 2, 4, 5, 6, 7, 9]]
"""Rows of each part of a streamed step; on two ranks one part is of a single rank."""
SPLITS = {
    "1": {"micro_batch_size_per_gpu": 1},
    "3": {"micro_batch_size_per_gpu": 3},
    "all": {},
    "16 tokens": {"max_tokens_per_gpu": 16},
    "40 tokens": {"max_tokens_per_gpu": 40},
}
PROMPT_LENGTHS = [3, 2, 5, 4, 6, 2, 1, 3, 2, 4, 1]
ROWS = {"some": [8, 3, 0, 10], "one": [5]}
SAMPLING = SamplingParams(temperature=0.8, top_k=10)


def update_of(models, runner, backward, skip_nonfinite=False) -> PolicyUpdate:
    losses = policy_losses if models.critic is None else losses_with_critic
    return PolicyUpdate(partial(losses, models), models, runner, backward, skip_nonfinite, seed=3)


class Worker(LightningModule):
    automatic_optimization = False

    def __init__(self, folder: Path, splits: list[str]) -> None:
        super().__init__()
        self.folder = folder
        self.splits = {name: SPLITS[name] for name in splits}
        self.model = ModelConfig(path=str(folder / "model"))
        self.padded = PaddedRows(**load_file(folder / "batch.safetensors"))
        self.results: dict[str, object] = {}
        self.capture: TokenCapture | None = None

    def setup(self, stage):
        """Each rank has every other row, as a rollout would leave them: whole groups, here of one row."""
        self.mine = range(self.global_rank, self.padded.num_sequences, self.trainer.world_size)
        self.batch = self.own_rows(self.padded)

    def own_rows(self, padded, rows=None) -> StepBatch:
        rows = list(self.mine if rows is None else rows)
        padded = padded.replace(group_index=torch.arange(padded.num_sequences))
        return padded.map(lambda tensor: tensor[rows]).flat(self.trainer.strategy.statistics)

    def whole(self, tokens):
        """Float [B, T] of all ranks' rows, from this rank's [N]."""
        if tokens is None:
            return None
        mine = PaddedRows.of(self.batch.with_tokens(values=tokens)).values
        width = self.padded.input_ids.shape[1] - mine.shape[1]
        found = self.trainer.strategy.gather([(list(self.mine), torch.nn.functional.pad(mine, (0, width)))])
        grid = torch.zeros(self.padded.input_ids.shape)
        for rows, values in found:
            grid[rows] = values
        return grid

    def forward_only(self, limits, forward):
        runner = self.runner(limits)
        rows = StepRows(self.batch, self.trainer.strategy)
        return runner.forward_only(runner.fetch(rows, range(rows.num_sequences), "forward"), forward)

    def one_home(self):
        """The metrics of a mini-batch whose rows are all on the last rank, and how many logprobs came to each rank."""
        is_last = self.global_rank == self.trainer.world_size - 1
        rows = StepRows(self.own_rows(self.padded, range(11) if is_last else []), self.trainer.strategy)
        result = self.update(SPLITS["3"]).forward_backward(rows, range(11), self.policy_loss())
        counts = self.trainer.strategy.gather([len(result.tokens.logprobs)])
        return result.metrics | result.maxima | result.minima, counts

    def configure_model(self):
        shard = self.trainer.strategy.shard
        self.policy = load_model(self.model)
        self.critic = load_critic(CriticConfig(seed=1), self.model)
        self.head = ValueHead(self.policy.config.hidden_size, seed=2)
        for module in (self.policy, self.critic.head, self.critic, self.head):
            shard(module, torch.float32, transformer_units(module))

    def configure_optimizers(self):
        return [torch.optim.SGD(module.parameters(), lr=0.05) for module in (self.policy, self.critic, self.head)]

    def training_step(self, tick, index):
        self.results["strategy"] = self.strategy_parts()
        for loss in ("token", "sequence", "entropy"):
            for split, limits in self.splits.items():
                self.results[f"{loss}/{split}"] = self.accumulate(self.policy_loss(LOSSES[loss]), limits)
        for name, rows in ROWS.items():
            self.results[f"rows/{name}"] = self.accumulate(self.policy_loss(), SPLITS["1"], rows)
        for split, limits in self.splits.items():
            models = self.models(LOSSES["token"], share_trunk=True)
            output = self.forward_only(limits, models.forward_policy)
            found = [output.tokens.logprobs, output.tokens.sampled_logprobs, output.values]
            self.results[f"forward/{split}"] = [self.whole(tokens) for tokens in found]
            for kind in ("critic", "shared", "head"):
                self.results[f"{kind}/{split}"] = self.accumulate(self.value_loss(kind), limits)
        self.results["critic/own budget"] = self.accumulate(
            self.value_loss("critic"), {"max_tokens_per_gpu": 40}, own=16
        )
        self.results["one home"] = self.one_home()
        models = self.models(LOSSES["value"])
        self.results["values"] = [self.whole(self.forward_only(SPLITS["3"], models.forward_critic).values)]
        for name, algorithm in STREAMED.items():
            with_given_advantages(algorithm)
            if name == "centres":
                algorithm.advantages = centred_over_the_step
            self.results[f"waited/{name}"] = self.accumulate(self.policy_loss(algorithm), SPLITS["3"])
            for split in self.splits.keys() & {"3", "16 tokens"}:
                self.results[f"{name}/streamed {split}"] = self.streamed(algorithm, SPLITS[split])
        self.results["clip"] = {max_norm: self.clip(max_norm) for max_norm in (None, 1e-3, 1e6)}
        self.results["nonfinite"] = self.nonfinite()
        self.results["on_policy"] = self.run(BatchSizes(**self.sizes()), self.padded.replace(old_logprobs=None))
        self.results["run"] = self.captured(BatchSizes(**self.sizes(), mini_batch_size=4, num_epochs=2))
        self.results["actor_critic"] = self.run(BatchSizes(**self.sizes()), self.padded, LOSSES["value"])
        tokenizer, folder = load_tokenizer(self.model), self.folder / "exported"
        export_policy(self.policy, tokenizer, torch.bfloat16, folder, self.global_rank, TRANSFORMERS)

    def sizes(self) -> dict[str, int]:
        return {"prompts_per_step": 6, "group_size": 2}  # of 12 completions, one of which is not there

    def models(self, algorithm, share_trunk=False) -> ActorCritic:
        policy, critic, head = self.optimizers()
        has_critic = share_trunk or algorithm is LOSSES["value"]
        learner = TrainableModel(
            "critic", self.head if share_trunk else self.critic, head if share_trunk else critic, None, 0.5
        )
        return ActorCritic(
            policy=TrainableModel("policy", self.policy, policy, None, 0.5),
            critic=learner if has_critic else None,
            critic_config=CriticConfig(share_trunk=share_trunk, warmup_steps=1) if has_critic else None,
            reference=None,
            algorithm=algorithm,
            sampling=SAMPLING,
            loss_hook=None,
        )

    def policy_loss(self, algorithm=LOSSES["token"]):
        (loss,) = policy_losses(self.models(algorithm), step=1)
        return loss

    def value_loss(self, name):
        models = self.models(LOSSES["value"], share_trunk=name != "critic")
        return losses_with_critic(models, step=2 if name == "shared" else 1)[-1]

    def runner(self, limits, own=None) -> MicroBatchRunner:
        sizes = limits if isinstance(limits, BatchSizes) else BatchSizes(**self.sizes(), **limits)
        plan = BatchPlan(sizes, self.trainer.world_size, critic_tokens=(own, None))
        return MicroBatchRunner(plan, self.trainer.strategy, self.capture)

    def update(self, limits, backward=None, own=None) -> PolicyUpdate:
        """What runs the passes of any loss."""
        backward = backward or self.manual_backward
        return update_of(self.models(LOSSES["token"]), self.runner(limits, own), backward)

    def accumulate(self, loss_fn, limits, rows=range(11), own=None):
        """Accumulate gradients; note after each backward pass what was reduced and whether gradients are there."""
        self.zero_grad()
        backward_passes = []
        watches = str(loss_fn.call).startswith("GRPO.loss") and loss_fn.call.part is LOSSES["token"]

        def backward(loss):
            with CommDebugMode() if watches else nullcontext() as communication:
                self.manual_backward(loss)
            counts = communication.get_comm_counts() if communication else {}
            reduced = sum(number for name, number in counts.items() if "reduce_scatter" in str(name))
            backward_passes.append((reduced, any(p.grad is not None for p in self.policy.parameters())))

        update = self.update(limits, backward, own)
        table = StepRows(self.batch, self.trainer.strategy)
        result = update.forward_backward(table, rows, loss_fn)
        micro_batches = update.runner.plan.passes(rows, table.lengths)[self.global_rank]
        return {
            "metrics": result.metrics | result.maxima | result.minima,
            "gradients": self.gradients(),
            "critic_gradients": self.gradients(self.critic),
            "head_gradients": self.gradients(self.head),
            "passes": self.trainer.strategy.gather([backward_passes]),
            "fillers": self.trainer.strategy.gather([sum(micro.is_filler for micro in micro_batches)]),
        }

    def streamed(self, algorithm, limits):
        """Run the passes in three parts; return the gradients with which the optimizer would step, or the error."""
        found = {}
        models = self.models(algorithm)
        optimizer = SimpleNamespace(
            state=True, step=lambda: found.update(gradients=self.gradients()), zero_grad=self.zero_grad
        )
        models = replace(models, policy=replace(models.policy, optimizer=optimizer, max_grad_norm=None))
        update = update_of(models, self.runner(limits), self.manual_backward)
        make_batch = lambda rows: self.own_rows(self.padded, [row.group for row in rows])  # noqa: E731
        step = StreamedStep(update, None, make_batch, lambda name: nullcontext())
        rows, rollout = [], Rollout()
        step.discard()
        try:
            for number, part in enumerate(PARTS, start=1):
                rows += [SimpleNamespace(group=row) for row in part if row in self.mine]
                step.add(
                    rollout := Rollout(tuple(rows), num_groups=rollout.num_groups + len(part)), 2, True, number < 3
                )
            batch, _ = step.logprobs(rollout, 2, True)
            step.require_advantages(compute_advantages(algorithm, batch, self.trainer.strategy.gather)[0])
            result = step.run(batch, 2)
        except RunError as problem:
            return str(problem)
        is_same = np.array_equal(batch.per_token["input_ids"], self.batch.per_token["input_ids"])
        sampled = self.whole(result.tokens.sampled_logprobs)
        return found | {"metrics": result.metrics, "is_same": is_same, "sampled": sampled}

    def gradients(self, module=None):
        named = (module or self.policy).named_parameters()
        return {name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None}

    def weights(self):
        named = [*self.policy.named_parameters(), *self.critic.named_parameters(prefix="critic")]
        return {name: p.detach().full_tensor().clone() for name, p in named}

    def clip(self, max_norm):
        self.accumulate(self.policy_loss(), SPLITS["3"])
        before = self.gradients()
        norm = self.trainer.strategy.clip_grad_norm(self.policy, max_norm)
        return {"before": before, "norm": norm, "after": self.gradients()}

    def run(self, sizes, batch, algorithm=LOSSES["token"], skip_nonfinite=False):
        self.zero_grad()
        before = self.weights()
        update = update_of(self.models(algorithm), self.runner(sizes), self.manual_backward, skip_nonfinite)
        try:
            result = update.run(self.own_rows(batch), step=2)
            metrics, sampled = result.metrics, result.tokens and self.whole(result.tokens.sampled_logprobs)
        except NonFiniteUpdate as problem:
            metrics, sampled = str(problem), None
        return {"before": before, "metrics": metrics, "sampled": sampled, "after": self.weights()}

    def captured(self, sizes):
        """Run with a capture of all tokens, and return those too."""
        self.capture = TokenCapture(11, 1, has_engine_logprobs=True, is_truncated=False)
        self.capture.begin(2)
        result = self.run(sizes, self.padded)
        samples = [self.sample(row) for row in self.mine]
        strategy = self.trainer.strategy
        chosen = self.capture.choose(sample_rows(samples, strategy))
        rows, columns = self.capture.collect(chosen, samples, self.batch, strategy)
        self.capture = None
        return result | {"token_rows": rows.tolist(), "columns": {n: v.tolist() for n, v in columns.items()}}

    def sample(self, row) -> Sample:
        ids = self.padded.input_ids[row][self.padded.attention_mask[row]].tolist()
        prompt = Prompt(str(row), tuple(ids[: PROMPT_LENGTHS[row]]), "")
        produced = [position >= PROMPT_LENGTHS[row] for position in range(len(ids))]
        return Sample(prompt, row, ids, produced, [0.0] * len(ids), "", "stop", policy_version=7)

    def nonfinite(self):
        """Row 5 is bad: the only mini-batch with it is the second of three."""
        advantages = self.padded.advantages.clone()
        advantages[5] = float("nan")
        bad, thirds = self.padded.replace(advantages=advantages), BatchSizes(**self.sizes(), mini_batch_size=4)
        return {
            "stopped": self.run(BatchSizes(**self.sizes()), bad),
            "skipped": self.run(BatchSizes(**self.sizes()), bad, skip_nonfinite=True),
            "stopped later": self.run(thirds, bad),
            "one skipped": self.run(thirds, bad, skip_nonfinite=True),
        }

    def strategy_parts(self):
        strategy = self.trainer.strategy
        half = load_model(ModelConfig(path=str(self.folder / "model")))
        strategy.shard(half, torch.bfloat16, transformer_units(half))
        logits = half(self.padded.input_ids).logits
        logits.float().sum().backward()
        buckets = weight_buckets(self.policy, torch.float32, 1 << 14)
        return {
            "world_size": dist.get_world_size(),
            "mesh_size": strategy.data_size,
            "units": [name for name, module in self.policy.named_modules() if isinstance(module, FSDPModule)],
            "local_elements": strategy.gather([sum(p.to_local().numel() for p in self.policy.parameters())]),
            "dtypes": [
                str({p.dtype for p in half.parameters()}),
                str(logits.dtype),
                str(half.lm_head.weight.grad.dtype),
            ],
            "gathered": strategy.gather([f"{strategy.global_rank}a", f"{strategy.global_rank}b"]),
            "gathered_unevenly": strategy.gather(["x"] * strategy.global_rank),
            "any_rank": [
                strategy.any_rank(False),
                strategy.any_rank(strategy.global_rank == 0),
                strategy.any_rank(True),
            ],
            "buckets": [[(name, tensor.clone()) for name, tensor in bucket] for bucket in buckets],
        }


def main() -> None:
    torch.set_num_threads(1)
    folder, world_size, *splits = sys.argv[1:]
    fit_and_save(Worker(Path(folder), splits), Path(folder), int(world_size))


if __name__ == "__main__":
    main()
