"""Which quantised drafters SGLang and vLLM load is asked of their own classes: `LAYOUTS` of each backend says the same.

A drafter of each layout is prepared as `serve` does it, and loaded by the engine's own loader with its own quantisation
method; what follows is multiplied by stand-ins (`tests/support/*_kernels.py`) for kernels that CPUs have not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_serve.adapter.launch import DRAFT
from dflash_serve.adapter.registry import backend
from dflash_serve.adapter.verdicts import QuantizedDrafterBackend, checkpoint_verdict
from dflash_serve.checkpoint.reader import open_checkpoint
from dflash_serve.deployment.description import Deployment
from tests.support.draft_layouts import LAYOUTS, PUBLISHED, Layout, whole_blocks, write, write_nemotron
from tests.support.tiny import edit_json
from tests.support.tiny_target import write_tiny_target

ENGINE = next((name for name in ("sglang", "vllm") if find_spec(name)), "")
pytestmark = pytest.mark.skipif(not ENGINE, reason="neither SGLang nor vLLM is installed")
PLAIN, SINKS = "plain", "attention sinks"
DENSE: dict[str, Collection[str]] = {"o_proj": ("o_proj",), "attention": ("q_proj", "k_proj", "v_proj", "o_proj")}
"""Products that published drafters leave in bf16, in all layers."""
MIXED = [(name, dense) for name in ("int8", "w4a16", "modelopt nvfp4", "hf fp8") for dense in DENSE]
NAMES = [
    PLAIN,
    *([SINKS] if ENGINE == "sglang" else []),
    *LAYOUTS,
    *(f"{name} without {dense}" for name, dense in MIXED),
]
CLOSE = 0.01
"""Relative error of products in bfloat16."""
ROUNDED = 0.05
"""Relative error of products where the activations are rounded to 8 bits."""


def layout_of(name: str) -> Layout | None:
    return LAYOUTS.get(name.partition(" without ")[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and for each name a folder with a published drafter and, where we serve it, a prepared one."""
    folder = tmp_path_factory.mktemp("layouts")
    target = write_tiny_target(folder / "target", family="qwen3", positions=512)
    edit_json(target / "config.json", {"hidden_size": 128})  # whole blocks; of the target no weight is loaded
    config = whole_blocks(target)
    for name in NAMES:
        dense = DENSE.get(name.partition(" without ")[2], ())
        heads = config.model_copy(update={"attention_sinks": name == SINKS})
        write(folder / name, heads, layout_of(name), dense=dense)
        fields: dict[str, Any] = {
            "target": {"model": str(target)},
            "drafter": {"model": str(folder / name / PUBLISHED)},
        }
        fields |= {"engine_args": {"sglang": {"speculative-draft-attention-backend": "triton"}}}  # has sinks
        launch = backend(ENGINE).launch(Deployment.model_validate(fields))  # type: ignore[attr-defined]
        if not launch.problems:
            launch.prepare(folder / name)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, Any]:
    """The engine's result for each prepared drafter, or for the published one where we do not serve it."""
    drafts = {name: folder / name / DRAFT for name in NAMES}
    drafts = {name: draft if draft.exists() else folder / name / PUBLISHED for name, draft in drafts.items()}
    return asked(folder / "target", drafts)


