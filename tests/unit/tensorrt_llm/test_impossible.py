"""Deployments that cannot work are refused before anything starts, with the reason and the way out."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment.description import Deployment
from dflash_tensorrt_llm.upstream import Release
from tests.support.heads import HEADS
from tests.support.tiny import SLIDING, SLIDING_BOTH_WAYS, edit_json, tiny_drafter_config, write_quantized_drafter
from tests.unit.tensorrt_llm.conftest import backend, changed, configuration, tiny_deployment

Changes = Mapping[str, Any]
QWEN: Changes = {
    "target": {"model": "Qwen/Qwen3-8B"},
    "drafter": {"model": "z-lab/Qwen3-8B-DFlash-b16"},
    "limits": {"max_batch_size": 32, "max_model_len": 8192},
    "hardware": {"gpu": "b200", "count": 1},
}
OSS: Changes = {
    "target": {"model": "openai/gpt-oss-120b", "quantization": "mxfp4"},
    "drafter": {"model": "z-lab/gpt-oss-120b-DFlash"},
    "parallel": {"tensor": 8, "expert": 8},
    "limits": {"max_batch_size": 32, "max_model_len": 16384},
    "hardware": {"gpu": "b300", "count": 8},
}
ALONE: Changes = {"target": QWEN["target"], "hardware": QWEN["hardware"]}
KIMI: Changes = {**OSS, "target": {"model": "nvidia/Kimi-K2.5-NVFP4"}, "parallel": {}}
OLD = "1.3.0rc27"
LONG: Changes = {"limits.max_batch_size": 512, "limits.max_model_len": 40960, "kv_cache.dtype": "fp8"}
"""With FP8 K/V the drafter's context keeps an arena of its own."""


def deployment(base: Changes, changes: Changes) -> Deployment:
    """`a.b: value` sets one key of a section."""
    fields = {key: dict(value) for key, value in base.items()}
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        if key:
            fields.setdefault(section, {})[key] = value
        else:
            fields[section] = value
    return Deployment.model_validate(fields)


def arguments(**given: object) -> Changes:
    return {"engine_args": {"tensorrt-llm": given}}


def devices(count: int, **parallel: object) -> Changes:
    return {"parallel": parallel, "hardware.count": count}


