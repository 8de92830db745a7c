"""PyTorch forms of the kernels of gated delta nets (GDN), one token at a time; as SGLang's, they write states in place.

Shapes: T tokens of all requests, D channels of the convolution, W its window, H heads of q and k, HV of v; a state of a
request is [HV, V, K].
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

CHUNK = 64
"""Tokens between two states that SGLang keeps for its prefix cache."""


def install() -> None:
    """Puts them in place through SGLang's own hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    operators = "sglang.kernels.ops"
    replacements = {
        f"{operators}.mamba.causal_conv1d_triton.causal_conv1d_fn": convolve_prompts,
        f"{operators}.mamba.causal_conv1d_triton.causal_conv1d_update": convolve_blocks,
        f"{operators}.attention.linear.fused_gdn_gating.fused_gdn_gating": gates,
        f"{operators}.attention.fla.chunk.chunk_gated_delta_rule": prompts,
        f"{operators}.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode": decode,
        f"{operators}.attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update": blocks,
        f"{operators}.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous": split,
        f"{operators}.attention.fla.layernorm_gated.RMSNorm.forward": gated_norm,
        f"{operators}.elementwise.elementwise.fused_sigmoid_mul": gated,
        f"{operators}.mamba.mamba_state_scatter_triton.fused_mamba_state_scatter_with_mask": commit,
        f"{operators}.mamba.mamba_state_scatter_triton.fused_conv_window_scatter_with_mask": commit,
        f"{operators}.mamba.mamba_state_scatter_triton._conv_multi_eligible": lambda pairs: False,
    }
    for name, function in replacements.items():
        HookRegistry.register(name, function, HookType.REPLACE)


def _convolved(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, activation: Any) -> tuple[Tensor, Tensor]:
    """x [D, T] convolved, and all windows [T, D, W - 1] after its tokens."""
    width = weight.shape[1]
    known = torch.cat([past.to(x.dtype), x], dim=1)
    found = (known.unfold(1, width, 1) * weight[:, None]).sum(-1)
    found = found if bias is None else found + bias[:, None]
    windows = known.unfold(1, width - 1, 1)[:, 1:].movedim(1, 0)
    return (silu(found) if activation else found), windows


def convolve_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any = None,
    cache_indices: Any = None,
    has_initial_state: Any = None,
    activation: Any = "silu",
    **_: Any,
) -> Tensor:
    """x [D, T] of whole prompts or chunks of them."""
    out, bounds = x.clone(), query_start_loc.tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        slot = int(cache_indices[i])
        past = conv_states[slot] * bool(has_initial_state[i])
        out[:, start:end], windows = _convolved(x[:, start:end], past, weight, bias, activation)
        conv_states[slot] = windows[-1]
    return out


def convolve_blocks(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    conv_state_indices: Any = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Any = None,
    **_: Any,
) -> Tensor:
    """x [n, D] or [n, D, w]; every slot's window is kept apart, to be taken over when drafts are accepted."""
    one = x.dim() == 2
    out = (x[..., None] if one else x).clone()
    for i, slot in enumerate(conv_state_indices.tolist()):
        out[i], windows = _convolved(out[i], conv_state[slot], weight, bias, activation)
        if intermediate_conv_window is None:
            conv_state[slot] = windows[-1]
        else:
            intermediate_conv_window[int(intermediate_state_indices[i]), : len(windows)] = windows
    return out[..., 0] if one else out


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, **_: Any) -> tuple[Tensor, Tensor]:  # noqa: N803
    """Logarithms of decays and step sizes, [1, T, HV] each."""
    return (-A_log.float().exp() * softplus(a.float() + dt_bias.float()))[None], b.float().sigmoid()[None]


