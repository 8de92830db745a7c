"""Step times without the engine's own time, with the provenance of each millisecond.

`StepTimes` has two providers. `Tables` has operators that NVIDIA measured for each GPU and engine; it alone uses their
library (`aiconfigurator-core` 0.12.0, pinned: some names lie outside its stable facade).

    verify(b, w, ctx) = the target's generation operators at b*w rows + decode attention at (b, ctx)
    draft(b, B, ctx)  = the drafter's matrix products at b*B rows + its attention over ctx + B + the head at b*(B-1)
    chain(b, w, ctx)  = w - 1 passes of one layer and a head, one after another: the first over b*w rows, all others
                        over b rows (EAGLE-3; a target's own MTP layer, priced as the mean of its layers)

Attention over one prefix is read once a step, whatever the width: the library's own speculation reads it once a token.

`Roofline` (bytes, arithmetic and the data sheet) is for machines without the tables and models that they do not have.
It knows nothing of kernels: it is optimistic about small batches, and says little of TP and quantised formats.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dflash_serve.checkpoint.config import DrafterConfig, context_bytes, weight_bytes
from dflash_serve.checkpoint.files import QUANT_CONFIG
from dflash_serve.checkpoint.storage import Format
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.common.extras import import_extra
from dflash_serve.deployment.description import Model
from dflash_serve.deployment.gpus import Gpu
from dflash_serve.errors import first_line

LIBRARY = "aiconfigurator_core"
QUANTIZED = {"fp8": ("fp8", "fp8"), "nvfp4": ("nvfp4", "nvfp4")}
"""A number format -> the library's words for matrix products and experts."""
ATTENTION = ("attention", "mla_block")
"""Words in the names of operators that read a prefix."""
SOURCES = {"silicon": "measured", "empirical": "roofline", "sol": "roofline"}


