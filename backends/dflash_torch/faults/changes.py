"""What can go wrong in front of and inside a drafter: disturbances of its feature rows, changes of its weights.

A row of features that never arrives is a row of zeros: without biases its keys and values are zero, as in memory that
was never written.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dflash_serve.models.drafter import Drafter
from dflash_serve.models.hot_tokens import HotHead
from dflash_serve.models.layers import dense_weight

from ..request import Request
from ..speculator import Speculator
from .fault import Disturbance, twin

FP8 = torch.float8_e4m3fn


def zeroed(rows: Tensor, request: Request) -> Tensor:
    """No row arrives."""
    return torch.zeros_like(rows)


def without_prompt(share: float = 1.0) -> Disturbance:
    """The first `share` of the prompt never arrives."""

    def disturb(rows: Tensor, request: Request) -> Tensor:
        missing = round(share * request.prompt_length)
        return rows * (_positions(rows, request) >= missing)[:, None]

    return disturb


def without_answer(rows: Tensor, request: Request) -> Tensor:
    """Only the prompt arrives."""
    return rows * (_positions(rows, request) < request.prompt_length)[:, None]


def anchors_only(rows: Tensor, request: Request) -> Tensor:
    """Of a verified block only the anchor's row arrives, not those of the accepted slots."""
    positions = _positions(rows, request)
    return rows * ((positions < request.prompt_length) | (positions == request.injected))[:, None]


class Shuffled:
    """The right rows at the wrong positions, made anew for every draft: acceptance must collapse."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, rows: Tensor, request: Request) -> Tensor:
        before = [self.kept[request.id]] if request.id in self.kept else []
        self.kept[request.id] = whole = torch.cat([*before, rows])
        request.injected = 0
        return whole[torch.randperm(len(whole), generator=self.generator).to(whole.device)]


class DelayedByOne:
    """Each row lands one position late, as EAGLE's drafters want them: the first is there twice, the newest missing."""

    def __init__(self) -> None:
        self.last: dict[int, Tensor] = {}

    def __call__(self, rows: Tensor, request: Request) -> Tensor:
        before = self.last.get(request.id, rows[:1])
        self.last[request.id] = rows[-1:].clone()
        return torch.cat([before, rows[:-1]])


def _positions(rows: Tensor, request: Request) -> Tensor:
    return request.injected + torch.arange(len(rows), device=rows.device)


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
    made, target = copy.copy(speculator), twin(speculator.target)
    weight = dense_weight(target.head)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rounded_to_fp8(weight), requires_grad=False)
    target.head, made.target = head, target
    if made.hot_head is not None:
        made.hot_head = HotHead(head, made.hot_head.token_ids)
    return made


def target_head(speculator: Speculator) -> Speculator:
    """The first rows of the target's head in the place of the drafter's own."""
    made = copy.copy(speculator)
    made.drafter = drafter = twin(speculator.drafter)
    assert drafter.d2t is not None
    weight = dense_weight(speculator.target.head)[: len(drafter.d2t)]
    drafter.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    drafter.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    return made


def offsets_as_ids(drafter: Drafter) -> None:
    """`d2t` taken for target ids."""
    drafter.token_ids = drafter.d2t


class NoConvolution(nn.Module):
    """Lets rows pass as they are; stands where a `GroupedConvolution` was."""

    def before(self, x: Tensor, rows: int) -> tuple[Tensor, None]:
        return x, None

    def after(self, y: Tensor, _: None) -> Tensor:
        return y


def without_convolution(drafter: Drafter) -> None:
    """Layers without their convolutions."""
    for layer in drafter.layers:
        for name in ("attention_conv", "mlp_conv"):
            setattr(layer, name, NoConvolution())


def empty_codebooks(drafter: Drafter) -> None:
    """A selector that knows nothing of any token."""
    selector = drafter.candidate_selector
    assert selector is not None
    for name in ("predecessor_codebook", "successor_codebook"):
        parameter = getattr(selector, name)
        setattr(selector, name, nn.Parameter(torch.zeros_like(parameter), requires_grad=False))


def without_markov_head(drafter: Drafter) -> None:
    """Each slot by itself."""
    drafter.markov_head = None


def rounded_to_fp8(weight: Tensor) -> Tensor:
    """A weight as it comes back from FP8 (e4m3) with one scale."""
    scale = weight.abs().max().float().clamp(min=1e-12) / torch.finfo(FP8).max
    return ((weight.float() / scale).to(FP8).float() * scale).to(weight.dtype)