def asked(target: Path, drafts: Mapping[str, Path], *options: str) -> dict[str, Any]:
    """Loads each drafter in a process of the engine; its result by name."""
    command = [sys.executable, "-m", f"tests.support.{ENGINE}_layouts", *options, str(target)]
    done = subprocess.run([*command, *map(str, drafts.values())], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[str(draft)] for name, draft in drafts.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_loads_what_the_table_says_and_multiplies_with_its_numbers(
    name: str, folder: Path, loaded: dict[str, Any]
) -> None:
    engine, found = backend(ENGINE), loaded[name]
    checkpoint = open_checkpoint(folder / name / PUBLISHED)
    verdict = checkpoint_verdict(engine, checkpoint, "qwen3")
    if verdict.verdict != "served":
        assert "error" in found, f"refused ({verdict.why}), and {ENGINE} loads it"
        return
    assert "error" not in found, found
    assert max(found["errors"].values()) < CLOSE, found
    layout = layout_of(name)
    if layout is not None:
        assert isinstance(engine, QuantizedDrafterBackend)
        assert engine.layouts[layout.dialect, layout.format].verdict == "served"
        assert "Unquantized" not in found["method"]


@pytest.mark.parametrize("markov", [True, False], ids=["DSpark", "DFlash"])
def test_a_drafter_of_nemotron_is_given_as_it_was_published(markov: bool, folder: Path, tmp_path: Path) -> None:
    """SGLang knows its form by several keys, and takes its embedding, its sinks, and `fc` as it is stored."""
    if ENGINE != "sglang":
        pytest.skip("of vLLM's classes none has this form of a Markov head")
    published = write_nemotron(tmp_path, folder / "target", markov=markov)
    fields: dict[str, Any] = {"target": {"model": str(folder / "target")}, "drafter": {"model": str(published)}}
    launch = backend(ENGINE).launch(Deployment.model_validate({**fields, "speculation": {"block_size": 4}}))  # type: ignore[attr-defined]
    assert launch.problems == []
    launch.prepare(tmp_path / "out")
    assert not (tmp_path / "out" / DRAFT).exists()
    argv = launch.command(tmp_path / "out").argv
    assert argv[argv.index("--speculative-draft-model-path") + 1] == str(published.resolve())
    module = [sys.executable, "-m", "tests.support.sglang_layouts", str(folder / "target")]
    done = subprocess.run([*module, str(published)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])[str(published)]
    assert "error" not in found, found
    assert (found["method"], found["quantization"]) == ("ModelOptNvFp4A16LinearMethod", "modelopt_fp4")
    sinks = [f"layers.{layer}.self_attn.attention_sink_bias" for layer in range(2)] if markov else []
    assert found["own"] == ["embed_tokens.weight", *sinks]
    assert {"fc", *(["markov_head.markov_w2"] if markov else [])} <= found["errors"].keys()
    assert max(found["errors"].values()) < CLOSE, found


def test_drafts_are_loaded_by_the_methods_that_the_command_names(folder: Path, loaded: dict[str, Any]) -> None:
    if ENGINE != "sglang":
        pytest.skip("vLLM is told nothing: it takes the method of the drafter's own config.json")
    from dflash_sglang.layouts import method_of

    for name in LAYOUTS:
        if "error" not in loaded[name]:
            # The test says `unquant`, and SGLang finds the same.
            assert loaded[name]["quantization"] == method_of(open_checkpoint(folder / name / PUBLISHED))


@pytest.mark.skipif(ENGINE != "vllm", reason="asked of vLLM")
def test_vllms_kernels_for_cpus_are_those_that_the_table_says(folder: Path) -> None:
    """In float32, of each format that is for a CPU in one layout at least; they round the activations, too."""
    from dflash_vllm.layouts import storage_problems

    names = [
        name for name, layout in LAYOUTS.items() if layout.format in ("int8", "fp8", "w4a16", "w8a16", "fp8-block")
    ]
    drafts = {name: folder / name / DRAFT for name in names if (folder / name / DRAFT).exists()}
    for name, found in asked(folder / "target", drafts, "--own-kernels").items():
        checkpoint = open_checkpoint(folder / name / PUBLISHED)
        problems = list(storage_problems(checkpoint, 1, name, dtype="float32", on_cpu=True))
        assert ("error" in found) is (problems != []), (name, problems, found)
        if "error" not in found:
            overflow = name == "int8" and not torch.cpu._is_vnni_supported()
            assert max(found["errors"].values()) < (0.5 if overflow else ROUNDED), (name, found)


def test_vllm_alone_does_not_find_fc_in_the_list_of_compressed_tensors(folder: Path) -> None:
    """`prepare` writes the list anew; this fails when vLLM needs that no more (vllm#53116)."""
    if ENGINE != "vllm":
        pytest.skip("asked of vLLM")
    draft = folder / "int8" / PUBLISHED
    module = [sys.executable, "-m", "tests.support.vllm_layouts"]
    done = subprocess.run([*module, str(folder / "target"), str(draft)], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])[str(draft)]["error"]
    assert "missing: fc.weight_scale" in said
