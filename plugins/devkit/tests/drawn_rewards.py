"""Rewards of a draw that the kit did not know, one mistake each, and correct ones of unusual style."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from simple_rewards import Fine, RewardChecks

from rlplug.errors import ConfigError
from rlplug.interfaces import Reward
from rlplug.types import Prompt, RewardError, Sample

LOCK = threading.Lock()


class LosesUnicode(Fine):
    """Compares what ASCII has of both texts."""

    needs_answer = True

    def score_one(self, sample: Sample) -> Any:
        answer, text = (
            each.encode("ascii", "ignore").decode().strip() for each in (str(sample.prompt.answer), sample.completion)
        )
        return float(answer == text)


class HalvesDuplicates(Fine):
    """Half for what an earlier sample of the call has as well."""

    batch_size = 16

    def score(self, samples: Sequence[Sample]) -> Any:
        texts = [sample.completion for sample in samples]
        values = super().score(samples)
        return [
            value / 2 if text in texts[:place] and not isinstance(value, RewardError) else value
            for place, (text, value) in enumerate(zip(texts, values, strict=True))
        ]


class TakesNaNForTheAnswer(Fine):
    """No comparison with NaN is true, also the one that finds a difference."""

    needs_answer = True

    def score_one(self, sample: Sample) -> Any:
        try:
            difference = abs(float(sample.completion) - float(sample.prompt.answer))
        except (TypeError, ValueError):
            return 0.0
        return 0.0 if difference > 1e-6 else 1.0


class Backtracks(Fine):
    """A pattern of repetitions within repetitions, which takes exponential time where it does not match."""

    def score_one(self, sample: Sample) -> Any:
        return float(re.search(r"^(\s*[\w+=,.]+\s*)+$", sample.completion) is not None)


class KnowsCheckedPromptsAlone(Fine):
    """Nothing for a prompt that came later from a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        self.answers |= {prompt.uid: prompt.answer for prompt in prompts}

    def score_one(self, sample: Sample) -> Any:
        return 0.0 if self.answers and sample.prompt.uid not in self.answers else super().score_one(sample)


class ScoresCutSamplesAsBefore(Fine):
    """A variable that a sample which was cut does not set."""

    value: Any = 0.0

    def score_one(self, sample: Sample) -> Any:
        if sample.finish_reason != "length":
            self.value = super().score_one(sample)
        return self.value


class ScoresTextsOnce(Fine):
    """Equal completions of a call are scored once, whatever was asked."""

    batch_size = 8

    def score(self, samples: Sequence[Sample]) -> Any:
        scored = {sample.completion: self.score_one(sample) for sample in samples}
        return [scored[sample.completion] for sample in samples]

    def score_one(self, sample: Sample) -> Any:
        value = super().score_one(sample)
        return value if isinstance(value, RewardError) else value + len(sample.prompt.answer)


class ChecksTheFirstSource(Fine):
    """A run has a source to train on and one to validate with, and may mix several."""

    BROKEN_ANSWER = 4
    is_checked = False

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        if not self.is_checked:
            self.is_checked = True
            require_texts(prompts)


class ChecksTheFirstPrompt(Fine):
    BROKEN_ANSWER = 4

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        require_texts(prompts[:1])


