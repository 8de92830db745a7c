"""Our two drafters in TensorRT-LLM, behind the duck-typed contract of its DFlash worker.

`PlugInDrafter` is the core's drafter. Contract: `tensorrt_llm/_torch/speculative/dflash.py` @00679c6 (`DFlashWorker`)
and, for loading, `_torch/models/modeling_dflash.py` @009d8fa (`DFlashForCausalLM`), whose attribute names are these.
With any other attention backend than VANILLA the worker hands over pages instead of the dense arena, and leaves it to
the draft model to bring a kernel that reads them: ours has flash-attn's only.

`DequantisedContext` is upstream's own drafter with quantised weights, in which one product is ours. Upstream fuses the
K/V rows of all layers' `qkv_proj.weight` as they are stored, scales ignored (`_build_fused_kv_buffers`,
modeling_dflash.py @7c7504c). Here that product gets the same rows dequantised, from the checkpoint itself: upstream's
own are rescaled (FP8) or rearranged (NVFP4) by then. Everything else, its quantised Linear, fused norms and RoPE, pages
and attention kernels, runs as for a bf16 drafter. The rows cost 2 * layers * K/V rows * H bf16 values: 84 MB of a
drafter for Qwen3-8B on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.checkpoint.formats import Format, QuantizedTensor, Weight, dequantized
from dflash_serve.checkpoint.quantization import Quantization, read_quantization
from dflash_serve.checkpoint.reader import assemble, read_config
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter

from ..upstream import NEUTRAL

Reduce = Callable[[Tensor], Tensor]
KEYS_AND_VALUES = ("k_proj", "v_proj")
COLUMN_PARALLEL, ROW_PARALLEL = ("q_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


@dataclass(frozen=True)
class Layout:
    """Rank `rank` of `size`; size 1 = the whole drafter."""

    rank: int = 0
    size: int = 1

    def check(self, config: DrafterConfig) -> None:
        """Refuses a drafter that cannot be split.

        Raises:
            UserError: heads or MLP columns do not split, or K/V heads neither split nor repeat.
        """
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        splits = heads % self.size == 0 and config.intermediate_size % self.size == 0
        if not splits or (kv % self.size and self.size % kv):
            what = f"{heads} heads, {kv} K/V heads and {config.intermediate_size} MLP columns over {self.size} devices"
            raise UserError(what, where="drafter", do="use fewer devices, or attention data parallelism")

    def kv_heads(self, config: DrafterConfig) -> int:
        """K/V heads of this rank: its share, or one that it shares with its neighbours."""
        return max(1, config.num_key_value_heads // self.size)

    def shard(self, name: str, weight: Weight, config: DrafterConfig) -> Weight:
        """This rank's part of a weight or bias; the ranks' results of `ROW_PARALLEL` products are added."""
        *_, module, leaf = ["", *name.split(".")]
        if module in KEYS_AND_VALUES:
            # With more ranks than heads, neighbours hold the same head: rank r has head r * heads // size.
            first = self.rank * config.num_key_value_heads // self.size * config.head_dim
            return _rows(weight, first, self.kv_heads(config) * config.head_dim)
        if module in COLUMN_PARALLEL:
            step = weight.shape[0] // self.size
            return _rows(weight, self.rank * step, step)
        if module in ROW_PARALLEL and leaf == "weight":
            step = weight.shape[1] // self.size
            start, stop = self.rank * step, (self.rank + 1) * step
            return weight.columns(start, stop) if isinstance(weight, QuantizedTensor) else weight[:, start:stop]
        if module in ROW_PARALLEL and isinstance(weight, Tensor) and self.rank > 0:
            return torch.zeros_like(weight)  # the sum has the bias of rank 0
        return weight  # norms and fc


def _rows(weight: Weight, start: int, count: int) -> Weight:
    stop = start + count
    return weight.rows(start, stop) if isinstance(weight, QuantizedTensor) else weight[start:stop]


def rank_weights(
    whole: Mapping[str, Weight], names: Iterable[str], config: DrafterConfig, layout: Layout, dtype: torch.dtype
) -> dict[str, Tensor]:
    """This rank's parts of tensors, by our names, quantised ones decoded."""
    return dequantized({name: layout.shard(name, whole[name], config) for name in names}, dtype)


