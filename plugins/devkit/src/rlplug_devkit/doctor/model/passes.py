"""Checks of passes over packed rows: beside transformers' own of each row alone, other neighbours, and repeated."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rlplug.models.forward import policy_forward
from rlplug.models.packing import pack
from rlplug.plugin_manager import plugins
from rlplug.types import Prompt, Sample, SamplingParams, StepBatch
from rlplug_devkit.doctor.model.results import Verdict
from rlplug_devkit.doctor.model.subject import Subject

LENGTHS: Final = ((17, 96), (5, 40), (33, 64), (1, 0), (2, 7))
"""Tokens of prompt and completion of each row: 265 in all; shorter where a model's context is."""
CHANGED: Final = 1
"""Row that has other tokens for its neighbours' sake."""
TOLERANCES: Final = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest difference of logprobs, as a share of the largest; in bfloat16, whose round-off grows with each layer, the
mean one as a share of the mean. SmolLM2 with 30 layers has 1e-6, and 7e-3."""
OF_GRADIENTS: Final = 10
"""Times that tolerance for gradients, each as a share of its own tensor; in bfloat16 of the tensor in the middle."""
SAMPLING: Final = SamplingParams()

LEAKS: Final = (
    "Use another model, or another attn_implementation: rows of a run would be trained on what their neighbours say."
)


@dataclass(frozen=True)
class Pass:
    """A training pass: logprobs float32 [K] of all rows end to end, and gradients on the host, by parameter."""

    logprobs: Tensor
    gradients: dict[str, Tensor]


class Passes:
    """The passes of a model that its checks compare."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._tolerance = TOLERANCES[subject.config.dtype]
        self._is_exact = subject.config.dtype == "float32"

    @functools.cached_property
    def rows(self) -> StepBatch:
        return self._rows(is_changed=False)

    @functools.cached_property
    def packed(self) -> Pass:
        """A pass of all rows in one."""
        return self._training_pass(self.rows)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def packed_equals_alone(self) -> Verdict:
        """Compare with transformers' own attention of one row at a time, without a packed row."""
        packed, alone = self.packed, self._alone()
        logprobs = self._difference(packed.logprobs, alone.logprobs)
        name, gradient = self._of_gradients(packed, alone)
        found = f"logprobs differ by {logprobs:.1e}, gradients by {gradient:.1e}"
        if logprobs <= self._tolerance and gradient <= OF_GRADIENTS * self._tolerance:
            return Verdict(found)
        where = f"at {name}; {self._allowed()}"
        return Verdict(f"{found} {where}", "no", f"Packed rows are computed otherwise than an engine does. {LEAKS}")

    def neighbours_change_nothing(self) -> Verdict:
        """Compare rows beside a row, and beside another one of the same length."""
        counts = self.rows.num_tokens.tolist()
        with torch.no_grad():
            parts = (torch.split(self._logprobs(rows), counts) for rows in (self.rows, self._rows(is_changed=True)))
            differences = [self._difference(one, two) for one, two in zip(*parts, strict=True) if len(one)]
        if not differences.pop(CHANGED) > 0:
            return Verdict(
                "a row has the same logprobs with other tokens", "no", "Look at its weights: they say nothing."
            )
        worst = max(differences)
        if worst <= self._tolerance:
            return Verdict(f"other tokens in one row change the others by {worst:.1e}")
        return Verdict(f"other tokens in one row change the others by {worst:.1e}; {self._allowed()}", "no", LEAKS)

    def passes_repeat(self) -> Verdict:
        """Compare a training pass with itself, and with a pass in evaluation mode."""
        first, again = self.packed, self._training_pass(self.rows)
        with torch.no_grad():
            engine = self._logprobs(self.rows, is_training=False)
        gradient = self._of_gradients(first, again)[1] / OF_GRADIENTS
        repeated = max(self._difference(first.logprobs, again.logprobs), gradient)
        found = f"the same pass differs by {repeated:.1e}"
        if not repeated <= self._tolerance:
            return Verdict(
                f"{found}; {self._allowed()}",
                "no",
                "Switch dropout and noise off in config.json, or use another model.",
            )
        if not (evaluated := self._difference(first.logprobs, engine)) <= self._tolerance:
            return Verdict(
                f"training and evaluation mode differ by {evaluated:.1e}; {self._allowed()}",
                "no",
                "Switch off in config.json what the model does in training alone: engines do not do it.",
            )
        return Verdict(f"{found}, evaluation mode by {evaluated:.1e}")

    def checkpointing_changes_nothing(self) -> Verdict:
        """Compare with a pass that recomputes the blocks, by the optimization of that name."""
        registry = plugins().registry
        if "GradientCheckpointing" not in registry.names("optimizations"):
            how = registry.how_to_get("rlplug-optims")
            return Verdict("no plugin has GradientCheckpointing", "skipped", f"It comes with {how}")
        first, model = self.packed, self._subject.model
        optimization: Any = registry.get("optimizations", "GradientCheckpointing")()
        optimization.before_shard(model)
        again = self._training_pass(self.rows)
        name, gradient = self._of_gradients(first, again)
        effects = "; ".join(effect.description for effect in optimization.effects())
        if not effects:
            return Verdict("no block was wrapped", "no", "Leave GradientCheckpointing out of model.optimizations.")
        if gradient <= OF_GRADIENTS * self._tolerance:
            return Verdict(f"{effects}: gradients differ by {gradient:.1e}")
        return Verdict(
            f"gradients differ by {gradient:.1e} at {name}; {self._allowed()}",
            "no",
            "Leave GradientCheckpointing out of model.optimizations: a block computes otherwise the second time.",
        )

    def _allowed(self) -> str:
        return f"allowed are {self._tolerance:.0e}, and {OF_GRADIENTS * self._tolerance:.0e} for gradients"

    # ---- passes -----------------------------------------------------------------------------------------------------

    def _rows(self, is_changed: bool) -> StepBatch:
        """Return rows of drawn tokens; one of them has others for ``is_changed``."""
        vocab_size = self._subject.vocab_size
        share = min(1.0, self._subject.spec.max_context / max(map(sum, LENGTHS)))
        samples = []
        for index, lengths in enumerate(LENGTHS):
            num_prompt, num_new = (int(share * length) for length in lengths)
            generator = np.random.default_rng(index)
            ids = generator.integers(0, vocab_size, max(num_prompt, 1) + num_new)
            if is_changed and index == CHANGED:
                ids = (ids + 1) % vocab_size
            tokens, trains = ids.astype(np.int32), np.arange(len(ids)) >= max(num_prompt, 1)
            prompt = Prompt(str(index), (), "")
            samples.append(Sample(prompt, index, tokens, trains, np.zeros(len(ids), np.float32), "", "stop", 0))
        return StepBatch.from_samples(samples)

    def _logprobs(self, rows: StepBatch, is_training: bool = True) -> Tensor:
        """Return logprobs [K] of rows in one packed row."""
        model = self._subject.model.train(is_training)
        micro_batch = pack(rows).to(self._subject.options.device)
        try:
            return policy_forward(model, micro_batch, SAMPLING, "none").tokens.logprobs
        finally:
            model.train()

    def _training_pass(self, rows: StepBatch) -> Pass:
        self._subject.model.zero_grad()
        logprobs = self._logprobs(rows)
        (_loss_weights(len(logprobs), logprobs) * logprobs).sum().backward()  # type: ignore[no-untyped-call]
        return self._taken(logprobs)

    def _alone(self) -> Pass:
        """Return a pass of each row alone, with transformers' own attention."""
        model = self._subject.model
        model.zero_grad()
        weights = _loss_weights(len(self.packed.logprobs), self.packed.logprobs)
        model.set_attn_implementation("eager")
        try:
            found: list[Tensor] = []
            for ids, trains in self._each_row():
                logprobs = eager_logprobs(model, ids)[trains[1:]]
                if len(logprobs):
                    first = sum(len(each) for each in found)
                    (weights[first : first + len(logprobs)] * logprobs).sum().backward()  # type: ignore[no-untyped-call]
                    found.append(logprobs.detach())
        finally:
            model.set_attn_implementation(self._subject.config.attn_implementation)
        return self._taken(torch.cat(found))

    def _difference(self, found: Tensor, expected: Tensor) -> float:
        """Return the difference as ``TOLERANCES`` has it; infinite where one is no number."""
        size: Any = torch.max if self._is_exact else torch.mean
        difference, whole = (float(size(each.float().abs())) for each in (found.float() - expected.float(), expected))
        return difference / (whole or 1.0) if difference == difference else float("inf")

    def _of_gradients(self, found: Pass, expected: Pass) -> tuple[str, float]:
        """Return the parameter whose gradients differ most, in bfloat16 the one in the middle, and by how much."""
        names = found.gradients.keys() & expected.gradients.keys()
        if missing := sorted(found.gradients.keys() ^ expected.gradients.keys()):
            return f"{missing[0]}, which one pass alone has", float("inf")
        differences = {name: self._difference(found.gradients[name], expected.gradients[name]) for name in names}
        ordered = sorted(differences, key=lambda name: (differences[name], name))
        name = ordered[-1 if self._is_exact else len(ordered) // 2]
        return name, differences[name]

    def _taken(self, logprobs: Tensor) -> Pass:
        """Return the pass with the model's gradients, which the model then has no more."""
        model = self._subject.model
        gradients = {name: each.grad.float().cpu() for name, each in model.named_parameters() if each.grad is not None}
        model.zero_grad()
        return Pass(logprobs.detach(), gradients)

    def _each_row(self) -> Iterator[tuple[Tensor, Tensor]]:
        device, rows = self._subject.options.device, self.rows
        for start, end in zip(rows.ends[:-1], rows.ends[1:], strict=True):
            ids = torch.from_numpy(rows.per_token["input_ids"][start:end].astype(np.int64))
            yield ids.to(device), torch.from_numpy(rows.per_token["response_mask"][start:end]).to(device)


def eager_logprobs(model: Any, ids: Tensor) -> Tensor:
    """Return logprobs of the tokens of one row after its first, float32 [T - 1], as transformers computes them."""
    scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(-1, ids[1:, None])[:, 0]  # type: ignore[no-any-return]


def _loss_weights(count: int, like: Tensor) -> Tensor:
    """Return what the loss multiplies logprobs with: another number for each token."""
    return torch.linspace(-1, 1, count, device=like.device)
