"""Makes the data: user turns from files, from datasets or made up by the target, every one answered by the target.

Answers are kept shard by shard; a killed run goes on where it stopped.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash_serve.common.files import write_whole
from dflash_serve.errors import UserError
from dflash_serve.models.target import TargetModel
from dflash_serve.models.target_config import TargetConfig
from dflash_serve.prompts import hub_prompts, jsonl_prompts
from dflash_serve.training.contamination import Excluded, read_excluded
from dflash_serve.training.dataset import (
    DataManifest,
    Example,
    read_manifest,
    read_shard,
    totals,
    write_manifest,
    write_shard,
)
from dflash_serve.training.decoding import BatchDecoder, Completion, Request
from dflash_serve.training.initialise import drafter_config
from dflash_serve.training.recipe import (
    AnswersSection,
    DatasetPrompts,
    FilePrompts,
    Recipe,
    SynthesisedPrompts,
    section_hash,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORTEST_ANSWER = 4
SENTINEL = "@@USER@@"
ATTEMPTS = 4
"""Sampled turns per kept one before we give up on a source."""
Report = Callable[[str, int], None]
"""Called with what is being made and how much of it there is."""


def make_data(
    recipe: Recipe, target: TargetModel, tokenizer: PreTrainedTokenizerBase, folder: Path, report: Report
) -> DataManifest:
    """Fills `folder` with prompts and answers, or finds it filled; with more minutes than before it is filled further.

    Raises:
        UserError: the folder holds data of another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    minutes = recipe.data.answers.max_minutes
    answers = recipe.data.answers.model_copy(update={"max_minutes": None})
    wanted = section_hash(recipe.target, recipe.data.model_copy(update={"answers": answers}), recipe.seed)
    manifest = read_manifest(folder)
    if manifest and manifest.recipe_sha256 != wanted:
        what = "its data was made with other target, data or seed settings"
        raise UserError(what, where=str(folder), do="give another --output, or remove the folder")
    if manifest and (manifest.finished or (minutes is not None and manifest.seconds >= minutes * 60)):
        return manifest
    excluded = read_excluded(recipe.data.exclude)
    prompts = gather_prompts(recipe, target, tokenizer, folder, excluded, report)
    if manifest is None:
        counts = {"prompts": len(prompts), "excluded": excluded.found}
        layers = feature_layers(recipe, target.config)
        manifest = DataManifest(recipe_sha256=wanted, target=recipe.target.model, feature_layers=layers, **counts)
    return _answer(recipe, target, prompts, _Writer(folder, manifest, recipe.data.answers.shard_size), report)


def feature_layers(recipe: Recipe, target: TargetConfig) -> tuple[int, ...]:
    """Layers whose outputs are written with the answers: the drafter's, and for soft labels the last."""
    if not recipe.data.answers.keep_features:
        return ()
    return (*drafter_config(recipe.drafter, target).target_layer_ids, target.num_layers - 1)


