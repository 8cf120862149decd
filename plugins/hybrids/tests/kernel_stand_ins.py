"""Stand-ins, in torch, for the GPU packages that transformers' hybrid models call; they record which borders arrive.

Signatures are those of causal-conv1d 0d2252d, flash-linear-attention bc3b101 and mamba e9594ce. Install them before
transformers imports a model. They are slow, token by token, and have no relation to the packages' code.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CALLS: dict[str, set[str]] = {}
"""Names of the borders that each function got."""


def record(name: str, seq_idx: Tensor | None, cu_seqlens: Tensor | None = None) -> None:
    given = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
    CALLS.setdefault(name, set()).update(key for key, value in given.items() if value is not None)


def starts(length: int, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None) -> set[int]:
    if cu_seqlens is not None:
        return set(cu_seqlens.tolist())
    if seq_idx is not None:
        return {0, *(seq_idx[0].diff().nonzero()[:, 0] + 1).tolist()}
    return {0}


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    record("causal_conv1d_fn", seq_idx)
    assert seq_idx is None or x.stride(1) == 1, "seq_idx is only supported for channel last layout"
    edges = [*sorted(starts(x.shape[-1], seq_idx)), x.shape[-1]]
    width = weight.shape[-1]
    parts = [functional.pad(x[..., a:b], (width - 1, 0)) for a, b in pairwise(edges) if b > a]
    out = torch.cat([functional.conv1d(part, weight[:, None], bias, groups=len(weight)) for part in parts], dim=-1)
    return functional.silu(out) if activation else out


def delta(q, k, v, g, beta, first, normalize):
    """Apply the gated delta rule; g is [B, T, H] or, per channel, [B, T, H, K]."""
    groups = v.shape[2] // k.shape[2]
    q, k = (states.repeat_interleave(groups, dim=2) for states in (q, k))
    if normalize:
        q, k = (s * torch.rsqrt(s.square().sum(-1, keepdim=True) + 1e-6) for s in (q, k))
    q, g = q * q.shape[-1] ** -0.5, g if g.ndim == 4 else g[..., None]
    out = []
    for t in range(q.shape[1]):
        if t in first:
            state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], error * beta[:, t, :, None])
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, dim=1)


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    record("chunk_gated_delta_rule", None, cu_seqlens)
    return delta(q, k, v, g, beta, starts(q.shape[1], None, cu_seqlens), use_qk_l2norm_in_kernel), None


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, **kwargs,
):  # fmt: skip
    record("chunk_kda", None, cu_seqlens)
    return delta(q, k, v, g, beta, starts(q.shape[1], None, cu_seqlens), use_qk_l2norm_in_kernel), None


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
    state_dtype=None,
):  # fmt: skip
    record("mamba_chunk_scan_combined", seq_idx)  # cu_seqlens only selects states to return
    dt = functional.softplus(dt + dt_bias).clamp(*dt_limit)
    B, C = (states.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for states in (B, C))
    first, out = starts(x.shape[1], seq_idx), []
    for t in range(x.shape[1]):
        if t in first:
            state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1])
        state = state * (dt[:, t] * A).exp()[..., None, None]
        state = state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + x[:, t] * D[:, None])
    return torch.stack(out, dim=1)


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
    dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu", rmsnorm_weight=None,
    rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
    state_dtype=None,
):  # fmt: skip
    record("mamba_split_conv1d_scan_combined", seq_idx)
    heads = len(D)
    inner, rest = heads * headdim, len(conv1d_weight) - heads * headdim
    z, xBC, dt = zxbcdt.split([inner, inner + rest, heads], dim=-1)
    xBC = causal_conv1d_fn(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation)
    x, B, C = xBC.transpose(1, 2).split([inner, rest // 2, rest // 2], dim=-1)
    B, C = (states.unflatten(-1, (ngroups, -1)) for states in (B, C))
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, -1)), dt, A, B, C, chunk_size, D, None, dt_bias, None, seq_idx, None, True, dt_limit
    ).flatten(2)
    if rmsnorm_weight is not None:
        y = (y * functional.silu(z)).unflatten(-1, (ngroups, -1))
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + rmsnorm_eps)).flatten(-2) * rmsnorm_weight
    return functional.linear(y, outproj_weight, outproj_bias)


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    record("selective_scan_fn", None)
    delta = functional.softplus(delta + delta_bias[:, None])
    state, out = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[-1]):
        step = delta[..., t, None]
        state = state * (step * A).exp() + step * B[:, None, :, t] * u[..., t, None]
        out.append((state * C[:, None, :, t]).sum(-1) + D * u[..., t])
    return torch.stack(out, dim=-1) * functional.silu(z)


def decode_only(*args: Any, seq_idx=None, cu_seqlens=None, **kwargs: Any) -> Any:
    raise AssertionError("no packed row decodes")


def install() -> None:
    """Put the stand-ins where transformers looks for the packages."""
    functions = {
        "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": decode_only},
        "fla": {},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": chunk_gated_delta_rule,
            "fused_recurrent_gated_delta_rule": decode_only,
        },
        "fla.ops.kda": {"chunk_kda": chunk_kda, "fused_recurrent_kda": decode_only},
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": decode_only},
        "mamba_ssm.ops.selective_scan_interface": {
            "selective_scan_fn": selective_scan_fn,
            "mamba_inner_fn": decode_only,
        },
    }
    for name, members in functions.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(members, __path__=[])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
