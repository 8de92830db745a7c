"""Neutral description of a DFlash drafter, independent of the dialect of its checkpoint, with its tensors' shapes.

`Heads` are the parts beyond plain DFlash: a Markov head and a confidence head (DSpark, arXiv 2607.05147), grouped
convolutions and a candidate selector (DFlash2). Tensor names are z-lab's, DeepSpec's for the DSpark heads, and those of
DeepSeek-V3 in layers with latent attention (MLA).

No torch: `inspect`, the engine adapters and the chart read drafters on machines without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dflash_serve.common.settings import Frozen, PositiveInt

MASK_EMBEDDING = "mask_embedding"  # tensor whose values fill masked slots; without it, a token of the target does
MarkovKind = Literal["vanilla", "gated", "rnn"]
Slots = Literal["fill-in", "anchor-first"]
"""Assignment of a block's rows to slots.

fill-in: row j is slot j, so row 0 (the anchor) predicts nothing; B rows. anchor-first: row j predicts slot j + 1, the
token after its own position, so the anchor's row predicts too; B - 1 rows (DeepSpec's gamma).
"""


class MarkovConfig(Frozen):
    """A bias on a slot's logits that depends on the token of the slot before it."""

    kind: MarkovKind
    rank: PositiveInt


class ConfidenceConfig(Frozen):
    """Estimates the probability that a slot is accepted if all slots before it are."""

    with_markov: bool  # the head also reads the Markov embedding of the token before


class ConvolutionConfig(Frozen):
    """Causal convolutions over the rows of a block, before and after attention and MLP of every layer."""

    taps: PositiveInt  # rows that an output reads: its own and the ones before it
    group_size: PositiveInt  # channels that share their coefficients; divides the hidden size


class SelectorConfig(Frozen):
    """Chooses each slot's token among its likeliest candidates by the token before it."""

    rank: PositiveInt
    top_k: PositiveInt  # candidates of a slot


class LatentConfig(Frozen):
    """Latent attention (MLA, DeepSeek-V2): low-rank queries, and one vector a token for keys and values of all heads.

    Names are those of DeepSeek-V3's config.json.
    """

    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt  # of the vector of which keys without RoPE, and values, are made
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt  # of the part of a key that RoPE turns, which all heads share
    v_head_dim: PositiveInt

    @property
    def width(self) -> int:
        """Numbers that a layer's cache keeps of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class Heads(Frozen):
    """Parts of a drafter beyond plain DFlash; None = absent. Plain DFlash has none of them."""

    slots: Slots = "fill-in"
    draft_vocabulary: PositiveInt | None = None
    """Number of tokens that the drafter can draft, if fewer than the target's; it then has its own `lm_head`."""
    markov: MarkovConfig | None = None
    confidence: ConfidenceConfig | None = None
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None
    attention_sinks: bool = False
    """Each head of a layer has a logit of its own in the softmax, which takes weight and gives no value."""
    latent: LatentConfig | None = None
    """Attention of all layers; None = grouped-query attention."""

    @property
    def not_embedded(self) -> str | None:
        """Part that engines have and the embedded engine and training have not; None = they have every part."""
        parts = {"attention sinks": self.attention_sinks, "latent attention (MLA)": self.latent is not None}
        found = next((part for part, is_there in parts.items() if is_there), None)
        return None if found is None else f"{found}, which the embedded engine and training have not"

    @property
    def family(self) -> Literal["DFlash", "DFlash2", "DSpark"]:
        """Engines' name of the drafter's kind: DSpark with a Markov head, DFlash2 with a selector, else DFlash."""
        return "DSpark" if self.markov else "DFlash2" if self.selector else "DFlash"

    @property
    def parts(self) -> dict[str, Any]:
        """Every part by its field's name; of a `DrafterConfig` its heads alone."""
        return {name: getattr(self, name) for name in Heads.model_fields}

    @property
    def first_row(self) -> int:
        """Index of the row that predicts slot 1; the rows of later slots follow it."""
        return 1 if self.slots == "fill-in" else 0

    @property
    def words(self) -> str:
        """Short description of the heads; "" for plain DFlash."""
        parts = [f"{self.markov.kind} Markov head of rank {self.markov.rank}"] if self.markov else []
        parts += ["confidence head"] if self.confidence else []
        parts += [f"convolutions of {self.convolution.taps} taps"] if self.convolution else []
        parts += [f"selector among {self.selector.top_k}"] if self.selector else []
        parts += ["attention sinks"] if self.attention_sinks else []
        parts += ["latent attention (MLA)"] if self.latent else []
        parts += [f"{self.draft_vocabulary:,} tokens"] if self.draft_vocabulary else []
        return ", ".join([*parts, *(["anchor-first slots"] if self.slots == "anchor-first" else [])])


