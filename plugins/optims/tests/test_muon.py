"""Muon equals torch's own Muon beside torch's AdamW on whole parameters, sharded or not."""

from __future__ import annotations

import pytest
import torch
from fsdp_worker import MUON, NUM_STEPS
from optims_models import set_gradients, tiny_model
from rlplug_optims import Muon
from rlplug_optims.muon import is_block_matrix, orthogonalized

from rlplug.errors import ConfigError


def trained(make_optimizers, num_steps=NUM_STEPS):
    """Return the weights of the tiny Llama after steps with random gradients."""
    model = tiny_model(packed=False)
    optimizers = make_optimizers(model)
    for step in range(num_steps):
        set_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def torchs_own(model):
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    rest = [p for name, p in model.named_parameters() if not (".layers." in name and p.ndim == 2)]
    assert len(matrices) == 4 * 7
    assert len(rest) == 4 * 2 + 3  # norms of the blocks; embeddings, last norm and output layer
    return [
        torch.optim.Muon(matrices, **MUON, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, **MUON, betas=(0.9, 0.95)),
    ]


@pytest.fixture(scope="module")
def expected():
    return trained(torchs_own)


def test_equals_torchs_own(expected):
    actual = trained(lambda model: [Muon(model.named_parameters(), **MUON)])
    initial = tiny_model().state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-6, atol=1e-7)
        assert float((weight - initial[name]).abs().max()) > MUON["lr"]


@pytest.mark.kit
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_sharded_and_resumed_it_is_the_same(world_size, sharded, expected):
    actual = sharded(world_size)["muon"]
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-6, atol=1e-7)


def test_orthogonalisation_keeps_directions_and_evens_out_sizes():
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    for whole in (matrix, matrix.T):
        left, _, right = torch.linalg.svd(whole, full_matrices=False)
        sizes = left.T @ orthogonalized(whole, num_steps=5).float() @ right.T
        assert float(sizes.diagonal().min()) > 0.5
        assert float(sizes.diagonal().max()) < 1.5
        assert float((sizes - sizes.diagonal().diag()).abs().max()) < 0.1


def test_a_step_is_as_large_as_adamws():
    """Both change a weight by about the learning rate: root mean square 0.2 to 0.4 of it, arXiv:2502.16982."""
    initial = tiny_model().state_dict()
    changed = trained(lambda model: [Muon(model.named_parameters(), lr=0.01)], num_steps=1)
    for name, weight in changed.items():
        if is_block_matrix(name, weight):
            assert 0.1 * 0.01 < float((weight - initial[name]).square().mean().sqrt()) < 0.4 * 0.01


def test_names_tell_matrices_of_blocks():
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert is_block_matrix("model.layers.3.mlp.up_proj.weight", matrix)
    assert is_block_matrix("transformer.h.0.attn.c_attn.weight", matrix)
    assert not is_block_matrix("model.layers.3.input_layernorm.weight", vector)
    assert not is_block_matrix("model.embed_tokens.weight", matrix)
    assert not is_block_matrix("lm_head.weight", matrix)


def test_what_it_cannot_tell_apart_is_refused():
    with pytest.raises(ConfigError, match="named parameters"):
        Muon(tiny_model().parameters())
    with pytest.raises(ConfigError, match=r"torch\.optim\.AdamW"):
        Muon(torch.nn.Linear(2, 2).named_parameters())
