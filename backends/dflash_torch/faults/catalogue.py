"""The faults that are tried on a pair: mistakes that engines, converters and checkpoints are known to make.

Upstream cases are named where they are known; the rest are the conventions in which readers of DFlash differ
(layer ids counted from 0 or 1, causal sliding windows, mask tokens that fall back, embedding scales).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from dflash_serve.backend import Prompt
from dflash_serve.checkpoint.config import DrafterConfig, RopeConfig, Slots, uniform_target_layer_ids

from ..speculator import Speculator
from . import changes
from .changes import (
    Disturbance,
    DisturbedSpeculator,
    DrafterFault,
    PromptFault,
    block_input,
    configured,
    drafter_changed,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THETAS = (1e4, 1e5, 1e6)  # transformers' default and what published targets use


def catalogue(speculator: Speculator) -> list[DrafterFault]:
    """Every fault that applies to this pair, except those of the prompt; names are unique."""
    return [*settings(speculator), *_block(speculator), *_context(), *_weights(speculator), *_heads(speculator)]


def settings(speculator: Speculator) -> Iterator[DrafterFault]:
    """Faults that a line of the checkpoint's configuration would cause as well."""
    config, depth = speculator.drafter.config, speculator.target.config.num_layers
    listed = config.target_layer_ids
    for by, who in ((1, "ids were raised twice"), (-1, "an id counted from 1 (speculators, GGUF) is read as from 0")):
        ids = tuple(min(max(layer + by, 0), depth - 1) for layer in listed)
        says = f"features of target layers {list(ids)}: {who}"
        yield _other_layers("layer ids", f"layer ids {by:+d}", says, ids)
    if len(listed) > 1:
        says = "the layers are concatenated in another order than fc takes them"
        yield _other_layers("layer order", "target layers in reverse order", says, listed[::-1])
    if depth >= 4 and (ids := uniform_target_layer_ids(depth, len(listed))) != listed:
        says = "the list in the checkpoint is not read; the formula's takes its place"
        yield _other_layers("layer ids", "layer ids by formula", says, ids)
    target = speculator.target.config
    yield from mask_tokens(config, (0, *target.eos_token_ids[:1], target.vocab_size - 1))
    yield from _attention(config, speculator.block_size)
    yield from _rope(config, target.rope)
    yield _slots(config)
    scale = 1.0 if config.embedding_scale != 1.0 else config.hidden_size**0.5
    says = "the block's embeddings are multiplied as Gemma's are, or no longer are"
    setting = f"input_embedding_scale = {scale:g}"
    yield _other("embedding scale", f"embedding scale {scale:g}", says, setting, embedding_scale=scale)


def _other(cause: str, name: str, says: str, setting: str, **fields: object) -> DrafterFault:
    return DrafterFault(cause, name, says, setting, change=configured(**fields))


def _other_layers(cause: str, name: str, says: str, ids: tuple[int, ...]) -> DrafterFault:
    return _other(cause, name, says, f"target_layer_ids = {list(ids)}", target_layer_ids=ids)


def mask_tokens(config: DrafterConfig, tokens: Iterable[int]) -> Iterator[DrafterFault]:
    """Other mask tokens than the configured one: readers fall back to padding, end of text, the first or last token."""
    if config.mask_token_id is None:
        return
    for token in dict.fromkeys(tokens):
        if token != config.mask_token_id and 0 <= token < config.vocab_size:
            says = "masked slots are filled with another token: a fallback, or padding"
            yield _other("mask token", f"mask token {token}", says, f"mask_token_id = {token}", mask_token_id=token)


def _slots(config: DrafterConfig) -> DrafterFault:
    # The same weights read in the other convention accept less than 1 % and raise no error (vLLM #56792).
    other: Slots = "anchor-first" if config.slots == "fill-in" else "fill-in"
    says = "row j is read as the token at its position, or after it: a missing key means either, by the reader"
    setting = f"sample_from_anchor = {str(other == 'anchor-first').lower()}"
    return _other("slot convention", f"slots read as {other}", says, setting, slots=other)


