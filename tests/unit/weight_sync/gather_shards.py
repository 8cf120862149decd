"""One rank of ``test_buckets.py``: shards a model in several ways, and compares what its buckets hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlplug.errors import RunError
from rlplug.interfaces import AdapterWeights, FP8Weights, HFWeight
from rlplug.weight_sync import buckets
from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.fp8_layers import check_finite, choose_fp8_weights
from rlplug.weight_sync.fp8_quantize import quantize_blocks
from rlplug.weight_sync.hf_names import attach_adapters, hf_views
from rlplug.weight_sync.low_rank import Adapters, LowRankUpdate

BUCKET_BYTES = 64


@contextmanager
def bytes_gathered() -> Iterator[list[int]]:
    """How many each collective operation takes from this rank."""
    gather, sent = dist.all_gather_into_tensor, []
    buckets.dist.all_gather_into_tensor = lambda out, mine, group: (sent.append(len(mine)), gather(out, mine, group))
    yield sent
    buckets.dist.all_gather_into_tensor = gather


def make_model() -> nn.Module:
    """Rows that no number of ranks divides, fewer rows than ranks, and a single number."""
    torch.manual_seed(0)
    model = nn.ParameterDict({f"rows {n}": nn.Parameter(torch.randn(n, 3)) for n in (1, 2, 5, 7, 8)})
    model["vector"] = nn.Parameter(torch.randn(5))
    model["cube"] = nn.Parameter(torch.randn(3, 2, 2))
    return model


def check(model: nn.Module, expected: nn.Module, num_gathers: int) -> None:
    with bytes_gathered() as gathers:
        sent = [pair for bucket in buckets.weight_buckets(model, torch.bfloat16, BUCKET_BYTES) for pair in bucket]
    assert [name for name, _ in sent] == [name for name, _ in expected.named_parameters()]
    for (name, tensor), parameter in zip(sent, expected.parameters(), strict=True):
        assert torch.equal(tensor, parameter.to(torch.bfloat16)), name
    assert len(gathers) == num_gathers, gathers


def make_linears() -> nn.Module:
    """Rows that are whole blocks on each of 2 to 4 ranks, on some ranks, with a ragged end, and on none."""
    torch.manual_seed(0)
    rows = (1536, 256, 900, 200, 1)
    return nn.ModuleDict({f"rows {n}": nn.Linear(192, n, bias=False) for n in rows})


def check_fp8(model: nn.Module, size: int) -> None:
    """Values and scales are those of the whole weights, and shards of whole blocks travel as values and scales."""
    whole = dict(make_linears().named_parameters())
    fp8 = FP8Weights(quantized=tuple(whole), kept=())
    with bytes_gathered() as sent:
        for bucket in buckets.weight_buckets(model, torch.bfloat16, 1, fp8):
            (name, values), (scale_name, scales) = bucket
            weight = whole.pop(name)
            expected_values, expected_scales = quantize_blocks(weight, torch.bfloat16)
            assert scale_name == f"{name}_scale_inv"
            assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8)), name
            assert torch.equal(scales, expected_scales), name
            rows = -(-len(weight) // size)
            num_bytes = rows * 192 * 2 if rows % 128 else rows * 192 + rows // 128 * 2 * 4
            assert num_bytes <= sent[-1] < num_bytes + 32, (name, num_bytes, sent)
    assert not whole


def check_converted(model: nn.Module) -> None:
    """A weight that is no view of its parameter, here its rows in reverse, is quantised after it was converted."""
    whole = dict(make_linears().named_parameters())
    fp8 = FP8Weights(quantized=tuple(name for name in whole if "900" not in name), kept=())
    weights = {name: (HFWeight(name, weight.shape, convert=lambda t: t.flip(0)),) for name, weight in whole.items()}
    sent = dict(pair for bucket in buckets.weight_buckets(model, torch.bfloat16, 1, fp8, weights) for pair in bucket)
    for name, weight in whole.items():
        values, scales = quantize_blocks(weight.flip(0), torch.bfloat16)
        if name in fp8.quantized:
            assert torch.equal(sent.pop(FP8Weights.scale_name(name)), scales), name
        expected = values if name in fp8.quantized else weight.flip(0).to(torch.bfloat16)
        assert torch.equal(sent.pop(name).view(torch.uint8), expected.view(torch.uint8)), name
    assert not sent


def make_moe(num_experts: int, width: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2}
    experts = {"num_experts": num_experts, "moe_intermediate_size": width, "mlp_only_layers": [1]}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_attention_heads=2, num_key_value_heads=1))


def whole_weights(model: nn.Module, fp8: FP8Weights | None) -> dict[str, torch.Tensor]:
    """What travels of an unsharded model."""
    weights: dict[str, torch.Tensor] = {}
    for name, weight in hf_views(model).items():
        if fp8 is not None and name in fp8.quantized:
            weights[name], weights[f"{name}_scale_inv"] = quantize_blocks(
                weight, torch.bfloat16, fp8.power_of_two_scales
            )
        else:
            weights[name] = weight.to(torch.bfloat16)
    return weights


def check_experts(num_experts: int, width: int, keep: list[str] | None, size: int) -> None:
    """Each rank has some experts, or none; where all are whole blocks of rows, values and scales cross the links."""
    whole, model = make_moe(num_experts, width), make_moe(num_experts, width)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (size,)))
    fp8 = None
    if keep is not None:
        fp8 = choose_fp8_weights(whole, WeightSyncConfig(dtype="fp8_block", keep=keep))
        check_finite(model, torch.bfloat16, fp8)
    expected, walk = whole_weights(whole, fp8), buckets.weight_buckets(model, torch.bfloat16, 1, fp8)
    with bytes_gathered() as sent:
        for parameter, bucket in zip(whole.parameters(), walk, strict=True):
            for name, tensor in bucket:
                weight = expected.pop(name)
                assert tensor.dtype == weight.dtype, name
                assert torch.equal(tensor.view(torch.uint8), weight.view(torch.uint8)), name
            if parameter.dim() == 3:
                is_whole = len(bucket[0][1]) % 128 == 0 and not any(t.dtype == torch.bfloat16 for _, t in bucket)
                num_bytes = -(-num_experts // size) * expert_bytes(parameter.shape, is_whole)
                assert num_bytes <= sent[-1] < num_bytes + 32, (bucket[0][0], num_bytes, sent)
    assert not expected


def expert_bytes(shape: torch.Size, is_whole: bool) -> int:
    _, rows, columns = shape
    return rows * columns + rows // 128 * -(-columns // 128) * 4 if is_whole else rows * columns * 2


def check_names(size: int) -> None:
    """Also where transformers knows other names by the class, of which FSDP makes another."""
    config = GPTNeoXConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    whole, model = GPTNeoXForCausalLM(config), GPTNeoXForCausalLM(config)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,)))
    sent = [name for bucket in buckets.weight_buckets(model, torch.bfloat16) for name, _ in bucket]
    assert sent == list(hf_views(whole))
    assert sent[-1] == "embed_out.weight"


def make_adapted() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict()
    for rows in (1, 5, 8):
        model[f"rows {rows}"] = nn.Linear(6, rows, bias=False)
        model[f"down {rows}"], model[f"up {rows}"] = nn.Linear(6, 3, bias=False), nn.Linear(3, rows, bias=False)
    names = [name for name, _ in model.named_parameters() if name.startswith("rows")]
    updates = {name: LowRankUpdate(*(model[f"{m} {name[5]}"] for m in ("down", "up")), 2.0) for name in names}
    attach_adapters(model, Adapters(updates, {name: name for name in names}))
    return model


def check_adapters(size: int) -> None:
    """Adapters of any number of rows are gathered together, and are those of the unsharded model."""
    whole, model = make_adapted(), make_adapted()
    for layer in model.values():
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (size,)))
    adapters = AdapterWeights(3, 6.0, ("rows 1", "rows 5", "rows 8"))
    with bytes_gathered() as gathers:
        (sent,) = buckets.adapter_buckets(model, adapters, torch.bfloat16, 1 << 20)
    assert len(gathers) == 1
    assert len(sent) == 6
    for module in adapters.modules:
        for name, kind in zip(AdapterWeights.names(module), ("down", "up"), strict=True):
            expected = whole[module.replace("rows", kind)].weight.to(torch.bfloat16)
            assert torch.equal(dict(sent)[name], expected), name


def check_finite_on_one_rank(model: nn.Module) -> None:
    """A NaN in one rank's shard stops all of them."""
    fp8 = FP8Weights(quantized=("rows 1536.weight", "rows 900.weight"), kept=())
    check_finite(model, torch.bfloat16, fp8)
    if dist.get_rank() == 1:
        model["rows 900"].weight.to_local().detach()[0, 0] = torch.nan
    with pytest.raises(RunError, match=r"rows 900\.weight contains NaN"):
        check_finite(model, torch.bfloat16, fp8)