def mask_arguments(kind: AttentionKind) -> tuple[bool, tuple[int, int]]:
    """flash-attn's `causal` and `window_size`: W is the query itself and W - 1 to its left (and right); -1 = all."""
    if kind.window is None:
        return kind.causal, (-1, -1)
    return kind.causal, (kind.window - 1, 0 if kind.causal else kind.window - 1)


@dataclass(frozen=True)
class ArenaAttention:
    """An `Attend` that appends the blocks' K/V behind each request's context and attends over both.

    The arena's `keys` and `values` are [entries, layers, capacity, kv_heads, head_dim].
    """

    attention: Callable[..., Tensor]  # `flash_attn_with_kvcache`
    kinds: tuple[AttentionKind, ...]  # attention of each layer
    keys: Tensor
    values: Tensor
    lengths: Tensor  # context tokens of each request: int32 [requests]
    entries: Tensor  # each request's entry of the arena: int32 [requests]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal, window = mask_arguments(self.kinds[layer])
        requests = len(self.entries)
        dtype = self.keys.dtype
        out = self.attention(
            q=q.view(requests, -1, *q.shape[1:]).to(dtype),
            k_cache=self.keys[:, layer],
            v_cache=self.values[:, layer],
            k=k.view(requests, -1, *k.shape[1:]).to(dtype),
            v=v.view(requests, -1, *v.shape[1:]).to(dtype),
            cache_seqlens=self.lengths[:requests],
            cache_batch_idx=self.entries,
            causal=causal,
            window_size=window,
        )
        return out.reshape(q.shape).to(q.dtype)