def _attention(config: DrafterConfig, block_size: int) -> Iterator[DrafterFault]:
    causal = all(kind.causal for kind in config.layers)
    layers = tuple(kind.model_copy(update={"causal": not causal}) for kind in config.layers)
    name, says = ("bidirectional", "is_causal was lost") if causal else ("causal", "the default of most attention code")
    setting = f"is_causal = {str(not causal).lower()}"
    yield _other("block attention", f"{name} block attention", says, setting, layers=layers)
    windowed = any(kind.window for kind in config.layers)
    window = None if windowed else 4 * block_size
    layers = tuple(kind.model_copy(update={"window": window}) for kind in config.layers)
    name = "window ignored" if windowed else f"window of {window} tokens"
    says = "layer_types say full while use_swa is set (ModelOpt), or a draft window was given to the engine"
    yield _other("window", name, says, f"sliding_window = {window or 'null'}", layers=layers)


def _rope(config: DrafterConfig, target: RopeConfig) -> Iterator[DrafterFault]:
    rope, says = config.rope, "rope_theta was not read, or is another model's"
    for theta in dict.fromkeys((*THETAS, target.theta)):
        if theta != rope.theta:
            changed = rope.model_copy(update={"theta": theta})
            yield _other("RoPE theta", f"RoPE theta {theta:g}", says, f"rope_theta = {theta:g}", rope=changed)
    other = RopeConfig(theta=rope.theta) if rope.scaling else _scaled(rope, target)
    name = "RoPE scaling ignored" if rope.scaling else f"RoPE scaled ({other.scaling}, {other.factor:g}x)"
    says = "rope_scaling was not read, or the target's is applied to a drafter that was trained without"
    yield _other("RoPE scaling", name, says, f"rope_scaling = {other.scaling or 'null'}", rope=other)


def _scaled(rope: RopeConfig, target: RopeConfig) -> RopeConfig:
    if target.scaling is not None:
        return target.model_copy(update={"theta": rope.theta})
    return RopeConfig(theta=rope.theta, scaling="linear", factor=4.0)


def _block(speculator: Speculator) -> Iterator[DrafterFault]:
    size = speculator.drafter.config.rows(speculator.block_size)
    change = block_input(lambda rows, at: (torch.cat([rows[:, 1:2], rows[:, 1:]], dim=1), at), size)
    says = "slot 0 holds the mask's embedding, not the anchor's (hipfire #483: 1.46 instead of 6.34)"
    yield DrafterFault("anchor", "anchor embedding missing in slot 0", says, change=change)
    for by, name in ((1, "late"), (-1, "early")):
        change = block_input(lambda rows, at, by=by: (rows, (at + by).clamp(min=0)), size)  # type: ignore[misc]
        says = "the block's positions do not follow on the context's"
        yield DrafterFault("positions", f"block positions one {name}", says, change=change)


def _context() -> Iterator[DrafterFault]:
    yield _rows("features", "features shuffled", "rows land at the wrong positions", changes.Shuffled)
    yield _rows("features", "features zeroed", "no feature reaches the drafter", lambda: changes.zeroed)
    says = "features are shifted by one token, as EAGLE's drafters want them"
    yield _rows("feature rows", "features one position late", says, changes.DelayedByOne)
    says = "a prefix hit or a prefill server left the drafter without the prompt (TensorRT-LLM #16005, #19352)"
    yield _rows("prompt context", "no drafter context of the prompt", says, changes.without_prompt)
    half = partial(changes.without_prompt, 0.5)
    yield _rows("prompt context", "no drafter context of half of the prompt", says, half)
    says = "features of accepted tokens are not injected: only each step's anchor's are"
    yield _rows("stale context", "accepted tokens not injected", says, lambda: changes.anchors_only)
    says = "nothing is injected after the prefill"
    yield _rows("stale context", "no drafter context of the answer", says, lambda: changes.without_answer)


def _rows(cause: str, name: str, says: str, make: Callable[[], Disturbance]) -> DrafterFault:
    # `make` is called for every run, since a disturbance may remember requests.
    return DrafterFault(cause, name, says, change=lambda speculator: DisturbedSpeculator(speculator, make()))