PLAIN_DRAFTER = "use a plain DFlash drafter of the same target"
BUILD = "take the bf16 drafter that it was made of; `dflash-serve build` quantises it, to INT8, W4A16, FP8 or NVFP4"
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers in transformers' `layer_types`
Size = Annotated[int, Field(gt=0, lt=2**31)]
"""A size of a model; engines count them in 32 bits."""
MOST_LAYERS, MOST_SLOTS = 1024, 1024
"""Bounds of what a config.json may ask for. Published targets have up to 126 layers, drafters up to 16 slots;
a larger number is a mistake, and lists of so many layers or slots would take all memory."""
MOST_PADDING = 1024  # tokens: vocabularies are padded to multiples of 64 to 512, for each device
BF16 = 2  # bytes of a number in bfloat16


class AttentionKind(Frozen):
    """Attention mask of one drafter layer.

    `window` W: a query at position q sees keys at k with q - k < W (and k - q < W where not causal); None = everything.
    `causal`: within the block, slot j sees slots <= j only. Context positions lie before the block and are always
    visible, up to the window. (dflash 0.1.0 `_attention_mask`; SGLang 0.5.23 `models/dflash.py`.)
    """

    window: PositiveInt | None = None
    causal: bool = False


class RopeConfig(Frozen):
    """Rotary embedding. `scaling` is None for plain RoPE; the fields follow transformers' rope_parameters."""

    theta: Annotated[float, Field(gt=0)] = 10000.0
    scaling: Literal["linear", "llama3", "yarn", "longrope"] | None = None
    factor: float | None = None
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @property
    def parameters(self) -> dict[str, object]:
        """transformers 5's `rope_parameters`."""
        known = self.model_dump(mode="json", exclude={"theta", "scaling"}, exclude_none=True)
        return {"rope_type": self.scaling or "default", "rope_theta": self.theta, **known}


class TransformerConfig(Frozen):
    """Sizes of a stack of decoder layers, a drafter's or a target's."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    layers: Annotated[tuple[AttentionKind, ...], Field(min_length=1, max_length=MOST_LAYERS)]
    max_position_embeddings: Size = 32768
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6  # beside mean squares of about 1
    rope: RopeConfig = RopeConfig()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)


class DrafterConfig(Heads, TransformerConfig):
    """Sizes and options of a drafter (paper section 4; z-lab `dflash/model.py`), and its heads."""

    block_size: Annotated[int, Field(ge=2, le=MOST_SLOTS)]
    """B: slots in a block with its anchor (slot 0); B - 1 are drafted. An anchor-first checkpoint writes B - 1."""
    target_layer_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    """0-based decoder layers of the target whose *outputs* are the context feature, in the order `fc` takes them."""
    num_target_layers: PositiveInt | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    """Token whose target embedding fills slots 1..B-1; None if the checkpoint has its own `mask_embedding`."""
    has_mask_embedding: bool = False

    attention_bias: bool = False
    embedding_scale: float = 1.0  # factor on the embedding row of every slot (Gemma); z-lab's `input_embedding_scale`
    output_multiplier: float = 1.0  # factor on the drafter's logits, before the soft-cap
    final_logit_softcap: Annotated[float, Field(gt=0)] | None = None  # c in `logits = c * tanh(logits / c)`

    @model_validator(mode="after")
    def _is_possible(self) -> DrafterConfig:
        for contradiction in _contradictions(self):
            raise ValueError(contradiction)
        return self

    @property
    def feature_size(self) -> int:
        """Size of a context feature row, the input of `fc`: F chosen layers x H."""
        return len(self.target_layer_ids) * self.hidden_size

    def kv_split(self, devices: int) -> int:
        """Parts of a token's K/V over devices: heads are repeated, not split further, and a latent vector is whole."""
        return 1 if self.latent else min(devices, self.num_key_value_heads)

    def rows(self, block_size: int | None = None) -> int:
        """Input rows of a block that is served with `block_size` slots (None = the drafter's own)."""
        return (block_size or self.block_size) - 1 + self.first_row


