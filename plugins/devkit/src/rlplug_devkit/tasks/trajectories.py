"""Checks of the trajectories of an environment: well-formed, repeatable, and apart from each other."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any, ClassVar, Final

import pytest

from rlplug.errors import ConfigError
from rlplug.rollout.turns.environment_calls import ask_environment
from rlplug.types import Prompt
from rlplug_devkit.tasks.calls import HOSTILE, NUM_THREADS, eager_threads, is_same, same_random_generators
from rlplug_devkit.tasks.playing import Played, Plays

NUM_TURNS: Final = 24
"""Turns of a long trajectory."""
PAUSE_S: Final = 0.8
"""Time before each turn of a trajectory whose policy is slow, in seconds."""
CLOSES_AFTER_S: Final = 1.0
"""When a call that runs is closed, in seconds."""


class TrajectoryChecks(Plays):
    """Checks of what an environment answers.

    Attributes:
        is_deterministic: Whether the same prompt, seed and turns always have the same answers; without that a run
            cannot be resumed.
    """

    is_deterministic: ClassVar[bool] = True

    def _compared(self, played: Played) -> Played:
        """Return what was played; end the check where a call failed."""
        if played.problem:
            self._not_compared(played.problem)
        return played

    def _needs_repetition(self) -> None:
        """Skip a comparison of calls where they need not repeat, or where an earlier check has failed."""
        if not self.is_deterministic:
            pytest.skip("does not apply: is_deterministic is False")
        self._skip_after_failure()

    # ---- what a run needs of every environment --------------------------------------------------------------------

    def test_tools_and_notes_are_readable(self) -> None:
        try:
            with self._guard().around("tools and notes"):
                tools, notes = ask_environment(self.make_environment)
        except ConfigError as problem:
            pytest.fail(f"a run refuses the environment at its start: {problem}", pytrace=False)
        names = [(tool.get("function") or tool).get("name") for tool in tools]
        assert len(names) == len({*names}), f"tools() has the names {names}: a policy tells tools apart by their names."
        expected = self.expected_tools()
        assert expected is None or is_same((list(tools), list(notes)), tuple(map(list, expected))), (
            f"tools and notes are {tools} and {notes}, and expected is {expected}."
        )

    def test_calls_end_by_their_deadline(self) -> None:
        for prompt in self.prompts():
            problem = self._play(prompt, self.turns()).problem
            type(self)._is_late = "took longer" in problem
            assert not self._is_late, (
                f"{problem}. Give what it waits for a shorter deadline, and await instead of blocking in async methods."
            )

    def test_turns_are_answered_without_exceptions(self) -> None:
        for prompt in self.prompts():
            error = self._play(prompt, self.turns()).error
            assert not error, (
                f"on the prompt {prompt.text!r}, {error}. Override prompts() and turns() to fit its tasks. A run's "
                "seeds have 63 bits, it makes objects and calls them in threads, and sets response_template first."
            )

    def test_answers_are_well_formed(self) -> None:
        for prompt in self.prompts():
            malformed = self._play(prompt, self.turns()).malformed
            assert not malformed, (
                f"{malformed}. Return StepResult(text or messages, reward=a number, done=a bool, metrics=numbers)."
            )

    def test_turns_have_the_expected_answers(self) -> None:
        expected, metrics = self.expected(), self.expected_metrics()
        if expected is None and metrics is None:
            pytest.skip("does not apply: expected and expected_metrics return None")
        played = [self._compared(self._play(prompt, self.turns())) for prompt in self.prompts()]
        told = [each.told for each in played]
        assert expected is None or told == [list(each) for each in expected], (
            f"turns are answered {told}, and expected is {expected}."
        )
        measured = [[_rounded(answer.metrics) for answer in each.answers] for each in played]
        assert metrics is None or measured == [[*map(_rounded, each)] for each in metrics], (
            f"turns have the metrics {measured}, and expected is {metrics}."
        )

    def test_close_succeeds_after_any_call(self) -> None:
        """A run closes an environment once: when it is done, and after a failure of any call, the first one too."""
        for name, turns in (("reset", []), ("a step", self.turns()[:1]), ("its last step", self.turns())):
            error = self._play(self.prompts()[0], turns).close_error
            assert not error, f"after {name}, {error}. Let close release what there is, and nothing more."
        error = self._close(self.make_environment())
        assert not error, f"after its constructor, {error}. Let close release what there is, and nothing more."

    def test_close_ends_a_call_that_runs(self) -> None:
        """A run closes the environment of a late call, whose thread and processes would else work on beside others."""
        turn = self.endless_turn()
        if turn is None:
            pytest.skip("does not apply: endless_turn returns None")
        self._skip_after_failure()
        environment = self.make_environment()
        self._reset(environment, self.prompts()[0])

        def close_soon() -> None:
            time.sleep(min(CLOSES_AFTER_S, self.deadline_s / 4))
            environment.close()

        with self._guard().around("step and close"):
            step, close = self._calls(
                [functools.partial(environment.step, turn), close_soon], lambda returned: returned
            )
        assert not close.error, f"while step answers {turn!r}, close raised {close.error}."
        assert step.kind != "late" or not step.error, (
            f"step goes on with {turn!r} although close was called: let close end what step waits for."
        )

    def test_many_turns_are_answered(self) -> None:
        """``model.turns.max_turns`` is the user's: a trajectory may go on for longer than the author has thought."""
        turns = self.turns()
        answers = self._compared(self._play(self.prompts()[0], turns)).answers
        stays = [turn for turn, answer in zip(turns, answers, strict=False) if not answer.done]
        played = self._play(self.prompts()[0], list(islice(cycle(stays or turns), NUM_TURNS)))
        assert not played.problem, (
            f"after {len(played.answers)} turns, {played.problem}. Answer any number of turns, or end with done=True."
        )
        told = [str(answer.text)[:-1] for answer in played.answers if not answer.done]
        assert len(told) < 3 or not told[0].startswith("[{") or any(map(_is_new, told, told[1:])), (
            "each answer has all messages of the one before and more: return the new ones, the policy has the others."
        )
        assert all(answer.text is not None for answer in played.answers), (
            f"of {len(played.answers)} turns some are answered with more than {self.max_observation_chars} characters: "
            "the policy has all former answers in its context, do not tell them again."
        )

    # ---- what its answers depend on -------------------------------------------------------------------------------

    def test_tools_are_the_same_each_time(self) -> None:
        """A run asks one object, and presents its tools to the policies of all."""
        self._skip_after_failure()
        for other in (self._tools(), self._elsewhere("_tools")):
            first = self._tools()
            assert first == other, f"two objects have the tools {first} and {other}: return the same ones each time."

    def _tools(self) -> list[dict[str, Any]]:
        return ask_environment(self.make_environment)[0]

    def test_the_same_turns_have_the_same_answers(self) -> None:
        """A resumed run makes a new object, and repeats the turns of a trajectory, whatever was said in others."""
        self._needs_repetition()
        prompts, turns = self.prompts(), self.turns()
        first = [self._compared(self._play(prompt, turns)) for prompt in prompts]
        for text in HOSTILE.values():
            self._play(prompts[-1], [text, *turns[:1]])
        again = [self._compared(self._play(prompt, turns)) for prompt in prompts]
        backwards = [self._compared(self._play(prompt, turns)) for prompt in reversed(prompts)]
        for one, *others in zip(first, again, reversed(backwards), strict=True):
            for other in others:
                assert one.told == other.told, (
                    f"two objects answered {one.told} and {other.told}: draw from random.Random(seed) alone, of the "
                    "seed that reset gets, and keep nothing in the class or its module."
                )

    @pytest.mark.parametrize("seed", [0, 2**63 - 1])
    def test_every_seed_repeats(self, seed: int) -> None:
        """A run draws seeds of 63 bits, and 0 is one."""
        self._needs_repetition()
        self._seed = seed
        first, again = (self._compared(self._play(self.prompts()[0], self.turns())).told for _ in range(2))
        assert first == again, (
            f"with the seed {seed}, two objects answered {first} and {again}: it is a seed as others."
        )

    def test_the_time_between_turns_changes_nothing(self) -> None:
        """A policy may write a turn in a second or in an hour, and a resumed run repeats turns at once."""
        self._needs_repetition()
        soon = self._compared(self._play(self.prompts()[0], self.turns())).told
        self._pause_s = PAUSE_S
        late = self._compared(self._play(self.prompts()[0], self.turns())).told
        assert soon == late, (
            f"with {PAUSE_S:g} s before each turn, turns were answered {late}, and at once {soon}: count turns, not "
            "seconds; the run has deadlines for calls."
        )

    def test_another_process_has_the_same_answers(self) -> None:
        """A resumed run is another process, in which texts have other hashes and sets another order."""
        self._needs_repetition()
        here, (_, there) = self._answered(), self._of_another_process("_answered_later")
        assert here == there, (
            f"another process answered {there} instead of {here}: a resumed run would too. Sort sets, and call no "
            "hash() or id()."
        )

    def _answered(self) -> list[Any]:
        """Return what is answered to the turns after each prompt."""
        return [self._compared(self._play(prompt, self.turns())).told for prompt in self.prompts()]

    def _answered_later(self) -> tuple[list[Any], list[Any]]:
        """Return what is answered in trajectories at once, several of each prompt, and then one by one."""
        with eager_threads():
            first = [played.told for played in self._at_once(self.prompts(), self.turns())]
        return first, self._answered()

    def test_trajectories_do_not_see_each_other(self) -> None:
        """Objects of a run are alive at the same time; what one keeps in its class, another overwrites."""
        self._needs_repetition()
        prompts, turns = self.prompts(), self.turns()
        alone = [self._compared(self._play(prompt, turns)) for prompt in prompts]
        with self._guard().around("trajectories at once"), eager_threads():
            self._require_same(alone, self._in_turn([(prompt, turns) for prompt in prompts]))
            self._require_same(alone, self._at_once(prompts, turns))

    def test_trajectories_of_one_prompt_do_not_see_each_other(self) -> None:
        """A group has several of them, whose policies say other things; the prompt and its uid are the same."""
        self._needs_repetition()
        prompt, turns = self.prompts()[0], self.turns()
        pairs = [(prompt, turns), (prompt, [*turns[::-1], "x"]), (prompt, ["x", *turns])]
        alone = [self._compared(self._play(*pair)) for pair in pairs]
        with self._guard().around("trajectories of one prompt at once"):
            self._require_same(alone, self._in_turn(pairs))
        pairs = [(prompt, list(islice(cycle([turn]), NUM_TURNS))) for turn in dict.fromkeys([*turns, "x"])]
        alone = [self._compared(self._play(*pair)) for pair in pairs]  # some end early: the others have long ones
        with self._guard().around("long trajectories of one prompt at once"):
            self._require_same(alone, self._in_turn(pairs))

    def test_first_trajectories_at_once_are_answered_alike(self) -> None:
        """A run's first trajectories meet, in a process where nothing was called before."""
        self._needs_repetition()
        (first, _), alone = self._of_another_process("_answered_later"), self._answered()
        assert first == alone * (len(first) // len(alone)), (
            f"the first trajectories of a process, played at once, were answered {first[: len(alone)]} instead of "
            f"{alone}: fill what objects share at import, or under a lock."
        )

    def _in_turn(self, pairs: Sequence[tuple[Prompt, Sequence[str]]]) -> list[Played]:
        """Play a turn of each trajectory after the other; one more is reset, stepped once and closed in between."""
        environments = [self.make_environment() for _ in pairs]
        errors = [self._reset(each, prompt) for each, (prompt, _) in zip(environments, pairs, strict=True)]
        played = [Played(error=error) for error in errors]
        for index in range(max(len(turns) for _, turns in pairs)):
            for place, (environment, (_, turns)) in enumerate(zip(environments, pairs, strict=True)):
                former = played[place]
                if former.problem or (former.answers and former.answers[-1].done) or index >= len(turns):
                    continue
                answer, error, malformed = self._step(environment, turns[index])
                played[place] = Played((*former.answers, *([answer] if answer else [])), error, malformed)
            if index == 0:
                self._trajectory(pairs[-1][0], pairs[-1][1][:1])
        for environment in environments:
            self._close(environment)
        return played

    def _at_once(self, prompts: Sequence[Prompt], turns: Sequence[str]) -> list[Played]:
        rounds = [prompt for _ in range(NUM_THREADS // 2) for prompt in prompts]
        environments = [self.make_environment() for _ in rounds]  # all before the first is used
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            return list(threads.map(lambda p, e: self._trajectory(p, turns, e), rounds, environments))

    def _require_same(self, alone: Sequence[Played], together: Sequence[Played]) -> None:
        for index, played in enumerate(together):
            expected = alone[index % len(alone)].told
            assert not played.problem, f"beside others, {played.problem}. Keep a trajectory's state in self."
            assert played.told == expected, (
                f"beside others, a trajectory was answered {played.told}, and alone {expected}: keep its state in "
                "self, and in nothing that objects share."
            )

    def test_the_task_decides_the_answers(self) -> None:
        """An environment that ignores the prompt rewards every policy alike."""
        self._needs_repetition()
        first, other = (self._compared(self._play(prompt, self.turns())) for prompt in self.prompts()[:2])
        assert first.told != other.told, (
            f"prompts with other answers were answered alike, {first.told}: read the task in reset, and override "
            "prompts() and turns() where these tasks have the same answers."
        )

    def test_objects_that_were_not_asked_answer_alike(self) -> None:
        """A run asks one object for tools and notes, and plays in others."""
        self._needs_repetition()
        for prompt in self.prompts():
            asked = self.make_environment()
            asked.tools()
            asked.notes()
            first, other = self._play(prompt, self.turns(), asked), self._play(prompt, self.turns())
            first, other = self._compared(first), self._compared(other)
            assert first.told == other.told, (
                f"an object that was asked for tools and notes answered {first.told}, and another one {other.told}: "
                "keep what tools and notes load in the module, or load it in the constructor."
            )

    def test_global_random_generators_are_left_alone(self) -> None:
        with same_random_generators("the environment"):
            self._play(self.prompts()[0], self.turns())


def _is_new(before: str, after: str) -> bool:
    """Return whether a list of messages, as text without its end, does not begin with the one before."""
    return not after.startswith(f"{before}, {{")


def _rounded(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in metrics.items()}
