"""The training data: user turns, the target's answers to them through any `Engine`, and both on disk.

User turns come from files, from datasets, or from the target itself; those that share words with an evaluation's are
left out. Answers are safetensors shards of flat token ids, named by a manifest. A killed run goes on after its last
shard. Every answer depends on the recipe's seed and its prompt only, so a resumed run writes the same answers.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save
from torch import Tensor

from dflash_serve.backend import Conversation, Engine, Stream, embedded_backend
from dflash_serve.checkpoint.source import target_folder
from dflash_serve.checkpoint.target_config import read_target_config
from dflash_serve.common.documents import DATA, read_bytes
from dflash_serve.common.files import sha256, write_whole
from dflash_serve.common.settings import Frozen
from dflash_serve.common.store import digest
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_tokenizer
from dflash_serve.prompts import HUMAN_EVAL, hub_prompts, human_eval_prompts, jsonl_prompts
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.training.recipe import DatasetPrompts, FilePrompts, Recipe, SynthesisedPrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST = "manifest.json"
WINDOW = 13  # words in a row that two texts hardly ever share by chance (GPT-3, arXiv 2005.14165, appendix C)
WORD = re.compile(r"\w+")
SHORTEST_ANSWER = 4  # tokens; an anchor and one to predict are the least that could be trained on
SENTINEL = "@@USER@@"
ATTEMPTS = 4  # sampled turns per kept one before a source ends with fewer than it was to give
LONGEST_PERIOD, REPEATS, SHORTEST_TAIL = 24, 4, 24  # limits of a loop: see `repeated_tail`
LOOP_CHECK_EVERY = 16
Report = Callable[[str, int], None]  # called with the kind of data being made and how much of it there is


@dataclass(frozen=True)
class Example:
    """One training sequence: prompt and answer as token ids int32 [length], and how long the prompt is."""

    prompt_index: int
    tokens: Tensor
    prompt_length: int


class ShardEntry(Frozen):
    """One shard in the manifest."""

    file: str
    sha256: str
    answers: int
    tokens: int
    answer_tokens: int


class DataManifest(Frozen):
    """The contents of a data folder and the digest of its settings."""

    recipe_sha256: str
    target: str
    prompts: int
    excluded: int = 0  # prompts left out because they share words with an evaluation's
    shards: tuple[ShardEntry, ...] = ()
    ended: int = 0  # answers that ended by themselves; the others were cut at the limit or in a loop
    looped: int = 0
    dropped: int = 0  # answers that were too short or a repetition
    seconds: float = 0.0
    finished: bool = False  # all prompts are answered; False after `max_minutes` ran out


def write_shard(folder: Path, number: int, answers: Sequence[Example]) -> ShardEntry:
    """Writes a shard, whole or not at all."""
    path = folder / f"answers-{number:05d}.safetensors"
    lengths = torch.tensor([len(a.tokens) for a in answers])
    tensors = {
        "tokens": torch.cat([a.tokens for a in answers]).int(),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "prompt_lengths": torch.tensor([a.prompt_length for a in answers], dtype=torch.int32),
        "prompt_indexes": torch.tensor([a.prompt_index for a in answers], dtype=torch.int32),
    }
    write_whole(path, save(tensors))
    total = int(lengths.sum())
    return ShardEntry(
        file=path.name,
        sha256=sha256(path),
        answers=len(answers),
        tokens=total,
        answer_tokens=total - sum(a.prompt_length for a in answers),
    )


def read_shard(folder: Path, entry: ShardEntry) -> list[Example]:
    """Reads a shard back.

    Raises:
        UserError: missing, or not what the manifest says.
    """
    path = folder / entry.file
    if not path.exists() or sha256(path) != entry.sha256:
        raise UserError("missing or changed since it was written", where=str(path), do="make the data again")
    tensors = load_file(path)
    ends = tensors["offsets"][1:-1]
    tokens = tensors["tokens"].tensor_split(ends)
    indexes, lengths = tensors["prompt_indexes"].tolist(), tensors["prompt_lengths"].tolist()
    return [Example(*fields) for fields in zip(indexes, tokens, lengths, strict=True)]


def read_manifest(folder: Path) -> DataManifest | None:
    """The folder's manifest, None if there is none yet."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return DataManifest.model_validate_json(read_bytes(path, DATA))
    except ValidationError as error:
        what = f"not a data manifest of this version ({error.errors()[0]['msg']})"
        raise UserError(what, where=str(path), do="give another --output, or remove the folder") from None


