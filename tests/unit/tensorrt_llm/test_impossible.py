"""Deployments that cannot work are refused before anything starts, with the reason and the way out."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment import Deployment
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.releases import Release
from tests.support.tiny import SLIDING, SLIDING_BOTH_WAYS, edit_json, tiny_drafter_config, write_quantized_drafter
from tests.unit.tensorrt_llm.conftest import tiny_deployment

Changes = Mapping[str, object]
QWEN: dict[str, object] = {
    "target": {"model": "Qwen/Qwen3-8B"},
    "drafter": {"model": "z-lab/Qwen3-8B-DFlash-b16"},
    "limits": {"max_batch_size": 32, "max_model_len": 8192},
    "hardware": {"gpu": "b200", "count": 1},
}
OSS: dict[str, object] = {
    "target": {"model": "openai/gpt-oss-120b", "quantization": "mxfp4"},
    "drafter": {"model": "z-lab/gpt-oss-120b-DFlash"},
    "parallel": {"tensor": 8, "expert": 8},
    "limits": {"max_batch_size": 32, "max_model_len": 16384},
    "hardware": {"gpu": "b300", "count": 8},
}
KIMI: dict[str, object] = {**OSS, "target": {"model": "nvidia/Kimi-K2.5-NVFP4"}, "parallel": {}}
INT4: Changes = {"target.model": "moonshotai/Kimi-K2.5"}
DUMMY: Changes = {"engine_args": {"tensorrt-llm": {"load_format": "dummy"}}}
NEW, OLD = Release.parse("1.4"), Release.parse("1.3.0rc27")
LONG: Changes = {"limits.max_batch_size": 512, "limits.max_model_len": 40960, "kv_cache.dtype": "fp8"}
"""With FP8 K/V the drafter's context keeps an arena of its own."""


def deployment(base: Mapping[str, object], changes: Changes) -> Deployment:
    """`a.b: value` sets one key of a section."""
    fields = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        if key:
            inner = fields.setdefault(section, {})
            assert isinstance(inner, dict)
            inner[key] = value
        else:
            fields[section] = value
    return Deployment.model_validate(fields)


def devices(count: int, **parallel: object) -> dict[str, object]:
    return {"parallel": parallel, "hardware.count": count}


# What, base, changes, where it is said to be, words of the reason.
IMPOSSIBLE: list[tuple[str, Mapping[str, object], Changes, str, str]] = [
    ("no GPU", QWEN, {"hardware.gpu": "none"}, "hardware.gpu", "NVIDIA GPUs only"),
    ("float32", QWEN, {"hardware.dtype": "float32"}, "hardware.dtype", "float32"),
    ("pipeline", QWEN, devices(2, pipeline=2), "parallel.pipeline", "pipeline parallelism"),
    ("Helix", QWEN, devices(2, context=2), "parallel.context", "Helix"),
    ("devices that do not add up", QWEN, {"hardware.count": 4}, "parallel.data", "hardware.count is 4"),
    ("heads that do not split", QWEN, devices(3, tensor=3), "parallel.tensor", "32 attention heads"),
    ("devices over uneven nodes", OSS, {"parallel.nodes": 3}, "parallel.nodes", "do not spread evenly"),
    ("too many devices on a node", OSS, devices(16, tensor=16), "parallel.nodes", "at most 8"),
    ("experts of a dense target", QWEN, devices(2, tensor=2, expert=2), "parallel.expert", "has no experts"),
    ("experts beyond the devices", OSS, {"parallel.expert": 3}, "parallel.expert", "does not divide tensor 8"),
    ("attention data alone", QWEN, {"parallel.attention_data": True}, "attention_data", "one device"),
    ("MXFP4 of bf16", QWEN, {"target.quantization": "mxfp4"}, "target.quantization", "gpt-oss is published"),
    ("FP8 of MXFP4", OSS, {"target.quantization": "fp8"}, "target.quantization", "mxfp4 already"),
    ("FP8 of bf16", QWEN, {"target.quantization": "fp8"}, "target.quantization", "is not fp8"),
    ("NVFP4 on Hopper", QWEN, {"target.quantization": "nvfp4", "hardware.gpu": "h200"}, "target.quant", "Blackwell"),
    ("NVFP4 K/V on Hopper", QWEN, {"kv_cache.dtype": "nvfp4", "hardware.gpu": "h200"}, "kv_cache.dtype", "Blackwell"),
    ("INT4 of compressed-tensors", KIMI, INT4, "target.model", "compressed-tensors in integers"),
    ("no weights at all", QWEN, DUMMY, "load_format", "no weights are read"),
    ("half of a pair", QWEN, {"role": "decode"}, "role", "never sees the prompt's features"),
    ("another's drafter", QWEN, {"drafter.model": "z-lab/gpt-oss-120b-DFlash"}, "drafter for", "hidden_size is 2880"),
    ("a sibling's drafter", QWEN, {"drafter.model": "z-lab/Qwen3-4B-DFlash-b16"}, "drafter for", "hidden_size is 2560"),
    ("a drafter not quantised", QWEN, {"drafter.quantization": "fp8"}, "drafter.quantization", "is not quantised"),
    (
        "a block beyond the drafter's",
        OSS,
        {"speculation": {"block_size": 16}},
        "speculation.block_size",
        "drafter's 10",
    ),
    ("a width beyond the block", OSS, {"speculation": {"width": 12}}, "speculation.width", "block of 10 slots"),
    ("prefix caching", QWEN, {"kv_cache.block_reuse": True}, "kv_cache.block_reuse", "no features of it"),
    ("beyond the target", QWEN, {"limits.max_model_len": 65536}, "limits.max_model_len", "40960 positions"),
    ("beyond the drafter", OSS, {"limits.max_model_len": 131072}, "limits.max_model_len", "covers 40960"),
    ("too few rows", QWEN, {"limits.max_num_tokens": 256}, "limits.max_num_tokens", "are 512 rows a step"),
    ("a bounded queue", QWEN, {"limits.max_queued_requests": 8}, "limits.max_queued_requests", "without bound"),
    ("an arena of hundreds of GiB", QWEN, LONG, "limits", "drafter's context needs"),
    ("too large a target", KIMI, {"hardware": {"gpu": "h100"}}, "parallel.tensor", "GiB of weights a device"),
]


