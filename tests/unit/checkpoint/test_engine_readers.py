"""Engines read a written config.json as it was meant, by their own rules; exceptions are refused or warned about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.checkpoint.formats import Format, QuantizedTensor
from dflash_serve.checkpoint.reader import DIALECTS, assemble, load_weights
from dflash_serve.checkpoint.tensors import FUSED
from dflash_tensorrt_llm.settings import beyond_built_in
from dflash_tensorrt_llm.upstream import Release
from tests.support.engine_readers import FUSED_BY, READERS, Raw
from tests.support.tiny import (
    FULL,
    SLIDING,
    SLIDING_BOTH_WAYS,
    quantized_state,
    random_tensors,
    tiny_drafter_config,
    write_quantized_drafter,
)

CAUSAL = AttentionKind(causal=True)
LAYERS: Mapping[str, tuple[AttentionKind, ...]] = {
    "full": (FULL, FULL),
    "full, causal": (CAUSAL, CAUSAL),
    "sliding, causal": (SLIDING, SLIDING),
    "sliding both ways": (SLIDING_BOTH_WAYS, SLIDING_BOTH_WAYS),
    "full and sliding, causal": (FULL, SLIDING),
    "full and sliding both ways": (FULL, SLIDING_BOTH_WAYS),
}
OUT_OF_WORDS = {
    ("speculators", "full, causal"),
    ("modelopt", "full and sliding, causal"),
    ("modelopt", "full and sliding both ways"),
}
"""Refused: the dialect cannot say it (test_round_trip)."""
MISREAD = {
    ("speculators", "vllm", "full and sliding, causal"): (CAUSAL, SLIDING),
}
"""Said rightly and read wrongly: `convert` warns of it."""
READS = {"zlab": READERS, "modelopt": READERS, "speculators": {"vllm": READERS["vllm"]}}
"""SGLang and TensorRT-LLM do not read the speculators dialect."""
CASES = [(d, e, c) for d in READS for e in READS[d] for c in LAYERS if (d, c) not in OUT_OF_WORDS]


def written(dialect: str, case: str) -> Raw:
    return DIALECTS[dialect].write(tiny_drafter_config(layers=LAYERS[case]), None)


@pytest.mark.parametrize(("dialect", "engine", "case"), CASES)
def test_an_engine_reads_what_was_meant(dialect: str, engine: str, case: str) -> None:
    config = tiny_drafter_config(layers=LAYERS[case])
    if engine == "tensorrt-llm" and beyond_built_in(config, Release.parse("1.3")):
        pytest.skip("TensorRT-LLM's own drafter has no such attention; our backend brings one that has")
    found = READERS[engine](written(dialect, case))
    assert found.layers == MISREAD.get((dialect, engine, case), config.layers)
    assert found.target_layer_ids == config.target_layer_ids
    assert found.mask_token_id == config.mask_token_id
    assert found.block_size in (config.block_size, None)


@pytest.mark.parametrize(
    "case", [case for case, layers in LAYERS.items() if len({kind.causal for kind in layers}) == 1]
)
def test_zlabs_causality_is_explicit_wherever_one_key_can_say_it(case: str) -> None:
    assert written("zlab", case)["is_causal"] == LAYERS[case][0].causal


def fused_groups(weights: Mapping[str, object]) -> Iterator[list[QuantizedTensor]]:
    """The parts of every product that engines fuse, in layers 0 and 1."""
    for index in range(2):
        for parent, fused in (("self_attn", "qkv_proj"), ("mlp", "gate_up_proj")):
            found = [weights[f"layers.{index}.{parent}.{part}.weight"] for part in FUSED[fused]]
            yield [part for part in found if isinstance(part, QuantizedTensor)]


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
@pytest.mark.parametrize("engine", FUSED_BY)
def test_an_engine_reads_fused_quantised_weights_to_the_bit(engine: str, format: Format, tmp_path: Path) -> None:
    _, weights = load_weights(write_quantized_drafter(tmp_path / "d", format))
    for parts in fused_groups(weights):
        assert torch.equal(FUSED_BY[engine](parts), torch.cat([part.dequantize() for part in parts]))


def test_scales_of_their_own_are_asserted_against_or_read_wrongly() -> None:
    config = tiny_drafter_config(intermediate_size=64)
    state = quantized_state(random_tensors(config), "nvfp4", torch.tensor(0.01), fused=False)
    for parts in fused_groups(assemble(state, config, "nvfp4")):
        meant = torch.cat([part.dequantize() for part in parts])
        assert (FUSED_BY["vllm"](parts) - meant).norm() > 0.01 * meant.norm()
        with pytest.raises(AssertionError, match="weight_scale_2 should be same"):
            FUSED_BY["tensorrt-llm"](parts)
