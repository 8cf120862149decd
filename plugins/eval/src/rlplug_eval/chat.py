"""A conversation with a policy, in tokens: what it has said is never tokenised again, as in a rollout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from rlplug.config import RunConfig
from rlplug.data.chat_template import render_all, takes_tools, tool_instructions
from rlplug.data.sources import PromptRow
from rlplug.data.tokenizing import tokenize_all
from rlplug.distributed.stop_signal import StopRequested
from rlplug.errors import RunError
from rlplug.interfaces.checks.engines import max_context_of
from rlplug.observability.phase_progress import PhaseProgress
from rlplug.rollout.agent_loop import GenerationStep
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.streaming import StreamingLoop
from rlplug.rollout.trajectory import Trajectory, new_trajectories
from rlplug.rollout.turns.environment_calls import EnvironmentCalls
from rlplug.rollout.turns.observation_tokens import ObservationTokens
from rlplug.rollout.turns.stop_strings import StopStrings
from rlplug.rollout.turns.trajectory_turns import TurnRules
from rlplug.setup.inputs import RunInputs
from rlplug.types import Prompt, SamplingParams
from rlplug_eval.engine import PolicyEngine

PIECE: Final = PartialRollout(max_tokens_per_step=16)
"""Tokens that are asked of the engine at a time, so that text appears while an answer grows."""
_HALF: Final = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes the first bytes of a character to."""


@dataclass(frozen=True)
class Piece:
    """Text that was added to an answer."""

    text: str
    is_policy: bool
    """False for an observation of the environment, such as a tool's result."""


@dataclass(frozen=True)
class End:
    """How an answer ended."""

    reason: str
    """``stop``, ``length``, ``interrupted`` or the error of the environment."""
    num_tokens: int
    """Tokens that the policy generated."""
    context: int
    """Tokens of the conversation so far."""


