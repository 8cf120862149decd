"""Liger's kernels on a GPU: the same loss and gradients, and as many modules as the model has. Elsewhere, what it says.

What needs a GPU runs with ``pytest plugins/optims/tests/test_liger.py`` on a machine that has one, and liger-kernel.
"""

from __future__ import annotations

import sys

import pytest
import torch
from optims_models import Results, assert_same, optimized_results, plain_results, tiny_batch, tiny_model
from rlplug_optims import Liger

from rlplug.errors import ConfigError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels run on CUDA")

NORMS = {"llama": 4 * 2 + 1, "qwen3": 4 * 4 + 1}
"""Of the tiny models: two in a block, with Qwen3's of queries and keys four, and the last."""


@needs_gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("parts", [{}, {"rope": False}, {"rms_norm": False}, {"swiglu": False}])
def test_the_same_loss_and_gradients(parts, family, monkeypatch):
    pytest.importorskip("liger_kernel")
    modeling = sys.modules[type(tiny_model(family)).__module__]
    expected = plain_results(tiny_model(family, packed=False), tiny_batch())
    for name in dir(modeling):  # Liger exchanges some for the whole process: put them back
        monkeypatch.setattr(modeling, name, getattr(modeling, name))
    model, liger = tiny_model(family).cuda(), Liger(**parts)
    liger.before_shard(model)
    result = optimized_results(model, tiny_batch())
    on_cpu = {name: gradient.cpu() for name, gradient in result.gradients.items()}
    assert_same(Results(result.loss.cpu(), on_cpu), expected, rtol=1e-4)
    count = NORMS[family] * parts.get("rms_norm", True) + 4 * parts.get("swiglu", True)
    effects = [f"Liger replaced {count} modules"]
    effects += ["Liger replaced the rotary embedding"] if parts.get("rope", True) else []
    assert [effect.description for effect in liger.effects()] == effects


@needs_gpu
def test_a_model_type_without_kernels():
    pytest.importorskip("liger_kernel")
    model = tiny_model()
    model.config.model_type = "unheard_of"
    with pytest.raises(ConfigError, match=r"'unheard_of'.*It knows .*llama"):
        Liger().before_shard(model)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="run on CUDA"):
        Liger().before_shard(tiny_model())


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"pip install rlplug-optims\[liger\]"):
        Liger().before_shard(tiny_model())


def test_what_is_not_ligers_is_no_effect():
    assert Liger().effects() == []