class PlugInDrafter(nn.Module):
    """A drafter for `SpeculativeDecodingMode.DFLASH`.

    Args:
        config: its description.
        format: of its quantised weights, which are decoded once; None = plain.
        layout: this rank's part.
        reduce: adds the ranks' partial results; None = one rank.
        attention: `flash_attn_with_kvcache`.
        dtype: of activations and context K/V.
        device: where it runs.
    """

    drafter: Drafter  # from `load_weights` on

    def __init__(
        self,
        config: DrafterConfig,
        *,
        format: Format | None = None,
        layout: Layout | None = None,
        reduce: Reduce | None = None,
        attention: Callable[..., Tensor],
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.format, self.layout, self.reduce = config, format, layout or Layout(), reduce
        self.layout.check(config)
        self.attention, self.dtype, self.device = attention, dtype, torch.device(device)
        self.dflash_attention_backend = "VANILLA"
        self.block_size = config.block_size
        # The worker embeds this token for the masked slots; with an embedding of our own we overwrite the rows.
        self.mask_token_id = config.mask_token_id or 0
        self.target_layer_ids = list(config.target_layer_ids)
        # Where the worker looks for the target's embedding and head.
        self.draft_model_full: Any = nn.Module()
        self.draft_model_full.model = self.model = nn.Module()
        self.lm_head: Any = None
        self.logits_processor: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self._adjusted(value) if name == "logits_processor" and value is not None else value)

    def _adjusted(self, processor: Callable[..., Tensor]) -> Any:
        # The target's logits processor, followed by the drafter's multiplier and soft-cap.
        return lambda *args, **kwargs: self.drafter.adjust_logits(processor(*args, **kwargs))

    def load_weights(self, weights: Mapping[str, Tensor], weight_mapper: Any = None, **kwargs: Any) -> None:
        """Takes this rank's part of every tensor; none may be missing, extra or misshapen.

        Raises:
            UserError: all that does not fit.
        """
        whole, reduce = assemble(dict(weights.items()), self.config, self.format), self.reduce
        with torch.device("meta"):
            drafter = Drafter(self.config)
        for name, tensor in rank_weights(whole, whole, self.config, self.layout, self.dtype).items():
            module, _, leaf = name.rpartition(".")
            part = nn.Parameter(tensor.contiguous().to(self.device), requires_grad=False)
            setattr(drafter.get_submodule(module), leaf, part)
        drafter.rotary.to(self.device)
        if reduce is not None:
            for layer in drafter.layers:
                for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    product.register_forward_hook(lambda _, given, partial: reduce(partial))
        self.drafter, self.fc, self.hidden_norm = drafter.eval(), drafter.fc, drafter.hidden_norm

    def load_weights_from_target_model(self, target_model: Any) -> None:
        """Shares the target's embedding and head."""
        self.draft_model_full.model.embed_tokens = target_model.model.embed_tokens
        self.draft_model_full.lm_head = self.lm_head = target_model.lm_head

    def _build_fused_kv_buffers(self) -> None:
        """Publishes the sizes of the arena, as the worker expects after this call."""
        self._num_attn_layers = self.config.num_layers
        self._num_heads = self.config.num_attention_heads // self.layout.size
        self._num_kv_heads = self.layout.kv_heads(self.config)
        self._head_dim = self.config.head_dim

    def _get_attention_mask_args(self, layer_idx: int) -> tuple[bool, tuple[int, int]]:
        return mask_arguments(self.config.layers[layer_idx])

    def validate_block_attention_windows(self) -> None:
        """Asked by workers later than 1.4.0rc1, whose own drafter has windows that some kernels lack; ours has none."""

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        """Captured features [N, F*H], layers ascending -> [N, H]."""
        return self.drafter.project_context(hidden_states.to(self.dtype))

    def precompute_context_kv(self, projected_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Context rows [N, H] -> rotated keys and values [N, layers, kv_heads, head_dim]."""
        return self.drafter.context_kv(projected_hidden.to(self.dtype), positions.reshape(-1))

    def dflash_forward(
        self,
        noise_embedding: Tensor,
        query_positions: Tensor,
        num_ctx_per_req: Tensor,
        ctx_k_cache: Tensor,
        ctx_v_cache: Tensor,
        ctx_cache_batch_idx: Tensor,
        ctx_kv_cache: Tensor | None = None,
        ctx_page_table: Tensor | None = None,
    ) -> Tensor:
        """Blocks [requests, B, H] -> hidden states of their slots [requests * B, H]; see `Drafter.forward`."""
        drafter = self.drafter
        noise = noise_embedding.to(self.dtype)
        if drafter.mask_embedding is not None:
            noise = torch.cat([noise[:, :1], drafter.mask_embedding.to(noise).expand_as(noise[:, 1:])], dim=1)
        lengths, entries = num_ctx_per_req.to(torch.int32), ctx_cache_batch_idx.to(torch.int32)
        attend = ArenaAttention(self.attention, self.config.layers, ctx_k_cache, ctx_v_cache, lengths, entries)
        rows = noise.reshape(-1, noise.shape[-1]) * self.config.embedding_scale
        out: Tensor = drafter(rows, query_positions.reshape(-1), attend)
        return out


def build(model_config: Any, draft_config: Any) -> PlugInDrafter:
    """This rank's drafter, from TensorRT-LLM's configs of target and draft.

    Raises:
        UserError: an attention backend that it does not run on, or a drafter it cannot read.
    """
    speculative, mapping = model_config.spec_config, model_config.mapping
    if speculative.attention_backend != "VANILLA":
        do = "set speculative_config.attention_backend to VANILLA"
        raise UserError(f"this drafter does not run on {speculative.attention_backend}", where="config.yaml", do=do)
    found, quantization = read_draft_folder(speculative.speculative_model)
    layout = layout_of(mapping)
    distributed = import_module("tensorrt_llm._torch.distributed") if layout.size > 1 else None
    attention = import_module("tensorrt_llm._torch.speculative.dflash_attention").get_dflash_flash_attention()
    plug_in = PlugInDrafter(
        found,
        format=quantization.format if quantization else None,
        layout=layout,
        reduce=distributed.AllReduce(mapping=mapping) if distributed else None,
        attention=attention,
        dtype=dtype_of(draft_config.pretrained_config),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    plug_in.model_config = draft_config  # weight mappers look for it
    return plug_in


class DequantisedContext:
    """Mixed into upstream's `DFlashForCausalLM`, whose names these are."""

    _fused_kv_weight: Tensor | None
    drafter_config: DrafterConfig
    quantization: Quantization | None
    layout: Layout
    context_dtype: torch.dtype
    context_rows: Tensor | None = None

    def load_weights(self, weights: Mapping[str, Tensor], weight_mapper: Any = None, **kwargs: Any) -> None:
        """Keeps the K/V rows of this rank, dequantised, and hands all on; loading again makes the product again.

        Raises:
            UserError: tensors that do not fit.
        """
        config, stored = self.drafter_config, dict(weights.items())
        whole = assemble(stored, config, self.quantization.format if self.quantization else None)
        products = (f"layers.{i}.self_attn.{name}.weight" for i in range(config.num_layers) for name in KEYS_AND_VALUES)
        rows = rank_weights(whole, products, config, self.layout, self.context_dtype)
        self.context_rows = torch.cat(list(rows.values())).to("cuda" if torch.cuda.is_available() else "cpu")
        self._fused_kv_weight = None
        super().load_weights(weights, weight_mapper=weight_mapper, **kwargs)  # type: ignore[misc]

    def _build_fused_kv_buffers(self) -> None:  # upstream's, with our rows in place of its raw ones
        if self._fused_kv_weight is None:
            super()._build_fused_kv_buffers()  # type: ignore[misc]
            self._fused_kv_weight = self.context_rows


def build_dequantised(model_config: Any, draft_config: Any) -> Any:
    """This rank's drafter of upstream's with a context K/V of ours, from TensorRT-LLM's configs of target and draft.

    Raises:
        UserError: a drafter that cannot be read, or that does not split over the devices.
    """
    base = import_module("tensorrt_llm._torch.models.modeling_dflash").DFlashForCausalLM
    speculative = model_config.spec_config
    config, quantization = read_draft_folder(speculative.speculative_model)
    layout = layout_of(model_config.mapping)
    layout.check(config)
    made: type = type("DequantisedDFlash", (DequantisedContext, base), {"__module__": __name__})
    pretrained = draft_config.pretrained_config
    original = pretrained.architectures
    # The architecture that upstream falls back to; under its own name it would find `Unwanted`.
    pretrained.architectures = ["".join(word.capitalize() for word in pretrained.model_type.split("_")) + "ForCausalLM"]
    try:
        drafter = made(draft_config, dflash_attention_backend=speculative.attention_backend)
    finally:
        pretrained.architectures = original
    drafter.drafter_config, drafter.quantization, drafter.layout = config, quantization, layout
    drafter.context_dtype = dtype_of(pretrained)
    return drafter


def read_draft_folder(folder: str | Path) -> tuple[DrafterConfig, Quantization | None]:
    """The drafter that `prepare` left there, in our own words where they are.

    Raises:
        UserError: a drafter that cannot be read.
    """
    neutral = Path(folder) / NEUTRAL
    if neutral.is_file():
        return DrafterConfig.model_validate_json(neutral.read_text()), read_quantization(Path(folder))
    config, checkpoint = read_config(folder)
    return config, checkpoint.quantization


def layout_of(mapping: Any) -> Layout:
    """This rank's part; attention data parallelism gives each rank a whole drafter."""
    whole = mapping.enable_attention_dp or mapping.tp_size == 1
    return Layout() if whole else Layout(mapping.tp_rank, mapping.tp_size)


def dtype_of(pretrained: Any) -> torch.dtype:
    """The draft's dtype, which transformers keeps as a name or as a torch.dtype."""
    stated = getattr(pretrained, "dtype", None) or getattr(pretrained, "torch_dtype", None) or torch.bfloat16
    return stated if isinstance(stated, torch.dtype) else getattr(torch, str(stated).removeprefix("torch."))
