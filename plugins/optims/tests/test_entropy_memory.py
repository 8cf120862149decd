"""Entropies in chunks and with recomputation: the same numbers, from tensors that are smaller or shorter-lived."""

from __future__ import annotations

import itertools

import pytest
import torch
from optims_models import tiny_model
from rlplug_optims import EntropyCheckpointing, EntropyChunking

from rlplug.errors import ConfigError
from rlplug.scoring import scorer_of

ROWS, VOCABULARY = 64, 512
SWITCHES = {"chunks": lambda: EntropyChunking(chunk_size=8), "recomputed": EntropyCheckpointing}
CHOICES = [[], *itertools.permutations(SWITCHES, 1), *itertools.permutations(SWITCHES, 2)]


def entropy_of(names):
    model = tiny_model()
    for name in names:
        SWITCHES[name]().before_shard(model)
    return scorer_of(model).entropy


def logits_of(seed=0):
    return (torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3).requires_grad_()


@pytest.mark.parametrize("names", CHOICES)
def test_values_and_gradients_are_those_of_torch(names):
    logits, weights = logits_of(), torch.arange(ROWS).cos()
    entropies = entropy_of(names)(logits)
    expected = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(entropies.double(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad((entropies * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def saved_elements(names):
    """Return how many elements, the logits' own aside, are kept for the backward pass."""
    logits = logits_of()
    own, saved = logits.untyped_storage().data_ptr(), {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() != own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        entropy_of(names)(logits)
    return sum(tensor.numel() for tensor in saved.values())


def largest_intermediate(names, with_gradient):
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not function.is_view:
                sizes.append(result.numel())
            return result

    logits = logits_of()
    with torch.set_grad_enabled(with_gradient), Sizes():
        entropy_of(names)(logits)
    return max(sizes)


def test_chunks_bound_what_the_forward_pass_makes():
    assert largest_intermediate([], with_gradient=False) >= ROWS * VOCABULARY
    assert largest_intermediate(["chunks"], with_gradient=False) <= 8 * VOCABULARY
    assert largest_intermediate(["recomputed", "chunks"], with_gradient=True) <= 8 * VOCABULARY


def test_recomputation_keeps_nothing_but_the_logits():
    assert saved_elements([]) >= ROWS * VOCABULARY
    assert saved_elements(["chunks"]) >= ROWS * VOCABULARY
    for names in (["recomputed"], ["chunks", "recomputed"], ["recomputed", "chunks"]):
        assert saved_elements(names) == 0


def test_effects_say_what_is_set():
    model, chunks, recomputed = tiny_model(), SWITCHES["chunks"](), SWITCHES["recomputed"]()
    assert chunks.effects() == recomputed.effects() == []
    chunks.before_shard(model)
    recomputed.before_shard(model)
    assert [effect.description for effect in chunks.effects()] == ["entropies computed 8 tokens at a time"]
    assert [effect.description for effect in recomputed.effects()] == ["entropies recomputed in the backward pass"]


def test_a_chunk_has_tokens():
    with pytest.raises(ConfigError, match="chunk_size is 0"):
        EntropyChunking(chunk_size=0)