def _recurrent(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[list[Tensor], Tensor]:
    """States after every token, and outputs [T, HV, V]; q and k are [T, H, K], v [T, HV, V], the rest [T, HV]."""
    share = v.shape[1] // q.shape[1]
    q, k = (normalize(x.float(), dim=-1, eps=1e-6).repeat_interleave(share, 1) for x in (q, k))
    states, out = [], torch.empty_like(v)
    state = state.float()
    for t in range(len(v)):
        state = state * decay[t].exp()[:, None, None]
        change = (v[t].float() - (state * k[t][:, None]).sum(-1)) * beta[t][:, None]
        state = state + change[..., None] * k[t][:, None]
        out[t] = (state * q[t][:, None]).sum(-1) * k.shape[-1] ** -0.5
        states.append(state)
    return states, out


def prompts(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """Whole prompts: outputs [1, T, HV, V], and the states [1, chunks, HV, V, K] before every chunk."""
    out, kept, bounds = torch.empty_like(v), [], cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        slot, own = int(initial_state_indices[i]), slice(start, end)
        first = initial_state[slot].clone()
        states, out[0, own] = _recurrent(first, q[0, own], k[0, own], v[0, own], g[0, own], beta[0, own])
        initial_state[slot] = states[-1]
        kept += [first if at == 0 else states[at - 1] for at in range(0, end - start, CHUNK)]
    return out, None, torch.stack(kept)[None]


def decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    **_: Any,
) -> None:
    """One token of each request [n, 1, HV, V], into `out`."""
    heads, dim, keys = initial_state.shape[1:]
    q, k, v = mixed_qkv.split([(mixed_qkv.shape[1] - heads * dim) // 2] * 2 + [heads * dim], dim=1)
    q, k, v = q.reshape(len(q), -1, keys), k.reshape(len(k), -1, keys), v.reshape(len(v), heads, dim)
    (decay,), (beta,) = gates(A_log, a, b, dt_bias)
    for i, slot in enumerate(ssm_state_indices.tolist()):
        one = slice(i, i + 1)
        states, out[i] = _recurrent(initial_state[slot], q[one], k[one], v[one], decay[one], beta[one])
        initial_state[slot] = states[-1]


def blocks(
    *,
    A_log: Tensor,  # noqa: N803
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    disable_state_update: bool,
    **_: Any,
) -> Tensor:
    """Blocks that are verified: no state changes, every slot's one is kept apart."""
    assert disable_state_update
    (decay,), (beta,) = gates(A_log, a, b, dt_bias)
    out, bounds = torch.empty_like(v), cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        own, first = slice(start, end), initial_state_source[int(initial_state_indices[i])]
        states, out[0, own] = _recurrent(first, q[0, own], k[0, own], v[0, own], decay[own], beta[own])
        intermediate_states_buffer[int(intermediate_state_indices[i]), : end - start] = torch.stack(states)
    return out


def commit(dst: Tensor, src: Tensor, dst_indices: Tensor, steps: Tensor, src_indices: Tensor | None = None) -> None:
    """Takes over the states [layers, requests, slots, ...] after the last accepted tokens; -1: of none."""
    rows = range(len(steps)) if src_indices is None else src_indices.tolist()
    for row, slot, step in zip(rows, dst_indices.tolist(), steps.tolist(), strict=False):
        if step >= 0 and slot >= 0:
            dst[:, slot] = src[:, row, step].to(dst.dtype)


def split(
    qkvz: Tensor, ba: Tensor, heads_qk: int, heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts [T, q | k | v], z, b and a of two projections."""
    size = heads_v * head_v
    mixed, z = qkvz.split([2 * heads_qk * head_qk + size, size], dim=1)
    b, a = (part.contiguous() for part in ba.split(heads_v, dim=1))
    return mixed.contiguous(), z.reshape(len(z), heads_v, head_v), b, a


def gated_norm(norm: Any, x: Tensor, z: Tensor) -> Tensor:
    """RMSNorm(x) * silu(z)."""
    found: Tensor = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    return (found * silu(z.float())).to(x.dtype)


def gated(attn_output: Tensor, gate: Tensor, **_: Any) -> Tensor:
    """attn_output * sigmoid(gate)."""
    return attn_output * gate.reshape(attn_output.shape).sigmoid()