@dataclass(frozen=True)
class Milliseconds:
    """A time and its provenance: the parts add up to it."""

    measured: float = 0.0  # From a table of operators that were measured on this GPU, interpolated between its points
    interpolated: float = 0.0  # Composed of measured and modelled parts, or transferred from another table
    roofline: float = 0.0  # From bytes, arithmetic and the GPU's data sheet
    constants: float = 0.0  # The engine's own time between kernels

    @property
    def total(self) -> float:
        return self.measured + self.interpolated + self.roofline + self.constants

    def __add__(self, other: Milliseconds) -> Milliseconds:
        return Milliseconds(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> Milliseconds:
        """All parts alike."""
        return Milliseconds(*(part * factor for part in astuple(self)))

    def shares(self) -> dict[str, float]:
        """Provenance -> its share of the time."""
        return {name: part / self.total if self.total else 0.0 for name, part in asdict(self).items()}


@dataclass(frozen=True)
class Split:
    """Tensor and expert parallelism of one copy of the model."""

    tensor: int = 1
    expert: int = 1  # 1, or as many as `tensor`: experts are shared out instead of sliced

    def __str__(self) -> str:
        return f"TP {self.tensor}" + (f", EP {self.expert}" if self.expert > 1 else "")


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, as far as their configurations tell."""

    model: Model
    folder: Path  # Folder with the target's config.json
    layout: TargetLayout
    drafter: DrafterConfig
    assumed: str | None = None  # The assumption about the drafter, where none was named
    kv_bytes_each: float = 2.0  # Bytes of one number in the target's K/V cache
    memory_fraction: float | None = None  # Share of the memory beside the weights for K/V; None = MEMORY_SHARE
    catalogued: tuple[str, ...] = ()  # A sentence for each model whose sizes are the catalogue's: it is not here
    drafter_bytes: int | None = None  # Of the drafter's weights; None = all its tensors in bf16
    drafter_formats: Mapping[str, Format] = field(default_factory=dict)  # Quantised product -> format; others are bf16

    @property
    def draft_bytes(self) -> int:
        """Bytes of the drafter's weights."""
        return weight_bytes(self.drafter) if self.drafter_bytes is None else self.drafter_bytes


@dataclass(frozen=True)
class Chain:
    """A head that drafts one token after another: an EAGLE-3 head, or a target's own MTP layer."""

    hidden: int
    features: int  # Rows of the target's hidden size that its `fc` joins for one token
    vocabulary: int  # Tokens that it can draft
    intermediate: int = 0  # Sizes of an EAGLE-3 head's only layer; 0 = the layer is the target's own
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def joined(self) -> int:
        """Parameters of its `fc`."""
        return self.features * self.hidden * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of an EAGLE-3 head's layer: its attention reads the token's embedding beside the hidden state."""
        attention = 2 * self.hidden * (self.heads + 2 * self.kv_heads) + self.heads * self.hidden
        return attention * self.head_dim + 3 * self.hidden * self.intermediate


class StepTimes(Protocol):
    """Step times of one split on one GPU, without the engine's own time."""

    @property
    def basis(self) -> str:
        """The source of the figures, in words."""
        ...

    def verify(self, batch: int, width: int, context: int) -> Milliseconds:
        """The target's pass over `width` slots of each of `batch` requests, each with `context` tokens before them."""
        ...

    def draft(self, batch: int, block_size: int, context: int) -> Milliseconds:
        """The drafter's pass over a block for each request, new context features and the head included."""
        ...

    def chain(self, head: Chain, batch: int, width: int, context: int) -> Milliseconds:
        """The passes of a chain that drafts `width` - 1 tokens for each request."""
        ...

    def prefill(self, prompts: int, tokens: int) -> Milliseconds:
        """The target's pass over so many prompts of `tokens` tokens each."""
        ...


OF_BANDWIDTH, OF_FLOPS = 0.8, 0.7
"""Shares of the data sheet that large copies and large matrix products reach."""
ALL_REDUCE_MS = 0.008  # Latency of one all-reduce among GPUs of one node
ABSORBED = 1088  # Multiplications of a head with one token's latent vector while decoding: DeepSeek's 512 + 64, and 512


def kv_bytes(pair: Pair, tensor: int, context: int) -> float:
    """One sequence's keys and values on each device: heads are repeated, not split further; so is a latent vector."""
    layout = pair.layout
    return layout.kv_bytes(pair.kv_bytes_each, context) / (1 if layout.latent else min(tensor, layout.kv_heads))


@dataclass(frozen=True)
class Roofline:
    """`StepTimes` from the data sheet."""

    pair: Pair
    on: Gpu
    split: Split

    @property
    def basis(self) -> str:
        return f"roofline of the {self.on.name.upper()}'s data sheet"

    def verify(self, batch: int, width: int, context: int) -> Milliseconds:
        layout = self.pair.layout
        return self._target(batch, width, context, ABSORBED if layout.latent else 2 * layout.head_dim)

    def _target(self, batch: int, width: int, context: int, each: int) -> Milliseconds:
        # `each`: multiplications of one head's query with one token's keys and values.
        layout, tensor = self.pair.layout, self.split.tensor
        cached = tensor * kv_bytes(self.pair, tensor, context) + 2 * layout.state_bytes
        attended = sum(layer.entries(context) for layer in layout.kv_layers)
        multiplied = layout.active_parameters + attended * layout.attention_heads * each
        rows = batch * width
        return self._pass(self._weights(rows), multiplied, rows, batch * cached, layout.shape.num_layers)

    def draft(self, batch: int, block_size: int, context: int) -> Milliseconds:
        drafter = self.pair.drafter
        head = 2 * drafter.vocab_size * drafter.hidden_size
        read, rows = self.pair.draft_bytes + head, batch * block_size
        multiplied = (weight_bytes(drafter) + head) / 2
        cached = sum(min(context + block_size, kind.window or context + block_size) for kind in drafter.layers)
        per_layer = context_bytes(drafter) / drafter.num_layers
        return self._pass(read, multiplied, rows, batch * cached * per_layer, drafter.num_layers)

    def chain(self, head: Chain, batch: int, width: int, context: int) -> Milliseconds:
        layout, logits = self.pair.layout, head.vocabulary * head.hidden

        def one(rows: int) -> Milliseconds:
            if not head.intermediate:
                depth = layout.shape.num_layers
                layer = self._target(batch, max(1, rows // batch), context, 2 * layout.head_dim).times(1 / depth)
                return layer + self._pass(2 * (logits + head.joined), logits + head.joined, batch, 0, 1)
            cached = batch * context * 4 * head.kv_heads * head.head_dim
            joined = head.joined if rows > batch else 0
            return self._pass(2 * (head.layer + logits + joined), head.layer + joined, rows, cached, 1)

        return one(batch * width) + one(batch).times(width - 2)

    def prefill(self, prompts: int, tokens: int) -> Milliseconds:
        return self._target(prompts, tokens, tokens // 2, 2 * self.pair.layout.head_dim)

    @property
    def _precision(self) -> str:
        asked = self.pair.model.quantization
        return asked if asked != "none" else self.pair.layout.native_quantization or "none"

    def _weights(self, rows: int) -> float:
        # Bytes read. An expert is read where some row uses it; rows are taken as choosing independently.
        layout = self.pair.layout
        if not layout.experts:
            return float(layout.weight_bytes)
        touched = 1 - (1 - layout.experts_per_token / layout.experts) ** rows
        return layout.weight_bytes - layout.expert_bytes * (1 - touched)

    def _pass(self, read: float, parameters: float, rows: int, cached: float, layers: int) -> Milliseconds:
        on, tensor = self.on, self.split.tensor
        memory = (read + cached) / tensor / (OF_BANDWIDTH * on.bandwidth)
        arithmetic = 2 * parameters * rows / tensor / (OF_FLOPS * on.speed(self._precision))
        total = 1e3 * (memory + arithmetic)
        if tensor > 1:
            moved = 2 * rows * self.pair.layout.shape.hidden_size
            total += 2 * layers * (ALL_REDUCE_MS + 1e3 * moved / on.link)
        return Milliseconds(roofline=total)


def shortened(text: str, most: int = 140) -> str:
    """The words of a text that fit."""
    return text if len(text) <= most else f"{text[: most - 3].rpartition(' ')[0]} ..."


def tables_installed() -> bool:
    """True where `aiconfigurator-core` is installed."""
    return find_spec(LIBRARY) is not None


def library(*parts: str) -> Any:
    """The library, or a module of it.

    Raises:
        UserError: it cannot be imported.
    """
    return import_extra("plan", ".".join([LIBRARY, *parts]))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the library's remarks on low-fidelity rows: the provenance of each figure says it."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def shipped_configuration(name: str) -> Path | None:
    """A folder with the configuration that the library has of a hub model, until this process ends; None where it has
    none.
    """
    if not tables_installed():
        return None
    shipped = Path(library().__file__).parent / "model_configs"
    files = {file: shipped / f"{name.replace('/', '--')}_{file}" for file in ("config.json", QUANT_CONFIG)}
    if not files["config.json"].is_file():
        return None
    folder = Path(tempfile.mkdtemp(prefix="dflash-serve-plan-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file, found in files.items():
        if found.is_file():
            shutil.copyfile(found, folder / file)
    return folder


def priced(
    pair: Pair, on: Gpu, split: Split, engine: str, block_size: int, context: int
) -> tuple[StepTimes, str | None]:
    """The operator tables of an engine where they can price a split, else the roofline, and why it is that."""
    by_hand = Roofline(pair, on, split)
    if not tables_installed():
        return by_hand, "the operator tables are not installed (pip install 'dflash-serve[plan]')"
    if on.system is None:
        return by_hand, f"no operator was measured on {on.name}"
    try:
        measured = Tables(pair, on, split, engine)
        _ = measured.verify(1, block_size, context), measured.draft(1, block_size, context), measured.prefill(1, 8)
    except Exception as error:  # the library's own errors are of many kinds: none of them prices this
        return by_hand, f"the operator tables cannot price this ({shortened(first_line(error).partition(' {')[0])})"
    return measured, None


class Tables:
    """`StepTimes` of one split on one GPU with one engine's kernels.

    Raises:
        Exception: the library's own, of many kinds, where it cannot price this; see `priced`.
    """

    def __init__(self, pair: Pair, on: Gpu, split: Split, engine: str) -> None:
        self.pair, self.on, self.split, self.engine = pair, on, split, engine
        tensor, expert = split.tensor, split.expert
        self._options = {"tp_size": tensor, **quantization(pair, on)}
        if pair.layout.experts:
            self._options |= {"moe_tp_size": tensor // expert, "moe_ep_size": expert}
        sdk = library("sdk")
        with quiet():
            self._handle = sdk.EngineHandle(sdk.compile_engine(str(pair.folder), on.system, engine, **self._options))
        self._decode = cache(self._decode_uncached)
        self.verify, self.draft = cache(self._verify_uncached), cache(self._draft_uncached)

    @cached_property
    def basis(self) -> str:
        name = LIBRARY.replace("_", "-")
        return f"operator tables of {name} {version(name)}, {self.engine} kernels on {self.on.system}"

    def _verify_uncached(self, batch: int, width: int, context: int) -> Milliseconds:
        rows = [op for op in self._decode(batch * width, context) if not any(name in op[0] for name in ATTENTION)]
        if width > 1:  # a recurrence reads its state once and writes one for each slot; the library counts both a slot
            half = {op[0]: op for op in self._decode(max(1, round(batch * (width + 1) / 2)), context)}
            rows = [half[op[0]] if "gdn_recurrence" in op[0] else op for op in rows]
        # A latent block has its products with weights in it, which depend on rows; only the rest depends on the prefix.
        blocks = [*self._blocks(batch * width, 1), *self._blocks(batch, context)]
        blocks += [(name, -ms, energy, source) for name, ms, energy, source in self._blocks(batch, 1)]
        return _sum([*rows, *blocks, *(op for op in self._decode(batch, context) if "attention" in op[0])])

    def _blocks(self, rows: int, context: int) -> list[tuple[str, float, float, str]]:
        return [op for op in self._decode(rows, context) if "mla_block" in op[0]]

    @quiet()
    def prefill(self, prompts: int, tokens: int) -> Milliseconds:
        return _sum(self._handle.evaluate_context_ops(self._context_ops, batch_size=prompts, s=tokens, prefix=0))

    @quiet()
    def _decode_uncached(self, rows: int, context: int) -> list[tuple[str, float, float, str]]:
        return list(self._handle.decode_step_per_op(rows, context, 2))

    @cached_property
    def _context_ops(self) -> list[int]:
        config = library("sdk", "config_builders").build_model_config(
            tp_size=self.split.tensor,
            pp_size=1,
            attention_dp_size=1,
            moe_tp_size=self._options.get("moe_tp_size", 1),
            moe_ep_size=self._options.get("moe_ep_size", 1),
            moe_quant_mode=self._options.get("moe_quant_mode"),
        )
        model = library("sdk", "models").get_model(str(self.pair.folder), config, self.engine)
        return list(range(len(model.context_ops)))

    def _draft_uncached(self, batch: int, block_size: int, context: int) -> Milliseconds:
        ops, common, drafter = library("sdk", "operations"), library("sdk", "common"), self.pair.drafter
        tensor, bf16 = self.split.tensor, common.GEMMQuantMode.bfloat16
        depth, hidden, wide = drafter.num_layers, drafter.hidden_size, drafter.intermediate_size // tensor
        heads, kv_heads = drafter.num_attention_heads // tensor, max(1, drafter.num_key_value_heads // tensor)
        query, kv = heads * drafter.head_dim, kv_heads * drafter.head_dim
        dense = [
            ops.Embedding("d_embed", 1, drafter.vocab_size // tensor, hidden, 0.3),
            ops.GEMM("d_fc", 1, hidden, drafter.feature_size, bf16),
            ops.GEMM("d_context_kv", depth, 2 * kv, hidden, self._mode("k_proj", "v_proj")),
            ops.GEMM("d_qkv", depth, query + 2 * kv, hidden, self._mode("q_proj", "k_proj", "v_proj")),
            ops.GEMM("d_o", depth, hidden, query, self._mode("o_proj")),
            ops.GEMM("d_gate_up", depth, 2 * wide, hidden, self._mode("gate_proj", "up_proj")),
            ops.GEMM("d_down", depth, hidden, wide, self._mode("down_proj")),
            ops.ElementWise("d_norms", 2 * depth, 2 * hidden, 2 * hidden, 0.8),
            ops.ElementWise("d_act", depth, 2 * wide, wide, 0.8),
        ]
        if tensor > 1:
            dense.append(ops.CustomAllReduce("d_all_reduce", 2 * depth + 1, hidden, tensor))
        head = ops.GEMM("d_head", 1, drafter.vocab_size // tensor, hidden, bf16)
        done = self._evaluate(dense, batch * block_size) + self._evaluate([head], batch * max(1, block_size - 1))
        kv_mode, size = common.KVCacheQuantMode.bfloat16, drafter.head_dim
        for window, layers in Counter(kind.window for kind in drafter.layers).items():
            op = ops.GenerationAttention("generation_attention", layers, heads, kv_heads, kv_mode, head_size=size)
            done += self._evaluate([op], batch, min(context + block_size, window or context + block_size))
        return done

    def _mode(self, *products: str) -> Any:
        # Of products that are multiplied as one; bf16 where they differ, and for formats that no table has.
        formats, modes = {self.pair.drafter_formats.get(each) for each in products}, library("sdk", "common")
        able = {"fp8": self.on.has_fp8, "nvfp4": self.on.has_fp4}
        found = str(formats.pop()) if len(formats) == 1 else ""
        return modes.GEMMQuantMode[found if able.get(found) else "bfloat16"]

    def chain(self, head: Chain, batch: int, width: int, context: int) -> Milliseconds:
        ops, tensor = library("sdk", "operations"), self.split.tensor
        bf16 = library("sdk", "common").GEMMQuantMode.bfloat16
        logits = self._evaluate([ops.GEMM("c_head", 1, head.vocabulary // tensor, head.hidden, bf16)], batch)
        join = ops.GEMM("c_fc", 1, head.hidden, head.features * head.hidden, bf16)
        first, later = batch * width, batch
        if head.intermediate:  # `fc` joins the target's layers, once for each new token
            done = self._evaluate([join], first) + self._layer(head, first, batch, context)
            return done + logits + (self._layer(head, later, batch, context) + logits).times(width - 2)
        done, more = (
            self._evaluate([join], rows) + self._mean_layer(batch, wide, context) + logits
            for rows, wide in ((first, width), (later, 1))
        )
        return done + more.times(width - 2)

    def _mean_layer(self, batch: int, width: int, context: int) -> Milliseconds:
        # The target's pass without its embedding and its head, by its number of layers.
        beside = [op for op in self._decode(batch * width, context) if "embedding" in op[0] or "logits" in op[0]]
        whole = self.verify(batch, width, context) + _sum(beside).times(-1)
        return whole.times(1 / self.pair.layout.shape.num_layers)

    def _layer(self, head: Chain, rows: int, batch: int, context: int) -> Milliseconds:
        ops, common, tensor = library("sdk", "operations"), library("sdk", "common"), self.split.tensor
        bf16, wide, hidden = common.GEMMQuantMode.bfloat16, head.intermediate // tensor, head.hidden
        heads, kv_heads = head.heads // tensor, max(1, head.kv_heads // tensor)
        query, kv, kv_mode = heads * head.head_dim, kv_heads * head.head_dim, common.KVCacheQuantMode.bfloat16
        dense = [
            ops.GEMM("c_qkv", 1, query + 2 * kv, 2 * hidden, bf16),
            ops.GEMM("c_o", 1, hidden, query, bf16),
            ops.GEMM("c_gate_up", 1, 2 * wide, hidden, bf16),
            ops.GEMM("c_down", 1, hidden, wide, bf16),
            ops.ElementWise("c_norms", 4, hidden, hidden, 0.8),
            ops.ElementWise("c_act", 1, 2 * wide, wide, 0.8),
        ]
        if tensor > 1:
            dense.append(ops.CustomAllReduce("c_all_reduce", 2, hidden, tensor))
        size = head.head_dim
        reads = ops.GenerationAttention("generation_attention", 1, heads, kv_heads, kv_mode, head_size=size)
        return self._evaluate(dense, rows) + self._evaluate([reads], batch, context)

    @quiet()
    def _evaluate(self, ops: Sequence[Any], rows: int, context: int = 0) -> Milliseconds:
        engine = library("sdk", "engine")
        database = library("sdk", "perf_database").get_database(self.on.system, self.engine, "current")
        engine._resolve_attention_lane_orders(ops, database, None)
        text = engine.build_ops_json(ops)
        return _sum(self._handle.evaluate_ops_json(text, is_context=False, batch_size=rows, s=context))


def _sum(ops: Iterable[Sequence[Any]]) -> Milliseconds:
    # Rows are (name, ms, energy, source).
    parts = {"measured": 0.0, "interpolated": 0.0, "roofline": 0.0}
    for op in ops:
        parts[SOURCES.get(str(op[-1]), "interpolated")] += float(op[1])
    return Milliseconds(**parts)


def quantization(pair: Pair, on: Gpu) -> dict[str, str]:
    """The library's words for number formats that it would not choose itself, or not well.

    gpt-oss's MXFP4 runs as w4a8 on Blackwell and as w4a16 on Hopper; the library takes w4a16 everywhere.
    """
    asked, native, found = pair.model.quantization, pair.layout.native_quantization, {}
    if native == "mxfp4":
        found["moe_quant_mode"] = "w4a8_mxfp4_mxfp8" if on.is_sm100 else "w4a16_mxfp4"
    elif asked in QUANTIZED and native is None:
        found["gemm_quant_mode"], moe = QUANTIZED[asked]
        found |= {"moe_quant_mode": moe} if pair.layout.experts else {}
    if pair.kv_bytes_each == 1.0:
        found["kvcache_quant_mode"] = "fp8"
    return found
