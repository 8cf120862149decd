"""Faults of plugins, one table for each seam: each is refused where it comes in, by one message that names the call."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import signal
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pluggy
import pytest
import torch
from torch import nn

from rlplug.errors import RunError
from rlplug.interfaces import (
    Advantages,
    Algorithm,
    Effect,
    EngineCapabilities,
    EngineFault,
    LossOutput,
    Placement,
    PolicySpec,
    RolloutEngine,
    SyncReport,
)
from rlplug.interfaces.checks import process_state
from rlplug.interfaces.checks.algorithms import check_loss, check_same_names, check_selection
from rlplug.interfaces.checks.calls import PluginCall, failed_call, running_call
from rlplug.interfaces.checks.engines import check_report, check_stats
from rlplug.interfaces.checks.metrics import MetricsOfStep, read_metrics
from rlplug.interfaces.checks.models import check_effects, check_network
from rlplug.interfaces.checks.process_state import ProcessState, watched
from rlplug.observability.hook_costs import HookCosts
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.engines.ranks import EngineRanks
from rlplug.rollout.trajectory import new_trajectories
from rlplug.training.advantages import compute_advantages
from rlplug.training.mismatch_gate import MismatchGate, limit_of
from rlplug.types import Completion, Prompt, SamplingParams, StepBatch

CPU = torch.device("cpu")
END, VOCAB, LIMIT, VERSION = 1, 50, 4, 7
POLICY = PolicySpec("folder", torch.float32, (END, 2), 0, 100, vocab_size=VOCAB)


# ---- engines ------------------------------------------------------------------------------------------------------


class Scripted(RolloutEngine):
    """Answers as it should, and then changes its answer."""

    def __init__(self, change: Any = None, field: str = "", value: Any = None) -> None:
        self.change, self.field, self.value = change, field, value

    def start(self, policy: PolicySpec, placement: Placement) -> None: ...
    def update_weights(self, buckets: Any, version: int) -> Any: ...
    def close(self) -> None: ...

    def generate(self, requests: Any, sampling: SamplingParams) -> Any:
        good = [
            Completion(request.request_id, (5, 6, END), (-0.5, -1.0, 0.0), "stop", VERSION) for request in requests[:-1]
        ]
        good.append(Completion(requests[-1].request_id, (5, 6, 7, 8), (-0.5,) * 4, "length", VERSION))
        if self.field:
            good[0] = dataclasses.replace(good[0], **{self.field: self.value})
        return good if self.change is None else self.change(good)


def run_loop(engine: RolloutEngine) -> list[Any]:
    """Generate three completions and return their trajectories; raise the first fault."""
    trajectories = new_trajectories([Prompt("0", (3, 4), "")], [0], 3, "k")
    ranks = EngineRanks(Placement(CPU, 0, 1), 1, communicates=False)
    sampling = SamplingParams(LIMIT)
    loop = AgentLoop(trajectories, sampling, TurnOptions(), None, None, None, ranks, POLICY, VERSION)

    def refuse(fault: Any) -> bool:
        if fault is not None:
            raise fault
        return False

    driver: Any = SimpleNamespace(
        ready_engine=lambda version: contextlib.nullcontext(engine),
        end_if_stopping=lambda fault: None,
        failed_on_any_rank=refuse,
        finish=lambda: None,
    )
    loop.run(driver, VERSION)
    return list(trajectories)


def twice(good: list[Completion]) -> list[Completion]:
    return [good[0], good[0], good[2]]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Scripted(lambda good: good[:2]), "the completions of 3 requests in their order; it returned 2, and none of"),
        (Scripted(lambda good: [*good, good[0]]), "of 3 requests in their order; it returned 4"),
        (Scripted(lambda good: good[::-1]), "at index 0, where k/0/0 was asked for"),
        (Scripted(twice), "at index 1, where"),
        (Scripted(lambda good: None), "must return a list of completions; it returned NoneType None"),
        (Scripted(lambda good: ["a", *good[1:]]), "must return a list of completions; it returned list ['a'"),
        (Scripted(None, "request_id", "x0/1/0/0"), "returned str 'x0/1/0/0' at index 0"),
        (Scripted(None, "policy_version", VERSION - 1), "policy version 6, and its weights are of version 7"),
        (Scripted(None, "policy_version", None), "policy version None, and its weights are of version 7"),
        (Scripted(None, "token_ids", (5, VOCAB, END)), "the token id 50 at index 1, and the policy has ids from 0 to"),
        (Scripted(None, "token_ids", (5, -1, END)), "the token id -1 at index 1"),
        (Scripted(None, "token_ids", (5, 6, 7, 8, END)), "5 token ids where at most 4 were asked for"),
        (Scripted(None, "token_ids", (5, END)), "3 logprobs for 2 tokens"),
        (Scripted(None, "token_ids", ("a", "b", "c")), "token ids that are not all numbers, but also str 'a'"),
        (Scripted(None, "logprobs", (-0.5, float("nan"), -1)), "the logprob nan at index 1"),
        (Scripted(None, "logprobs", (-0.5, float("-inf"), -1)), "the logprob -inf at index 1"),
        (Scripted(None, "logprobs", (-0.5, 0.5, -1)), "the logprob 0.5 at index 1"),
        (Scripted(None, "logprobs", (-0.5, -1)), "2 logprobs for 3 tokens"),
        (Scripted(None, "finish_reason", "done"), "finish reason str 'done'"),
        (
            Scripted(None, "finish_reason", "length"),
            "finish reason 'length' and the last token 1: it is 'stop'",
        ),
        (Scripted(None, "token_ids", (5, 6, 7)), "finish reason 'stop' and the last token 7: it is 'stop' exactly"),
        (Scripted(None, "token_ids", (5, 2, END)), "3 tokens, and the end token 2 is at index 1"),
        (
            Scripted(lambda good: [dataclasses.replace(good[0], token_ids=(), logprobs=()), *good[1:]]),
            "no token and the finish reason 'stop'",
        ),
    ],
)
def test_an_engine_that_answers_wrongly(engine: RolloutEngine, words: str) -> None:
    """Each trained on before, or ended in an error that named no engine."""
    with pytest.raises(EngineFault) as fault:
        run_loop(engine)
    assert str(fault.value).startswith("Scripted.generate in ")
    assert words in str(fault.value), str(fault.value)


def test_an_engine_that_answers_well_is_believed() -> None:
    assert [len(trajectory.token_ids) for trajectory in run_loop(Scripted())] == [5, 5, 6]


def test_what_one_look_at_all_tokens_finds_is_what_a_look_at_each_finds() -> None:
    """Random faults: the quick check of a whole answer must not accept what the slow one refuses."""
    generator = random.Random(0)
    for _ in range(300):
        token_ids = [generator.choice([0, END, 2, 5, VOCAB - 1, VOCAB, -1][:: generator.choice([1, 2])]) for _ in "abc"]
        logprobs = [generator.choice([-1.0, 0.0, -1.0, -1.0, 2.0]) for _ in "abc"]
        reason = generator.choice(["stop", "length", "abort"])
        change = {"token_ids": token_ids, "logprobs": logprobs, "finish_reason": reason}
        engine = Scripted(lambda good, change=change: [dataclasses.replace(good[0], **change), *good[1:]])
        engine.is_stopping = lambda: True  # type: ignore[method-assign]
        is_good = (
            min(token_ids) >= 0
            and max(token_ids) < VOCAB
            and max(logprobs) <= 0
            and not {END, 2} & set(token_ids[:-1])
            and (
                change["finish_reason"] == "abort" or (token_ids[-1] in (END, 2)) == (change["finish_reason"] == "stop")
            )
        )
        if change["finish_reason"] == "abort" and is_good:
            continue  # nothing asked for it, and the loop would wait for the rest
        with contextlib.nullcontext() if is_good else pytest.raises(EngineFault):
            run_loop(engine)


ENGINE = PluginCall(Scripted(), "update_weights")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_report(ENGINE, None, 3), "must return a SyncReport; it returned NoneType None"),
        (lambda: check_report(ENGINE, SyncReport(1, 1, 1, 0.0, 2), 3), "report policy version 3; it reported 2"),
        (lambda: check_stats(ENGINE, {"a": "fast"}, frozenset()), "a number as metric 'a'; it returned str 'fast'"),
        (lambda: check_stats(ENGINE, {"restarts": 1.0}, frozenset({"restarts"})), "'restarts', which rlplug measures"),
        (lambda: check_stats(ENGINE, [1.0], frozenset()), "metrics as a mapping of names to numbers"),
    ],
)
def test_an_engine_that_reports_wrongly(call: Any, words: str) -> None:
    with pytest.raises(RunError, match=re.escape(words)):
        call()


# ---- algorithms ---------------------------------------------------------------------------------------------------


def rows(num_sequences: int = 2) -> StepBatch:
    """Sequences of 3 and 4 tokens, of which the first is the prompt's."""
    lengths = np.array([3, 4][:num_sequences], np.int64)
    size = int(lengths.sum())
    response = np.ones(size, np.bool_)
    response[lengths.cumsum() - lengths] = False
    return StepBatch(
        lengths=lengths,
        per_sequence={
            "rewards": np.zeros(num_sequences, np.float32),
            "reward_valid": np.ones(num_sequences, np.bool_),
            "group_index": np.zeros(num_sequences, np.int64),
            "truncated": np.zeros(num_sequences, np.bool_),
        },
        per_token={
            "input_ids": np.arange(size, dtype=np.int32),
            "response_mask": response,
            "rollout_logprobs": np.zeros(size, np.float32),
            "policy_versions": np.full(size, VERSION, np.int32),
        },
        pad_token_id=0,
    )


