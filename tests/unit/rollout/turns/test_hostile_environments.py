"""Whatever an environment returns, raises or does in ``close`` costs its own trajectory, and nothing else."""

from __future__ import annotations

import threading
import time
from types import MappingProxyType

import pytest
from hostile import SURROGATE, HugeText, Leaving, Slow, Unprintable, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlplug.errors import ConfigError
from rlplug.interfaces import Environment, StepResult
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.trajectory import new_trajectories
from rlplug.rollout.turns.environment_calls import EnvironmentCalls, ask_environment
from rlplug.rollout.turns.observation_tokens import ObservationTokens
from rlplug.types import Completion, Prompt, RewardError


class Letters:
    """A tokenizer of bytes."""

    name_or_path = "letters"
    all_special_tokens = ("<end>",)
    added_tokens_decoder = MappingProxyType({})

    def get_vocab(self):
        return {"a": 0}

    def decode(self, ids, skip_special_tokens):
        return "turn"

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}


class Doing(Environment):
    """Does what ``step`` and ``close`` say."""

    def __init__(self, step, close=lambda: None):
        self.do_step, self.do_close = step, close

    def step(self, completion):
        return self.do_step()

    def close(self):
        self.do_close()


def calls_of(make, deadline_s=20.0):
    tokenizer = Letters()
    options = TurnOptions(step_deadline_s=deadline_s)
    return EnvironmentCalls(make, tokenizer, (), options, ObservationTokens(tokenizer, chat=False))


def one_step(environment, deadline_s=20.0):
    """Return the answer to one turn, and the metrics afterwards."""
    calls = calls_of(lambda: environment, deadline_s)
    answer = stepped(calls)
    calls.close()
    metrics = calls.pop_metrics()
    assert all(type(value) is float for value in metrics.values())
    return answer


def stepped(calls):
    """Return the answer to the first turn of a trajectory, which ends then."""
    (trajectory,) = new_trajectories([Prompt("p", (1,), "")], [0], 1, "run")
    trajectory.add_completion(Completion(trajectory.key, (1, 2), (-1.0, -1.0), "stop", 0), ends_turn=True)
    calls.submit([trajectory], max_tokens=100)
    answers = []
    while calls.num_pending:
        answers += calls.collect(1.0)
    calls.release(trajectory)
    ((_, answer),) = answers
    return answer


def check(answer):
    """An answer is either a failure with readable text, or plain values that train."""
    if isinstance(answer, RewardError):
        assert 0 < len(answer.message.encode()) < 5000
        return
    assert type(answer.reward) is float
    assert abs(answer.reward) <= 1e15
    assert type(answer.done) is bool
    assert all(type(name) is str and type(value) is float for name, value in answer.metrics.items())
    if answer.text is not None:
        assert len(answer.text) <= 100 * 4 + 1000
        Letters()(answer.text)


messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name"]), values | st.just("user"), max_size=3), max_size=2
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    field=st.sampled_from(["observation", "reward", "done", "metrics", "metric", "name", "messages", "result"]),
    value=values,
    several=messages,
)
def test_every_result_is_plain_or_a_failure(field, value, several):
    """Puts a hostile value into each place of a step's result: one that gets through unchecked would end the run."""
    if field == "metric":
        result = StepResult(metrics={"number": value})
    elif field == "name":
        result = StepResult(metrics={SURROGATE: 1.0, "ok": 2.0})
    elif field == "messages":
        result = StepResult(several)
    else:
        result = value if field == "result" else StepResult(**{field: value})
    check(one_step(Doing(lambda: result)))


def do_raise(error):
    raise error


@pytest.mark.parametrize(
    "step",
    [
        lambda: do_raise(Unprintable()),
        lambda: do_raise(HugeText()),
        lambda: do_raise(SystemExit(0)),
        lambda: do_raise(KeyboardInterrupt()),
        lambda: do_raise(ValueError(Leaving())),
        lambda: StepResult(reward=Slow()),
        lambda: time.sleep(30),
    ],
)
def test_every_exception_is_a_failure(step):
    """An exception whose text raises, is huge, ends the process or never comes would do so in the main thread."""
    answer = one_step(Doing(step), deadline_s=0.5)
    assert isinstance(answer, RewardError)
    check(answer)


@pytest.mark.parametrize("close", [lambda: do_raise(Unprintable()), lambda: time.sleep(30)])
def test_a_close_that_raises_or_hangs_is_said_and_costs_nothing(close):
    began = time.perf_counter()
    with pytest.warns(UserWarning, match="The close of an environment failed"):
        answer = one_step(Doing(lambda: StepResult("next", 1.0), close), deadline_s=0.5)
    assert answer.text == "next"
    assert time.perf_counter() - began < 10


def test_an_environment_that_is_made_too_late_is_closed():
    """Validations have the same keys: the next one would go on with the late environment of the one before."""
    made, may_end = [], threading.Event()

    class LateAtFirst(Environment):
        def __init__(self):
            made.append(self)
            self.calls = []
            if len(made) == 1:
                may_end.wait(20)

        def reset(self, prompt, seed):
            self.calls.append("reset")

        def step(self, completion):
            self.calls.append("step")
            return StepResult(done=True)

        def close(self):
            self.calls.append("close")

    calls = calls_of(LateAtFirst, deadline_s=2.0)
    assert isinstance(stepped(calls), RewardError)
    may_end.set()
    deadline = time.monotonic() + 20
    while made[0].calls != ["close"]:
        assert time.monotonic() < deadline, made[0].calls
        time.sleep(0.01)
    assert stepped(calls).done
    calls.close()
    assert made[1].calls == ["reset", "step", "close"]


@pytest.mark.parametrize("tools", [None, 1, [1], [{1: 2}], [{"name": SURROGATE}], [{"a": ...}]])
def test_tools_that_are_no_schemas_are_refused(tools):
    class Odd(Environment):
        def tools(self):
            return tools

        def step(self, completion):
            return StepResult()

    with pytest.raises(ConfigError, match=r"model\.environment"):
        ask_environment(Odd)


def test_what_an_environment_changes_in_its_prompt_reaches_no_other_sample():
    class Changing(Environment):
        def reset(self, prompt, seed):
            prompt.metadata["tests"].append("mine")
            prompt.answer.clear()

        def step(self, completion):
            return StepResult(done=True)

    prompt = Prompt("p", (1,), "", answer=["4"], metadata={"tests": []})
    calls = calls_of(Changing)
    trajectories = new_trajectories([prompt], [0], 2, "run")
    for each in trajectories:
        each.add_completion(Completion(each.key, (1,), (-1.0,), "stop", 0), ends_turn=True)
    calls.submit(trajectories, 10)
    answers = []
    while calls.num_pending:
        answers += calls.collect(1.0)
    assert [answer.done for _, answer in answers] == [True, True]
    assert (prompt.answer, prompt.metadata) == (["4"], {"tests": []})


def test_an_environment_gets_the_tokenizers_rules_for_a_turn(monkeypatch):
    seen = []
    environment = Doing(lambda: seen.append(environment.response_template) or StepResult(done=True))
    one_step(environment)
    monkeypatch.setattr(Letters, "response_template", {"fields": {}}, raising=False)
    one_step(environment)
    assert seen == [None, {"fields": {}}]