# Base, changes, the place of the problem, words of the reason. Faults that every engine finds: tests/unit/adapters.
IMPOSSIBLE: list[tuple[Changes, Changes, str, str]] = [
    (QWEN, {"hardware.gpu": "none"}, "hardware.gpu", "NVIDIA GPUs only"),
    (QWEN, devices(2, context=2), "parallel.context", "Helix"),
    (QWEN, devices(8, data=8), "parallel.data", "one trtllm-serve has one copy of the model, not 8"),
    (QWEN, devices(3, tensor=3), "target.model", "32 attention heads"),
    (OSS, {"parallel.nodes": 3}, "parallel.nodes", "do not spread evenly"),
    (OSS, devices(16, tensor=16), "parallel.nodes", "at most 8"),
    (OSS, {"parallel.expert": 3}, "parallel.expert", "does not divide tensor 8"),
    (QWEN, {"parallel.attention_data": True}, "attention_data", "one device"),
    (QWEN, {"target.quantization": "mxfp4"}, "target.quantization", "gpt-oss is published"),
    (OSS, {"target.quantization": "fp8"}, "target.quantization", "mxfp4 already"),
    (QWEN, {"target.quantization": "fp8"}, "target.quantization", "is not fp8"),
    (QWEN, {"target.quantization": "nvfp4", "hardware.gpu": "h200"}, "target.quant", "Blackwell"),
    (QWEN, {"kv_cache.dtype": "nvfp4", "hardware.gpu": "h200"}, "kv_cache.dtype", "Blackwell"),
    (QWEN, {"kv_cache.dtype": "fp8", "hardware.gpu": "a100"}, "kv_cache.dtype", "SM89 or newer, a100 is SM80"),
    (QWEN, {"target.quantization": "fp8", "hardware.gpu": "a100"}, "target.quant", "SM89 or newer, a100 is SM80"),
    (KIMI, {"target.model": "moonshotai/Kimi-K2.5"}, "target.model", "compressed-tensors in integers"),
    (QWEN, arguments(load_format="dummy"), "load_format", "no weights are read"),
    (QWEN, arguments(attn_backend="FLASHINFER"), "attn_backend", "takes no drafter"),
    (QWEN, arguments(kv_cache_config={"tokens_per_block": 128}), "tokens_per_block", "pages of 16, 32 or 64"),
    (QWEN, arguments(cache_transceiver_config={"backend": "NIXL"}), "cache_transceiver", "acceptance silently drops"),
    (QWEN, arguments(kv_connector_config={"connector": "lmcache"}), "kv_connector", "brings of a prompt"),
    (QWEN, {"role": "decode"}, "role", "never sees the prompt's features"),
    (ALONE, {"role": "decode"}, "role", "role decode is not covered"),
    (ALONE, {"role": "prefill"}, "role", "role prefill is not covered"),
    (QWEN, {"speculation.draft_window": 512}, "speculation.draft_window", "no setting for a drafter's window"),
    (ALONE, {"speculation.block_size": 8}, "speculation.block_size", "there is no drafter"),
    (ALONE, {"speculation.width": 4}, "speculation.width", "there is no drafter"),
    (QWEN, {"drafter.model": "z-lab/gpt-oss-120b-DFlash"}, "drafter for", "hidden_size is 2880"),
    (QWEN, {"drafter.quantization": "fp8"}, "drafter.quantization", "is not quantised"),
    (QWEN, {"kv_cache.block_reuse": True}, "kv_cache.block_reuse", "no features of it"),
    (OSS, {"limits.max_model_len": 131072}, "limits.max_model_len", "covers 40960"),
    (QWEN, {"limits.max_num_tokens": 256}, "limits.max_num_tokens", "are 512 rows a step"),
    (QWEN, {"limits.max_queued_requests": 8}, "limits.max_queued_requests", "without bound"),
    (QWEN, LONG, "limits", "drafter's context needs"),
]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("rows", "advice"),
    [(4, "set it to 512 or more"), (64, "set it to 512 or more, or limits.max_batch_size to 4")],
)
def test_the_advice_on_too_few_rows_can_be_followed(rows: int, advice: str) -> None:
    problems = backend().launch(deployment(QWEN, {"limits.max_num_tokens": rows})).problems
    assert ("limits.max_num_tokens", advice) in [(problem.where, problem.do) for problem in problems]


def assert_refused(wanted: Deployment, where: str, reason: str, release: str = "1.4") -> None:
    problems = backend(release).launch(wanted).problems
    matching = [problem for problem in problems if where in problem.where and reason in problem.what]
    assert matching, [str(problem) for problem in problems]
    assert all(problem.what and problem.where and problem.do for problem in problems)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("base", "changes", "where", "reason"), IMPOSSIBLE, ids=[row[3] for row in IMPOSSIBLE])
def test_it_is_refused_with_the_reason(base: Changes, changes: Changes, where: str, reason: str) -> None:
    assert_refused(deployment(base, changes), where, reason)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("base", [QWEN, OSS], ids=["qwen", "gpt-oss"])
def test_the_deployments_that_they_were_made_from_are_possible(base: Changes) -> None:
    for release in ("1.3.0rc22", OLD, "1.4"):
        assert backend(release).launch(deployment(base, {})).problems == []
    assert_refused(deployment(base, {}), "TensorRT-LLM", "not supported with a drafter", "1.3.0rc21")
    assert backend("1.2.1").launch(deployment(base, {"speculation": {"width": "off"}})).problems == []


def test_a_release_is_read_from_its_version() -> None:
    texts = ("1.3.0rc27", "1.3.0", "1.4.0rc1.post1", "1.4")
    found = [Release.parse(text) for text in texts]
    assert found == sorted(found)
    assert [str(release) for release in found] == ["1.3.0rc27", "1.3", "1.4.0rc1", "1.4"]