class Gives(Algorithm):
    """Returns what it was made with."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def advantages(self, batch: StepBatch) -> Any:
        return self.found

    def loss(self, micro_batch: Any, logprobs: Any, entropy: Any, denominators: Any) -> Any:
        return self.found


NAN = float("nan")
ON_PROMPT = torch.tensor([[0.5, 1, 1, 0], [0, 1, 1, 1.0]])
ALL = torch.ones(2, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (torch.zeros(2), "must return rlplug.interfaces.Advantages; it returned Tensor"),
        (Advantages(None), "advantages as float32 [2] or [2, 4] on the CPU; it returned NoneType None"),
        (Advantages([0.0, 0.0]), "advantages as float32 [2] or [2, 4] on the CPU; it returned list"),
        (Advantages(torch.zeros(3)), "advantages as float32 [2] or [2, 4] on the CPU; it returned float32 [3]"),
        (Advantages(torch.zeros(2, 3)), "it returned float32 [2, 3]"),
        (Advantages(torch.zeros(2, dtype=torch.int64)), "it returned int64 [2]"),
        (Advantages(torch.zeros(2, dtype=torch.float64)), "it returned float64 [2]"),
        (Advantages(torch.zeros(2, device="meta")), "it returned float32 [2] on meta"),
        (Advantages(torch.tensor([0.0, NAN])), "finite advantages; it returned nan in sequence 1"),
        (Advantages(ON_PROMPT), "0 where response_mask is false; it returned 0.5 at token 0 of sequence 0"),
        (Advantages(torch.zeros(2), torch.zeros(2)), "returns as float32 [2, 4] on the CPU; it returned float32 [2]"),
        (Advantages(torch.zeros(2), torch.full((2, 4), torch.inf)), "finite returns; it returned inf in sequence 0"),
        (Advantages(torch.zeros(2), None, ALL), "fewer tokens or as many; it set response_mask of 2 tokens"),
        (Advantages(torch.zeros(2), None, torch.zeros(2)), "response_mask as bool [2] or [2, 4]"),
        (Advantages(torch.zeros(2), metrics={"a": "b"}), "a number as metric 'a'; it returned str 'b'"),
        (Advantages(torch.zeros(2), metrics={1: 1.0}), "with printable text; it returned a metric named int 1"),
        (Advantages(torch.zeros(2), metrics=[1.0]), "metrics as a mapping of names to numbers"),
    ],
)
def test_advantages_that_cannot_train(found: Any, words: str) -> None:
    with pytest.raises(RunError) as error:
        compute_advantages(Gives(found), rows(), list)
    assert str(error.value).startswith("Gives.advantages in ")
    assert words in str(error.value), str(error.value)


def test_advantages_that_can_train_are_taken() -> None:
    fewer = torch.tensor([[False, True, False, False], [False, True, True, True]])
    result = Advantages(torch.where(fewer, 2.0, 0.0), torch.zeros(2, 4), fewer, {"a/b": np.float32(1)})  # type: ignore[dict-item]
    batch, metrics = compute_advantages(Gives(result), rows(), list)
    assert batch.per_token["response_mask"].tolist() == [False, True, False, False, True, True, True]
    assert metrics == {"a/b": 1.0}
    empty, _ = compute_advantages(Gives(Advantages(torch.zeros(0))), rows(0), list)
    assert empty.num_sequences == 0


LOSS = torch.ones((), requires_grad=True) * 2
ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (LOSS, "must return rlplug.interfaces.LossOutput; it returned Tensor"),
        (LossOutput(2.0), "a loss that is a float32 scalar; it returned float 2.0"),  # type: ignore[arg-type]
        (LossOutput(LOSS.double()), "a float32 scalar; it returned float64 []"),
        (LossOutput(LOSS[None]), "a float32 scalar; it returned float32 [1]"),
        (LossOutput(LOSS.detach()), "a loss with a gradient; it returned one that depends on no weight"),
        (LossOutput(LOSS, {"a": 1.0}), "metrics that are scalar tensors on cpu; it returned float 1.0 as 'a'"),  # type: ignore[dict-item]
        (LossOutput(LOSS, {"a": torch.ones(2)}), "it returned float32 [2] on cpu as 'a'"),
        (LossOutput(LOSS, {}, {"a": torch.ones((), device="meta")}), "maxima that are scalar tensors on cpu"),
        (LossOutput(LOSS, {"loss": ONE}), "names of their own; it returned 'loss'"),
        (LossOutput(LOSS, {"policy/grad_norm": ONE}), "names of their own; it returned 'policy/grad_norm'"),
        (LossOutput(LOSS, {"a": ONE}, {"a": ONE}), "names of their own; it returned 'a'"),
        (LossOutput(LOSS, None), "metrics as a mapping; it returned NoneType None"),  # type: ignore[arg-type]
    ],
)
def test_losses_that_cannot_train(found: Any, words: str) -> None:
    with pytest.raises(RunError, match=re.escape(words)):
        check_loss(PluginCall(Gives(found), "loss"), found)


def test_micro_batches_with_other_metrics() -> None:
    with pytest.raises(RunError, match="the same metrics for every micro-batch; it returned 'b' for some alone"):
        check_same_names(PluginCall("X.loss"), [{"a": ONE}, {"a": ONE, "b": ONE}])


@pytest.mark.parametrize(
    ("chosen", "words"),
    [(None, "a list of samples; it returned NoneType"), ([1], "a list of samples; it returned list")],
)
def test_a_selection_of_no_samples(chosen: Any, words: str) -> None:
    with pytest.raises(RunError, match=words):
        check_selection(PluginCall("X.select"), [], chosen)


# ---- hooks --------------------------------------------------------------------------------------------------------

SPEC, IMPL = pluggy.HookspecMarker("t"), pluggy.HookimplMarker("t")


def call_hook(name: str, edit: Any, value: Any) -> Any:
    """Return what a hook gives that a plugin wraps: ``edit`` makes its result of the core's, ``value``."""
    specs, core, plugin = ModuleType("specs"), ModuleType("core"), ModuleType("plugin")

    def spec(given): ...  # type: ignore[no-untyped-def]
    def inner(given):  # type: ignore[no-untyped-def]
        return given

    def wrapper(given):  # type: ignore[no-untyped-def]
        return edit((yield))

    for module, function, marker in ((specs, spec, SPEC(firstresult=True)), (core, inner, IMPL)):
        setattr(module, name, marker(function))
    wrapper.__name__ = wrapper.__qualname__ = name
    setattr(plugin, name, IMPL(wrapper=True)(wrapper))
    manager = pluggy.PluginManager("t")
    manager.add_hookspecs(specs)
    for module in (core, plugin):
        manager.register(module)
    for implementation in getattr(manager.hook, name).get_hookimpls():
        is_wrapper = bool(implementation.wrapper)
        implementation.function = HookCosts().timed("p", name, implementation.function, is_wrapper, is_wrapper)
    return getattr(manager.hook, name)(given=value)


