"""A target's config.json, read once, and what the files beside it say of the model.

Families of models give the same fact under different keys. Here each fact is looked up in all of them, and nothing is
refused but a size that must be there. `target` estimates layouts of any family from these facts. `target_config` makes
the embedded engine's configuration of them, and refuses every key that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dflash_serve.checkpoint.config import FULL, MOST_LAYERS, SLIDING
from dflash_serve.checkpoint.files import load_object
from dflash_serve.checkpoint.quantization import QuantizationRecipe, find_recipe
from dflash_serve.errors import UserError

GENERATION_CONFIG = "generation_config.json"
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal models have the keys of their language model."""
KEYS: Mapping[str, tuple[str, ...]] = {
    "layer types": ("layer_types", "layers_block_type", "attn_type_list"),
    "layers of full attention": ("attn_layer_indices", "full_attn_idxs"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "experts per token": (
        *("num_experts_per_tok", "experts_per_token", "moe_topk", "top_k_experts", "num_experts_per_token"),
    ),
    "shared experts": ("n_shared_experts", "num_shared_experts"),
    # Input size of routed experts that are narrower than the model: Nemotron 3, Kimi-K3.
    "input of experts": ("moe_latent_size", "routed_expert_hidden_size"),
    # Size of dense MLPs beside experts, where it is not `intermediate_size`: MiniMax-M3, Llama 4.
    "dense MLP": ("dense_intermediate_size", "intermediate_size_mlp"),
}
"""Fact -> its keys in the families that have it; the first that is given counts."""
LINEAR, CHUNKED, MAMBA = "linear_attention", "chunked_attention", "mamba"  # types of layers beside FULL and SLIDING
WINDOWS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}  # type of a layer -> key of its window
ALTERNATION = {"gemma2": 2, "gemma3_text": 6, "llama4_text": 4}
"""Model type -> each how many layers one is of full attention, where config.json does not say it."""
SLIDERS = ("mistral", "mixtral")  # model types that slide unless `use_sliding_window` forbids it

DRAFTER_KEYS, DRAFTER_NAMES = ("dflash_config", "speculators_model_type", "target_layer_ids"), ("dflash", "dspark")
"""Keys of config.json, and parts of the names of architectures, that only drafters have."""


@dataclass(frozen=True)
class ModelKeys:
    """The keys of a language model in a config.json."""

    fields: Mapping[str, object]
    path: Path  # the config.json, for messages

    def get(self, key: str) -> object:
        """The value; None where the key is absent."""
        return self.fields.get(key)

    def size(self, key: str, default: int = 0) -> int:
        """A positive whole number; the default where the key is absent or its value is something else."""
        value = self.fields.get(key)
        return value if type(value) is int and value > 0 else default

    def required(self, key: str) -> int:
        """A positive whole number; engines count sizes in 32 bits.

        Raises:
            UserError: it is absent or something else.
        """
        value = self.fields.get(key)
        if type(value) is int and 0 < value < 2**31:
            return value
        what = f"{key} is {value!r}, not a positive whole number"
        raise UserError(what, where=str(self.path), do="give a language model")

    @property
    def depth(self) -> int:
        """The number of layers; 0 where the key is absent or its value is something else.

        Raises:
            UserError: more than `MOST_LAYERS`.
        """
        count = self.size("num_hidden_layers")
        if count > MOST_LAYERS:
            what = f"num_hidden_layers is {count}, more than the {MOST_LAYERS} that a model may have"
            raise UserError(what, where=str(self.path), do="correct it")
        return count

    def size_of(self, fact: str) -> int:
        """The size under one of its `KEYS`; 0 where there is none."""
        return next((size for key in KEYS[fact] if (size := self.size(key))), 0)

    def list_of(self, fact: str) -> list[object] | None:
        """The list under one of its `KEYS`; None where there is none."""
        return next((value for key in KEYS[fact] if isinstance(value := self.get(key), list)), None)

    def part(self, key: str) -> ModelKeys | None:
        """The object under a key; None where there is none."""
        value = self.fields.get(key)
        return ModelKeys(value, self.path) if isinstance(value, dict) else None

    @cached_property
    def rope(self) -> Mapping[str, object]:
        """RoPE of full attention with its `rope_theta`, from any of the keys that have it."""
        given = self.get("rope_parameters") or self.get("rope_scaling")  # the first is flat, or by type of layer
        rope = given if isinstance(given, dict) else {}
        if by_layer := {kind: inner for kind, inner in rope.items() if isinstance(inner, dict)}:
            rope = by_layer.get(FULL, next(iter(by_layer.values())))
        return {"rope_theta": self.get("rope_theta"), **rope}

    @cached_property
    def layer_kinds(self) -> list[str]:
        """Type of every layer, in transformers' names."""
        for way in (_named_kinds, _kinds_by_letter, _kinds_by_index, _kinds_by_interval, _alternating_kinds):
            if (kinds := way(self)) is not None:
                return kinds
        return _windows_from_a_layer_on(self)


