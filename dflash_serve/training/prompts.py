"""User turns to answer: from files, from datasets, or made up by the target itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_serve.models.target import TargetModel
from dflash_serve.prompts import hub_prompts, jsonl_prompts
from dflash_serve.training.decoding import BatchDecoder, Request
from dflash_serve.training.recipe import DatasetPrompts, FilePrompts, Prompts, SynthesisedPrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTINEL = "@@USER@@"
ATTEMPTS = 4
"""Sampled turns per kept one before we give up on a source."""


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of one user turn up to where the assistant begins."""
    turns = [{"role": "user", "content": text}]
    rendered = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    return tuple(tokenizer.encode(rendered, add_special_tokens=False))


def collect(
    source: Prompts,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_batch_size: int,
    seed: int,
    progress: Callable[[int], None],
) -> list[str]:
    """Distinct user turns of one source, in a fixed order."""
    if isinstance(source, SynthesisedPrompts):
        return _synthesise(source, target, tokenizer, max_batch_size=max_batch_size, seed=seed, progress=progress)
    texts = _texts(source)
    chosen = [source.templates[i % len(source.templates)].replace("{prompt}", text) for i, text in enumerate(texts)]
    return list(dict.fromkeys(chosen))[: source.count]


def _texts(source: FilePrompts | DatasetPrompts) -> list[str]:
    if isinstance(source, FilePrompts):
        return jsonl_prompts(source.path)
    where, column = f"prompts {source.name}", source.column
    return hub_prompts(source.dataset, subset=source.subset, split=source.split, column=column, where=where)


def _synthesise(
    source: SynthesisedPrompts,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_batch_size: int,
    seed: int,
    progress: Callable[[int], None],
) -> list[str]:
    """Samples user turns; those that did not end by themselves, say nothing or repeat another are dropped."""
    prefix, stop_ids = _user_turn(tokenizer)
    starts = [tokenizer.encode(prefix + opener, add_special_tokens=False) for opener in source.openers]
    skip = len(tokenizer.encode(prefix, add_special_tokens=False))
    capacity = max(map(len, starts)) + source.max_new_tokens
    decoder = BatchDecoder(
        target,
        max_batch_size=max_batch_size,
        capacity=capacity,
        max_new_tokens=source.max_new_tokens,
        stop_ids=stop_ids,
        seed=seed,
    )
    kept: dict[str, None] = {}
    for completion in decoder.decode(_requests(starts, source, kept)):
        said = [*completion.request.prompt, *completion.tokens[:-1]][skip:]
        text = tokenizer.decode(said, skip_special_tokens=True).strip()
        opener = source.openers[completion.request.index % len(starts)].strip()
        if completion.ended and len(text) > len(opener) + 3:
            kept.setdefault(text)
            progress(len(kept))
    return list(kept)[: source.count]


def _requests(starts: Sequence[list[int]], source: SynthesisedPrompts, kept: dict[str, None]) -> Iterator[Request]:
    for index in range(ATTEMPTS * source.count):
        if len(kept) >= source.count:
            return
        yield Request(index, tuple(starts[index % len(starts)]), source.temperature)


def _user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """What the chat template puts before a user's words, and the token it puts after them."""
    turns = [{"role": "user", "content": SENTINEL}]
    before, after = str(tokenizer.apply_chat_template(turns, tokenize=False)).split(SENTINEL)
    return before, tokenizer.encode(after, add_special_tokens=False)[:1]