def assert_refused(release: Release, wanted: Deployment, where: str, reason: str) -> None:
    problems = TensorRTLLMBackend(release).check(wanted)
    matching = [problem for problem in problems if where in problem.where and reason in problem.what]
    assert matching, [str(problem) for problem in problems]
    assert all(problem.what and problem.where and problem.do for problem in problems)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("base", "changes", "where", "reason"), [row[1:] for row in IMPOSSIBLE], ids=[row[0] for row in IMPOSSIBLE]
)
def test_it_is_refused_with_the_reason(base: Mapping[str, object], changes: Changes, where: str, reason: str) -> None:
    assert_refused(NEW, deployment(base, changes), where, reason)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("release", "reason"), [("1.2.1", "1.2 has no DFlash"), ("1.3.0rc13", "came with 1.3.0rc14")])
def test_a_release_without_dflash_is_refused(release: str, reason: str) -> None:
    assert_refused(Release.parse(release), deployment(QWEN, {}), "TensorRT-LLM", reason)


def test_there_are_at_least_25_and_each_has_its_own_name() -> None:
    assert len({row[0] for row in IMPOSSIBLE}) == len(IMPOSSIBLE) >= 25


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("base", [QWEN, OSS], ids=["qwen", "gpt-oss"])
@pytest.mark.parametrize("release", [NEW, OLD])
def test_what_they_were_made_from_is_possible(base: Mapping[str, object], release: Release) -> None:
    assert TensorRTLLMBackend(release).check(deployment(base, {})) == []


@pytest.mark.usefixtures("hub")
def test_the_arena_is_counted_to_the_byte_and_names_limits_that_fit() -> None:
    # 513 slots x 5 layers x (40960 + 16, in pages of 32) tokens x 8 heads x 128 x K and V x bf16 = 431 GB.
    backend = TensorRTLLMBackend(NEW)
    (problem,) = backend.check(deployment(QWEN, LONG))
    assert f"{513 * 5 * (40960 + 32) * 8 * 128 * 2 * 2 / 2**30:.1f} GiB" in problem.what
    batch, length = (int(part.split(" to ")[1]) for part in problem.do.removeprefix("lower ").split(" or "))
    assert backend.check(deployment(QWEN, {**LONG, "limits.max_batch_size": batch})) == []
    assert backend.check(deployment(QWEN, {**LONG, "limits.max_model_len": length})) == []
    assert backend.check(deployment(QWEN, {**LONG, "limits.max_batch_size": batch + 1})) != []


ODD: dict[str, dict[str, Any]] = {
    "out of order": {"target_layer_ids": (5, 1, 3)},
    "embedding scale": {"embedding_scale": 2.0},
    "output multiplier": {"output_multiplier": 0.5},
    "soft-cap": {"final_logit_softcap": 30.0},
    "not causal in the block": {"layers": (SLIDING_BOTH_WAYS, SLIDING_BOTH_WAYS)},
}


