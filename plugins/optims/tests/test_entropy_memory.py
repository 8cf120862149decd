"""Logprobs in chunks and entropies with recomputation: the same numbers, and a lower peak."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from optims_models import tiny_model
from rlplug_optims import EntropyCheckpointing, EntropyChunking
from torch.utils._python_dispatch import TorchDispatchMode

from rlplug.errors import ConfigError
from rlplug.models.lm_head import LogprobRequest, lm_head_of
from rlplug.types import SamplingParams

ROWS, VOCABULARY = 250, 512
SWITCHES = {"chunks": lambda: EntropyChunking(chunk_size=8), "recomputed": EntropyCheckpointing}
CHOICES = [[], *itertools.permutations(SWITCHES, 1), *itertools.permutations(SWITCHES, 2)]
SAMPLINGS = {"all": SamplingParams(temperature=0.7), "some": SamplingParams(temperature=0.7, top_k=9, top_p=0.8)}


def lm_head_with(names):
    model = tiny_model()
    for name in names:
        SWITCHES[name]().before_shard(model)
    return lm_head_of(model)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(ROWS, VOCABULARY, generator=generator) * 3).to(dtype)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    excluded = torch.rand(ROWS, VOCABULARY, generator=generator) < torch.rand(ROWS, 1, generator=generator) - 0.3
    excluded[torch.arange(ROWS), targets] = False
    excluded[0] = torch.arange(VOCABULARY) != targets[0]  # a single token is left
    return logits.masked_fill(excluded, -torch.inf).requires_grad_(), targets


def kept_by_sampling(probabilities, sampling):
    """Return which tokens top-k and top-p leave, row by row."""
    kept = torch.zeros_like(probabilities, dtype=torch.bool)
    for row, of_row in enumerate(probabilities):
        order = of_row.argsort(descending=True)[: sampling.top_k or len(of_row)]
        left = of_row[order] / of_row[order].sum()
        kept[row, order[left.cumsum(0) - left < sampling.top_p]] = True
    return kept


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("names", CHOICES)
def test_values_and_gradients_are_those_of_torch(names, sampling):
    logits, targets = inputs()
    sampling = SAMPLINGS[sampling]
    result = lm_head_with(names).from_logits(logits, LogprobRequest(targets, sampling, "gradient"))
    distribution = torch.distributions.Categorical(logits=logits.double() / sampling.temperature)
    chosen = torch.nn.functional.one_hot(targets, VOCABULARY).bool()
    kept = kept_by_sampling(distribution.probs.detach(), sampling) | chosen
    mass = (distribution.probs.detach() * kept).sum(-1).log()
    expected = (distribution.log_prob(targets), distribution.entropy(), distribution.log_prob(targets).detach() - mass)
    for values, wanted in zip(
        (result.tokens.logprobs, result.entropy, result.tokens.sampled_logprobs), expected, strict=True
    ):
        torch.testing.assert_close(values.double(), wanted, rtol=1e-5, atol=1e-5)
    places = torch.arange(ROWS)
    losses = [
        (logprobs * places.sin() + entropies * places.cos()).sum()
        for logprobs, entropies in ((result.tokens.logprobs, result.entropy), expected[:2])
    ]
    found, wanted = (torch.autograd.grad(loss, logits)[0] for loss in losses)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Peak(TorchDispatchMode):
    """Notes how many bytes of storages are there at a time."""

    def __init__(self):
        super().__init__()
        self.sizes, self.bytes = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.sizes:
                self.sizes[key] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self.sizes.pop, key)
        self.bytes = max(self.bytes, sum(self.sizes.values()))
        return result


def peak_of(names, entropy_mode):
    """Return the peak of an update (of a forward pass without gradients for ``none``), in float32 [K, V].

    Logits are in bfloat16, 0.5 of that, and come from a product, as a model's do.
    """
    source, targets = inputs(torch.bfloat16)
    lm_head, request = lm_head_with(names), LogprobRequest(targets, SAMPLINGS["all"], entropy_mode)
    with Peak() as peak, torch.set_grad_enabled(entropy_mode != "none"):
        result = lm_head.from_logits(source * 1, request)
        if entropy_mode != "none":
            loss = result.tokens.logprobs.sum() + (result.entropy.sum() if result.entropy.requires_grad else 0)
            loss.backward()
    return peak.bytes / (ROWS * VOCABULARY * 4)


def test_chunks_lower_the_peak():
    assert peak_of([], "none") > 2.4
    assert peak_of(["chunks"], "none") < 0.75
    assert peak_of([], "value") > 3.9
    assert peak_of(["chunks"], "value") < 1.75


def test_recomputation_lowers_the_peak_of_an_entropy_with_gradients():
    assert peak_of([], "gradient") > 4.9
    assert 2.5 < peak_of(["chunks"], "gradient") < 2.8
    for names in itertools.permutations(SWITCHES):
        assert peak_of(names, "gradient") < 1.75


def test_nothing_to_recompute_is_refused():
    logits, targets = inputs()
    lm_head = lm_head_with(["recomputed"])
    with pytest.raises(ConfigError, match="loss has no entropy"):
        lm_head.from_logits(logits, LogprobRequest(targets, SamplingParams(), "value"))
    with torch.no_grad():
        lm_head.from_logits(logits.detach(), LogprobRequest(targets, SamplingParams(), "value"))


def test_effects_say_what_is_set():
    model, chunks, recomputed = tiny_model(), SWITCHES["chunks"](), SWITCHES["recomputed"]()
    assert chunks.effects() == recomputed.effects() == []
    chunks.before_shard(model)
    recomputed.before_shard(model)
    assert [effect.description for effect in chunks.effects()] == ["logprobs computed from logits 8 tokens at a time"]
    assert [effect.description for effect in recomputed.effects()] == ["entropies recomputed in the backward pass"]


def test_a_chunk_has_tokens():
    with pytest.raises(ConfigError, match="chunk_size is 0"):
        EntropyChunking(chunk_size=0)