def other_dtype(batch: StepBatch) -> StepBatch:
    return batch.replace(advantages=torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda batch: None, "must return what its yield gives, or replace(...) of it; it returned NoneType None"),
        (lambda batch: rows(1), "it returned 1 other rows for 2"),
        (lambda batch: batch.replace(advantages=None), "keep the tensors of the batch; it removed 'advantages'"),
        (other_dtype, "return 'advantages' as float32; it returned float64"),
        (lambda batch: batch.replace(advantages=torch.full((2,), torch.nan)), "finite advantages"),
        (lambda batch: batch.replace(input_ids=torch.zeros(2, 4, dtype=torch.int32)), "leave 'input_ids' as it is"),
        (lambda batch: batch.replace(response_mask=ALL), "train on fewer tokens or as many"),
    ],
)
def test_a_batch_that_a_wrapper_spoils(edit: Any, words: str) -> None:
    with pytest.raises(RunError) as error:
        call_hook("rlplug_prepare_batch", edit, rows().replace(advantages=torch.ones(2)))
    assert str(error.value).startswith("rlplug_prepare_batch in ")
    assert words in str(error.value), str(error.value)


def test_a_wrapper_may_edit_the_batch() -> None:
    batch = rows().replace(advantages=torch.ones(2))
    edited = call_hook("rlplug_prepare_batch", lambda batch: batch.replace(advantages=torch.zeros(2, 4)), batch)
    assert not edited.per_token["advantages"].any()


