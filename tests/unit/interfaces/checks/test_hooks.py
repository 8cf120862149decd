"""Faults of plugins' hooks: each is refused where it comes in, by one message that names the plugin."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pluggy
import pytest
import torch
from unit.interfaces.checks.seam_cases import LOSS, rows

from rlplug.errors import RunError
from rlplug.interfaces import LossOutput
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.metrics import MetricsOfStep, read_metrics
from rlplug.observability.hook_costs import HookCosts
from rlplug.types import StepBatch

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
        (lambda batch: batch.with_tokens(input_ids=torch.zeros(7, dtype=torch.int32)), "leave 'input_ids' as it is"),
        (
            lambda batch: batch.with_tokens(response_mask=torch.ones(7, dtype=torch.bool)),
            "train on fewer tokens or as many",
        ),
    ],
)
def test_a_batch_that_a_wrapper_spoils(edit: Any, words: str) -> None:
    with pytest.raises(RunError) as error:
        call_hook("rlplug_prepare_batch", edit, rows().with_advantages(torch.ones(2)))
    assert str(error.value).startswith("rlplug_prepare_batch in ")
    assert words in str(error.value), str(error.value)


def test_a_wrapper_may_edit_the_batch() -> None:
    batch = rows().with_advantages(torch.ones(2))
    edited = call_hook("rlplug_prepare_batch", lambda batch: batch.replace(advantages=torch.zeros(2)), batch)
    assert not edited.tokens.advantages.any()


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
