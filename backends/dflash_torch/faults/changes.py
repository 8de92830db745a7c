"""Faults of serving a drafter, as changes of a Speculator: disturbed feature rows, other settings, other weights.

Each is a mistake that engines and checkpoints make, here made on purpose. Run through the real loop or replayed
(`replay`) they are the controls of an acceptance figure (`evaluate`: a figure that survives them is no proof) and the
explanations of a low one (`doctor`). A changed Speculator shares the weights of the sound one. A row of features that
never arrives is a row of zeros: without biases its keys and values are zero, as in memory that was never written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from dflash_serve.doctor.evidence import Fault
from dflash_serve.models.drafter import Drafter, HotHead
from dflash_serve.models.layers import RotaryEmbedding, dense_weight

from ..request import Request
from ..speculator import Speculator

FP8 = torch.float8_e4m3fn
Module = TypeVar("Module", bound=nn.Module)
Change = Callable[[Speculator], Speculator]
Disturbance = Callable[[Tensor, Request], Tensor]
"""New feature rows [rows, F*H] of a request, from position `injected` on -> the rows that are injected instead."""


@dataclass(frozen=True)
class DrafterFault(Fault):
    """A fault in how the drafter is served: drafts change, and the target's answers do not."""

    change: Change = field(kw_only=True)


@dataclass(frozen=True)
class PromptFault(Fault):
    """A fault of the target's prompts: its answers differ, so it needs a run of its own."""

    prompts: tuple[tuple[int, ...], ...] = ()  # token ids of each prompt under the fault


class DisturbedSpeculator(Speculator):
    """A sound speculator's drafter and K/V cache, with other feature rows injected.

    Args:
        disturb: applied to the new rows of each request before they reach the drafter.
    """

    def __init__(self, sound: Speculator, disturb: Disturbance) -> None:
        super().__init__(sound.drafter, sound.target, block_size=sound.block_size, max_batch_size=1, capacity=1)
        self.cache, self.drafter_runner = sound.cache, sound.drafter_runner
        self.disturb = disturb

    def inject(self, requests: Sequence[Request]) -> None:
        """Disturbs the rows that wait, then injects them."""
        for request in requests:
            if request.features:
                request.features = [self.disturb(torch.cat(request.features), request)]
        super().inject(requests)


def drafter_changed(change: Callable[[Drafter], None]) -> Change:
    """A change of a twin of the drafter."""

    def apply(speculator: Speculator) -> Speculator:
        made = copy.copy(speculator)
        made.drafter = twin(speculator.drafter)
        change(made.drafter)
        return made

    return apply


def configured(**fields: object) -> Change:
    """A change of fields of DrafterConfig; the weights stay."""

    def change(drafter: Drafter) -> None:
        device = drafter.rotary.inverse_frequency.device
        drafter.config = config = drafter.config.model_copy(update=fields)
        drafter.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings).to(device)

    return drafter_changed(change)


def block_input(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], block_size: int) -> Change:
    """A change of the block's inputs: rows [blocks, B, H] and positions [rows]."""

    def before(_: nn.Module, args: tuple[Tensor, Tensor, object]) -> tuple[Tensor, Tensor, object]:
        noise, positions, attend = args
        rows, positions = change(noise.view(-1, block_size, noise.shape[-1]), positions)
        return rows.reshape(noise.shape), positions, attend

    def hook(drafter: Drafter) -> None:
        drafter.register_forward_pre_hook(before)

    return drafter_changed(hook)


def twin(module: Module) -> Module:
    """A copy that can be changed without changing the original; the tensors themselves are shared."""
    tensors = [tensor for part in module.modules() for tensor in _tensors_of(part)]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _tensors_of(module: nn.Module) -> list[Tensor]:
    # packed weights are plain attributes
    attributes = [value for value in vars(module).values() if isinstance(value, Tensor)]
    return [*module.parameters(recurse=False), *module.buffers(recurse=False), *attributes]


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
    """The drafter gets only the anchor's row of a verified block, not the rows of accepted slots."""
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
    # the cache stays in `outer`
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
    """The first rows of the target's head instead of the drafter's own head."""
    made = copy.copy(speculator)
    made.drafter = drafter = twin(speculator.drafter)
    assert drafter.d2t is not None
    weight = dense_weight(speculator.target.head)[: len(drafter.d2t)]
    drafter.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    drafter.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    return made


def offsets_as_ids(drafter: Drafter) -> None:
    """`d2t` read as target ids."""
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
    """A selector with codebooks of zeros."""
    selector = drafter.candidate_selector
    assert selector is not None
    for name in ("predecessor_codebook", "successor_codebook"):
        parameter = getattr(selector, name)
        setattr(selector, name, nn.Parameter(torch.zeros_like(parameter), requires_grad=False))


def without_markov_head(drafter: Drafter) -> None:
    """Every slot is drafted by itself."""
    drafter.markov_head = None


def rounded_to_fp8(weight: Tensor) -> Tensor:
    """A weight as it comes back from FP8 (e4m3) with one scale."""
    scale = weight.abs().max().float().clamp(min=1e-12) / torch.finfo(FP8).max
    return ((weight.float() / scale).to(FP8).float() * scale).to(weight.dtype)
