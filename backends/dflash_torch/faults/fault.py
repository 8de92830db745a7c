"""Faults: one thing wrong with how a drafter is served, as a change of a Speculator, and the ways to make such changes.

Each is a mistake that engines and checkpoints really make, made on purpose. Run through the real loop or replayed
(`reference`) they are the controls of an acceptance figure (`evaluate`: a figure that survives them is no proof)
and the explanations of a low one (`doctor`). A changed Speculator shares the weights of the sound one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from dflash_serve.doctor.evidence import Fault
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.layers import RotaryEmbedding

from ..request import Request
from ..speculator import Speculator

Module = TypeVar("Module", bound=nn.Module)
Change = Callable[[Speculator], Speculator]
Disturbance = Callable[[Tensor, Request], Tensor]
"""New feature rows [rows, F*H] of a request, from position `injected` on -> what is injected instead."""


@dataclass(frozen=True)
class DrafterFault(Fault):
    """A fault in how the drafter is served: drafts change, and the target's answers do not."""

    change: Change = field(kw_only=True)


@dataclass(frozen=True)
class PromptFault(Fault):
    """A fault in what the target is given: its answers differ, so it needs a run of its own."""

    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids of what it makes of each prompt."""


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
    """Other fields of DrafterConfig, with weights that are not theirs."""

    def change(drafter: Drafter) -> None:
        device = drafter.rotary.inverse_frequency.device
        drafter.config = config = drafter.config.model_copy(update=fields)
        drafter.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings).to(device)

    return drafter_changed(change)


def block_input(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], block_size: int) -> Change:
    """Other inputs of the block: rows [blocks, B, H] and positions [rows]."""

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
    """Its own parameters and buffers, and packed weights, which are plain attributes."""
    attributes = [value for value in vars(module).values() if isinstance(value, Tensor)]
    return [*module.parameters(recurse=False), *module.buffers(recurse=False), *attributes]