def test_a_loss_that_a_wrapper_spoils() -> None:
    with pytest.raises(RunError, match=r"rlplug_compute_loss .* a loss with a gradient"):
        call_hook("rlplug_compute_loss", lambda output: LossOutput(output.loss.detach()), LossOutput(LOSS))


def test_metrics_that_take_a_name() -> None:
    """``reward/mean: 42`` of a plugin was believed."""
    metrics, hook = MetricsOfStep(), PluginCall("rlplug_after_update of some-plugin 1.0")
    metrics |= {"reward/mean": 0.5}
    metrics.add(hook, {"own": 1})
    with pytest.raises(RunError, match=r"some-plugin 1.0 must give .*; it returned 'reward/mean', which is another"):
        metrics.add(hook, {"reward/mean": 42})
    with pytest.raises(RunError, match=r"some-plugin 1.0 must give .*; it returned 'own', which is another"):
        metrics |= {"own": 2.0}
    assert metrics == {"reward/mean": 0.5, "own": 1.0}
    with pytest.raises(RunError, match="it returned list"):
        read_metrics(hook, {"a": [1.0]})


# ---- trainers and optimizations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_effects(PluginCall("X.effects"), None), "a list of Effect, each with a description"),
        (lambda: check_effects(PluginCall("X.effects"), ["replaced"]), "a list of Effect, each with a description"),
        (lambda: check_effects(PluginCall("X.effects"), [Effect("")]), "a list of Effect, each with a description"),
        (lambda: check_network(PluginCall("X.empty_network"), None), "return a torch.nn.Module"),
        (
            lambda: check_network(PluginCall("X.e"), nn.Linear(1, 1)),
            "the meta device; it returned weight as float32",
        ),
    ],
)
def test_models_that_cannot_train(call: Any, words: str) -> None:
    with pytest.raises(RunError, match=re.escape(words)):
        call()


