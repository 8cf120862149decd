"""Functions by name: advantages and policy losses that :class:`~rlplug_algos.composed.Composed` puts together.

A function of one's own is enough for a loss or an advantage::

    # my_losses.py, beside the YAML file
    import torch
    from rlplug_algos.functions import policy_loss
    from rlplug_algos.policy_losses import token_ratio

    @policy_loss
    def soft_gate(logprobs, batch, temperature=1.05):
        ratio = token_ratio(logprobs, batch.old_logprobs)
        return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * batch.advantages

``--model.algorithm Composed --model.algorithm.policy_loss my_losses.soft_gate`` trains with it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor

from rlplug.errors import ConfigError, PluginError, describe, did_you_mean
from rlplug.interfaces import Advantages
from rlplug.types import Batch, StepBatch
from rlplug_algos.advantages import discounted_returns, group_relative, leave_one_out, token_rewards, whiten
from rlplug_algos.policy_losses import PolicyTerm, cispo_loss, clipped_loss, sequence_ratio, token_ratio

Function = Callable[..., Any]

ADVANTAGES: Final[dict[str, Function]] = {}
"""Functions of a ``StepBatch`` and options, by name. They return a tensor [B] or :class:`Advantages`."""
POLICY_LOSSES: Final[dict[str, Function]] = {}
"""Functions of logprobs [K], a ``Batch`` and options, by name. They return the loss of each token, a tensor [K] or a
:class:`PolicyTerm`."""


def advantage(function: Function) -> Function:
    """Register a function of a ``StepBatch`` as advantages, under its own name."""
    return _register(ADVANTAGES, function, 1)


def policy_loss(function: Function) -> Function:
    """Register a function of logprobs and a ``Batch`` as the policy's loss of each token, under its own name."""
    return _register(POLICY_LOSSES, function, 2)


def bound(key: str, known: Mapping[str, Function], name: str, options: Mapping[str, Any]) -> Function:
    """Return the function of a name, or of ``module.function``, with its options.

    Args:
        key: Option that names it, for messages.
        known: ``ADVANTAGES`` or ``POLICY_LOSSES``.
        name: The function.
        options: Its keyword arguments.

    Raises:
        ConfigError: There is no such function, or it has no such option; the message names the nearest.
    """
    function = known.get(name)
    if function is None and "." in name:
        module, _, attribute = name.rpartition(".")
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"Composed's {key} is {name!r}, which cannot be imported: {describe(error)}.") from error
    if not callable(function):
        hint = did_you_mean(name, known) or f" Give one of {', '.join(sorted(known))}, or module.function."
        raise ConfigError(f"Composed's {key} is {name!r}: there is no such function.{hint}")
    taken = [*inspect.signature(function).parameters][1 if known is ADVANTAGES else 2 :]
    for option in options:
        if option not in taken:
            hint = did_you_mean(option, taken) or f" It takes {', '.join(taken) or 'none'}."
            raise ConfigError(f"Composed's {key}_options have {option!r}, which {name} does not take.{hint}")
    return partial(function, **options)


def _register(known: dict[str, Function], function: Function, num_positional: int) -> Function:
    name = function.__name__
    if len(inspect.signature(function).parameters) < num_positional:
        what = "the batch" if num_positional == 1 else "logprobs and the batch"
        raise PluginError(f"{name} in {function.__module__} must take {what}.")
    if (other := known.get(name)) is not None and other.__module__ != function.__module__:
        raise PluginError(
            f"{name} in {function.__module__} has the name of a function in {other.__module__}: rename it."
        )
    known[name] = function
    return function


# ---- those of the papers ------------------------------------------------------------------------------------------


@advantage
def group(batch: StepBatch, normalize_std: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Return GRPO's advantages: rewards relative to their group."""
    return group_relative(batch.rewards, batch.reward_valid, batch.group_index, normalize_std, epsilon)


@advantage
def others(batch: StepBatch) -> Tensor:
    """Return RLOO's advantages: rewards less the mean of the group's other rewards."""
    return leave_one_out(batch.rewards, batch.reward_valid, batch.group_index)


@advantage
def returns(batch: StepBatch, gamma: float = 1.0) -> Advantages:
    """Return REINFORCE++'s advantages: discounted returns, normalised over the step's tokens."""
    rewards = token_rewards(batch.rewards, batch.num_tokens)
    return Advantages(of_tokens=whiten(discounted_returns(rewards, batch.num_tokens, gamma), batch.step))


@policy_loss
def clipped(
    logprobs: Tensor, batch: Batch, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None
) -> PolicyTerm:
    """Return PPO's clipped loss, of each token's ratio."""
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    ratio = token_ratio(logprobs, batch.old_logprobs)
    return clipped_loss(ratio, batch.advantages, clip_low, clip_high, clip_dual)


@policy_loss
def sequence_clipped(logprobs: Tensor, batch: Batch, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyTerm:
    """Return GSPO's loss: clipped, of the geometric mean of a completion's ratios."""
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    ratio = sequence_ratio(logprobs, batch.old_logprobs, batch, length_normalized=True)
    return clipped_loss(ratio, batch.advantages, clip_low, clip_high)


@policy_loss
def bounded_weight(logprobs: Tensor, batch: Batch, ratio_min: float = 0.0, ratio_max: float = 5.0) -> PolicyTerm:
    """Return CISPO's loss: log-likelihood with the ratio as a bounded weight."""
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    ratio = token_ratio(logprobs, batch.old_logprobs)
    return cispo_loss(logprobs, ratio, batch.advantages, ratio_min, ratio_max)