def _named_kinds(model: ModelKeys) -> list[str] | None:
    listed = model.list_of("layer types")
    names = {"0": LINEAR, "1": FULL, "attention": FULL}  # MiniMax's numbers, and Granite's name
    return None if listed is None else [names.get(str(kind), str(kind)) for kind in listed]


def _kinds_by_letter(model: ModelKeys) -> list[str] | None:
    letters = model.get("hybrid_override_pattern")  # Nemotron-H
    names = {"*": FULL, "M": MAMBA, "E": "moe"}
    return [names.get(letter, "mlp") for letter in letters] if isinstance(letters, str) else None


def _kinds_by_index(model: ModelKeys) -> list[str] | None:
    full, linear = model.list_of("layers of full attention"), model.part("linear_attn_config")
    counted = linear.get("full_attn_layers") if linear else None
    if isinstance(counted, list):  # Kimi-Linear counts from 1
        full = [index - 1 for index in counted if isinstance(index, int)]
    count = model.depth
    return None if full is None else [FULL if index in full else LINEAR for index in range(count)]


def _kinds_by_interval(model: ModelKeys) -> list[str] | None:
    interval, period = model.size("full_attention_interval"), model.size("attn_layer_period")
    if not (interval or period):  # Qwen3-Next, and Jamba
        return None
    offset = model.size("attn_layer_offset") if period else interval - 1
    layers = range(model.depth)
    return [FULL if layer % (period or interval) == offset else LINEAR for layer in layers]


def _alternating_kinds(model: ModelKeys) -> list[str] | None:
    flags, family = model.get("hybrid_layer_pattern"), str(model.get("model_type"))
    if isinstance(flags, list):  # MiMo-V2
        return [SLIDING if slides else FULL for slides in flags]
    pattern = model.size("sliding_window_pattern", ALTERNATION.get(family, 0))
    other = CHUNKED if family == "llama4_text" else SLIDING
    if pattern <= 1 or not model.get(WINDOWS[other]):  # Gemma 2 and 3, Llama 4
        return None
    return [FULL if layer % pattern == pattern - 1 else other for layer in range(model.depth)]


def _windows_from_a_layer_on(model: ModelKeys) -> list[str]:
    # Mistral slides everywhere, Qwen2 behind a switch and from `max_window_layers` on.
    family = str(model.get("model_type"))
    has_window = bool(model.fields.get("sliding_window", family == "mistral"))
    slides = has_window and model.fields.get("use_sliding_window", family in SLIDERS)
    most = model.fields.get("max_window_layers", 28)
    first = most if isinstance(most, int) and family.startswith("qwen") else 0
    return [SLIDING if slides and layer >= first else FULL for layer in range(model.depth)]


@dataclass(frozen=True)
class TargetFiles:
    """A target's config.json, and the files beside it, which are read when they are asked for."""

    folder: Path
    raw: Mapping[str, object]

    @property
    def path(self) -> Path:
        """The config.json."""
        return self.folder / "config.json"

    @cached_property
    def model(self) -> ModelKeys:
        """The keys of the language model."""
        parts = (inner for inner in map(self.raw.get, TEXT_CONFIGS) if isinstance(inner, dict))
        return ModelKeys(next(parts, self.raw), self.path)

    @cached_property
    def recipe(self) -> QuantizationRecipe:
        """Its quantisation.

        Raises:
            UserError: hf_quant_config.json is no JSON object.
        """
        return find_recipe((self.raw, self.model.fields), self.folder)

    @cached_property
    def generation(self) -> Mapping[str, object]:
        """The keys of generation_config.json; {} where there is none.

        Raises:
            UserError: it is no JSON object.
        """
        path = self.folder / GENERATION_CONFIG
        return load_object(path, kind="target") if path.is_file() else {}


def read_target(folder: Path) -> TargetFiles:
    """The files of the target in a folder.

    Raises:
        UserError: no config.json, or one that is no JSON object, or is a drafter's.
    """
    target = TargetFiles(folder, load_object(folder / "config.json", kind="target"))
    named = target.raw.get("architectures")
    names = [str(name).lower() for name in named] if isinstance(named, list) else []
    if any(map(target.raw.get, DRAFTER_KEYS)) or any(part in name for name in names for part in DRAFTER_NAMES):
        do = "give the model that it drafts for as the target, and this folder as the drafter"
        raise UserError("a DFlash drafter, not a target: are target and drafter swapped?", where=str(folder), do=do)
    return target
