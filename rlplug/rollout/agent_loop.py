"""The turn loop: trajectories against an engine, until each is finished or has used up its part of the step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from lightning.pytorch.utilities import rank_zero_info

from rlplug.interfaces.environment import StepResult
from rlplug.interfaces.rollout import EngineFault, RolloutEngine
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.engines.ranks import EngineRanks
from rlplug.rollout.environment_calls import EnvironmentCalls, Failure
from rlplug.rollout.observation_tokens import ObservationTokens
from rlplug.rollout.trajectory import Trajectory
from rlplug.types import Completion, Request, SamplingParams

COLLECT_S: Final = 1.0
"""How long the engine is waited for at a time."""
COLLECT_BESIDE_ANSWERS_S: Final = 0.02
"""The same while environments work."""
PROGRESS_S: Final = 30.0


class AgentLoop:
    """Plays some trajectories. After an engine's fault it goes on where it was, with the engine started anew.

    With an engine that streams, each trajectory goes on as soon as its environment has answered. With any other, all
    that wait are generated together, and then answered together.

    Args:
        trajectories: They grow here.
        sampling: ``max_new_tokens`` holds for all of a trajectory after its prompt.
        options: Limits of turns.
        environments: ``None`` for completions of a single turn.
        observations: From an answer to tokens.
        partial: How much of a trajectory this loop waits for; by default all.
        ranks: Those that share the engine; the environments of the first answer.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        sampling: SamplingParams,
        options: TurnOptions,
        environments: EnvironmentCalls | None,
        observations: ObservationTokens | None,
        partial: PartialRollout | None,
        ranks: EngineRanks,
    ) -> None:
        self.sampling = sampling
        self._options = options
        self._environments = environments
        self._observations = observations
        self._ranks = ranks
        self._trajectories = trajectories
        budget = None if partial is None else partial.max_tokens_per_step
        self._left = {trajectory.key: budget or sampling.max_new_tokens for trajectory in trajectories}
        self._max_seconds = None if partial is None else partial.max_seconds_per_step
        self._ends_at = float("inf")

    @property
    def waiting(self) -> list[Trajectory]:
        """Trajectories that want more tokens now."""
        return [trajectory for trajectory in self._trajectories if self._wants_more(trajectory)]

    def play(self, engine: RolloutEngine) -> None:
        """Let all trajectories go on.

        Raises:
            EngineFault: The engine cannot; what it had completed is in the trajectories.
        """
        if self._max_seconds is not None and self._ends_at == float("inf"):
            self._ends_at = time.monotonic() + self._max_seconds
        is_streamed = self._environments is not None or self._max_seconds is not None
        if is_streamed and engine.capabilities.streaming:
            self._stream(engine)
        else:
            self._play_rounds(engine)

    # ---- in rounds ------------------------------------------------------------------------------------------------

    def _play_rounds(self, engine: RolloutEngine) -> None:
        while waiting := self.waiting:
            fault = None
            try:
                completions = engine.generate([self._request(trajectory) for trajectory in waiting], self.sampling)
            except EngineFault as problem:
                completions, fault = problem.completions, problem
            by_request = {trajectory.request_id: trajectory for trajectory in waiting}
            ended = [by_request[c.request_id] for c in completions if self._receive(by_request[c.request_id], c)]
            if self._environments is not None:
                self._answer_all(ended, self._environments)
            if fault is not None:
                raise fault

    def _answer_all(self, ended: Sequence[Trajectory], environments: EnvironmentCalls) -> None:
        def ask() -> dict[str, StepResult | Failure]:
            environments.ask(ended)
            answers: dict[str, StepResult | Failure] = {}
            while environments.num_asked:
                answers |= {trajectory.key: answer for trajectory, answer in environments.answers(COLLECT_S)}
            return answers

        answers = self._ranks.from_first(ask)
        for trajectory in ended:
            self._take(trajectory, answers[trajectory.key])

    # ---- streaming ------------------------------------------------------------------------------------------------

    def _stream(self, engine: RolloutEngine) -> None:
        asked: dict[str, Trajectory] = {}
        progress, is_broken_off = _Progress(len(self._trajectories)), False
        fault: EngineFault | None = None
        ready = self.waiting
        while ready or asked or self._num_answering:
            asked |= {trajectory.request_id: trajectory for trajectory in ready}
            completions: Sequence[Completion] = []
            try:
                if ready:
                    engine.submit([self._request(trajectory) for trajectory in ready], self.sampling)
                if asked and self._seconds_left <= 0 and not is_broken_off:
                    engine.abort(list(asked))
                    is_broken_off = True
                if asked:
                    completions = engine.collect(COLLECT_BESIDE_ANSWERS_S if self._num_answering else COLLECT_S)
            except EngineFault as problem:
                completions, fault = problem.completions, problem
            collected = [(asked.pop(completion.request_id), completion) for completion in completions]
            ended = [trajectory for trajectory, completion in collected if self._receive(trajectory, completion)]
            if self._environments is not None:
                self._environments.ask(ended)
            if fault is not None:
                asked.clear()  # what has ended is answered before the engine starts anew
            answered = self._take_answers(0.0 if asked else COLLECT_S)
            ready = [t for t in answered if self._wants_more(t)] if fault is None else []
            progress.tell(len(asked) + self._num_answering + len(ready))
        if fault is not None:
            raise fault

    @property
    def _num_answering(self) -> int:
        return 0 if self._environments is None else self._environments.num_asked

    def _take_answers(self, timeout_s: float) -> list[Trajectory]:
        if self._environments is None:
            return []
        answers = self._environments.answers(timeout_s)
        for trajectory, answer in answers:
            self._take(trajectory, answer)
        return [trajectory for trajectory, _ in answers]

    # ---- one trajectory -------------------------------------------------------------------------------------------

    @property
    def _seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def _wants_more(self, trajectory: Trajectory) -> bool:
        return trajectory.finish_reason is None and self._left[trajectory.key] > 0 and self._seconds_left > 0

    def _request(self, trajectory: Trajectory) -> Request:
        return trajectory.request(min(self._left[trajectory.key], self._room(trajectory)))

    def _room(self, trajectory: Trajectory) -> int:
        """Return how many tokens the turn may have yet, whatever is left of the step."""
        room = self.sampling.max_new_tokens - trajectory.num_after_prompt
        if self._options.max_tokens_per_turn is None:
            return room
        return min(room, self._options.max_tokens_per_turn - trajectory.num_in_turn)

    def _receive(self, trajectory: Trajectory, completion: Completion) -> bool:
        """Append what the engine returned; return whether that ends a turn that an environment shall answer."""
        num_tokens, left = len(completion.token_ids), self._left[trajectory.key]
        is_long = completion.finish_reason == "length"
        is_open = (is_long and num_tokens == left < self._room(trajectory)) or completion.finish_reason == "abort"
        is_at_turn_limit = trajectory.num_in_turn + num_tokens == self._options.max_tokens_per_turn
        self._left[trajectory.key] = left - num_tokens
        if num_tokens or not is_open:
            trajectory.add_completion(completion, ends_turn=not is_open)
        if is_open:
            return False
        if self._environments is None:
            trajectory.finish_reason = completion.finish_reason
            return False
        trajectory.turn_was_cut = is_long and not is_at_turn_limit
        return True

    def _take(self, trajectory: Trajectory, answer: StepResult | Failure) -> None:
        """Append what an environment answered, or end the trajectory."""
        if isinstance(answer, Failure):
            trajectory.error = answer.message
            trajectory.finish_reason = "abort"
        else:
            trajectory.reward += answer.reward
            if answer.done:
                trajectory.finish_reason = "length" if trajectory.turn_was_cut else "stop"
            else:
                self._observe(trajectory, answer)
        if trajectory.finish_reason is not None and self._environments is not None:
            self._environments.forget(trajectory)

    def _observe(self, trajectory: Trajectory, answer: StepResult) -> None:
        assert self._observations is not None
        token_ids = self._observations.after(trajectory.token_ids[-1], answer.observation)
        room = self.sampling.max_new_tokens - trajectory.num_after_prompt - len(token_ids)
        if trajectory.num_turns == self._options.max_turns or room < 1:
            trajectory.finish_reason = "length"
        else:
            trajectory.add_observation(token_ids)


class _Progress:
    """Says how far a long rollout is."""

    def __init__(self, num_trajectories: int) -> None:
        self._num_trajectories = num_trajectories
        self._began = time.monotonic()
        self._next_s = PROGRESS_S

    def tell(self, num_unfinished: int) -> None:
        seconds = time.monotonic() - self._began
        if seconds > self._next_s:
            self._next_s += PROGRESS_S
            num_done = self._num_trajectories - num_unfinished
            rank_zero_info(f"rollout: {num_done} of {self._num_trajectories} trajectories after {seconds:.0f} s")