@pytest.mark.usefixtures("hub")
def test_the_arena_is_counted_to_the_byte_and_names_limits_that_fit() -> None:
    # 513 slots x 5 layers x (40960 + 16, in pages of 32) tokens x 8 heads x 128 x K and V x bf16 = 431 GB.
    (problem,) = backend().launch(deployment(QWEN, LONG)).problems
    assert f"{513 * 5 * (40960 + 32) * 8 * 128 * 2 * 2 / 2**30:.1f} GiB" in problem.what
    batch, length = (int(part.split(" to ")[1]) for part in problem.do.removeprefix("lower ").split(" or "))
    assert backend().launch(deployment(QWEN, {**LONG, "limits.max_batch_size": batch})).problems == []
    assert backend().launch(deployment(QWEN, {**LONG, "limits.max_model_len": length})).problems == []
    assert backend().launch(deployment(QWEN, {**LONG, "limits.max_batch_size": batch + 1})).problems != []


@pytest.mark.usefixtures("hub")
def test_with_16_bit_kv_the_context_lies_in_the_pool_and_is_reserved_nowhere_else() -> None:
    """#18343: in 1.4, with TRTLLM attention; before it, and with FP8 K/V, it is an arena beside the pool."""
    wanted = deployment(QWEN, {**LONG, "kv_cache.dtype": "auto"})
    assert backend().launch(wanted).problems == []
    assert "drafter's context needs" in backend(OLD).launch(wanted).problems[0].what


@pytest.mark.usefixtures("hub")
def test_an_arena_that_is_made_before_the_pool_is_measured_is_not_taken_off_twice() -> None:
    """#19410: since 1.4 but with TRTLLM attention; 30 GiB of an H100 are left for the pool."""
    wanted = deployment(QWEN, {"hardware.gpu": "h100", "limits.max_batch_size": 128})
    shares = [configuration(wanted, release)["kv_cache_config"]["free_gpu_memory_fraction"] for release in (OLD, "1.4")]
    assert shares[0] < 0.6 < 0.8 < shares[1] < 0.9


ODD: dict[str, dict[str, Any]] = {
    "embedding scale": {"embedding_scale": 2.0},
    "output multiplier": {"output_multiplier": 0.5},
    "soft-cap": {"final_logit_softcap": 30.0},
    "not causal in the block": {"layers": (SLIDING_BOTH_WAYS, SLIDING_BOTH_WAYS)},
}


@pytest.mark.parametrize("odd", ODD)
def test_a_property_that_upstreams_drafter_silently_ignores_needs_ours(odd: str, tmp_path: Path) -> None:
    wanted = tiny_deployment(tmp_path, tiny_drafter_config(**ODD[odd]))
    assert backend().launch(wanted).problems == []
    (problem,) = backend(OLD).launch(wanted).problems
    assert "would silently ignore" in problem.what
    assert odd in problem.what


GATED = "gated Markov head"
NO_DSPARK, NO_DFLASH2 = "has no DSpark drafter in a folder of its own", "is not known to have DFlash2"
BY_RELEASE: list[tuple[str, dict[str, Any], dict[str, str | None]]] = [
    ("vanilla Markov", {}, {"1.3.0rc27": NO_DSPARK, "1.4.0rc0": None, "1.4": None}),
    ("vanilla Markov, fill-in", {}, {"1.3.0rc27": NO_DSPARK, "1.4": None}),
    ("anchor-first", {}, {"1.3.0rc27": NO_DSPARK, "1.4": None}),
    ("gated Markov", {}, {"1.4": GATED}),
    ("DFlash2", {}, {"1.3.0rc27": NO_DFLASH2, "1.4.0rc0": NO_DFLASH2, "1.4.0rc1": None, "1.4": None}),
    ("convolution", {}, {"1.4": "together with a selector only"}),
    ("vanilla Markov", {"embedding_scale": 2.0}, {"1.4": "our drafter there is plain DFlash"}),
    ("DFlash2", {"final_logit_softcap": 30.0}, {"1.4": "our drafter there is plain DFlash"}),
]


