"""Makes the data: every prompt answered by the target, shard by shard; a killed run goes on where it stopped."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dflash_serve.errors import UserError
from dflash_serve.training.decoding import BatchDecoder, Completion, Request
from dflash_serve.training.prompts import chat_prompt, collect, read_prompts
from dflash_serve.training.recipe import AnswersSection, Recipe, section_hash
from dflash_serve.training.shards import (
    Answer,
    Manifest,
    ShardEntry,
    read_manifest,
    read_shard,
    write_lines,
    write_manifest,
    write_shard,
)
from dflash_serve.training.target import Target, Tokenizer

SHORTEST_ANSWER = 4
Report = Callable[[str, int], None]
"""Called with what is being made and how much of it there is."""


def make_data(recipe: Recipe, target: Target, tokenizer: Tokenizer, folder: Path, report: Report) -> Manifest:
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
    manifest = manifest or Manifest(recipe_sha256=wanted, target=recipe.target.model, prompts=len(prompts))
    return _answer(recipe, target, prompts, folder, manifest, report)


def gather_prompts(
    recipe: Recipe, target: Target, tokenizer: Tokenizer, folder: Path, report: Report
) -> list[tuple[int, ...]]:
    """Token ids of all distinct prompts, shuffled by the seed; each source is kept in a file once it is whole."""
    excluded = {text for path in recipe.data.exclude for text in read_prompts(path)}
    texts: dict[str, None] = {}
    for number, source in enumerate(recipe.data.prompts):
        path = folder / f"prompts-{number:02d}-{source.name}.jsonl"
        if not path.exists():
            seed, slots = recipe.seed * 1000 + number, recipe.data.answers.slots
            label = f"prompts {source.name}"
            found = collect(source, target, tokenizer, slots=slots, seed=seed, progress=lambda n, s=label: report(s, n))  # type: ignore[misc]
            write_lines(path, found)
        texts.update(dict.fromkeys(read_prompts(path)))
    kept = [text for text in texts if not any(known in text for known in excluded)]
    prompts = [chat_prompt(tokenizer, text) for text in kept]
    prompts = [prompt for prompt in prompts if len(prompt) <= recipe.data.answers.max_prompt_tokens]
    random.Random(recipe.seed).shuffle(prompts)  # noqa: S311 - no secret
    return prompts


def _answer(
    recipe: Recipe, target: Target, prompts: list[tuple[int, ...]], folder: Path, manifest: Manifest, report: Report
) -> Manifest:
    settings = recipe.data.answers
    known = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
    done = {answer.prompt_index for answer in known}
    distinct = {tuple(answer.tokens[answer.prompt_length :].tolist()) for answer in known}
    started, before = time.monotonic(), manifest.seconds
    decoder = BatchDecoder(
        target,
        slots=settings.slots,
        capacity=settings.max_prompt_tokens + settings.max_new_tokens,
        max_new_tokens=settings.max_new_tokens,
        stop_ids=target.config.eos_token_ids,
        seed=recipe.seed + len(done),
    )
    pending: list[Answer] = []
    budget = None if settings.max_minutes is None else settings.max_minutes * 60 - before
    deadline = float("inf") if budget is None else started + budget
    counts = {"ended": manifest.ended, "looped": manifest.looped, "dropped": manifest.dropped}
    entries = list(manifest.shards)

    def save(finished: bool) -> Manifest:
        if pending:
            entries.append(write_shard(folder, len(entries), pending))
            pending.clear()
        seconds = before + time.monotonic() - started
        now = manifest.model_copy(update={**counts, "shards": tuple(entries), "seconds": seconds, "finished": finished})
        write_manifest(folder, now)
        return now

    for completion in decoder.decode(_requests(prompts, done, settings, recipe.seed, deadline)):
        tokens = tuple(completion.tokens)
        if len(tokens) < SHORTEST_ANSWER or tokens in distinct:
            counts["dropped"] += 1
            continue
        distinct.add(tokens)
        counts["ended"] += completion.ended
        counts["looped"] += completion.looped
        pending.append(_as_answer(completion))
        if len(pending) >= settings.shard_size:
            save(finished=False)
            report("answers", sum(entry.answers for entry in entries))
    return save(finished=True)


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


def _as_answer(completion: Completion) -> Answer:
    request = completion.request
    tokens = torch.tensor([*request.prompt, *completion.tokens], dtype=torch.int32)
    return Answer(request.index, tokens, len(request.prompt))


def totals(entries: tuple[ShardEntry, ...]) -> tuple[int, int, int]:
    """Answers, tokens and answer tokens of all shards."""
    return sum(e.answers for e in entries), sum(e.tokens for e in entries), sum(e.answer_tokens for e in entries)