def main() -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    fsdp = make_model()
    fully_shard(fsdp, mesh=dist.init_device_mesh("cpu", (size,)))
    num_buckets = sum(1 for _ in buckets.weight_buckets(make_model(), torch.bfloat16, BUCKET_BYTES))
    check(fsdp, make_model(), num_gathers=num_buckets)
    linears = make_linears()
    for linear in linears.values():
        fully_shard(linear, mesh=dist.init_device_mesh("cpu", (size,)))
    check_fp8(linears, size)
    check_converted(linears)
    check_finite_on_one_rank(linears)
    check_names(size)
    check_adapters(size)
    for num_experts in (4, 5):
        for width in (128, 64):
            for keep in (None, [], ["*.experts.2.*"]):
                check_experts(num_experts, width, keep, size)
    if size == 4:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        hybrid = make_model()
        fully_shard(hybrid, mesh=mesh)
        check(hybrid, make_model(), num_gathers=num_buckets)
        other = make_model()
        for name, parameter in list(other.items()):
            placements = [Shard(0), Shard(1) if parameter.dim() > 1 else Replicate()]
            sharded = distribute_tensor(parameter.detach(), mesh, placements)
            assert isinstance(sharded, DTensor)
            other[name] = nn.Parameter(sharded)
        check(other, make_model(), num_gathers=1)  # of the vector; the rest is left to torch
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    print("rank", os.environ["RANK"], "compared all")
