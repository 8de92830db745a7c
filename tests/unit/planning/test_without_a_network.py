"""A plan of a published drafter and its target needs no network: sizes that are not here are the catalogue's."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash_serve.checkpoint.catalogue import catalogue, catalogued_target
from dflash_serve.checkpoint.config import weight_bytes
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.planning import step_times
from dflash_serve.planning.pair import read_pair
from tests.unit.checkpoint.published import PUBLISHED

SIZED = [
    one for one in catalogue().drafters if one.sizes and (known := catalogued_target(one.target)) and known.has_sizes
]
TARGETS = sorted(
    {
        one.target
        for one in catalogue().drafters
        if "/" in one.target and (known := catalogued_target(one.target)) and known.has_sizes
    }
)


@pytest.fixture(autouse=True)
def nothing_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub, no cache of it, no operator tables."""

    def connect(*_: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(step_times, "tables_installed", lambda: False)


def plan(folder: Path, *words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", *words, "--json", "--output", str(folder)])
    assert done.exception is None, done.exception
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("backend", ["sglang", "vllm", "tensorrt-llm"])
def test_a_published_pair_is_planned_and_the_catalogues_figures_are_named(backend: str, tmp_path: Path) -> None:
    pair = ("--target", "openai/gpt-oss-120b", "--drafter", "z-lab/gpt-oss-120b-DFlash")
    told = plan(tmp_path / "plan", *pair, "--gpu", "b200", "--task", "gsm8k", "--backend", backend)
    cautions = "\n".join(told["cautions"])
    assert "openai/gpt-oss-120b is not on this machine: its sizes are the catalogue's (config.json, as" in cautions
    assert "z-lab/gpt-oss-120b-DFlash is not on this machine: its sizes are the catalogue's (z-lab model" in cautions
    assert f"{backend}'s own checks were not made" in cautions
    assert {point["variant"] == "auto" for point in told["points"]} == (
        {False} if "trt" in backend or "tensorrt" in backend else {False, True}
    )
    assert (tmp_path / "plan" / "deployment.yaml").exists()


def test_auto_is_planned_too(tmp_path: Path) -> None:
    told = plan(
        tmp_path / "plan", "--target", "Qwen/Qwen3-8B", "--drafter", "auto", "--gpu", "b200", "--task", "math500"
    )
    assert told["question"]["drafter"] == "z-lab/Qwen3-8B-DFlash-b16"
    assert told["acceptances"][0]["source"].startswith("published for z-lab/Qwen3-8B-DFlash-b16 with Qwen/Qwen3-8B")


def test_a_drafter_without_known_sizes_has_the_usual_shape_and_that_is_said(tmp_path: Path) -> None:
    pair = ("--target", "Qwen/Qwen3-8B", "--drafter", "mgoin/Qwen3-8B-speculator.dspark")
    told = plan(tmp_path / "plan", *pair, "--gpu", "b200", "--acceptance-length", "3")
    assert told["question"]["block_size"] == 8
    assert any(
        "the catalogue has no sizes of it: 5 layers as wide as the target are assumed" in each
        for each in told["cautions"]
    )


@pytest.mark.parametrize(
    ("target", "drafter"),
    [("Qwen/Qwen3.8-Flash-Next", None), ("Qwen/Qwen3-8B", "someone/else")],
)
def test_what_the_catalogue_does_not_know_is_one_line(target: str, drafter: str | None) -> None:
    given = {"target": {"model": target}, **({"drafter": {"model": drafter}} if drafter else {})}
    with pytest.raises(UserError, match="the hub does not give it"):
        read_pair(Deployment.model_validate(given))


@pytest.mark.parametrize("one", SIZED, ids=lambda one: one.repository)
def test_the_sizes_of_a_pair_fit_and_are_the_published_ones(one: Any) -> None:
    given = {"target": {"model": one.target}, "drafter": {"model": one.repository}}
    pair = read_pair(Deployment.model_validate(given))
    assert (pair.drafter.block_size, len(pair.catalogued)) == (one.block_size, 2)
    gib = {f"z-lab/{row.name}": row.gib for row in PUBLISHED}.get(one.repository)
    if gib is not None:
        assert weight_bytes(pair.drafter) / 2**30 == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize("target", TARGETS)
def test_the_catalogues_targets_can_be_planned_for(target: str) -> None:
    pair = read_pair(Deployment.model_validate({"target": {"model": target}}))
    assert pair.layout.weight_bytes > 10**9
    assert pair.layout.shape.max_position_embeddings


@pytest.mark.parametrize(
    ("backend", "gpu", "follows"), [("sglang", "b200", False), ("vllm", "a100", False), ("vllm", "b200", True)]
)
def test_auto_is_not_priced_where_the_engine_verifies_whole_blocks(
    backend: str, gpu: str, follows: bool, tmp_path: Path
) -> None:
    """The drafter has a Markov head, as the catalogue tells."""
    pair = ("--target", "Qwen/Qwen3-8B", "--drafter", "mgoin/Qwen3-8B-speculator.dspark", "--backend", backend)
    told = plan(tmp_path / "plan", *pair, "--gpu", gpu, "--acceptance-length", "3")
    assert {point["variant"] for point in told["points"]} == {"off", "fixed 8", *(("auto",) if follows else ())}
    said = f"`width: auto` was not compared: {backend} verifies whole blocks with a DSpark drafter"
    assert any(caution.startswith(said) for caution in told["cautions"]) is not follows


def test_vllm_drafts_at_every_load_where_its_adaptive_verification_runs_alone(tmp_path: Path) -> None:
    """For a plain drafter our scheduler leaves the draft out; beside a Markov head it does not run."""
    words = ("--target", "Qwen/Qwen3-8B", "--backend", "vllm", "--gpu", "b200", "--acceptance-length", "1.02")
    for drafter, least in (("mgoin/Qwen3-8B-speculator.dspark", 2), ("z-lab/Qwen3-8B-DFlash-b16", 1)):
        told = plan(tmp_path / str(least), *words, "--drafter", drafter)
        assert min(point["width"] for point in told["points"] if point["variant"] == "auto") == least
