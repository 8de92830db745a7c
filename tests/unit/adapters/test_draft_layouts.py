"""Quantised drafters on each engine: its table, how one checkpoint stores its weights, slices of devices, memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from dflash_serve.adapter.draft_layouts import SERVED, Layouts, layout_verdict, stored_bytes
from dflash_serve.adapter.launch import EngineLaunch
from dflash_serve.adapter.registry import backend, server_backend
from dflash_serve.adapter.verdicts import checkpoint_verdict, rule
from dflash_serve.checkpoint.catalogue import EngineVerdict
from dflash_serve.checkpoint.config import weight_bytes
from dflash_serve.checkpoint.reader import Checkpoint, open_checkpoint
from dflash_serve.checkpoint.storage import Format, Layout, Scheme
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GPUS
from dflash_serve.planning.pair import read_pair
from dflash_vllm.settings import VLLMSettings
from tests.support.draft_layouts import LAYOUTS
from tests.support.other_formats import FORMATS
from tests.support.paper_models import PAPER_DRAFTER, write_paper_target
from tests.support.quantised_smollm2 import CASES, OF_GPUS, OWN
from tests.support.tiny import tiny_drafter_config, write_in_layout, write_tiny_drafter

ENGINES = ("sglang", "vllm", "tensorrt-llm", "torch")
PAGE = Path(__file__).parents[3] / "docs/quantised.md"
INTEGERS = ("w4a16", "w8a16")
IMPOSSIBLE = {
    *((layout, format) for layout in ("modelopt", "fp8") for format in ("int8", *INTEGERS, "mxfp4")),
    *(("fp8", format) for format in ("nvfp4", "mxfp8", "mixed")),
    ("compressed-tensors", "mixed"),
    *(("gptq", format) for format in get_args(Format) if format not in INTEGERS),
    *(("awq", format) for format in get_args(Format) if format != "w4a16"),
}
"""Pairs that no quantiser writes, of the embedded engine's whole table."""
CT: Layout = "compressed-tensors"
W4A16 = Scheme("w4a16", CT, "group", group=32)
INT8, W8A16 = Scheme("int8", CT, "channel"), Scheme("w8a16", CT, "channel")
FP8_ROWS = Scheme("fp8", CT, "channel")
STATIC = Scheme("fp8", "modelopt", static_inputs=True)
WIDE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
}


def checkpoint(folder: Path, scheme: Scheme, dense: Collection[str] = (), **sizes: Any) -> Checkpoint:
    return open_checkpoint(write_in_layout(folder, scheme, tiny_drafter_config(**{**WIDE, **sizes}), dense=dense))


def verdicts(found: Checkpoint) -> dict[str, EngineVerdict]:
    return {name: checkpoint_verdict(backend(name), found, "qwen3") for name in ENGINES}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (INT8, {"sglang": "served", "vllm": "served", "tensorrt-llm": "after convert"}),
        (W4A16, {"sglang": "served", "vllm": "served", "tensorrt-llm": "after convert"}),
        (W8A16, {"sglang": "served", "vllm": "served", "tensorrt-llm": "after convert"}),
        (FP8_ROWS, {"sglang": "served", "vllm": "served", "tensorrt-llm": "after convert"}),
        (STATIC, {"sglang": "served", "vllm": "served", "tensorrt-llm": "served"}),
        (Scheme("mxfp4", CT), {"sglang": "after convert", "vllm": "served", "tensorrt-llm": "after convert"}),
        (Scheme("fp8", "fp8"), {"sglang": "served", "vllm": "served", "tensorrt-llm": "after convert"}),
    ],
)
def test_each_engine_has_a_verdict_on_each_layout(scheme: Scheme, expected: Mapping[str, str], tmp_path: Path) -> None:
    found = verdicts(checkpoint(tmp_path / "drafter", scheme))
    assert {name: each.verdict for name, each in found.items()} == {**expected, "torch": "served"}
    for each in found.values():
        assert each.verdict == "served" or "dflash-serve convert" in str(each.why)


@pytest.mark.parametrize(
    ("scheme", "dense", "engine", "said"),
    [
        (INT8, ("k_proj",), "vllm", "q_proj, k_proj, v_proj of layers.0.self_attn are stored in different ways"),
        (INT8, ("k_proj",), "sglang", "q_proj, k_proj, v_proj of layers.0.self_attn are stored in different ways"),
        (INT8, ("layers.1.mlp.down_proj",), "sglang", "down_proj is not stored alike in all layers"),
        (Scheme("fp8", "modelopt"), (), "sglang", "has no input_scale, which SGLang needs of ModelOpt's FP8"),
        (Scheme("fp8", "modelopt"), (), "vllm", "has no input_scale, which vLLM needs of ModelOpt's FP8"),
    ],
)
def test_what_an_engine_would_read_wrongly_is_named_with_the_conversion_that_mends_it(
    scheme: Scheme, dense: Collection[str], engine: str, said: str, tmp_path: Path
) -> None:
    found = checkpoint_verdict(backend(engine), checkpoint(tmp_path / "drafter", scheme, dense), "qwen3")
    assert found.verdict == "after convert"
    assert said in str(found.why)


