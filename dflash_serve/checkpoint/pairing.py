"""Does this drafter belong to this target? Found out from two config.json files, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.errors import Problem, UserError

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where multimodal models keep their language model's sizes."""


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must know of its target, read from the target's config.json without loading it."""

    name: str
    """As the user gave it; for messages."""
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int | None


def check_pairing(config: DrafterConfig, target: TargetShape) -> list[Problem]:
    """Everything in which the drafter cannot be this target's."""
    where = f"drafter for {target.name}"
    return [Problem(what, where, do) for what, do in _mismatches(config, target)]


def _mismatches(config: DrafterConfig, target: TargetShape) -> Iterator[tuple[str, str]]:
    """(what, do) of each."""
    other = "use the drafter that was trained for this target"
    if config.hidden_size != target.hidden_size:
        yield f"hidden_size is {config.hidden_size}, the target's is {target.hidden_size}", other
    if config.vocab_size != target.vocab_size:
        yield f"vocab_size is {config.vocab_size}, the target's is {target.vocab_size}", other
    if config.num_target_layers not in (None, target.num_layers):
        yield f"trained for a target of {config.num_target_layers} layers, this one has {target.num_layers}", other
    beyond = [layer for layer in config.target_layer_ids if layer >= target.num_layers]
    if beyond:
        yield (
            f"target_layer_ids {list(config.target_layer_ids)} name {beyond}, but the target has layers "
            f"0..{target.num_layers - 1} (ids are 0-based layer outputs)",
            "correct target_layer_ids (speculators and GGUF count from 1), or use this target's drafter",
        )
    token = config.mask_token_id
    if token is not None and token >= target.vocab_size:
        yield (
            f"mask_token_id {token} has no row in the target's embedding of {target.vocab_size}",
            "correct mask_token_id; a special token added after training does not count",
        )
    longest = target.max_position_embeddings
    if longest is not None and config.block_size > longest:
        yield f"block_size {config.block_size} exceeds the target's {longest} positions", "correct block_size"


def read_target_shape(folder_or_id: str | Path, revision: str | None = None) -> TargetShape:
    """A target's sizes from its config.json; of a hub id, only that file is fetched.

    Raises:
        UserError: no such target, or a config.json without these sizes.
    """
    path = local_folder(folder_or_id, revision, files=["config.json"]) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no config.json", where=str(path.parent), do="give a Hugging Face model folder") from None
    except (ValueError, OSError) as error:
        raise UserError(f"not valid JSON ({error})", where=str(path), do="download the target again") from None
    if not isinstance(raw, dict):
        raise UserError("not a JSON object", where=str(path), do="download the target again")
    inner = language_model(raw)
    longest = inner.get("max_position_embeddings")
    return TargetShape(
        name=str(folder_or_id),
        model_type=str(raw.get("model_type", "unknown")),
        vocab_size=_size(inner, "vocab_size", path),
        hidden_size=_size(inner, "hidden_size", path),
        num_layers=_size(inner, "num_hidden_layers", path),
        max_position_embeddings=longest if type(longest) is int else None,
    )


def language_model(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config.json that has the language model's sizes."""
    return next((inner for inner in map(raw.get, TEXT_CONFIGS) if isinstance(inner, dict)), raw)


def _size(raw: Mapping[str, object], key: str, path: Path) -> int:
    value = raw.get(key)
    if type(value) is int and value > 0:
        return value
    raise UserError(f"{key} is {value!r}, not a positive whole number", where=str(path), do="give a language model")
