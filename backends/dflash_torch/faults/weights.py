"""What can go wrong with a drafter's weights and their arithmetic: changes of a drafter or its head."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dflash_serve.models.drafter import Drafter

from ..speculator import Speculator

FP8 = torch.float8_e4m3fn


def skip_layer(drafter: Drafter, index: int) -> None:
    """A layer whose weights never arrived and are zero adds nothing to what passes through it."""
    drafter.layers[index].register_forward_hook(lambda module, args, out: args[0])


def random_fc(drafter: Drafter) -> None:
    """`fc` as initialised: its tensor was not found under its name."""
    device = drafter.rotary.inverse_frequency.device
    weight = torch.empty(drafter.config.hidden_size, drafter.config.feature_size)
    nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(20602))
    drafter.fc = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    drafter.fc.weight = nn.Parameter(weight.to(device, drafter.hidden_norm.weight.dtype), requires_grad=False)


def without_context_norm(drafter: Drafter) -> None:
    """`hidden_norm` left out."""
    drafter.hidden_norm = nn.Identity()  # type: ignore[assignment]


def without_final_norm(drafter: Drafter) -> None:
    """`norm` left out."""
    drafter.norm = nn.Identity()  # type: ignore[assignment]


def in_dtype(drafter: Drafter, dtype: torch.dtype) -> None:
    """All of the drafter's arithmetic in another dtype; what comes and goes keeps its own."""
    outer = drafter.hidden_norm.weight.dtype
    drafter.fc.register_forward_pre_hook(lambda module, args: (args[0].to(dtype),))

    def before(_: nn.Module, args: tuple[Tensor, Tensor, object]) -> tuple[Tensor, Tensor, object]:
        noise, positions, attend = args
        return noise.to(dtype), positions, _attending(attend, outer, dtype)

    drafter.register_forward_pre_hook(before)
    drafter.register_forward_hook(lambda module, args, out: out.to(outer))
    rotary = drafter.rotary
    for module in drafter.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
    drafter.rotary = rotary


def _attending(attend: object, outer: torch.dtype, inner: torch.dtype) -> object:
    """Attention over the cache, which stays in `outer`."""
    assert callable(attend)

    def attending(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(layer, q.to(outer), k.to(outer), v.to(outer))
        return out.to(inner)

    return attending


def in_fp8(drafter: Drafter) -> None:
    """Every linear layer's weights rounded to FP8, one scale a tensor."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(rounded_to_fp8(module.weight), requires_grad=False)


def fp8_head(speculator: Speculator) -> Speculator:
    """The head it drafts with rounded to FP8; the target verifies with its own."""
    made, target = copy.copy(speculator), copy.copy(speculator.target)
    target._modules = dict(target._modules)
    weight = _plain(target.head)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rounded_to_fp8(weight), requires_grad=False)
    target.head, made.target = head, target
    return made


def _plain(head: nn.Module) -> Tensor:
    """The head's weight [vocabulary, H] as it was before any packing."""
    weight = head.weight
    assert isinstance(weight, Tensor)
    return weight.to_dense() if weight.is_mkldnn else weight.detach()


def rounded_to_fp8(weight: Tensor) -> Tensor:
    """A weight as it comes back from FP8 (e4m3) with one scale."""
    scale = weight.abs().max().float().clamp(min=1e-12) / torch.finfo(FP8).max
    return ((weight.float() / scale).to(FP8).float() * scale).to(weight.dtype)
