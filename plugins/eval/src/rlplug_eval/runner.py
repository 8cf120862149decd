"""Runs an evaluation: each policy on each source of prompts, batch after batch, as far as its folder lacks it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlplug.config import RunConfig
from rlplug.data.datamodule import PromptDataModule
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.observability.sample_records import with_turns
from rlplug.observability.terminal import say
from rlplug.rewards import RewardRunner, start_rewards
from rlplug.rollout.source import RolloutGenerator, RolloutRequest
from rlplug.setup.checks.engine import check_context
from rlplug.setup.inputs import RunInputs
from rlplug.setup.start import make_generator, make_rewards
from rlplug.types import Sample
from rlplug_eval.engine import PolicyEngine
from rlplug_eval.folder import EvalFolder
from rlplug_eval.policies import Policy


@dataclass(frozen=True)
class EvalPolicy:
    """A policy with what its checkpoint needs."""

    policy: Policy
    run: RunConfig | None = None
    """Options of the run that wrote the policy's checkpoint, where it is one."""


@dataclass(frozen=True)
class EvalSource:
    """Prompts to evaluate on, as validation prompts of a data module."""

    name: str
    data: PromptDataModule


class Evaluation:
    """Evaluation of policies on sources of prompts, by the rewards and with the environment of one configuration.

    Args:
        config: Options of the run.
        policies: The policies, one after another on one engine.
        sources: Sources of prompts.
        engine: The engine.
        folder: Where completions are kept; those that are there are not generated again.
        note: Called with a line after each batch.
    """

    def __init__(
        self,
        config: RunConfig,
        policies: Sequence[EvalPolicy],
        sources: Sequence[EvalSource],
        engine: PolicyEngine,
        folder: EvalFolder,
        note: Callable[[str], None],
    ) -> None:
        self._config = config
        self._policies = policies
        self._sources = sources
        self._engine = engine
        self._folder = folder
        self._note = note
        self._options = folder.record.options
        self._rewards: RewardRunner = make_rewards(config)
        self._generators: list[RolloutGenerator] = []
        self._has_started_rewards = False

    def run(self) -> None:
        """Generate, score and write all that is missing.

        Raises:
            StopRequested: It is told to stop; the batches so far are in the folder.
            RLPlugError: A policy, a source or the engine cannot be used.
        """
        for each in self._policies:
            PHASE_PROGRESS.begin("starting")
            inputs = self._engine.read(each.policy)
            self._folder.check_policy(each.policy)
            self._prepare(each, inputs)

    def close(self) -> None:
        """Close environments and engine; safe to call twice."""
        for generator in self._generators:
            generator.close()
        self._engine.close()

    def _prepare(self, each: EvalPolicy, inputs: RunInputs) -> None:
        """Read the prompts of all sources for a policy, and evaluate it where some lack completions."""
        name, is_used = each.policy.name, False
        for source in self._sources:
            source.data.load("validate", inputs.prompt_rules(self._options.sampling.max_new_tokens))
            prompts = source.data.val_prompts
            self._folder.check_prompts(name, source.name, prompts)
            if not self._folder.missing(name, source.name, prompts):
                continue
            self._start_rewards()
            if not is_used:
                self._engine.use(each.policy, inputs, each.run)
                is_used = True
            longest_prompt, max_new_tokens = source.data.longest_prompt, self._options.sampling.max_new_tokens
            check_context(self._config.engine, inputs.spec, longest_prompt, max_new_tokens)
            generator = make_generator(self._config, inputs, self._engine.driver, source.data)
            self._generators.append(generator)
            self._evaluate(name, source, generator, inputs.tokenizer)

    def _start_rewards(self) -> None:
        """Start the rewards once, before the engine: they may take memory of the device."""
        if self._has_started_rewards:
            return
        notes = start_rewards(self._rewards.rewards, self._engine.placement.device)
        self._has_started_rewards = True
        self._folder.record.reward_notes = notes
        for note in notes:
            say(note, wraps=True)

    def _evaluate(
        self, name: str, source: EvalSource, generator: RolloutGenerator, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        options, prompts = self._options, source.data.val_prompts
        missing = self._folder.missing(name, source.name, prompts)
        done = len(prompts) - len(missing)
        for batch in batches(missing, options.prompts_per_batch):
            PHASE_PROGRESS.begin("rollout")
            request = RolloutRequest(
                prompts[batch.start : batch.stop],
                options.num_samples,
                options.sampling,
                f"eval/{options.seed}/{source.name}",
                self._engine.version,
            )
            samples = generator.generate(
                request, first_group=batch.start
            )  # numbers, and so seeds, do not depend on batches
            generator.pop_metrics()  # says what the engine advises
            PHASE_PROGRESS.begin("rewards")
            samples = self._rewards.score(samples)
            self._folder.add_counts(name, source.name, self._rewards.pop_own_counts())
            self._folder.append(name, source.name, [with_turns(sample, tokenizer) for sample in samples])
            done += len(batch)
            self._note(f"{name} on {source.name}: {done:,}/{len(prompts):,} prompts | {_short(samples)}")


def batches(indices: Sequence[int], size: int) -> list[range]:
    """Return increasing indices as ranges without gaps of at most ``size``."""
    found: list[range] = []
    for index in indices:
        if found and found[-1].stop == index and len(found[-1]) < size:
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
    return found


def _short(samples: Sequence[Sample]) -> str:
    """Return the mean reward of a batch, and its errors, in a few words."""
    scored = [sample.reward for sample in samples if not sample.errors]
    text = f"reward {math.fsum(scored) / len(scored):.3f}" if scored else "no reward"
    return text + (f", {len(samples) - len(scored)} errors" if len(scored) < len(samples) else "")