def _weights(speculator: Speculator) -> Iterator[DrafterFault]:
    last = speculator.drafter.config.num_layers - 1
    for index in sorted({0, last // 2, last}):
        says = "its tensors have other names and are skipped without an error"
        change = drafter_changed(partial(changes.skip_layer, index=index))
        yield DrafterFault(f"layer {index}", f"weights of drafter layer {index} missing", says, change=change)
    says = "fc was skipped without an error and is random (SGLang #39087: fc.weight_packed)"
    yield DrafterFault("fc", "fc not loaded", says, change=drafter_changed(changes.random_fc))
    says = "the context goes to the layers without hidden_norm"
    yield DrafterFault("hidden_norm", "hidden_norm missing", says, change=drafter_changed(changes.without_context_norm))
    says = "the head gets the last layer's output without norm"
    yield DrafterFault("norm", "final norm missing", says, change=drafter_changed(changes.without_final_norm))
    other = torch.bfloat16 if speculator.target.embedding.dtype == torch.float32 else torch.float32
    name = f"drafter in {str(other).removeprefix('torch.')}"
    change = drafter_changed(partial(changes.in_dtype, dtype=other))
    yield DrafterFault("dtype", name, "another precision than the reference's", change=change, benign=True)
    says = "the drafter's linear layers are rounded to FP8"
    yield DrafterFault("quantised drafter", "drafter in FP8", says, change=drafter_changed(changes.in_fp8), benign=True)
    yield DrafterFault(
        "quantised head", "head in FP8", "the head drafts from is rounded", change=changes.fp8_head, benign=True
    )


def _heads(speculator: Speculator) -> Iterator[DrafterFault]:
    # heads that loaders skip or misread
    config = speculator.drafter.config
    if config.draft_vocabulary is not None:
        says = "the engine puts the target's head in its place (vllm-ascend #11374: acceptance 25 % -> 1.7 %)"
        yield DrafterFault("draft head", "lm_head replaced by the target's", says, change=changes.target_head)
        says = "d2t's offsets are read as the ids themselves"
        change = drafter_changed(changes.offsets_as_ids)
        yield DrafterFault("vocabulary map", "d2t as absolute ids", says, change=change)
    if config.convolution is not None:
        says = "its tensors are skipped, the layers run without"
        yield DrafterFault(
            "convolution", "convolution dropped", says, change=drafter_changed(changes.without_convolution)
        )
    if config.selector is not None:
        says = "the codebooks' names have no .weight, and are skipped by loaders that want one"
        change = drafter_changed(changes.empty_codebooks)
        yield DrafterFault("selector", "codebooks left zero", says, change=change)
    if config.markov is not None:
        says = "the Markov head's tensors are skipped"
        change = drafter_changed(changes.without_markov_head)
        yield DrafterFault("Markov head", "Markov head not loaded", says, change=change)


def prompt_faults(
    tokenizer: PreTrainedTokenizerBase, asked: Sequence[Prompt], token_ids: Sequence[Sequence[int]]
) -> Iterator[PromptFault]:
    """Faults of the chat template and of the token that begins a text (BOS).

    Args:
        asked: text, token ids or messages.
        token_ids: the correct token ids of these prompts.
    """
    texts = [_without_template(prompt) for prompt in asked]
    if tokenizer.chat_template and all(text is not None for text in texts):
        bare = tuple(tuple(tokenizer(text)["input_ids"]) for text in texts)
        says = "prompts reach the target without the chat template that the drafter was trained behind"
        yield PromptFault("chat template", "chat template missing", says, prompts=bare)
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    has = all(ids[0] == bos for ids in token_ids)
    more = tuple((bos, *ids) for ids in token_ids)
    name = "BOS doubled" if has else "BOS added"
    yield PromptFault("BOS", name, "template and tokenizer both add it", prompts=more)
    if has:
        fewer = tuple(tuple(ids[1:]) for ids in token_ids)
        yield PromptFault("BOS", "BOS missing", "neither template nor tokenizer adds it", prompts=fewer)


def _without_template(prompt: Prompt) -> str | None:
    # None for a prompt that is not messages
    turns = [turn for turn in prompt if isinstance(turn, Mapping)]
    return "\n".join(turn["content"] for turn in turns) if turns else None