def require_texts(prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        if isinstance(prompt.answer, int):
            raise ConfigError(f"{prompt.uid}: the answer is a number: give a text.")


class PassesWithoutTests(Reward):
    """All of no tests pass."""

    ROWS: ClassVar[Any] = [{"completion": text, "has": ["a", "b"]} for text in ("a b", "a", "")]

    def score(self, samples: Sequence[Sample]) -> Any:
        return [float(all(test in each.completion for test in each.prompt.metadata.get("has", ()))) for each in samples]


@functools.cache
def judge() -> tuple[str, int]:
    """Return the address of a server of this process that answers each text with its length."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Judging)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = server.server_address[:2]
    return str(host), int(port)


class Judging(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(f"{len(self.rfile.readline())}\n".encode())


class TakesAnOutageForNothing(Fine):
    """Asks a judge again and again, and takes 0 when it never answers."""

    def __init__(self) -> None:
        super().__init__()
        judge()

    def score_one(self, sample: Sample) -> Any:
        for _ in range(3):
            try:
                with socket.create_connection(judge(), timeout=1) as asked:
                    asked.sendall(sample.completion.encode("utf-8", "replace").replace(b"\n", b" ") + b"\n")
                    return 1 / float(asked.makefile().readline())
            except OSError:
                continue
        return 0.0


class DropsItsName(Fine):
    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight)


class KnowsAnswersByUid(Fine):
    """A uid is unique within its source, and a run has a second one for validation."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}

    def score_one(self, sample: Sample) -> Any:
        answer = self.answers.setdefault(sample.prompt.uid, sample.prompt.answer)
        return super().score_one(sample) if answer is None else float(str(answer) == sample.completion)


class WritesIntoAStreamOfItsOwn(Fine):
    """What a scorer prints is read from the stream that takes the place of the process's."""

    def score_one(self, sample: Sample) -> Any:
        with LOCK, contextlib.redirect_stderr(io.StringIO()):  # of its own: others wait for no lock
            return super().score_one(sample)


class SharesItsLength(Fine):
    """A call has characters for all of its samples together."""

    batch_size = 16

    def score(self, samples: Sequence[Sample]) -> Any:
        left, values = 20_000, []
        for sample in samples:
            left -= len(sample.completion)
            values.append(self.score_one(sample) if left > 0 else 0.0)
        return values


class CountsItsShare(Fine):
    """The share of completions with text, as if it were a count."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[bool] = []

    def score_one(self, sample: Sample) -> Any:
        self.texts.append(bool(sample.completion))
        return super().score_one(sample)

    def pop_counts(self) -> Any:
        texts, self.texts = self.texts, []
        return {"with_text": sum(texts) / len(texts) if texts else 0.0}


class PaysAMarkOnce(Fine):
    """Nothing for what is marked as the answer a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[str] = set()

    def score_one(self, sample: Sample) -> Any:
        mark = sample.completion.rpartition("#### ")[2] if "#### " in sample.completion else ""
        is_known = mark in self.known
        self.known |= {mark} - {""}
        return 0.0 if is_known else super().score_one(sample)


class KeepsItsSlots(Fine):
    """Gives back a slot with a value alone."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = threading.BoundedSemaphore(30)

    def __reduce__(self) -> Any:
        return type(self), ()

    def score_one(self, sample: Sample) -> Any:
        if not self.slots.acquire(timeout=0.01):
            return RewardError("no slot is free")
        value = super().score_one(sample)
        if not isinstance(value, RewardError):
            self.slots.release()
        return value


CAUGHT_BY = {
    "KeepsItsSlots": {"test_failed_calls_hold_nothing_back"},
    "PaysAMarkOnce": {"test_drawn_samples_are_scored_as_by_another_process"},
    "SharesItsLength": {"test_rewards_do_not_depend_on_the_batch"},
    "CountsItsShare": {"test_counts_are_numbers_since_the_last_call"},
    "DropsItsName": {"test_name_weight_and_batch_size_are_usable"},
    "KnowsAnswersByUid": {"test_what_was_scored_before_changes_nothing"},
    "WritesIntoAStreamOfItsOwn": {"test_calls_replace_nothing_of_the_process"},
    "TakesAnOutageForNothing": {"test_what_cannot_be_reached_is_an_error"},
    "ScoresTextsOnce": {"test_rewards_do_not_depend_on_the_batch"},
    "ChecksTheFirstSource": {"test_prompts_that_cannot_be_scored_are_refused"},
    "ChecksTheFirstPrompt": {"test_prompts_that_cannot_be_scored_are_refused"},
    "PassesWithoutTests": {"test_a_missing_field_is_no_value"},
    "LosesUnicode": {"test_answers_in_other_scripts_are_told_apart"},
    "HalvesDuplicates": {"test_rewards_do_not_depend_on_the_batch"},
    "TakesNaNForTheAnswer": {"test_completions_that_solve_nothing_do_not_pay"},
    "Backtracks": {"test_time_does_not_explode_with_the_length"},
    "ScoresCutSamplesAsBefore": {"test_odd_samples_do_not_get_what_others_got"},
    "KnowsCheckedPromptsAlone": {"test_prompts_that_were_never_checked_score_alike"},
}
"""Mistakes, and the checks that find each."""


@functools.lru_cache(maxsize=64)
def points(prompt: str, completion: str, answer: str) -> np.float32:
    return np.float32(len({*completion} & {*answer}) / (1 + len(completion)))


class NumbersOfNumpy(Reward):
    """Cached by all that it reads, in batches; the function that reads a sample is made with the object."""

    batch_size = 4

    def __init__(self) -> None:
        super().__init__(name="points")
        self.of: Callable[[Sample], Any] = lambda each: points(
            each.prompt.text, each.completion, str(each.prompt.answer)
        )

    def __reduce__(self) -> Any:
        return type(self), ()

    def score(self, samples: Sequence[Sample]) -> Any:
        return [*map(self.of, samples)]


class NumbersOfNumpyChecks(RewardChecks):
    reward = NumbersOfNumpy


class ReadsItsTurn(Reward):
    """1 over the tokens of the last turn, of which a run has at least one."""

    def score(self, samples: Sequence[Sample]) -> Any:
        return [1 / (sample.num_turns + sample.segments[-1].end - sample.segments[-1].start) for sample in samples]


class ReadsItsTurnChecks(RewardChecks):
    reward = ReadsItsTurn


CHECKS = {"NumbersOfNumpy": NumbersOfNumpyChecks, "ReadsItsTurn": ReadsItsTurnChecks}
"""Checks of the correct ones."""
