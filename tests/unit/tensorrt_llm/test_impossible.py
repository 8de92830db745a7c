"""Deployments that cannot work are refused before anything starts, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment import Deployment
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.release import Release
from tests.support.tiny import SLIDING_BOTH_WAYS, tiny_drafter_config, write_tiny_drafter

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
NEW, OLD = "1.4", "1.3.0rc27"


def deployment(base: Mapping[str, object], changes: Mapping[str, object]) -> Deployment:
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


def two(parallel: Mapping[str, object], **more: object) -> dict[str, object]:
    return {"parallel": dict(parallel), "hardware.count": 2, **more}


IMPOSSIBLE = [
    # what, base, changes, release, where, words of the reason
    ("a release without DFlash", QWEN, {}, "1.2.1", "TensorRT-LLM", "1.2 has no DFlash"),
    ("the candidate before the first", QWEN, {}, "1.3.0rc13", "TensorRT-LLM", "came with 1.3.0rc14"),
    ("no GPU", QWEN, {"hardware.gpu": "none"}, NEW, "hardware.gpu", "NVIDIA GPUs only"),
    ("float32", QWEN, {"hardware.dtype": "float32"}, NEW, "hardware.dtype", "float32"),
    ("pipeline parallelism", QWEN, two({"pipeline": 2}), NEW, "parallel.pipeline", "pipeline parallelism"),
    ("Helix", QWEN, two({"context": 2}), NEW, "parallel.context", "Helix"),
    ("devices that do not add up", QWEN, {"hardware.count": 4}, NEW, "parallel.tensor", "hardware.count is 4"),
    ("devices over uneven nodes", OSS, {"parallel.nodes": 3}, NEW, "parallel.nodes", "do not spread evenly"),
    (
        "too many devices on a node",
        OSS,
        {"parallel.tensor": 16, "hardware.count": 16},
        NEW,
        "parallel.nodes",
        "at most 8",
    ),
    ("experts of a dense target", QWEN, two({"tensor": 2, "expert": 2}), NEW, "parallel.expert", "has no experts"),
    ("experts beyond the devices", OSS, {"parallel.expert": 3}, NEW, "parallel.expert", "does not divide tensor 8"),
    (
        "data-parallel attention on one device",
        QWEN,
        {"parallel.attention_data": True},
        NEW,
        "attention_data",
        "one device",
    ),
    (
        "heads that do not split",
        QWEN,
        {"parallel.tensor": 3, "hardware.count": 3},
        NEW,
        "parallel.tensor",
        "32 attention heads",
    ),
    (
        "MXFP4 of a bf16 target",
        QWEN,
        {"target.quantization": "mxfp4"},
        NEW,
        "target.quantization",
        "gpt-oss is published",
    ),
    ("FP8 of an MXFP4 target", OSS, {"target.quantization": "fp8"}, NEW, "target.quantization", "mxfp4 already"),
    ("FP8 of a bf16 checkpoint", QWEN, {"target.quantization": "fp8"}, NEW, "target.quantization", "is not fp8"),
    (
        "NVFP4 on Hopper",
        QWEN,
        {"target.quantization": "nvfp4", "hardware.gpu": "h200"},
        NEW,
        "target.quantization",
        "Blackwell",
    ),
    (
        "NVFP4 K/V on Hopper",
        QWEN,
        {"kv_cache.dtype": "nvfp4", "hardware.gpu": "h200"},
        NEW,
        "kv_cache.dtype",
        "Blackwell",
    ),
    ("half of a disaggregated pair", QWEN, {"role": "decode"}, NEW, "role", "never sees the prompt's features"),
    (
        "another target's drafter",
        QWEN,
        {"drafter.model": "z-lab/gpt-oss-120b-DFlash"},
        NEW,
        "drafter for",
        "hidden_size is 2880",
    ),
    (
        "a smaller sibling's drafter",
        QWEN,
        {"drafter.model": "z-lab/Qwen3-4B-DFlash-b16"},
        NEW,
        "drafter for",
        "hidden_size is 2560",
    ),
    (
        "a quantised drafter that is not",
        QWEN,
        {"drafter.quantization": "fp8"},
        NEW,
        "drafter.quantization",
        "is not quantised",
    ),
    (
        "a block wider than trained",
        OSS,
        {"speculation": {"block_size": 16}},
        NEW,
        "speculation.block_size",
        "max_draft_len would be 15",
    ),
    ("a width beyond the block", OSS, {"speculation": {"width": 12}}, NEW, "speculation.width", "block of 10 slots"),
    ("prefix caching", QWEN, {"kv_cache.block_reuse": True}, NEW, "kv_cache.block_reuse", "no features of it"),
    ("longer than the target", QWEN, {"limits.max_model_len": 65536}, NEW, "limits.max_model_len", "40960 positions"),
    (
        "longer than the drafter",
        OSS,
        {"limits.max_model_len": 131072, "limits.max_batch_size": 1},
        NEW,
        "limits.max_model_len",
        "covers 40960",
    ),
    (
        "more rows than a step has",
        QWEN,
        {"limits.max_num_tokens": 256},
        NEW,
        "limits.max_num_tokens",
        "are 512 rows a step",
    ),
    ("a bounded queue", QWEN, {"limits.max_queued_requests": 8}, NEW, "limits.max_queued_requests", "without bound"),
    (
        "an arena of hundreds of GiB",
        QWEN,
        {"limits.max_batch_size": 512, "limits.max_model_len": 40960},
        NEW,
        "limits",
        "drafter's context needs",
    ),
    (
        "a target that is too large",
        {**OSS, "parallel": {}},
        {"hardware.count": 1, "hardware.gpu": "h100", "target": {"model": "moonshotai/Kimi-K2.5"}},
        NEW,
        "parallel.tensor",
        "GiB of weights a device",
    ),
]
CASE = ("base", "changes", "release", "where", "reason")


@pytest.mark.parametrize(CASE, [row[1:] for row in IMPOSSIBLE], ids=[row[0] for row in IMPOSSIBLE])
def test_it_is_refused_with_the_reason(
    base: Mapping[str, object], changes: Mapping[str, object], release: str, where: str, reason: str, hub: Path
) -> None:
    problems = TensorRTLLMBackend(Release.parse(release)).check(deployment(base, changes))
    matching = [problem for problem in problems if where in problem.where and reason in problem.what]
    assert matching, [str(problem) for problem in problems]
    assert all(problem.what and problem.where and problem.do for problem in problems)


def test_there_are_at_least_25_and_each_has_its_own_name() -> None:
    assert len({row[0] for row in IMPOSSIBLE}) == len(IMPOSSIBLE) >= 25


@pytest.mark.parametrize("base", [QWEN, OSS], ids=["qwen", "gpt-oss"])
@pytest.mark.parametrize("release", [NEW, OLD])
def test_what_they_were_made_from_is_possible(base: Mapping[str, object], release: str, hub: Path) -> None:
    assert TensorRTLLMBackend(Release.parse(release)).check(deployment(base, {})) == []


def test_the_arena_is_counted_to_the_byte_and_names_limits_that_fit(hub: Path) -> None:
    # 513 slots x 5 layers x (40960 + 16, in pages of 32) tokens x 8 heads x 128 x K and V x bf16 = 431 GB.
    changes = {"limits.max_batch_size": 512, "limits.max_model_len": 40960}
    (problem,) = TensorRTLLMBackend(Release.parse(NEW)).check(deployment(QWEN, changes))
    assert f"{513 * 5 * (40960 + 32) * 8 * 128 * 2 * 2 / 2**30:.1f} GiB" in problem.what
    batch, length = (int(part.split(" to ")[1]) for part in problem.do.removeprefix("lower ").split(" or "))
    backend = TensorRTLLMBackend(Release.parse(NEW))
    assert backend.check(deployment(QWEN, {**changes, "limits.max_batch_size": batch})) == []
    assert backend.check(deployment(QWEN, {**changes, "limits.max_model_len": length})) == []
    assert backend.check(deployment(QWEN, {**changes, "limits.max_batch_size": batch + 1})) != []


ODD: dict[str, dict[str, Any]] = {
    "out of order": {"target_layer_ids": (5, 1, 3)},
    "embedding scale": {"embedding_scale": 2.0},
    "output multiplier": {"output_multiplier": 0.5},
    "soft-cap": {"final_logit_softcap": 30.0},
    "not causal in the block": {"layers": (SLIDING_BOTH_WAYS, SLIDING_BOTH_WAYS)},
}


@pytest.mark.parametrize("odd", ODD)
def test_what_upstreams_drafter_gets_wrong_in_silence_needs_ours(odd: str, tmp_path: Path) -> None:
    drafter = write_tiny_drafter(tmp_path / "drafter", tiny_drafter_config(**ODD[odd]))
    target = tmp_path / "target"
    target.mkdir()
    sizes = '"hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 96, "num_attention_heads": 4'
    (target / "config.json").write_text(f'{{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", {sizes}}}')
    wanted = Deployment.model_validate({
        "target": {"model": str(target)}, "drafter": {"model": str(drafter)}, "limits": {"max_model_len": 128},
        "hardware": {"gpu": "h200"},
    })  # fmt: skip
    assert TensorRTLLMBackend(Release.parse(NEW)).check(wanted) == []
    (problem,) = TensorRTLLMBackend(Release.parse(OLD)).check(wanted)
    assert "would ignore in silence" in problem.what
    assert odd in problem.what