@pytest.mark.parametrize(("heads", "odd", "verdicts"), BY_RELEASE)
def test_heads_are_served_by_the_releases_that_have_them(
    heads: str, odd: dict[str, Any], verdicts: dict[str, str | None], tmp_path: Path
) -> None:
    """modeling_dspark.py @661c857 raises for gated and rnn heads; modeling_dflash.py asks for all of DFlash2's keys."""
    wanted = tiny_deployment(tmp_path, tiny_drafter_config(**HEADS[heads], **odd))
    for release, reason in verdicts.items():
        problems = backend(release).launch(wanted).problems
        assert problems == [] if reason is None else reason in problems[0].what, (release, problems)


@pytest.mark.parametrize("family", ["gemma4_text", "mistral", "qwen2", "qwen2_5_vl_text"])
def test_a_target_whose_class_makes_no_drafter_is_refused_and_served_without(family: str, tmp_path: Path) -> None:
    wanted = tiny_deployment(tmp_path, tiny_drafter_config())
    edit_json(tmp_path / "target" / "config.json", {"model_type": "mistral_large_3"})
    assert backend().launch(wanted).problems == [], "another class, whose name begins alike"
    edit_json(tmp_path / "target" / "config.json", {"model_type": family})
    (problem,) = backend().launch(wanted).problems
    assert f"'{family}' makes no drafter" in problem.what
    assert backend().launch(changed(wanted, speculation={"width": "off"})).problems == []


def test_no_fp8_or_nvfp4_part_on_a_device_is_cut_through_its_blocks(tmp_path: Path) -> None:
    """16 rows and columns at least, and multiples of them: `_scaled_mm` and NVFP4's scales ask for it."""
    config = tiny_drafter_config(intermediate_size=64, head_dim=8, num_key_value_heads=2)
    wanted = tiny_deployment(tmp_path, config)
    shutil.rmtree(tmp_path / "drafter")
    write_quantized_drafter(tmp_path / "drafter", "fp8", config)
    assert backend().launch(wanted).problems == []
    (problem,) = backend().launch(changed(wanted, parallel={"tensor": 2}, hardware={"count": 2})).problems
    assert "8 K/V rows of the drafter on a device are no multiple of 16" in problem.what
    assert problem.do.startswith("use fewer devices")


def test_fewer_devices_than_one_are_not_advised(tmp_path: Path) -> None:
    config = tiny_drafter_config(intermediate_size=64, head_dim=8, num_key_value_heads=1)
    wanted = tiny_deployment(tmp_path, config)
    shutil.rmtree(tmp_path / "drafter")
    write_quantized_drafter(tmp_path / "drafter", "fp8", config)
    (problem,) = backend().launch(wanted).problems
    assert (problem.where, problem.do) == ("drafter", "use the bf16 drafter")


def test_prefix_caching_is_possible_where_a_tail_is_computed_again(tmp_path: Path) -> None:
    """A drafter of windows alone needs just its window; another one as much as the user says."""
    reused = changed(tiny_deployment(tmp_path, tiny_drafter_config()), kv_cache={"block_reuse": True})
    (problem,) = backend().launch(reused).problems
    assert "context_recompute_tail" in problem.do
    for tail in (64, -1):  # -1 is the whole prompt
        told = changed(reused, **arguments(speculative_config={"context_recompute_tail": tail}))
        assert configuration(told)["enable_chunked_prefill"] is True, "else upstream silently computes none again"
    at_once = arguments(speculative_config={"context_recompute_tail": 64}, enable_chunked_prefill=False)
    (problem,) = backend().launch(changed(reused, **at_once)).problems
    assert problem.where == "engine_args.tensorrt-llm.enable_chunked_prefill"
    (tmp_path / "windows").mkdir()
    windowed = tiny_deployment(tmp_path / "windows", tiny_drafter_config(layers=(SLIDING, SLIDING)))
    reused = changed(windowed, kv_cache={"block_reuse": True})
    assert backend().launch(reused).problems == []
    assert backend().launch(reused).recompute_tail == SLIDING.window
    assert backend(OLD).launch(reused).problems != []