def test_a_product_in_bf16_in_one_layer_is_served_by_vllm(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "drafter", INT8, ("layers.1.mlp.down_proj",))
    assert checkpoint_verdict(backend("vllm"), found, "qwen3").verdict == "served"


@pytest.mark.parametrize("format", get_args(Format))
@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_of_the_catalogue_has_a_verdict_on_each_format_without_its_files(engine: str, format: Format) -> None:
    found = rule(backend(engine), heads=tiny_drafter_config(), weights=format, unread=None, family="qwen3")
    assert found.verdict in ("served", "after convert", "not known")
    assert (found.why is None) is (found.verdict == "served")


def deployment(folder: Path, scheme: Scheme | None, tensor: int = 1, **more: Any) -> Deployment:
    config = tiny_drafter_config(**{**PAPER_DRAFTER, "intermediate_size": 96})
    drafter = folder / "drafter"
    write_tiny_drafter(drafter, config) if scheme is None else write_in_layout(drafter, scheme, config)
    fields = {
        "target": {"model": str(write_paper_target(folder / "target"))},
        "drafter": {"model": str(drafter)},
        "hardware": {"gpu": "h100", "count": tensor},
        "parallel": {"tensor": tensor},
        "limits": {"max_model_len": 256},
    }
    return Deployment.model_validate({**fields, **more})


@pytest.mark.parametrize(
    ("engine", "scheme", "tensor", "said"),
    [
        ("vllm", W4A16, 4, "are no multiple of 32, as vLLM asks for of w4a16"),
        ("sglang", W4A16, 1, "are no multiple of 128, as SGLang asks for of w4a16"),
        ("sglang", Scheme("fp8-block", CT, "block"), 1, "are no multiple of 128, as SGLang asks for of fp8-block"),
        ("vllm", INT8, 4, None),
    ],
)
def test_slices_that_are_no_whole_groups_or_blocks_are_refused_with_the_product(
    engine: str, scheme: Scheme, tensor: int, said: str | None, tmp_path: Path
) -> None:
    launch = server_backend(engine).launch(deployment(tmp_path, scheme, tensor))
    told = [problem.what for problem in launch.problems if "multiple" in problem.what]
    assert (told == []) if said is None else (said in told[0] and "layers.0." in told[0]), told


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_memory_counts_what_is_stored(engine: str, tmp_path: Path) -> None:
    plain, small = (
        server_backend(engine).launch(deployment(tmp_path / name, scheme))
        for name, scheme in (("plain", None), ("int8", INT8))
    )
    assert isinstance(plain, EngineLaunch)
    assert isinstance(small, EngineLaunch)
    assert small.drafter is not None
    assert small.memory is not None
    assert plain.memory is not None
    assert small.memory.drafter == stored_bytes(small.checkpoint, small.drafter)
    assert 0.5 < small.memory.drafter / plain.memory.drafter < 0.8  # fc and the norms stay as they are


def test_plans_and_vllm_s_first_costs_count_what_is_stored(tmp_path: Path) -> None:
    given = deployment(tmp_path, INT8)
    pair = read_pair(given)
    stored = stored_bytes(open_checkpoint(tmp_path / "drafter"), pair.drafter)
    assert pair.draft_bytes == stored < 0.8 * weight_bytes(pair.drafter)
    assert pair.drafter_formats["down_proj"] == "int8"
    settings = server_backend("vllm").launch(given)
    assert isinstance(settings, VLLMSettings)
    head, gpu = 2 * pair.drafter.vocab_size * pair.drafter.hidden_size, GPUS["h100"]
    assert json.loads(settings.guessed_costs)["draft"]["1"] == pytest.approx((stored + head) / gpu.bandwidth)


