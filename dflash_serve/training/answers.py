"""Makes the data: every prompt answered by the target, shard by shard; a killed run goes on where it stopped."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash_serve.common.files import write_whole
from dflash_serve.errors import UserError
from dflash_serve.models.target import TargetModel
from dflash_serve.prompts import jsonl_prompts
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
from dflash_serve.training.prompts import chat_prompt, collect
from dflash_serve.training.recipe import AnswersSection, Recipe, section_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORTEST_ANSWER = 4
Report = Callable[[str, int], None]
"""Called with what is being made and how much of it there is."""


def make_data(
    recipe: Recipe, target: TargetModel, tokenizer: PreTrainedTokenizerBase, folder: Path, report: Report
) -> DataManifest:
    """Fills `folder` with prompts and answers, or finds it filled.

    Raises:
        UserError: the folder holds data of another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = section_hash(recipe.target, recipe.data, recipe.seed)
    manifest = read_manifest(folder)
    if manifest and manifest.recipe_sha256 != wanted:
        what = "its data was made with other target, data or seed settings"
        raise UserError(what, where=str(folder), do="give another --output, or remove the folder")
    if manifest and manifest.finished:
        return manifest
    prompts = gather_prompts(recipe, target, tokenizer, folder, report)
    manifest = manifest or DataManifest(recipe_sha256=wanted, target=recipe.target.model, prompts=len(prompts))
    return _answer(recipe, target, prompts, folder, manifest, report)


def gather_prompts(
    recipe: Recipe, target: TargetModel, tokenizer: PreTrainedTokenizerBase, folder: Path, report: Report
) -> list[tuple[int, ...]]:
    """Token ids of all distinct prompts, shuffled by the seed; each source is kept in a file once it is whole."""
    excluded = {text for path in recipe.data.exclude for text in jsonl_prompts(path)}
    texts: dict[str, None] = {}
    for number, source in enumerate(recipe.data.prompts):
        path = folder / f"prompts-{number:02d}-{source.name}.jsonl"
        if not path.exists():
            found = collect(
                source,
                target,
                tokenizer,
                max_batch_size=recipe.data.answers.max_batch_size,
                seed=recipe.seed * 1000 + number,
                progress=partial(report, f"prompts {source.name}"),
            )
            write_whole(path, "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in found))
        if path.stat().st_size:  # a target may make up nothing of use
            texts.update(dict.fromkeys(jsonl_prompts(path)))
    kept = [text for text in texts if not any(known in text for known in excluded)]
    prompts = [chat_prompt(tokenizer, text) for text in kept]
    prompts = [prompt for prompt in prompts if len(prompt) <= recipe.data.answers.max_prompt_tokens]
    random.Random(recipe.seed).shuffle(prompts)  # noqa: S311 - no secret
    return prompts


def _answer(
    recipe: Recipe,
    target: TargetModel,
    prompts: list[tuple[int, ...]],
    folder: Path,
    manifest: DataManifest,
    report: Report,
) -> DataManifest:
    settings, writer = recipe.data.answers, _Writer(folder, manifest, recipe.data.answers.shard_size)
    decoder = BatchDecoder(
        target,
        max_batch_size=settings.max_batch_size,
        capacity=settings.max_prompt_tokens + settings.max_new_tokens,
        max_new_tokens=settings.max_new_tokens,
        stop_ids=target.config.eos_token_ids,
        seed=recipe.seed + len(writer.done),
    )
    minutes = settings.max_minutes
    deadline = inf if minutes is None else writer.started + minutes * 60 - manifest.seconds
    for completion in decoder.decode(_requests(prompts, writer.done, settings, recipe.seed, deadline)):
        if writer.add(completion):
            report("answers", writer.save(finished=False))
    writer.save(finished=True)
    return writer.manifest


class _Writer:
    """Collects answers into shards; what an earlier run wrote is `done`."""

    def __init__(self, folder: Path, manifest: DataManifest, shard_size: int) -> None:
        self.folder, self.manifest, self.shard_size = folder, manifest, shard_size
        known = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
        self.done = {answer.prompt_index for answer in known}
        self.distinct = {tuple(answer.tokens[answer.prompt_length :].tolist()) for answer in known}
        self.counts = {"ended": manifest.ended, "looped": manifest.looped, "dropped": manifest.dropped}
        self.pending: list[Example] = []
        self.started, self.before = time.monotonic(), manifest.seconds

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
        self.pending.append(Example(request.index, tokens, len(request.prompt)))
        return len(self.pending) >= self.shard_size

    def save(self, *, finished: bool) -> int:
        """Writes what is pending and the manifest; returns how many answers there are."""
        shards = self.manifest.shards
        if self.pending:
            shards = (*shards, write_shard(self.folder, len(shards), self.pending))
            self.pending = []
        seconds = self.before + time.monotonic() - self.started
        changes = {**self.counts, "shards": shards, "seconds": seconds, "finished": finished}
        self.manifest = self.manifest.model_copy(update=changes)
        write_manifest(self.folder, self.manifest)
        return totals(shards)[0]


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