@pytest.mark.parametrize("odd", ODD)
def test_what_upstreams_drafter_gets_wrong_in_silence_needs_ours(odd: str, tmp_path: Path) -> None:
    wanted = tiny_deployment(tmp_path, tiny_drafter_config(**ODD[odd]))
    assert TensorRTLLMBackend(NEW).check(wanted) == []
    (problem,) = TensorRTLLMBackend(OLD).check(wanted)
    assert "would silently ignore" in problem.what
    assert odd in problem.what


@pytest.mark.parametrize("family", ["gemma4_text", "mistral", "qwen2"])
def test_a_target_whose_class_makes_no_drafter_is_refused_and_served_without(family: str, tmp_path: Path) -> None:
    wanted = tiny_deployment(tmp_path, tiny_drafter_config())
    edit_json(tmp_path / "target" / "config.json", {"model_type": family})
    (problem,) = TensorRTLLMBackend(NEW).check(wanted)
    assert f"'{family}' makes no drafter" in problem.what
    off = Deployment.model_validate({**wanted.model_dump(exclude_unset=True), "speculation": {"width": "off"}})
    assert TensorRTLLMBackend(NEW).check(off) == []


@pytest.mark.usefixtures("hub")
def test_with_16_bit_kv_the_context_lies_in_the_pool_and_is_reserved_nowhere_else() -> None:
    """#18343: in 1.4, with TRTLLM attention; before it, and with FP8 K/V, it is an arena beside the pool."""
    wanted = {**LONG, "kv_cache.dtype": "auto"}
    in_pool, arena = (TensorRTLLMBackend(release).resolve(deployment(QWEN, wanted)) for release in (NEW, OLD))
    assert (in_pool.attention_backend, in_pool.context_in_pool, in_pool.arena_bytes(512, 40960)) == ("TRTLLM", True, 0)
    assert (arena.attention_backend, arena.context_in_pool) == ("TRTLLM", False)
    assert TensorRTLLMBackend(NEW).check(in_pool.deployment) == []
    assert "drafter's context needs" in TensorRTLLMBackend(OLD).check(arena.deployment)[0].what
    assert not TensorRTLLMBackend(NEW).resolve(deployment(QWEN, LONG)).context_in_pool


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200", "b300"])
def test_no_fp8_or_nvfp4_part_on_a_device_is_cut_through_its_blocks(gpu: str, tmp_path: Path) -> None:
    """16 rows and columns at least, and multiples of them: `_scaled_mm` and NVFP4's scales ask for it."""
    wanted = tiny_deployment(tmp_path, tiny_drafter_config(intermediate_size=64, head_dim=8, num_key_value_heads=2))
    shutil.rmtree(tmp_path / "drafter")
    config = tiny_drafter_config(intermediate_size=64, head_dim=8, num_key_value_heads=2)
    write_quantized_drafter(tmp_path / "drafter", "fp8", config)
    changed = wanted.model_copy(
        update={
            "parallel": wanted.parallel.model_copy(update={"tensor": 2}),
            "hardware": wanted.hardware.model_copy(update={"gpu": gpu, "count": 2}),
        }
    )
    (problem,) = TensorRTLLMBackend(NEW).check(changed)
    assert "8 K/V rows of the drafter on a device are no multiple of 16" in problem.what
    assert TensorRTLLMBackend(NEW).check(wanted) == []


def test_prefix_caching_is_possible_where_a_tail_is_computed_again(tmp_path: Path) -> None:
    """A drafter of windows alone needs just its window; another one as much as the user says."""
    full = tiny_deployment(tmp_path, tiny_drafter_config())
    reused = full.model_copy(update={"kv_cache": full.kv_cache.model_copy(update={"block_reuse": True})})
    (problem,) = TensorRTLLMBackend(NEW).check(reused)
    assert "context_recompute_tail" in problem.do
    told = {"tensorrt-llm": {"speculative_config": {"context_recompute_tail": 64}}}
    said = Deployment.model_validate({**reused.model_dump(exclude_unset=True), "engine_args": told})
    assert TensorRTLLMBackend(NEW).check(said) == []
    (tmp_path / "windows").mkdir()
    windowed = tiny_deployment(tmp_path / "windows", tiny_drafter_config(layers=(SLIDING, SLIDING)))
    reused = windowed.model_copy(update={"kv_cache": windowed.kv_cache.model_copy(update={"block_reuse": True})})
    assert TensorRTLLMBackend(NEW).check(reused) == []
    assert TensorRTLLMBackend(NEW).resolve(reused).recompute_tail == SLIDING.window
    assert TensorRTLLMBackend(OLD).check(reused) != []
