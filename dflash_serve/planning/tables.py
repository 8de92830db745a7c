"""Step times from `aiconfigurator-core`'s operator tables, measured by NVIDIA for each GPU and engine. This is the
only module that uses that library (0.12.0, pinned: some names lie outside its stable facade).

    verify(b, w, ctx) = the target's generation operators at b*w rows + decode attention at (b, ctx)
    draft(b, B, ctx)  = the drafter's matrix products at b*B rows + its attention over ctx + B + the head at b*(B-1)

Attention over one prefix is read once a step, whatever the width: the library's own speculation reads it once a token.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.config import context_bytes, weight_bytes
from dflash_serve.common.extras import import_extra
from dflash_serve.planning.step_times import Milliseconds, Pair, Specification, Split

LIBRARY = "aiconfigurator_core"
MEMORY_SHARE = 0.85
QUANTIZED = {"fp8": ("fp8", "fp8"), "nvfp4": ("nvfp4", "nvfp4")}
"""A number format -> the library's words for matrix products and experts."""
SOURCES = {"silicon": "measured", "empirical": "roofline", "sol": "roofline"}


def installed() -> bool:
    """True where the library is installed."""
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
    """A folder with the config.json that the library has of a hub model; None where it has none."""
    if not installed():
        return None
    folder = Path(library().__file__).parent / "model_configs"
    found = folder / f"{name.replace('/', '--')}_config.json"
    if not found.is_file():
        return None
    copy = Path(tempfile.mkdtemp(prefix="dflash-serve-plan-")) / "config.json"
    copy.write_bytes(found.read_bytes())
    return copy.parent


class Tables:
    """`StepTimes` of one split on one GPU with one engine's kernels.

    Raises:
        Exception: the library's own, of many kinds, where it cannot price this; see `step_times_of`.
    """

    def __init__(self, pair: Pair, on: Specification, split: Split, engine: str) -> None:
        self.pair, self.on, self.split, self.engine = pair, on, split, engine
        tensor, expert = split.tensor, split.expert
        self._options = {"tp_size": tensor, **quantization(pair, on)}
        if pair.layout.experts:
            self._options |= {"moe_tp_size": tensor // expert, "moe_ep_size": expert}
        self._sdk = library("sdk")
        with quiet():
            compiled = self._sdk.compile_engine(str(pair.folder), on.system, engine, **self._options)
            self._handle = self._sdk.EngineHandle(compiled)
        self._decode = cache(self._decode_uncached)
        self.verify, self.draft = cache(self._verify_uncached), cache(self._draft_uncached)

    @cached_property
    def basis(self) -> str:
        name = LIBRARY.replace("_", "-")
        return f"operator tables of {name} {version(name)}, {self.engine} kernels on {self.on.system}"

    def _verify_uncached(self, batch: int, width: int, context: int) -> Milliseconds:
        rows = [op for op in self._decode(batch * width, context) if "attention" not in op[0]]
        if width > 1:  # a recurrence reads its state once and writes one for each slot; the library counts both a slot
            half = {op[0]: op for op in self._decode(max(1, round(batch * (width + 1) / 2)), context)}
            rows = [half[op[0]] if "gdn_recurrence" in op[0] else op for op in rows]
        return _sum([*rows, *(op for op in self._decode(batch, context) if "attention" in op[0])])

    @quiet()
    def prefill(self, prompts: int, tokens: int) -> Milliseconds:
        return _sum(self._handle.evaluate_context_ops(self._context_ops, batch_size=prompts, s=tokens, prefix=0))

    @quiet()
    def kv_tokens(self, context: int = 1) -> int:
        drafter, tensor = self.pair.drafter, self.split.tensor
        found = self._sdk.estimate_kv_cache(
            str(self.pair.folder), self.on.system, self.engine, "current", max_num_tokens=8192, max_batch_size=64,
            memory_fraction_kind="of_total", memory_fraction_value=MEMORY_SHARE, **self._options,
        )  # fmt: skip
        free = found["total_kv_size_bytes"] - weight_bytes(drafter) / tensor
        own = context_bytes(drafter, max(1, drafter.num_key_value_heads // tensor))
        return max(0, int(free / (found["kv_size_per_token_bytes"] + own)))

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
            ops.GEMM("d_context_kv", depth, 2 * kv, hidden, bf16),
            ops.GEMM("d_qkv", depth, query + 2 * kv, hidden, bf16),
            ops.GEMM("d_o", depth, hidden, query, bf16),
            ops.GEMM("d_gate_up", depth, 2 * wide, hidden, bf16),
            ops.GEMM("d_down", depth, hidden, wide, bf16),
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


def quantization(pair: Pair, on: Specification) -> dict[str, str]:
    """The library's words for number formats that it would not choose itself, or not well.

    gpt-oss's MXFP4 runs as w4a8 on Blackwell and as w4a16 on Hopper; the library takes w4a16 everywhere.
    """
    asked, native, found = pair.model.quantization, pair.layout.native_quantization, {}
    if native == "mxfp4":
        found["moe_quant_mode"] = "w4a8_mxfp4_mxfp8" if on.gpu.is_blackwell else "w4a16_mxfp4"
    elif asked in QUANTIZED and native is None:
        found["gemm_quant_mode"], moe = QUANTIZED[asked]
        found |= {"moe_quant_mode": moe} if pair.layout.experts else {}
    if pair.kv_bytes_each == 1.0:
        found["kvcache_quant_mode"] = "fp8"
    return found