def _contradictions(config: DrafterConfig) -> Iterator[str]:
    heads, kv_heads, depth = config.num_attention_heads, config.num_key_value_heads, config.num_target_layers
    if config.mask_token_id is None and not config.has_mask_embedding:
        yield "neither mask_token_id nor a mask embedding is given: masked slots would have no input"
    if config.mask_token_id is not None and config.mask_token_id >= config.vocab_size:
        yield f"mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}"
    if config.block_size > config.max_position_embeddings:
        yield f"block_size {config.block_size} is more than max_position_embeddings {config.max_position_embeddings}"
    if config.latent is not None and config.head_dim != config.latent.qk_nope_head_dim + config.latent.qk_rope_head_dim:
        yield f"head_dim {config.head_dim} is not qk_nope_head_dim + qk_rope_head_dim"
    if heads % kv_heads:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
    if depth is not None and max(config.target_layer_ids) >= depth:
        what = f"target_layer_ids {list(config.target_layer_ids)} name layer {max(config.target_layer_ids)}"
        yield f"{what}, but the target has layers 0..{depth - 1} (ids are 0-based layer outputs)"
    if config.draft_vocabulary is not None and config.draft_vocabulary >= config.vocab_size:
        yield f"a draft vocabulary of {config.draft_vocabulary} tokens is no part of the target's {config.vocab_size}"
    if config.selector is not None and config.markov is not None:
        yield "a candidate selector and a Markov head: each would choose the tokens"
    if config.selector is not None and config.slots == "anchor-first":
        yield "a candidate selector with anchor-first slots: DFlash2 is fill-in"
    if config.selector is not None and config.draft_vocabulary is not None:
        yield "a candidate selector with a reduced draft vocabulary: DFlash2 needs all of the target's tokens"
    if config.selector is not None and config.selector.top_k > config.vocab_size:
        yield f"selector_top_k {config.selector.top_k} is more than the vocabulary of {config.vocab_size}"
    if config.confidence is not None and config.confidence.with_markov and config.markov is None:
        yield "the confidence head reads Markov embeddings, but there is no Markov head"
    convolution = config.convolution
    if convolution is not None and config.hidden_size % convolution.group_size:
        yield f"conv_group_size {convolution.group_size} does not divide hidden_size {config.hidden_size}"
    if convolution is not None and convolution.taps > config.rows():
        yield f"conv_kernel_size {convolution.taps} is more than the block's {config.rows()} rows"