def gather_prompts(
    recipe: Recipe,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    excluded: Excluded,
    report: Report,
) -> list[tuple[int, ...]]:
    """Token ids of all distinct prompts, shuffled by the seed; each source is kept in a file once it is whole."""
    answers = recipe.data.answers
    texts: dict[str, None] = {}
    for number, source in enumerate(recipe.data.prompts):
        path = folder / f"prompts-{number:02d}-{source.name}.jsonl"
        if not path.exists():
            if isinstance(source, SynthesisedPrompts):
                seed = recipe.seed * 1000 + number
                found = _synthesised(source, target, tokenizer, answers.max_batch_size, seed, report)
            else:
                found = written_prompts(source)
            write_whole(path, "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in found))
        if path.stat().st_size:  # a target may make up nothing of use
            texts.update(dict.fromkeys(jsonl_prompts(path)))
    kept = [text for text in texts if text not in excluded]
    prompts = [chat_prompt(tokenizer, text) for text in kept]
    prompts = [prompt for prompt in prompts if len(prompt) <= answers.max_prompt_tokens]
    random.Random(recipe.seed).shuffle(prompts)  # noqa: S311 - no secret
    return prompts


def written_prompts(source: FilePrompts | DatasetPrompts) -> list[str]:
    """Distinct user turns that others wrote, each in one of the source's templates, in a fixed order."""
    if isinstance(source, FilePrompts):
        texts = jsonl_prompts(source.path)
    else:
        where, column = f"prompts {source.name}", source.column
        texts = hub_prompts(source.dataset, subset=source.subset, split=source.split, column=column, where=where)
    chosen = [source.templates[i % len(source.templates)].replace("{prompt}", text) for i, text in enumerate(texts)]
    return list(dict.fromkeys(chosen))[: source.count]


def _synthesised(
    source: SynthesisedPrompts,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    max_batch_size: int,
    seed: int,
    report: Report,
) -> list[str]:
    """Samples user turns; those that did not end by themselves, say nothing or repeat another are dropped."""
    prefix, stop_ids = _user_turn(tokenizer)
    starts = [tokenizer.encode(prefix + opener, add_special_tokens=False) for opener in source.openers]
    skip = len(tokenizer.encode(prefix, add_special_tokens=False))
    decoder = BatchDecoder(
        target,
        max_batch_size=max_batch_size,
        capacity=max(map(len, starts)) + source.max_new_tokens,
        max_new_tokens=source.max_new_tokens,
        stop_ids=stop_ids,
        seed=seed,
    )
    kept: dict[str, None] = {}
    for completion in decoder.decode(_starts(starts, source, kept)):
        said = [*completion.request.prompt, *completion.tokens[:-1]][skip:]
        text = tokenizer.decode(said, skip_special_tokens=True).strip()
        opener = source.openers[completion.request.index % len(starts)].strip()
        if completion.ended and len(text) > len(opener) + 3:
            kept.setdefault(text)
            report(f"prompts {source.name}", len(kept))
    return list(kept)[: source.count]


def _starts(starts: Sequence[list[int]], source: SynthesisedPrompts, kept: dict[str, None]) -> Iterator[Request]:
    """The beginnings of user turns, until enough of them are `kept`."""
    for index in range(ATTEMPTS * source.count):
        if len(kept) >= source.count:
            return
        yield Request(index, tuple(starts[index % len(starts)]), source.temperature)


def _user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """What the chat template puts before a user's words, and the token it puts after them."""
    turns = [{"role": "user", "content": SENTINEL}]
    before, after = str(tokenizer.apply_chat_template(turns, tokenize=False)).split(SENTINEL)
    return before, tokenizer.encode(after, add_special_tokens=False)[:1]


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of one user turn up to where the assistant begins."""
    turns = [{"role": "user", "content": text}]
    rendered = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    return tuple(tokenizer.encode(rendered, add_special_tokens=False))


def _answer(
    recipe: Recipe, target: TargetModel, prompts: list[tuple[int, ...]], writer: _Writer, report: Report
) -> DataManifest:
    settings = recipe.data.answers
    decoder = BatchDecoder(
        target,
        max_batch_size=settings.max_batch_size,
        capacity=settings.max_prompt_tokens + settings.max_new_tokens,
        max_new_tokens=settings.max_new_tokens,
        stop_ids=target.config.eos_token_ids,
        seed=recipe.seed + len(writer.done),
        layer_ids=writer.manifest.feature_layers,
    )
    deadline = inf if settings.max_minutes is None else writer.began + settings.max_minutes * 60
    for completion in decoder.decode(_requests(prompts, writer.done, settings, recipe.seed, deadline)):
        if writer.add(completion):
            report("answers", writer.save(finished=False))
    # An answer that was too short or said before is dropped, and asked for again where a run goes on.
    writer.save(finished=time.monotonic() <= deadline)
    return writer.manifest


def _requests(
    prompts: list[tuple[int, ...]], done: set[int], settings: AnswersSection, seed: int, deadline: float
) -> Iterator[Request]:
    for index, prompt in enumerate(prompts):
        if time.monotonic() > deadline:
            return
        if index in done:
            continue
        # A pure function of seed and prompt: a resumed run samples the same prompts.
        chance = random.Random(seed * 1_000_003 + index).random()  # noqa: S311 - no secret
        yield Request(index, prompt, settings.temperature if chance < settings.sampled_share else 0.0)


class _Writer:
    """Collects answers into shards; what an earlier run wrote is `done`."""

    def __init__(self, folder: Path, manifest: DataManifest, shard_size: int) -> None:
        self.folder, self.manifest, self.shard_size = folder, manifest, shard_size
        known = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
        self.done = {answer.prompt_index for answer in known}
        self.distinct = {tuple(answer.tokens[answer.prompt_length :].tolist()) for answer in known}
        self.counts = {"ended": manifest.ended, "looped": manifest.looped, "dropped": manifest.dropped}
        self.pending: list[Example] = []
        self.began = time.monotonic() - manifest.seconds  # as if all had been made without a pause

    def add(self, completion: Completion) -> bool:
        """Takes an answer, or drops one too short or said before; True when a shard is full."""
        request, said = completion.request, tuple(completion.tokens)
        if len(said) < SHORTEST_ANSWER or said in self.distinct:
            self.counts["dropped"] += 1
            return False
        self.distinct.add(said)
        self.counts["ended"] += completion.ended
        self.counts["looped"] += completion.looped
        tokens = torch.tensor([*request.prompt, *said], dtype=torch.int32)
        self.pending.append(Example(request.index, tokens, len(request.prompt), features=completion.features))
        return len(self.pending) >= self.shard_size

    def save(self, *, finished: bool) -> int:
        """Writes what is pending and the manifest; returns how many answers there are."""
        shards = self.manifest.shards
        if self.pending:
            shards = (*shards, write_shard(self.folder, len(shards), self.pending))
            self.pending = []
        seconds = time.monotonic() - self.began
        changes = {**self.counts, "shards": shards, "seconds": seconds, "finished": finished}
        self.manifest = self.manifest.model_copy(update=changes)
        write_manifest(self.folder, self.manifest)
        return totals(shards)[0]