class Conversation:
    """Conversation with the policy of an engine.

    With a chat template, messages follow each other in the template's form. Without one, as for base models, each
    message is a prompt of its own that the policy continues.

    Args:
        engine: The engine, which generates with the policy.
        config: Options of the run: its environment, whose tools the policy may call, and the limits of turns.
        inputs: Facts about policy and environment.
        sampling: How tokens are drawn; ``max_new_tokens`` bounds an answer with its tool results.
        system: System message; empty for none.
        is_chat: Whether to use the chat template; by default where there is one.
        seed: Seed of the answers.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        config: RunConfig,
        inputs: RunInputs,
        sampling: SamplingParams,
        system: str = "",
        is_chat: bool | None = None,
        seed: int = 0,
    ) -> None:
        tokenizer, tools = inputs.tokenizer, inputs.tools
        self.sampling, self.system = sampling, system
        self.is_chat = bool(tokenizer.chat_template) and is_chat is not False
        self._engine, self._inputs = engine, inputs
        presents = bool(tools) and self.is_chat and takes_tools(tokenizer, tools)
        self._template_tools: Sequence[Any] = tools if presents else ()
        self._instructions = tool_instructions(tools) if tools and not presents else ""
        self._messages = ObservationTokens(tokenizer, self.is_chat, self._template_tools)
        observations = ObservationTokens(tokenizer, self.is_chat, self._template_tools, has_tools=bool(tools))
        self._environments: EnvironmentCalls | None = None
        if config.environment is not None:
            self._environments = EnvironmentCalls(
                config.environment, tokenizer, inputs.spec.eos_token_ids, config.turns, observations
            )
        turns = TurnOptions() if config.environment is None else config.turns
        stop = StopStrings(tokenizer, inputs.spec) if inputs.spec.stop else None
        self._rules = TurnRules(turns, self._environments, observations, stop)
        self._numbers = itertools.count()
        self._seed = seed
        self._token_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._token_ids)

    @property
    def max_context(self) -> int:
        """Longest conversation, in tokens: the engine's context may be shorter than the policy's."""
        return max_context_of(self._engine.config.engine, self._inputs.spec)

    def reset(self, system: str | None = None) -> None:
        """Begin anew, with another system message where one is given."""
        self._token_ids = ()
        self.system = self.system if system is None else system

    def change_sampling(self, **changed: Any) -> None:
        """Draw later answers with other values of the fields of :class:`SamplingParams` that are given.

        Raises:
            ConfigError: A value is out of its range, or the engine does not know it.
        """
        sampling = replace(self.sampling, **changed)
        self._engine.config.engine.check_sampling(sampling, "sampling")
        self.sampling = sampling

    def answer(self, text: str) -> Iterator[Piece | End]:
        """Yield the policy's answer to a message, piece by piece, and then how it ended.

        Raises:
            RunError: The conversation fills the context, or the engine failed.
            ConfigError: The chat template refuses the message.
        """
        prompt_ids = self._prompt_ids(text)
        room = self.max_context - len(prompt_ids)
        if room < 1:
            raise RunError(
                f"the conversation has {len(prompt_ids):,} tokens with this message, and the context "
                f"{self.max_context:,}: /reset begins anew."
            )
        sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room))
        prompt = Prompt("chat", prompt_ids, text, None, {})
        key = f"chat/{self._seed}/{next(self._numbers)}"
        (trajectory,) = new_trajectories([prompt], [0], 1, key)
        reason = "interrupted"
        written: list[str] = []
        with suppress(StopRequested):
            while trajectory.finish_reason is None:
                self._loop(trajectory, sampling).run(self._engine.driver)
                yield from self._new_pieces(trajectory, written)
            reason = trajectory.error or trajectory.finish_reason
        yield from self._new_pieces(trajectory, written, is_last=True)
        if self._environments is not None:
            self._environments.release(trajectory)
        self._token_ids = tuple(trajectory.token_ids.tolist())
        yield End(reason, int(trajectory.response_mask.sum()), self.num_tokens)

    def close(self) -> None:
        """Close the environments."""
        if self._environments is not None:
            self._environments.close()

    def _prompt_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of the conversation with a new message."""
        tokenizer = self._inputs.tokenizer
        if self.is_chat and self._token_ids:
            added = self._messages.after(self._token_ids[-1], self._messages.text(text))
            return (*self._token_ids, *added)
        if self.is_chat:
            row = PromptRow("chat", text, None, {})
            (text,) = render_all([row], tokenizer, self.system or None, self._instructions, self._template_tools)
        (token_ids,) = tokenize_all(["chat"], [text], tokenizer, not self.is_chat, self.max_context)
        return token_ids

    def _loop(self, trajectory: Trajectory, sampling: SamplingParams) -> StreamingLoop:
        return StreamingLoop(
            trajectories=[trajectory],
            sampling=sampling,
            rules=self._rules,
            policy=self._inputs.spec,
            version=self._engine.version,
            ranks=EngineRanks(self._engine.placement, 1, communicates=False),
            step=GenerationStep(PIECE, progress=PhaseProgress()),
        )

    def _new_pieces(self, trajectory: Trajectory, written: list[str], is_last: bool = False) -> Iterator[Piece]:
        """Yield what was added to the turns and observations of an answer, whose texts so far are ``written``."""
        for index, (is_policy, token_ids) in enumerate(_spans(trajectory)):
            decoded: Any = self._inputs.tokenizer.decode(token_ids, skip_special_tokens=True)
            text = str(decoded) if is_last else str(decoded).rstrip(_HALF)
            if index == len(written):
                written.append("")
            if len(text) > len(written[index]):
                yield Piece(text[len(written[index]) :], is_policy)
                written[index] = text


def _spans(trajectory: Trajectory) -> Iterator[tuple[bool, list[int]]]:
    """Yield the tokens after the prompt in spans that the policy, or the environment, has written."""
    start = len(trajectory.prompt.token_ids)
    pairs = zip(trajectory.response_mask[start:].tolist(), trajectory.token_ids[start:].tolist(), strict=True)
    for is_policy, span in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield bool(is_policy), [token_id for _, token_id in span]