# ---- state of the process, exceptions, calls that hang -------------------------------------------------------------


@pytest.fixture
def same_process() -> Any:
    """Undo what a fault leaves."""
    rng, state = torch.get_rng_state(), ProcessState.now()
    process_state._SAID.clear()
    yield
    torch.set_default_dtype(state.default_dtype)
    torch.set_grad_enabled(state.gradients)
    torch.set_num_threads(state.num_threads)
    torch.set_rng_state(rng)
    signal.signal(signal.SIGTERM, state.terminate)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            lambda: torch.set_default_dtype(torch.float64),
            "default dtype at torch.float32; it left torch.float64",
        ),
        (lambda: torch.set_grad_enabled(False), "leave torch.is_grad_enabled() at True; it left False"),
    ],
)
def test_state_that_spoils_later_steps_is_an_error(fault: Any, words: str, same_process: Any) -> None:
    with pytest.raises(RunError, match=re.escape(words)), watched(PluginCall(Scripted(), "generate")):
        fault()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "torch.get_num_threads()"),
        (lambda: torch.manual_seed(torch.initial_seed() ^ 1), "the seed of torch's global generator"),
        (lambda: signal.signal(signal.SIGTERM, lambda *_: None), "the handler of SIGTERM"),
    ],
)
def test_other_state_is_said_once(fault: Any, words: str, same_process: Any) -> None:
    for is_first in (True, False):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with watched(PluginCall(Scripted(), "generate")):
                fault()
        assert [words in str(each.message) and "Scripted.generate" in str(each.message) for each in said] == [
            True
        ] * is_first