def write_manifest(folder: Path, manifest: DataManifest) -> None:
    """Replaces the manifest, whole or not at all."""
    write_whole(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")


def totals(entries: tuple[ShardEntry, ...]) -> tuple[int, int, int]:
    """Answers, tokens and answer tokens of all shards."""
    return sum(e.answers for e in entries), sum(e.tokens for e in entries), sum(e.answer_tokens for e in entries)


def load_answers(
    folder: Path, manifest: DataManifest, *, validation_share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """All answers, split into (training, validation) by their prompt: adding data moves no answer to the other side.

    Raises:
        UserError: nothing to train on, or a shard is broken.
    """
    answers = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
    training: list[Example] = []
    validation: list[Example] = []
    for answer in answers:
        chance = random.Random(seed * 2_000_003 + answer.prompt_index).random()  # noqa: S311 - no secret
        (validation if chance < validation_share else training).append(answer)
    if not training:
        raise UserError("no answers to train on", where=str(folder), do="give more prompts")
    return training, validation


def seen_vocabulary(answers: Sequence[Example], least: int = 1) -> Tensor:
    """Token ids that stand in the answers `least` times or more, sorted, int64.

    Raises:
        UserError: there are none.
    """
    wanted = [answer.tokens[answer.prompt_length :] for answer in answers]
    found, counts = torch.unique(torch.cat(wanted), return_counts=True)
    kept: Tensor = found[counts >= least]
    if not len(kept):
        do = "lower training.seen_at_least, or make more data"
        raise UserError(f"no token is in the data {least} times", where="training.seen_at_least", do=do)
    return kept.to(torch.int64)


class Excluded:
    """Evaluation prompts that must not be trained on.

    A text is `in` it if it shares WINDOW words in a row with a prompt, case and punctuation aside, or if it contains a
    whole shorter prompt and little else. `found` counts such texts.
    """

    def __init__(self, prompts: Iterable[str]) -> None:
        self.found = 0
        every = [_words(prompt) for prompt in prompts]
        self._windows = {window for words in every for window in _windows(words, WINDOW)}
        self._short = {tuple(words) for words in every if 0 < len(words) < WINDOW}

    def __contains__(self, text: object) -> bool:
        words = _words(str(text))
        held = any(window in self._windows for window in _windows(words, WINDOW))
        if not held and len(words) < 2 * WINDOW:
            held = any(short in _windows(words, len(short)) for short in self._short)
        self.found += held
        return held


def read_excluded(sources: Sequence[str]) -> Excluded:
    """Reads the excluded prompts: JSONL files of {"prompt": text}, or `humaneval` for that package's.

    Raises:
        UserError: a file cannot be read, or the package is not installed.
    """
    where = "data.exclude"
    found = [human_eval_prompts(where) if name == HUMAN_EVAL else jsonl_prompts(Path(name)) for name in sources]
    return Excluded(prompt for prompts in found for prompt in prompts)


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _windows(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    for first in range(len(words) - length + 1):
        yield tuple(words[first : first + length])


@dataclass(frozen=True)
class Request:
    """A prompt to continue."""

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass
class Completion:
    """A continued prompt. `ended`: by a stop token (kept, the last one); `looped`: cut because it repeated itself."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    looped: bool = False


def answer_engine(recipe: Recipe, device: str) -> Engine:
    """The target without a drafter, in bfloat16, with room for `max_batch_size` of the recipe's answers.

    Raises:
        UserError: the embedded backend is not installed, or does not run the target.
    """
    model, answers = recipe.target, recipe.data.answers
    tokenizer = load_tokenizer(model.model, model.revision)
    room = [answers.max_prompt_tokens + answers.max_new_tokens]
    for source in recipe.data.prompts:
        if isinstance(source, SynthesisedPrompts):
            starts, _ = _user_turns(tokenizer, source.openers)
            room.append(max(map(len, starts)) + source.max_new_tokens)
    context = read_target_config(target_folder(model.model, model.revision)).max_position_embeddings
    fields = {
        "target": {"model": model.model, "revision": model.revision},
        "hardware": {"dtype": "bfloat16", "gpu": "none" if device == "cpu" else None},
        "limits": {"max_batch_size": answers.max_batch_size, "max_model_len": min(max(room), context)},
    }
    return embedded_backend().engine(Deployment.model_validate(fields))


def make_data(recipe: Recipe, open_engine: Callable[[], Engine], folder: Path, report: Report) -> DataManifest:
    """Fills `folder` with prompts and answers, or finds it filled; with more minutes than before it is filled further.

    Args:
        open_engine: gives the target's engine; not called if nothing is left to answer.

    Raises:
        UserError: the folder holds data of another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    minutes = recipe.data.answers.max_minutes
    answers = recipe.data.answers.model_copy(update={"max_minutes": None})
    data = recipe.data.model_copy(update={"answers": answers})
    wanted = digest([recipe.target.model_dump(mode="json"), data.model_dump(mode="json"), recipe.seed])
    manifest = read_manifest(folder)
    if manifest and manifest.recipe_sha256 != wanted:
        what = "its data was made with other target, data or seed settings"
        raise UserError(what, where=str(folder), do="give another --output, or remove the folder")
    if manifest and (manifest.finished or (minutes is not None and manifest.seconds >= minutes * 60)):
        return manifest
    engine, excluded = open_engine(), read_excluded(recipe.data.exclude)
    prompts = gather_prompts(recipe, engine, folder, excluded, report)
    if manifest is None:
        counts = {"prompts": len(prompts), "excluded": excluded.found}
        manifest = DataManifest(recipe_sha256=wanted, target=recipe.target.model, **counts)
    writer = _Writer(folder, manifest, recipe.data.answers.shard_size)
    deadline = inf if minutes is None else writer.began + minutes * 60
    requests = _requests(recipe, prompts, writer.done, deadline)
    for completion in ask(engine, requests, recipe.data.answers.max_batch_size):
        if writer.add(completion):
            report("answers", writer.save(finished=False))
    # A dropped answer is asked for again when an unfinished run goes on.
    writer.save(finished=time.monotonic() <= deadline)
    return writer.manifest


def gather_prompts(
    recipe: Recipe, engine: Engine, folder: Path, excluded: Excluded, report: Report
) -> list[tuple[int, ...]]:
    """Token ids of all distinct prompts, shuffled by the seed; each source is kept in a file once it is whole."""
    texts: dict[str, None] = {}
    for number, source in enumerate(recipe.data.prompts):
        path = folder / f"prompts-{number:02d}-{source.name}.jsonl"
        if not path.exists():
            if isinstance(source, SynthesisedPrompts):
                seeds = (recipe.seed, number)
                found = _synthesised(source, engine, recipe.data.answers.max_batch_size, seeds, report)
            else:
                found = written_prompts(source)
            write_whole(path, "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in found))
        if path.stat().st_size:  # a target may make up nothing of use
            texts.update(dict.fromkeys(jsonl_prompts(path)))
    turns = ([{"role": "user", "content": text}] for text in texts if text not in excluded)
    prompts = [tuple(engine.tokenize(Conversation(turn, recipe.target.chat_template_kwargs))) for turn in turns]
    prompts = [prompt for prompt in prompts if len(prompt) <= recipe.data.answers.max_prompt_tokens]
    random.Random(recipe.seed).shuffle(prompts)  # noqa: S311 - no secret
    return prompts


def written_prompts(source: FilePrompts | DatasetPrompts) -> list[str]:
    """Distinct user turns of a file or a dataset, each in one of the source's templates, in a fixed order."""
    if isinstance(source, FilePrompts):
        texts = jsonl_prompts(source.path)
    else:
        where, column = f"prompts {source.name}", source.column
        texts = hub_prompts(source.dataset, subset=source.subset, split=source.split, column=column, where=where)
    chosen = [source.templates[i % len(source.templates)].replace("{prompt}", text) for i, text in enumerate(texts)]
    return list(dict.fromkeys(chosen))[: source.count]


def ask(engine: Engine, requests: Iterator[Request], at_once: int) -> Iterator[Completion]:
    """Completions as they end, with up to `at_once` requests in the engine; one that repeats itself is cut."""
    running: list[tuple[Stream, Completion]] = []  # a stream each, so that one answer can be ended early
    while True:
        # Refilled some at a time: a prefill of one prompt costs nearly as much as one of many.
        if len(running) <= at_once - max(1, at_once // 16):
            for request in islice(requests, at_once - len(running)):
                running.append((engine.stream([request.prompt], [request.params]), Completion(request)))
        if not running:
            return
        going = []
        for stream, completion in running:
            if _goes_on(stream, completion):
                going.append((stream, completion))
            else:
                stream.close()
                yield completion
        running = going


def repeated_tail(tokens: Sequence[int]) -> int:
    """The shortest period n <= 24 with which the tail repeats, 0 if it does not.

    The rule: the last max(4n, 24) tokens are one n-gram over and over, i.e. each equals the token n before it.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        tail = max(REPEATS * period, SHORTEST_TAIL)
        if len(tokens) < tail:
            continue
        last = tokens[-tail:]
        if last[period:] == last[:-period]:
            return period
    return 0


def _goes_on(stream: Stream, completion: Completion) -> bool:  # False when the answer is complete
    chunk, tokens = next(stream), completion.tokens
    before = len(tokens)
    tokens += chunk.token_ids
    if chunk.finish_reason is not None:
        completion.ended = chunk.finish_reason == "stop"
        return False
    if before // LOOP_CHECK_EVERY != len(tokens) // LOOP_CHECK_EVERY and (period := repeated_tail(tokens)):
        completion.looped = True
        del tokens[len(tokens) - 2 * period :]
    return not completion.looped


def _synthesised(
    source: SynthesisedPrompts, engine: Engine, at_once: int, seeds: tuple[int, int], report: Report
) -> list[str]:
    """Samples user turns; drops those that are cut at the limit, say nothing or repeat another."""
    starts, stop_ids = _user_turns(engine.tokenizer, source.openers)
    skip = len(_user_turns(engine.tokenizer, ("",))[0][0])
    kept: dict[str, None] = {}

    def requests() -> Iterator[Request]:
        for index in range(ATTEMPTS * source.count):
            if len(kept) >= source.count:
                return
            params = SamplingParams(
                temperature=source.temperature,
                max_tokens=source.max_new_tokens,
                stop_token_ids=stop_ids,
                seed=_seed(*seeds, index),
            )
            yield Request(index, starts[index % len(starts)], params)

    for completion in ask(engine, requests(), at_once):
        said = [*completion.request.prompt, *completion.tokens[:-1]][skip:]
        text = engine.tokenizer.decode(said, skip_special_tokens=True).strip()
        opener = source.openers[completion.request.index % len(starts)].strip()
        if completion.ended and len(text) > len(opener) + 3:
            kept.setdefault(text)
            report(f"prompts {source.name}", len(kept))
    return list(kept)[: source.count]


def _user_turns(
    tokenizer: PreTrainedTokenizerBase, openers: Sequence[str]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    turns = [{"role": "user", "content": SENTINEL}]
    before, after = str(tokenizer.apply_chat_template(turns, tokenize=False)).split(SENTINEL)
    starts = [tuple(tokenizer.encode(before + opener, add_special_tokens=False)) for opener in openers]
    return starts, tuple(tokenizer.encode(after, add_special_tokens=False)[:1])


def _requests(recipe: Recipe, prompts: list[tuple[int, ...]], done: set[int], deadline: float) -> Iterator[Request]:
    settings = recipe.data.answers
    for index, prompt in enumerate(prompts):
        if time.monotonic() > deadline:
            return
        if index in done:
            continue
        # A pure function of seed and prompt: a resumed run samples the same prompts.
        chance = random.Random(recipe.seed * 1_000_003 + index).random()  # noqa: S311 - no secret
        temperature = settings.temperature if chance < settings.sampled_share else 0.0
        seed, limit = _seed(recipe.seed, index), settings.max_new_tokens
        yield Request(index, prompt, SamplingParams(temperature=temperature, max_tokens=limit, seed=seed))


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


class _Writer:
    """Collects answers into shards; `done` are the prompts that an earlier run answered."""

    def __init__(self, folder: Path, manifest: DataManifest, shard_size: int) -> None:
        self.folder, self.manifest, self.shard_size = folder, manifest, shard_size
        known = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
        self.done = {answer.prompt_index for answer in known}
        self.distinct = {tuple(answer.tokens[answer.prompt_length :].tolist()) for answer in known}
        self.counts = {"ended": manifest.ended, "looped": manifest.looped, "dropped": manifest.dropped}
        self.pending: list[Example] = []
        self.began = time.monotonic() - manifest.seconds  # as if all had been made without a pause

    def add(self, completion: Completion) -> bool:
        """Takes an answer, or drops one that is too short or a repetition; True when a shard is full."""
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
        """Writes the pending answers and the manifest; returns how many answers there are."""
        shards = self.manifest.shards
        if self.pending:
            shards = (*shards, write_shard(self.folder, len(shards), self.pending))
            self.pending = []
        seconds = time.monotonic() - self.began
        changes = {**self.counts, "shards": shards, "seconds": seconds, "finished": finished}
        self.manifest = self.manifest.model_copy(update=changes)
        write_manifest(self.folder, self.manifest)
        return totals(shards)[0]
