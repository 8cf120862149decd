"""``HooksConformance``: checks that the hooks of every plugin must pass."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rlplug.errors import PluginError, brief, describe
from rlplug.hookspecs import ENTRY_POINT_GROUP, WRAPPER_ONLY
from rlplug.interfaces import Denominators, LossOutput, SyncReport
from rlplug.interfaces.plain_values import as_number
from rlplug.plugin_checks import REGISTRATION_PREFIX, PluginRecord, import_checked
from rlplug.registry import Registry
from rlplug.timeouts import CallError
from rlplug.types import ONE_RANK, StepBatch, StepStatistics
from rlplug_devkit.algorithms.passes import Learned, difference, is_close
from rlplug_devkit.algorithms.steps import Row, make_rows, on_ranks, shares_of
from rlplug_devkit.hooks.calls import INNER, METRICS, VERSION, CoreFailure, Hooks, prepared
from rlplug_devkit.process_state import changes_since, process_state
from rlplug_devkit.tasks.calls import NOT_COMPARED, TaskChecks, same_random_generators
from rlplug_devkit.tasks.tiny_run import write_task

TOLERANCE = 1e-4
NUM_RANKS = 3
RETURNS = (SyncReport, StepBatch, LossOutput)
"""What the hooks that a plugin may wrap return."""


class HooksConformance(TaskChecks):
    """All checks of a plugin's hooks, to subclass in a test module that returns its module from ``make_plugin``.

    Hooks are called as a run calls them, around a core of the kit's own: on one rank and on three, of which one has no
    completions. A hook that the plugin does not have passes. What a hook is for belongs into tests beside them.

    Example::

        class TestMyHooks(HooksConformance):
            def make_plugin(self) -> ModuleType:
                return rlplug_my_hooks.plugin
    """

    _process: ClassVar[dict[str, Any]] = {}
    """State of the process before the first check."""

    @pytest.fixture(autouse=True)
    def _first_state(self) -> None:
        type(self)._process = self._process or process_state()

    def make_plugin(self) -> ModuleType:
        """Return the module behind the plugin's entry point."""
        raise NotImplementedError(f"{type(self).__name__}.make_plugin must return the plugin's module")

    def _subject(self) -> str:
        return self.make_plugin().__name__

    def _implements(self, hook: str) -> bool:
        return getattr(getattr(self.make_plugin(), hook, None), "rlplug_impl", None) is not None

    def _hooks(self, with_inner: bool = False) -> Hooks:
        return Hooks(self.make_plugin(), with_inner)

    def _rows(self) -> list[Row]:
        return make_rows(0, group_size=4, max_new_tokens=8)

    def _wrapped(self, hooks: Hooks) -> dict[str, Callable[[], Any]]:
        """Return a call of each hook that a plugin may wrap."""
        micro_batch = prepared(self._rows()).tokens
        logprobs = torch.full(micro_batch.token_ids.shape, -0.5)
        return {
            "rlplug_sync_weights": hooks.sync_weights,
            "rlplug_prepare_batch": lambda: hooks.prepare_batch(self._rows()),
            "rlplug_compute_loss": lambda: hooks.compute_loss(micro_batch, logprobs, Denominators(96, 24)),
        }

    def _observed(self, hooks: Hooks) -> dict[str, Callable[[], list[Any]]]:
        return {
            "rlplug_after_rollout": lambda: hooks.after_rollout(self._rows()),
            "rlplug_after_update": hooks.after_update,
        }

    def _result(self, call: Callable[[], Any]) -> Any:
        """Return what a call returns; skip the check where it raises, which is a check of its own."""
        try:
            return call()
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)

    # ---- the module ------------------------------------------------------------------------------------------------

    def test_a_run_takes_the_plugin(self) -> None:
        """Its API range, its declared order, and names, arguments and marks of its hooks."""
        name = self.make_plugin().__name__
        record = PluginRecord(name, name, "0")
        try:
            import_checked(EntryPoint(name, name, ENTRY_POINT_GROUP), record)
        except PluginError as problem:
            pytest.fail(f"a run refuses the plugin: {problem}", pytrace=False)

    def test_registrations_can_be_repeated(self) -> None:
        """A process that loads its plugins again, as a notebook does, registers the same classes."""
        names = []
        for _ in range(2):
            registry = Registry()
            registry.set_owner("kit")
            try:
                for hook, function in sorted(vars(self.make_plugin()).items()):
                    if hook.startswith(REGISTRATION_PREFIX):
                        function(registry=registry)
            except Exception as error:  # noqa: BLE001 - the plugin's own
                pytest.fail(f"{hook} raised {describe(error)}.", pytrace=False)
            names.append([f"{each.kind}/{each.name}" for each in registry.by_distribution().get("kit", [])])
        assert names[0] == names[1], f"hooks registered {names[0]}, and when they were called again {names[1]}."

    # ---- calls -----------------------------------------------------------------------------------------------------

    def test_hooks_can_be_called(self) -> None:
        hooks = self._hooks()
        for hook, call in {**self._wrapped(hooks), **self._observed(hooks)}.items():
            try:
                call()
            except Exception as error:  # noqa: BLE001 - the plugin's own
                pytest.fail(
                    f"{hook} raised {describe(error)}. A wrapper yields once and returns a result; no hook may count "
                    "on a step, a group or a metric being there.",
                    pytrace=False,
                )

    def test_wrappers_return_what_the_hook_returns(self) -> None:
        kinds = {
            "rlplug_sync_weights": SyncReport,
            "rlplug_prepare_batch": StepBatch,
            "rlplug_compute_loss": LossOutput,
        }
        for hook, call in self._wrapped(self._hooks()).items():
            found = self._result(call)
            assert isinstance(found, kinds[hook]), (
                f"{hook} returned {brief(found)}, and not a {kinds[hook].__name__}: return what the yield gives, or "
                "an edited copy of it."
            )
        batch = self._result(lambda: self._hooks().prepare_batch(self._rows()))
        assert batch.lengths.tolist() == prepared(self._rows()).lengths.tolist(), (
            "rlplug_prepare_batch returned other rows: to leave some out, make their response_mask false."
        )

    def test_wrappers_call_the_core_once(self) -> None:
        hooks = self._hooks()
        for hook, call in self._wrapped(hooks).items():
            self._result(call)
            found = hooks.core.calls[hook]
            assert found == 1, f"around {hook} the core was called {found} times instead of once."
        assert hooks.core.tensors == ["a", "b", "c"], (
            f"of the tensors a, b and c the engine got {hooks.core.tensors}: buckets can be iterated once, and only by "
            "the engine."
        )

    def test_wrappers_nest(self) -> None:
        """What another plugin's wrapper within did reaches the outside."""
        calls = self._wrapped(self._hooks(with_inner=True))
        report, batch, loss = (self._result(call) for call in calls.values())
        advice = "Build the result from what the yield gives: dataclasses.replace(result, ...), batch.replace(...)."
        assert report.policy_version == VERSION + 100, (
            f"rlplug_sync_weights lost what an inner wrapper reported. {advice}"
        )
        assert batch.tokens.returns is not None, f"rlplug_prepare_batch lost what an inner wrapper put in. {advice}"
        assert INNER in loss.metrics, f"rlplug_compute_loss lost an inner wrapper's metric. {advice}"

    def test_errors_pass_through_wrappers(self) -> None:
        """And the next call works: the core repeats what failed, such as a sync after an engine was restarted."""
        hooks = self._hooks()
        calls = self._wrapped(hooks)
        for hook, call in calls.items():
            expected = self._result(call)
            hooks.core.fails = True
            try:
                returned = call()
                pytest.fail(f"the core failed within {hook}, and the plugin returned {brief(returned)}.", pytrace=False)
            except CoreFailure:
                pass
            except Exception as error:  # noqa: BLE001 - the plugin's own
                pytest.fail(f"the core failed within {hook}, and the plugin raised {describe(error)}.", pytrace=False)
            hooks.core.fails = False
            try:
                again = call()
            except Exception as error:  # noqa: BLE001 - the plugin's own
                pytest.fail(f"after a failure, {hook} raises {describe(error)}: restore in finally.", pytrace=False)
            assert type(again) is type(expected), f"after a failure, {hook} returns {brief(again)}."

    # ---- metrics ---------------------------------------------------------------------------------------------------

    def test_metrics_are_numbers(self) -> None:
        for hook, call in self._observed(self._hooks()).items():
            for found in self._result(call):
                if found is None:
                    continue
                assert isinstance(found, Mapping), f"{hook} returned {brief(found)}: return a mapping, or None."
                for name, value in found.items():
                    assert isinstance(name, str), f"{hook} returned a metric named {name!r}: give text."
                    try:
                        as_number(value)
                    except CallError as problem:
                        pytest.fail(f"{hook} returned {name} = {problem}.", pytrace=False)

    def test_metrics_have_names_of_their_own(self) -> None:
        known = dict.fromkeys(METRICS, "the core")
        for hook, call in self._observed(self._hooks()).items():
            for found in self._result(call):
                for name in found or ():
                    assert name not in known, f"{hook} returned {name}, which {known[name]} has: name it my-plugin/..."
                known |= dict.fromkeys(found or (), hook)
        (loss,) = [self._result(call) for hook, call in self._wrapped(self._hooks()).items() if hook.endswith("loss")]
        for name in set(loss.metrics) - {"kit/objective"}:
            assert name not in known, f"rlplug_compute_loss returned {name}, a metric of {known[name]}."

    # ---- ranks and micro-batches -----------------------------------------------------------------------------------

    def test_ranks_get_what_one_rank_gets(self) -> None:
        """Ranks have whole groups each, and the last one none."""
        rows = self._rows()
        whole = self._result(lambda: self._hooks().prepare_batch(rows))
        shares, place = shares_of(rows, NUM_RANKS), {id(row): index for index, row in enumerate(rows)}

        def call(rank: int, statistics: StepStatistics) -> StepBatch:
            found: StepBatch = self._hooks().prepare_batch(shares[rank], statistics)
            return found

        try:
            parts = on_ranks(call, NUM_RANKS)
        except threading.BrokenBarrierError:
            pytest.fail("ranks called different methods of batch.step: call them on every rank.", pytrace=False)
        except Exception as error:  # noqa: BLE001 - the plugin's own
            pytest.fail(
                f"rlplug_prepare_batch raised on a rank with a part of the step: {describe(error)}", pytrace=False
            )
        expected_kinds = _kinds(whole)
        for part in parts:
            assert _kinds(part) == expected_kinds, (
                f"rlplug_prepare_batch made {_kinds(part)} of a rank's rows, and {expected_kinds} of all: replace the "
                "same tensors everywhere, on a rank without rows too."
            )
        for mine, part in zip(shares, parts, strict=True):
            expected_part = whole.select([place[id(row)] for row in mine]).tokens.tensors()
            for name, tensor in part.tokens.tensors().items():
                expected = expected_part[name]
                assert is_close(tensor.float(), expected.float(), TOLERANCE), (
                    f"rlplug_prepare_batch made other {name} of a part of the step: numbers over the whole step come "
                    "from batch.step."
                )

    def test_ranks_have_the_same_metrics(self) -> None:
        names = []
        for share in shares_of(self._rows(), NUM_RANKS)[:-1]:  # a rank without samples does not call the hook
            (found,) = self._result(lambda: self._hooks().after_rollout(share)) or [None]  # noqa: B023
            names.append(sorted(found or ()))
        assert all(each == names[0] for each in names), (
            f"rlplug_after_rollout returned the metrics {names} on ranks with different completions: return the same "
            "ones always, such as 0 where nothing was counted."
        )

    def test_arguments_are_left_as_they_were(self) -> None:
        batch = prepared(self._rows(), ONE_RANK)
        kept = copy.deepcopy({**batch.per_sequence, **batch.per_token})
        self._result(lambda: self._hooks().prepare(batch))
        now = {**batch.per_sequence, **batch.per_token}
        changed = [name for name in kept if kept[name].tobytes() != now[name].tobytes()]
        assert not changed, f"rlplug_prepare_batch wrote into {changed} of the batch: edit a copy, batch.replace(...)."
        micro_batch = batch.tokens
        before = {name: tensor.clone() for name, tensor in micro_batch.tensors().items()}
        logprobs = torch.full(micro_batch.token_ids.shape, -0.5)
        self._result(lambda: self._hooks().compute_loss(micro_batch, logprobs, Denominators(96, 24)))
        changed = [name for name, tensor in micro_batch.tensors().items() if not tensor.equal(before[name])]
        assert not changed, f"rlplug_compute_loss wrote into {changed} of the micro-batch, which the next epoch reads."

    def test_micro_batches_add_up(self) -> None:
        step = prepared(self._rows())
        logprobs = -torch.arange(int(step.lengths.sum())) / 100

        def learned(rows: list[int]) -> Learned:
            batch = step.select(rows)
            places = step.tokens_of(np.asarray(rows))[batch.per_token["response_mask"]]
            leaf = logprobs[places].requires_grad_()
            output = self._hooks().compute_loss(batch.tokens, leaf, Denominators(96, 24))
            (gradient,) = torch.autograd.grad(output.loss, leaf)
            whole = torch.zeros_like(logprobs)
            whole[places] = gradient
            metrics = {name: float(value) for name, value in output.metrics.items()}
            nothing = torch.zeros(())
            return Learned(output.loss.detach(), {"logprobs": whole, "entropy": nothing, "values": nothing}, metrics)

        everything = list(range(step.num_sequences))
        expected = self._result(lambda: learned(everything))
        total = self._result(lambda: learned(everything[:5]))
        for first in range(5, len(everything), 5):
            total.add(self._result(lambda: learned(everything[first : first + 5])))  # noqa: B023
        found = difference(total, expected, TOLERANCE)
        assert not found, (
            f"with rlplug_compute_loss, in micro-batches of 5 rows {found}: a loss and its metrics are terms of the "
            "mini-batch's. Divide sums by denominators."
        )

    # ---- what is left behind ---------------------------------------------------------------------------------------

    def test_global_random_generators_are_left_alone(self) -> None:
        hooks = self._hooks()
        with same_random_generators("a hook"):
            for call in {**self._wrapped(hooks), **self._observed(hooks)}.values():
                self._result(call)

    def test_the_process_is_left_as_it_was(self) -> None:
        """After a call that worked, and after one within which the core failed."""
        hooks, handlers = self._hooks(), "signal handlers"
        before = self._process | {handlers: process_state()[handlers]}  # limits of a test's time have one of their own
        for hook, call in {**self._wrapped(hooks), **self._observed(hooks)}.items():
            for hooks.core.fails in (False, True):
                if hooks.core.fails and hook not in WRAPPER_ONLY:
                    continue
                try:
                    call()
                except Exception:  # noqa: BLE001 - a check of its own
                    if not hooks.core.fails:
                        pytest.skip(NOT_COMPARED)
                changed = sorted(changes_since(before))
                assert not changed, f"{hook} changes {changed} of the process, for all others too: restore in finally."
            hooks.core.fails = False

    def test_other_tokenizers_are_left_to_the_core(self, tmp_path: Path) -> None:
        write_task(tmp_path)
        try:
            found = self._hooks().make_tokenizer(str(tmp_path / "model"))
        except Exception as error:  # noqa: BLE001 - the plugin's own
            pytest.fail(
                f"rlplug_make_tokenizer raised {describe(error)} for a folder that is not its own.", pytrace=False
            )
        assert found is None, "rlplug_make_tokenizer made the tokenizer of a folder that AutoTokenizer can load."


def _kinds(batch: StepBatch) -> dict[str, str]:
    """Return dtype and dimensions of each tensor of a batch, by its name."""
    named = {**batch.per_sequence, **batch.per_token}
    return {name: f"{array.dtype} [{'N' if name in batch.per_token else 'B'}]" for name, array in sorted(named.items())}
