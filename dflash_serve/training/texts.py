"""Texts that others wrote, as training data: one pass of the target over them instead of an answer token by token.

A text is a source of contexts. What the drafter must predict in one is what the target would say there, and a block
counts as far as the text agrees with that: up to its first other token, beyond which decoding would be elsewhere.
"""

from __future__ import annotations

import glob
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash_serve.errors import UserError
from dflash_serve.models.target import TargetModel
from dflash_serve.training.answers import Report, chat_prompt
from dflash_serve.training.contamination import read_excluded
from dflash_serve.training.dataset import DataManifest, Example, target_features, write_manifest, write_shard
from dflash_serve.training.recipe import Recipe, Texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORTEST_PIECE = 32
"""Tokens; a shorter rest of a text is left."""
TOKENS_AT_ONCE = 2048
Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of the user turn before it, and its own."""


def make_texts(
    recipe: Recipe,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    manifest: DataManifest,
    report: Report,
) -> DataManifest:
    """Adds shards of texts to `folder`, going on behind those that are there.

    Raises:
        UserError: a source's files cannot be read.
    """
    size = recipe.data.answers.shard_size
    if manifest.texts_finished or not recipe.data.texts:
        return manifest
    pieces, left_out = gather_pieces(recipe, tokenizer)
    for first in range(size * len(manifest.texts), len(pieces), size):
        batches = _batches(pieces[first : first + size])
        entry = write_shard(
            folder, len(manifest.texts), [text for batch in batches for text in read_by(target, batch)], kind="texts"
        )
        manifest = manifest.model_copy(update={"texts": (*manifest.texts, entry)})
        write_manifest(folder, manifest)
        report("texts", min(first + size, len(pieces)))
    manifest = manifest.model_copy(update={"texts_excluded": left_out, "texts_finished": True})
    write_manifest(folder, manifest)
    return manifest


def gather_pieces(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Piece], int]:
    """Distinct pieces of all sources, shuffled by the seed, and how many texts were left out as too like a prompt of an
    evaluation.
    """
    excluded = read_excluded(recipe.data.exclude)
    pieces: list[Piece] = []
    for source in recipe.data.texts:
        prompt = () if source.prompt is None else chat_prompt(tokenizer, source.prompt)
        found: dict[tuple[int, ...], None] = {}
        for text in read_texts(source):
            if text not in excluded:
                found.update(dict.fromkeys(cut(tokenizer.encode(text, add_special_tokens=False), source.piece_tokens)))
        own = [(prompt, piece) for piece in found]
        random.Random(f"{recipe.seed} {source.name}").shuffle(own)  # noqa: S311 - no secret
        pieces += own[: source.count]
    random.Random(recipe.seed).shuffle(pieces)  # noqa: S311 - no secret
    return pieces, excluded.found


def cut(token_ids: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """Pieces of at most `length` tokens; a rest of fewer than SHORTEST_PIECE is left."""
    for first in range(0, len(token_ids) - SHORTEST_PIECE + 1, length):
        yield tuple(token_ids[first : first + length])


def read_texts(source: Texts) -> Iterator[str]:
    """Every file that the pattern names, in the order of their names; of a JSONL file every line's `text`.

    Raises:
        UserError: no such file, or a line without a text.
    """
    where = f"data.texts {source.name}"
    paths = [Path(name) for name in sorted(glob.glob(source.path, recursive=True))]
    if not any(path.is_file() for path in paths):
        raise UserError(f"no file is called {source.path}", where=where, do="check the pattern")
    for path in paths:
        if not path.is_file():
            continue
        written = path.read_text(encoding="utf-8", errors="ignore")
        if path.suffix == ".jsonl":
            for number, line in enumerate(filter(str.strip, written.split("\n")), 1):
                yield _text(line, f"{path}:{number}")
        else:
            yield written


def _text(line: str, place: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise UserError("a line without a text", where=place, do='give one {"text": ...} a line')
    return text


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Few enough tokens at once for the target's activations."""
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if sum(len(prompt) + len(own) for prompt, own in batch) >= TOKENS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


@torch.inference_mode()
def read_by(target: TargetModel, pieces: Sequence[Piece]) -> list[Example]:
    """Pieces as examples, with what the target would say after each token. They have no prompt's number."""
    device = target.embedding.device
    sequences = [torch.tensor([*prompt, *own], device=device) for prompt, own in pieces]
    last = target_features(target, sequences, (target.config.num_layers - 1,))
    said = target.logits(target.norm(torch.cat(last))).argmax(-1).int().cpu().split([len(s) for s in sequences])
    examples = []
    for (prompt, _), tokens, says in zip(pieces, sequences, said, strict=True):
        # Its own first token is the first anchor, as an answer's is.
        examples.append(Example(-1, tokens.int().cpu(), max(1, len(prompt)), says))
    return examples