def test_drawing_random_numbers_is_no_fault(same_process: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watched(PluginCall(Scripted(), "generate")):
            torch.rand(3)


def test_an_exception_says_whose_it_is() -> None:
    def fail() -> None:
        raise KeyError("x0/1/0/0")

    try:
        run_loop(Scripted(lambda good: fail()))
    except KeyError as error:
        call = failed_call(error)
    assert str(call).startswith("Scripted.generate in ")
    with pytest.raises(ZeroDivisionError) as of_core:
        1 / 0  # noqa: B018
    assert failed_call(of_core.value) is None


def test_a_call_that_runs_has_a_name() -> None:
    seen = []
    run_loop(Scripted(lambda good: seen.append(running_call(__import__("sys")._getframe())) or good))
    assert str(seen[0]).startswith("Scripted.generate in ")


def test_the_distribution_of_a_plugin_is_named() -> None:
    from rlplug_algos.grpo import GRPO

    assert re.fullmatch(r"GRPO\.loss of rlplug-algos [\w.]+", str(PluginCall(GRPO(), "loss")))


# ---- the mismatch gate --------------------------------------------------------------------------------------------


def mismatch(gate: MismatchGate, difference: float, step: int = 1, version: int = VERSION) -> dict[str, float]:
    batch = rows()
    trainer = torch.from_numpy(batch.per_token["rollout_logprobs"] + np.float32(difference))
    return gate.compare(batch, trainer, version, step, is_first_step=step == 1)


def gate_of(policy: PolicySpec = POLICY, every_step: bool = True, **options: Any) -> MismatchGate:
    limit = limit_of(policy, CPU, SamplingParams(LIMIT))
    return MismatchGate("Engine", limit, limit, every_step, options.get("has_old_tokens", False))


@pytest.mark.parametrize(("fault", "step"), [(1e-3, 3), (0.06, 1), (0.047, 2)])
def test_the_gate_stops_float32_at_each_step(fault: float, step: int) -> None:
    """A stale layer, a dropped weight and skipped small changes: each trained on under a limit of 0.1."""
    gate = gate_of()
    for sound in range(1, step):
        mismatch(gate, 5e-7, sound)
    with pytest.raises(RunError, match=rf"step {step}: Engine and the trainer disagree .* gate 0.0001\."):
        mismatch(gate, fault, step)


def test_a_jump_against_the_runs_own_history_is_said_once() -> None:
    gate = gate_of(dataclasses.replace(POLICY, dtype=torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, sound in enumerate((0.004, 0.003, 0.005, 0.004, 0.009, 0.004), start=1):
            mismatch(gate, sound, step)
    with pytest.warns(UserWarning, match="step 7: .* 0.047, maximum 0.047; the median of the last 6 steps is 0.004"):
        mismatch(gate, 0.047, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mismatch(gate, 0.05, 8)


def test_few_tokens_of_the_newest_version_are_no_gate() -> None:
    gate = gate_of(has_old_tokens=True)
    assert mismatch(gate, 0.5)["mismatch/mean"] == pytest.approx(0.5)
    assert mismatch(gate, 0.5, version=VERSION + 1) == {}


@pytest.mark.parametrize(
    ("dtype", "device", "sampling", "limit"),
    [
        (torch.float32, "cpu", {}, 1e-4),
        (torch.float32, "cpu", {"temperature": 0.1}, 1e-3),
        (torch.float32, "cpu", {"top_p": 0.9}, 1e-2),
        (torch.float32, "cuda", {}, 1e-2),
        (torch.bfloat16, "cpu", {"temperature": 0.1}, 0.1),
    ],
)
def test_the_limit_follows_from_the_dtype(dtype: torch.dtype, device: str, sampling: Any, limit: float) -> None:
    policy = dataclasses.replace(POLICY, dtype=dtype)
    assert limit_of(policy, torch.device(device), SamplingParams(4, **sampling)) == pytest.approx(limit)


def test_capabilities_without_logprobs() -> None:
    """An engine that says that it has no logprobs may return NaN."""
    engine = Scripted(None, "logprobs", (NAN, NAN, NAN))
    engine.capabilities = EngineCapabilities(logprobs=False)
    assert len(run_loop(engine)) == 3
