"""A target's sizes, from its config.json alone: what every reader of a target's configuration starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.checkpoint.json_file import load_object
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.errors import UserError

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where multimodal models keep their language model's sizes."""


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must know of its target."""

    name: str
    """The target as the user named it, for messages."""
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int | None


def read_target_shape(folder_or_id: str | Path, revision: str | None = None) -> TargetShape:
    """A target's sizes from its config.json; of a hub id, only that file is fetched.

    Raises:
        UserError: no such target, or a config.json without these sizes.
    """
    folder = local_folder(folder_or_id, revision, files=["config.json"])
    return target_shape(read_target_json(folder), folder, str(folder_or_id))


def read_target_json(folder: Path) -> Mapping[str, object]:
    """A target's config.json.

    Raises:
        UserError: there is none, or it is no JSON object.
    """
    return load_object(folder / "config.json", kind="target")


def target_shape(raw: Mapping[str, object], folder: Path, name: str) -> TargetShape:
    """The sizes in a target's config.json that was read from `folder`.

    Raises:
        UserError: one of them is not there, or impossible.
    """
    inner = language_model(raw)
    longest = inner.get("max_position_embeddings")
    return TargetShape(
        name=name,
        model_type=str(raw.get("model_type", "unknown")),
        vocab_size=required_size(inner, "vocab_size", folder),
        hidden_size=required_size(inner, "hidden_size", folder),
        num_layers=required_size(inner, "num_hidden_layers", folder),
        max_position_embeddings=longest if type(longest) is int else None,
    )


def language_model(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config.json that has the language model's sizes."""
    return next((inner for inner in map(raw.get, TEXT_CONFIGS) if isinstance(inner, dict)), raw)


def required_size(fields: Mapping[str, object], key: str, folder: Path) -> int:
    """A positive whole number of the config.json in `folder`.

    Raises:
        UserError: it is not there, or something else.
    """
    value = fields.get(key)
    if type(value) is int and value > 0:
        return value
    where = str(folder / "config.json")
    raise UserError(f"{key} is {value!r}, not a positive whole number", where=where, do="give a language model")


def size(fields: Mapping[str, object], key: str, default: int = 0) -> int:
    """A positive whole number of config.json; anything else counts as not given."""
    value = fields.get(key)
    return value if type(value) is int and value > 0 else default
