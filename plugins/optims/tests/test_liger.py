"""Liger's kernels on a GPU: the same loss and gradients, and as many modules as the model has. Elsewhere, what it says.

What needs a GPU runs with ``pytest plugins/optims/tests/test_liger.py`` on a machine that has one, and liger-kernel.
"""

from __future__ import annotations

import contextlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
from optims_models import Results, assert_same, optimized_results, plain_results, tiny_batch, tiny_model
from rlplug_optims import Liger
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.llama import modeling_llama

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
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)  # stays exchanged otherwise
    model, liger = tiny_model(family).cuda(), Liger(**parts)
    liger.before_shard(model)
    result = optimized_results(model, tiny_batch())
    on_cpu = {name: gradient.cpu() for name, gradient in result.gradients.items()}
    assert_same(Results(result.loss.cpu(), on_cpu), expected, rtol=1e-4)
    count = NORMS[family] * parts.get("rms_norm", True) + 4 * parts.get("swiglu", True)
    effects = [f"Liger replaced {count} modules"]
    effects += ["Liger replaced the rotary embedding"] if parts.get("rope", True) else []
    assert [effect.description for effect in liger.effects()] == effects
    assert not any("liger" in type(module).__module__ for module in tiny_model(family).modules())


@needs_gpu
def test_a_model_type_without_kernels():
    pytest.importorskip("liger_kernel")
    model = tiny_model()
    model.config.model_type = "unheard_of"
    with pytest.raises(ConfigError, match=r"'unheard_of'.*only for .*llama"):
        Liger().before_shard(model)


@pytest.fixture
def package(monkeypatch):
    """Stand in for the package: it exchanges what Liger's function for Llama does, with kernels of no use."""

    def kernel(*inputs):
        raise AssertionError("runs nowhere")

    kernel.__module__ = "liger_kernel.kernels"

    def apply_to_instance(model, rope, rms_norm, swiglu, **others):
        assert not any(others[name] for name in ("cross_entropy", "fused_linear_cross_entropy"))
        modeling_llama.apply_rotary_pos_emb = kernel if rope else modeling_llama.apply_rotary_pos_emb
        modeling_llama.LlamaMLP = type("LigerSwiGLUMLP", (), {})
        for layer in model.model.layers:
            layer.mlp.forward = kernel

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "LlamaMLP", modeling_llama.LlamaMLP)
    functions = {"MODEL_TYPE_TO_APPLY_LIGER_FN": {"llama": None}, "_apply_liger_kernel_to_instance": apply_to_instance}
    module = types.ModuleType("liger_kernel.transformers")
    module.monkey_patch = types.SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)


def test_models_built_later_have_their_own_modules(package):
    liger, plain = Liger(rope=False), modeling_llama.LlamaMLP
    liger.before_shard(tiny_model())
    assert [effect.description for effect in liger.effects()] == ["Liger replaced 4 modules"]
    assert modeling_llama.LlamaMLP is plain
    assert all(type(layer.mlp) is plain for layer in tiny_model().model.layers)
    assert plain_results(tiny_model(packed=False), tiny_batch()).loss.isfinite()


def test_tensor_parallelism_is_refused(package):
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("weights", "tensor"))
        for axis, is_refused in (("weights", False), ("tensor", True)):
            model, liger = tiny_model(), Liger()
            liger.before_shard(model)
            head = model.lm_head
            head.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), mesh[axis], [Shard(0)]))
            with (
                pytest.raises(ConfigError, match=r"Liger.*trainer\.strategy\.init_args\.tensor")
                if is_refused
                else (contextlib.nullcontext())
            ):
                liger.after_shard(model)
    finally:
        dist.destroy_process_group()


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="need CUDA"):
        Liger().before_shard(tiny_model())


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("liger_kernel", "liger_kernel.transformers"):  # the second, where a test before imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install rlplug-optims\[liger\]"):
        Liger().before_shard(tiny_model())


def test_what_is_not_ligers_is_no_effect():
    assert Liger().effects() == []