def uniform_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`count` 0-based layer ids, uniform between layer 1 and layer N-3: z-lab's `build_target_layer_ids`.

    One id is the middle layer N // 2; otherwise round(1 + i (N - 4) / (count - 1)), rounding half to even (dflash 0.1.0
    `model.py`). A checkpoint's own list always wins: its number of features is independent of the drafter's layers.

    Raises:
        ValueError: count < 1, or a target too shallow for the formula (N < 4; N < 1 for one id).
    """
    if count < 1:
        raise ValueError(f"cannot choose {count} target layers")
    if num_target_layers < (1 if count == 1 else 4):
        raise ValueError(f"a target of {num_target_layers} layers is too shallow to choose {count} layers uniformly")
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


def in_layer_order(config: DrafterConfig) -> DrafterConfig:
    """The drafter with ascending `target_layer_ids`; the columns of its `fc` follow by `writer.fc_in_layer_order`."""
    return config.model_copy(update={"target_layer_ids": tuple(sorted(config.target_layer_ids))})


TensorShapes = Iterator[tuple[str, tuple[int, ...]]]


def _latent_tensors(config: TransformerConfig, latent: LatentConfig, layer: str) -> TensorShapes:
    """(name, shape) of every tensor of a layer with latent attention; its MLP and norms are those of any layer."""
    heads, hidden, attention = config.num_attention_heads, config.hidden_size, f"{layer}.self_attn"
    yield f"{attention}.q_a_proj.weight", (latent.q_lora_rank, hidden)
    yield f"{attention}.q_a_layernorm.weight", (latent.q_lora_rank,)
    yield f"{attention}.q_b_proj.weight", (heads * config.head_dim, latent.q_lora_rank)
    yield f"{attention}.kv_a_proj_with_mqa.weight", (latent.width, hidden)
    yield f"{attention}.kv_a_layernorm.weight", (latent.kv_lora_rank,)
    each = latent.qk_nope_head_dim + latent.v_head_dim
    yield f"{attention}.kv_b_proj.weight", (heads * each, latent.kv_lora_rank)
    yield f"{attention}.o_proj.weight", (hidden, heads * latent.v_head_dim)
    plain = layer_tensors(config, layer, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)
    yield from ((name, shape) for name, shape in plain if ".self_attn." not in name)


def layer_tensors(
    config: TransformerConfig, layer: str, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool
) -> TensorShapes:
    """(name, shape) of every tensor in one decoder layer, whose name is `layer`; Hugging Face's names."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    attention = [
        ("q_proj", query, hidden, qkv_bias),
        ("k_proj", kv, hidden, qkv_bias),
        ("v_proj", kv, hidden, qkv_bias),
    ]
    mlp = [("gate_proj", inner, hidden, mlp_bias), ("up_proj", inner, hidden, mlp_bias)]
    mlp += [("down_proj", hidden, inner, mlp_bias)]
    for part, products in (("self_attn", [*attention, ("o_proj", hidden, query, o_bias)]), ("mlp", mlp)):
        for name, outputs, inputs, has_bias in products:
            yield f"{layer}.{part}.{name}.weight", (outputs, inputs)
            if has_bias:
                yield f"{layer}.{part}.{name}.bias", (outputs,)
        if qk_norm and part == "self_attn":
            yield from ((f"{layer}.self_attn.{name}.weight", (head,)) for name in ("q_norm", "k_norm"))
    yield from ((f"{layer}.{name}.weight", (hidden,)) for name in ("input_layernorm", "post_attention_layernorm"))


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, in z-lab's names: 11 L + 3, more with biases, a mask embedding, heads or MLA."""
    hidden, bias = config.hidden_size, config.attention_bias
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.has_mask_embedding:
        shapes["mask_embedding"] = (hidden,)
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        if config.latent is not None:
            shapes |= dict(_latent_tensors(config, config.latent, layer))
        else:
            shapes |= dict(layer_tensors(config, layer, qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=True))
        if config.attention_sinks:
            shapes[f"{layer}.self_attn.attention_sink_bias"] = (config.num_attention_heads,)
    return shapes | _head_tensors(config)


def _head_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    hidden, vocab, reduced = config.hidden_size, config.vocab_size, config.draft_vocabulary
    shapes: dict[str, tuple[int, ...]] = {}
    if reduced is not None:
        shapes |= {"d2t": (reduced,), "lm_head.weight": (reduced, hidden)}
    rank = config.markov.rank if config.markov else 0
    if config.markov is not None:  # `markov_w1` is indexed by target ids; `markov_w2` gives biases of draft ids
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (reduced or vocab, rank)
        added = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
        if config.markov.kind in added:
            name, outputs, inputs = added[config.markov.kind]
            shapes[f"markov_head.{name}.weight"], shapes[f"markov_head.{name}.bias"] = (outputs, inputs), (outputs,)
    if config.confidence is not None:
        inputs = hidden + (rank if config.confidence.with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
    if config.convolution is not None:  # the first index of `base_kernel` is 0 before the sublayer and 1 after it
        taps, groups = config.convolution.taps, hidden // config.convolution.group_size
        for layer in range(config.num_layers):
            for sublayer in (f"layers.{layer}.attention_conv", f"layers.{layer}.mlp_conv"):
                shapes[f"{sublayer}.base_kernel"] = (2, taps, hidden)
                shapes[f"{sublayer}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if config.selector is not None:  # the codebooks have no `.weight` in z-lab's files
        shapes["candidate_selector.hidden_projection.weight"] = (config.selector.rank, hidden)
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (vocab, config.selector.rank)
    return shapes


def weight_bytes(config: DrafterConfig) -> int:
    """Bytes of all tensors of a drafter in bfloat16."""
    return BF16 * sum(prod(shape) for shape in expected_tensors(config).values())


def context_bytes(config: DrafterConfig, kv_heads: int | None = None) -> int:
    """Bytes of one context token's K and V in all layers, in bfloat16; `kv_heads`: of one device, None = all."""
    if config.latent is not None:
        return config.num_layers * config.latent.width * BF16
    heads = config.num_key_value_heads if kv_heads is None else kv_heads
    return 2 * config.num_layers * heads * config.head_dim * BF16