@pytest.mark.parametrize(
    ("scheme", "flag"), [(None, "unquant"), (INT8, CT), (STATIC, "modelopt_fp8"), (Scheme("fp8", "fp8"), "fp8")]
)
def test_sglang_is_told_the_drafters_own_method(scheme: Scheme | None, flag: str, tmp_path: Path) -> None:
    launch = server_backend("sglang").launch(deployment(tmp_path, scheme))
    words = launch.command(tmp_path).argv
    assert words[words.index("--speculative-draft-model-quantization") + 1] == flag


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_dry_run_shows_the_recipe_that_prepare_writes(engine: str, tmp_path: Path) -> None:
    launch = server_backend(engine).launch(deployment(tmp_path, INT8))
    assert launch.problems == []
    shown = {file.name: file for file in launch.files(tmp_path / "prepared")}
    launch.prepare(tmp_path / "prepared")
    assert shown["draft/config.json"].text is not None
    recipe = json.loads(shown["draft/config.json"].text)["quantization_config"]
    assert "quantised to INT8 (compressed-tensors)" in shown["draft/model.safetensors"].about
    assert json.loads((tmp_path / "prepared/draft/config.json").read_text())["quantization_config"] == recipe
    assert {"fc", "model.fc"} <= set(recipe["ignore"])
    written, given = open_checkpoint(tmp_path / "prepared/draft"), open_checkpoint(tmp_path / "drafter")
    assert written.problems == []
    assert written.quantised == given.quantised


@pytest.mark.parametrize("scheme", [W8A16, Scheme("fp8", CT, static_inputs=True), INT8, FP8_ROWS])
def test_vllm_on_a_cpu_refuses_what_it_has_no_kernel_for(scheme: Scheme, tmp_path: Path) -> None:
    launch = server_backend("vllm").launch(deployment(tmp_path, scheme, hardware={"gpu": "none"}))
    told = [problem.what for problem in launch.problems if "no kernel on CPUs" in problem.what]
    expected = {"w8a16": "W8A16 (compressed-tensors)", "fp8": "FP8 (compressed-tensors) with a scale of the tensor"}
    served = scheme in (INT8, FP8_ROWS)
    assert told == ([] if served else [f"vLLM has no kernel on CPUs for {expected[scheme.format]}"])


def test_vllm_on_a_cpu_multiplies_w4a16_in_16_bits_alone(tmp_path: Path) -> None:
    """Its kernel ends the first request in float32, which is the default there."""
    (told,) = server_backend("vllm").launch(deployment(tmp_path / "32", W4A16, hardware={"gpu": "none"})).problems
    assert (told.where, "in bfloat16 and float16 only" in told.what) == ("hardware.dtype", True)
    in_16_bits = deployment(tmp_path / "16", W4A16, hardware={"gpu": "none", "dtype": "bfloat16"})
    assert not server_backend("vllm").launch(in_16_bits).problems


def test_the_page_has_the_tables_that_the_engines_are_asked_for() -> None:
    """Also where `inspect` has a problem of the format itself, and no layout: ModelOpt's FP8 by block on SGLang."""
    rows = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith(("| compressed-tensors ", "| modelopt ", "| fp8 ", "| gptq ", "| awq "))
    ]
    told = {tuple(cells[0].split()): cells[1:] for row in rows if len(cells := row.strip("| ").split(" | ")) == 5}
    backends = [backend(name) for name in ("torch", "sglang", "vllm", "tensorrt-llm")]
    for (layout, format), verdicts in told.items():
        found = [layout_verdict(one.layouts, layout, format, one.name).verdict for one in backends]  # type: ignore[attr-defined]
        assert verdicts == found, (layout, format)
    assert {one for each in backends for one in each.layouts} - {*told} == IMPOSSIBLE  # type: ignore[attr-defined]


def test_the_page_tells_of_each_layout_how_it_was_run() -> None:
    """The suite's lists, by name: what is in none of an engine's is asked of its class alone."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = {name.strip("`"): (layout, *cells) for name, layout, *cells in rows if len(cells) == 2}
    assert told.keys() == CASES.keys()
    for name, (layout, *cells) in told.items():
        asked = CASES[name]
        assert layout == f"{asked.dialect} {asked.format}"
        for engine, cell in zip(("sglang", "vllm"), cells, strict=True):
            served = engine_layouts(engine).get((asked.dialect, asked.format)) is SERVED
            alone = "class" if name in LAYOUTS else "not run"
            how = "server" if name in OWN[engine] else "stand-in" if name in OF_GPUS[engine] else alone
            assert cell.partition(":")[0] == (how if served else "refused"), (name, engine)


def engine_layouts(name: str) -> Layouts:
    found: Layouts = backend(name).layouts  # type: ignore[attr-defined]
    return found


def test_the_contract_tests_ask_for_every_layout_of_the_tables() -> None:
    asked: set[tuple[str, str]] = {(one.dialect, one.format) for one in LAYOUTS.values()}
    asked |= {(layout, format) for _, _, format, layout in FORMATS.values()}
    tables = {*backend("sglang").layouts, *backend("vllm").layouts}  # type: ignore[attr-defined]
    assert tables <= asked
