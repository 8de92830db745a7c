"""A target as the embedded engine runs it: `TargetConfig`, and the tensors of its files.

Every key of config.json that changes what is computed is computed or refused, and so is a key that is not known.
The engine reads plain weights only: scales that were left unread would make the answers of a quantised target
meaningless, so a target with any tensor that is not read is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.checkpoint.config import (
    FULL,
    SLIDING,
    AttentionKind,
    TensorShapes,
    TransformerConfig,
    layer_tensors,
)
from dflash_serve.checkpoint.dialects.keys import QWEN3_HEAD_DIM, TRANSFORMER_KEYS, read_rope
from dflash_serve.checkpoint.files import TOKENIZER, Header, load_object, read_headers, same_data
from dflash_serve.checkpoint.quantization import plain_target_only
from dflash_serve.checkpoint.section import ConfigSection
from dflash_serve.checkpoint.storage import FLOATS
from dflash_serve.checkpoint.target_files import GENERATION_CONFIG, ModelKeys, TargetFiles, read_target
from dflash_serve.checkpoint.tensors import RECOMPUTED
from dflash_serve.errors import Problem, UserError, raise_problems

ARCHITECTURES = {
    **{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
    **{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"},
}
"""model_type that we run -> its architecture."""
KV_HEADS = "num_key_value_heads"
HAS_BIAS_KEY = {"llama", "qwen3"}  # families with the key attention_bias; in others it has no effect
HARMLESS = {
    *("transformers.js_config", "unsloth_version", "unsloth_fixed", "is_llama_config", "rope_interleaved"),
    *("gradient_checkpointing", "resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout", "mlp_dropout"),
    *("max_sequence_length", "model_max_length", "seq_length"),
}
"""Keys of targets without effect on the logits: of tools, of training, and lengths that old files repeat."""
DEFAULT_THETA, DEFAULT_WINDOW = 10000.0, 4096  # transformers' for a key that is absent, in all four families
OTHER = "it may change what the target computes; serve the target with another backend, or remove it if it does not"
TOKENIZER_CONFIG, TOKEN_MAP = "tokenizer_config.json", "special_tokens_map.json"


def is_embedded(model_type: object) -> bool:
    """The embedded engine runs the family with this `model_type` of a config.json."""
    return isinstance(model_type, str) and model_type in ARCHITECTURES


class TargetConfig(TransformerConfig):
    """Shape of a dense decoder of the Llama and Qwen families."""

    model_type: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()


def read_target_config(folder: Path) -> TargetConfig:
    """`target_config` of the target in a folder."""
    return target_config(read_target(folder))


def target_config(target: TargetFiles) -> TargetConfig:
    """A config.json (transformers 4 and 5 forms), and the end-of-sequence tokens of the files beside it.

    Raises:
        UserError: a family we do not run, a key that changes what is computed, or an impossible value.
    """
    path = str(target.path)
    family = target.raw.get("model_type")
    if not is_embedded(family):
        raise UserError(
            f"model_type {family!r} is not one the embedded backend runs",
            where=path,
            do=f"use one of {', '.join(ARCHITECTURES)}; other backends serve more models",
        )
    section = ConfigSection(target.raw, path, [])
    fields = _fields(section, target)
    raise_problems(section.problems)
    try:
        return TargetConfig.model_validate(fields)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"incomplete or impossible: {what}", where=path) from None


def _fields(config: ConfigSection, target: TargetFiles) -> dict[str, object]:
    raw, family = target.raw, str(target.raw["model_type"])
    keys = ModelKeys(raw, target.path)  # of the whole file: these families have no part for their language model
    tokens = {key for key in raw if key.endswith("_token_id")}
    config.only(TRANSFORMER_KEYS | HARMLESS | tokens, OTHER)
    config.refuse("hidden_act", ("silu",), "the embedded backend computes silu", "use another backend")
    config.refuse("rope_interleaved", (False,), "the embedded backend rotates halves", "use another backend")
    config.refuse("use_gemma_norm", (False,), "Gemma's norms are not computed", "use another backend")
    config.refuse("use_mrope", (False,), "rotation by several axes is not computed", "use another backend")
    for name in config.architectures:
        if name != ARCHITECTURES[family]:
            config.note(f"architecture {name!r} of a {family} is not computed", f"computed is {ARCHITECTURES[family]}")
    heads, hidden = keys.required("num_attention_heads"), keys.required("hidden_size")
    bias = family in HAS_BIAS_KEY and bool(config.given("attention_bias", bool))
    epsilon = config.positive("rms_norm_eps")
    if not config.has("rms_norm_eps"):
        config.note("no rms_norm_eps", "add it: a number")
    return {
        "model_type": family,
        "vocab_size": keys.required("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.required("intermediate_size"),
        "num_attention_heads": heads,
        # Absent, it is all heads in Llama, and a number of its own in each other family; null is all heads.
        "num_key_value_heads": config.integer(KV_HEADS, heads if family == "llama" or KV_HEADS in raw else None),
        "head_dim": config.integer("head_dim", QWEN3_HEAD_DIM if family == "qwen3" else max(1, hidden // heads)),
        "layers": _layers(config, keys),
        "max_position_embeddings": keys.required("max_position_embeddings"),
        "rms_norm_eps": epsilon,
        "rope": read_rope(config, DEFAULT_THETA),
        "qkv_bias": bias or family == "qwen2",
        "o_bias": bias,
        "mlp_bias": family == "llama" and bool(config.given("mlp_bias", bool)),
        "qk_norm": family == "qwen3",
        "tie_word_embeddings": bool(config.given("tie_word_embeddings", bool)),
        "eos_token_ids": tuple(_ends(config, target)),
    }


def _layers(config: ConfigSection, keys: ModelKeys) -> tuple[AttentionKind, ...]:
    count, kinds = keys.depth or keys.required("num_hidden_layers"), keys.layer_kinds
    if len(kinds) != count:
        config.note(f"layer_types names {len(kinds)} layers but num_hidden_layers is {count}", "correct one of them")
    for unknown in sorted({*kinds} - {FULL, SLIDING}):
        config.note(f"layer type {unknown!r} is not computed", "use another backend")
    if SLIDING not in kinds:
        return tuple(AttentionKind(causal=True) for _ in kinds)
    if config.raw["model_type"] == "llama":  # transformers ignores its windows, vLLM does not
        config.note("a llama with sliding windows, which its readers disagree about", "use another backend")
    if config.given("use_sliding_window", bool) is False:
        config.note(f"layer_types has {SLIDING} layers but use_sliding_window is false", "keep the right one")
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    return tuple(AttentionKind(causal=True, window=window if kind == SLIDING else None) for kind in kinds)


def _ends(config: ConfigSection, target: TargetFiles) -> list[int]:
    # The union of three files, as in SGLang and vLLM: chat models end a turn by a token that config.json may not name.
    beside = ConfigSection(target.generation, str(target.folder / GENERATION_CONFIG), config.problems)
    ends: dict[int, None] = {}
    for source in (config, beside):
        several = isinstance(source.raw.get("eos_token_id"), list)
        given = source.integers("eos_token_id") if several else source.optional_integer("eos_token_id", minimum=0)
        ends |= dict.fromkeys(given if isinstance(given, tuple) else [] if given is None else [given])
    own = _tokenizers_end(target.folder)
    return [*ends] if own is None else [*(ends | {own: None})]


def _tokenizers_end(folder: Path) -> int | None:
    def read(name: str) -> Mapping[str, object]:
        return load_object(folder / name, kind="target") if (folder / name).is_file() else {}

    def text(token: object) -> object:
        return token.get("content") if isinstance(token, dict) else token

    settings = read(TOKENIZER_CONFIG)
    end = text(settings.get("eos_token")) or text(read(TOKEN_MAP).get("eos_token"))
    if not isinstance(end, str):
        return None
    added = settings.get("added_tokens_decoder")
    for number, token in added.items() if isinstance(added, dict) else ():
        if text(token) == end and str(number).isdecimal():
            return int(number)
    whole = read(TOKENIZER)
    listed, model = whole.get("added_tokens"), whole.get("model")
    for token in listed if isinstance(listed, list) else ():
        if text(token) == end and isinstance(token.get("id"), int):
            return int(token["id"])
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(end) if isinstance(vocabulary, dict) else None
    return found if isinstance(found, int) else None


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ONE_TARGET = "use weights and config.json of one model"


def read_target_headers(target: TargetFiles, config: TargetConfig) -> tuple[dict[str, Header], list[Problem]]:
    """The tensors of a target by name, and every reason why the embedded engine cannot read them.

    For a quantised target this is the only problem: misfits of its tensors follow from it.
    """
    unreadable: list[Problem] = []
    headers = read_headers(target.folder, unreadable)
    quantised = plain_target_only(target.recipe, headers, target.folder)
    return headers, quantised or unreadable or list(_misfits(headers, config, target.folder))


def _misfits(headers: Mapping[str, Header], config: TargetConfig, folder: Path) -> Iterator[Problem]:
    wanted = dict(_wanted(config))
    for name, shape in wanted.items():
        header = headers.get(name)
        if header is None:
            yield Problem(f"tensor {name} {list(shape)} is missing", str(folder), "use a complete checkpoint")
        elif header.shape != shape:
            what = f"tensor {name} has shape {list(header.shape)}, config.json asks for {list(shape)}"
            yield Problem(what, str(header.file), ONE_TARGET)
        elif header.dtype not in FLOATS:
            yield Problem(f"tensor {name} is {header.dtype}, no floating-point weight", str(header.file), ONE_TARGET)
    head, embedding = headers.get(HEAD), headers.get(EMBEDDING)
    if config.tie_word_embeddings and head is not None and embedding is not None and not same_data(head, embedding):
        what = f"tensor {HEAD} is not {EMBEDDING}, but tie_word_embeddings is true"
        yield Problem(what, str(head.file), "set tie_word_embeddings to what the model was trained with")
    for name, header in headers.items():
        if name not in wanted and RECOMPUTED not in name and not (name == HEAD and config.tie_word_embeddings):
            what = f"tensor {name} {list(header.shape)} is not part of a {config.model_type} of this config.json"
            yield Problem(f"{what}, and would not be read", str(header.file), ONE_TARGET)


def _wanted(config: TargetConfig) -> TensorShapes:
    """(name, shape) of every tensor that is read, in Hugging Face's names."""
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    options = config.model_dump(include={"qkv_bias", "o_bias", "mlp_bias", "qk_norm"})
    for index in range(config.num_layers):
        yield from layer_tensors(config, f"model.layers.{index}", **options)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, config.hidden_size)
