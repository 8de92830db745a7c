"""Finds the first wrong tensor of an engine in this process; acceptance alone does not show every fault.

The engine decodes a few tokens through its own loop. Inputs and outputs of its drafter are compared, in the order of
the computation, with transformers' hidden states and the core's drafter, both read from disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_serve.answers.engine import Prompt
from dflash_serve.models.attention import RaggedAttention
from dflash_serve.models.drafter import Drafter, HotHead, propose, takes_hot_tokens
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.loader import load_drafter
from dflash_serve.speculation.params import SamplingParams

from ..engine import EmbeddedEngine
from ..request import Request

STEPS = 8  # decoding steps before the comparison: accepted tokens must have reached the context by then
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 6e-2}
"""Relative to a row's norm: above the difference of two orders of summation, below that of faults."""

Flow = dict[str, Tensor]  # in the order of the computation; the first dimension is a position or slot


@dataclass(frozen=True)
class Difference:
    """The first wrong tensor."""

    tensor: str
    row: int
    error: float  # relative error of that row

    def __str__(self) -> str:
        return f"{self.tensor} differs first, in row {self.row} (relative error {self.error:.2g})"


def first_difference(engine: EmbeddedEngine, target: Path, drafter: Path, prompt: Prompt) -> Difference | None:
    """Finds the first tensor of an engine that is not what transformers and the core compute from disk.

    Args:
        engine: the engine under test, with a drafter.
        target: folder of its target.
        drafter: folder of its drafter.

    Returns:
        None if nothing differs.
    """
    sound = load_drafter(drafter, dtype=torch.float32, dequantise=True)
    flow, request = _engine_flow(engine, sound.config.target_layer_ids, prompt)
    assert engine.block_size is not None
    expected = _expected_flow(target, sound, request, flow, engine.block_size)
    dtype = engine.scheduler.target.embedding.dtype
    limit = TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])
    for name, tensor in expected.items():
        found = flow[name]
        if found.shape != tensor.shape:
            return Difference(name, 0, float("inf"))
        errors = (found - tensor).flatten(1).norm(dim=1) / tensor.flatten(1).norm(dim=1).clamp(min=1e-6)
        wrong = ~(errors <= limit)  # NaN is wrong, too
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            return Difference(name, row, float(errors[row]))
    return None


@torch.inference_mode()
def _engine_flow(engine: EmbeddedEngine, layer_ids: tuple[int, ...], prompt: Prompt) -> tuple[Flow, Request]:
    assert engine.block_size is not None
    width, flow = engine.block_size, Flow()
    scheduler = engine.fixed(width).scheduler
    speculator = scheduler.speculator
    assert speculator is not None
    # Steps of padded passes leave no features on the host, and hooks do not run inside a captured graph.
    scheduler.target_runner.static = speculator.drafter_runner.static = False
    params = SamplingParams(temperature=0, max_tokens=(STEPS + 2) * width, ignore_eos=True)
    request = scheduler.join(engine.tokenize(prompt), params)
    try:
        for _ in range(STEPS):
            scheduler.step()
        pending = torch.cat(request.features)
        flow |= _features(layer_ids, pending.chunk(len(layer_ids), dim=-1))
        with _watched(speculator.drafter, flow, request.verified):
            (draft,) = speculator.draft([request], [width])
        flow["drafts"] = torch.tensor(draft)[:, None]
        flow |= _context(speculator.cache, request.entry, request.verified)
    finally:
        scheduler.leave(request, sound=False)
    return flow, request


@torch.inference_mode()
def _expected_flow(target: Path, drafter: Drafter, request: Request, found: Flow, width: int) -> Flow:
    """The tensors by transformers and the core. Drafts are compared by their logits, because of near-ties."""
    config, verified = drafter.config, request.verified
    model = _transformers(target)
    seen = torch.tensor([request.token_ids[:verified]])
    states = [state[0] for state in model(seen, output_hidden_states=True, use_cache=False).hidden_states]
    chosen = [states[layer + 1] for layer in config.target_layer_ids]
    rows = 1 + request.steps[-1][1]  # those that the last step verified: the anchor and what was accepted
    flow = _features(config.target_layer_ids, [state[verified - rows :] for state in chosen])
    cache = KVCache.of(config, 1, verified + width)
    context = drafter.project_context(torch.cat(chosen, dim=-1))
    cache.write_all([Span(0, 0, verified)], *drafter.context_kv(context, torch.arange(verified)))
    flow |= _context(cache, 0, verified)
    span = Span(0, verified, config.rows(width))
    noise = drafter.noise(torch.tensor([request.token_ids[-1]]), model.get_input_embeddings().weight, width)
    attend = RaggedAttention(cache, [span], config.layers, config.num_attention_heads)
    with _watched(drafter, flow, verified):
        hidden = drafter(noise, span_positions([span]), attend, block_size=width)
    head, slots = model.get_output_embeddings(), hidden[config.first_row :]
    hot = drafter.hot_tokens
    if config.markov is None and takes_hot_tokens(config):
        logits = drafter.adjust_logits(head(slots))
        choices = logits if hot is None else logits[:, hot]
        found["drafts"] = logits.gather(1, found["drafts"])
        flow["drafts"] = choices.max(dim=1, keepdim=True).values
        return flow
    choosing = HotHead(head, hot, drafter.markov_head) if hot else head
    (draft,) = propose(drafter, choosing, slots, [request.token_ids[-1]], [width - 1], [None])
    found["drafts"], flow["drafts"] = found["drafts"].float(), torch.tensor(draft)[:, None].float()
    return flow


def _transformers(target: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def _features(layer_ids: tuple[int, ...], rows: Any) -> Flow:
    return {f"features of target layer {layer}": _kept(part) for layer, part in zip(layer_ids, rows, strict=True)}


def _context(cache: KVCache, entry: int, verified: int) -> Flow:
    flow = Flow()
    for layer in range(len(cache.keys)):
        for name, tensor in (("keys", cache.keys), ("values", cache.values)):
            flow[f"context {name} of drafter layer {layer}"] = _kept(tensor[layer, entry, :, :verified].transpose(0, 1))
    return flow


@contextmanager
def _watched(drafter: Drafter, flow: Flow, verified: int) -> Iterator[None]:
    """Keeps the block's input and positions (from its anchor on), and what each layer and the whole drafter put out."""

    def entered(module: nn.Module, args: tuple[Any, ...]) -> None:
        flow["block input"] = _kept(args[0])
        # From the anchor on and from 1 on: one late must not vanish in the relative error of a long context.
        flow["block positions"] = _kept(1.0 + args[1][:, None] - verified)

    def left(name: str, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        flow[name] = _kept(out)

    hooks = [drafter.register_forward_pre_hook(entered)]
    for index, layer in enumerate(drafter.layers):
        hooks.append(layer.register_forward_hook(partial(left, f"output of drafter layer {index}")))
    hooks.append(drafter.register_forward_hook(partial(left, "block output")))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu().clone()
