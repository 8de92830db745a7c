"""Quantised drafters of SmolLM2 on vLLM's real server on a CPU: no token changes, and they draft as their numbers do.

`OWN` run by the kernels that vLLM has for CPUs; `OF_GPUS` by those of `tests/support/vllm_kernels.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from tests.support.quantised_smollm2 import (
    BLOCK,
    OF_GPUS,
    OWN,
    STAND_INS,
    STREAMS,
    TOKENS,
    Tokens,
    drafted_as_ours,
    encoded_prompts,
    write_smollm2,
)
from tests.support.vllm_server import OnCpu, serving, smollm2

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif("DFLASH_SERVE_TEST_LAYOUTS" not in os.environ, reason="make test-layouts"),
]
VNNI = torch.cpu._is_vnni_supported()
ON_THIS_CPU = (pytest.param("int8", marks=pytest.mark.skipif(not VNNI, reason="oneDNN's sums overflow without VNNI")),)


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    return encoded_prompts()


@pytest.fixture(scope="module")
def truth(prompts: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """The answers of vLLM without speculation."""
    with serving(tmp_path_factory.mktemp("plain"), smollm2("off")) as server:
        return server.tokens(prompts, TOKENS, STREAMS)


@pytest.mark.parametrize("name", [*OWN["vllm"], *ON_THIS_CPU])
def test_vllms_own_kernels_draft_as_the_numbers_do(name: str, prompts: Tokens, truth: Tokens, tmp_path: Path) -> None:
    """They round the activations, too."""
    drafter = write_smollm2(tmp_path, name)
    with serving(tmp_path / "server", smollm2(BLOCK, drafter={"model": str(drafter)})) as server:
        found = drafted_as_ours(server, drafter, prompts, truth)
    print(f"vllm, its kernel, {name}: {found}")
    assert found.agrees, found


@pytest.mark.parametrize("name", OF_GPUS["vllm"])
def test_what_cpus_have_no_kernel_for_drafts_as_the_numbers_do(
    name: str, prompts: Tokens, truth: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_vllm.checks.storage_problems", lambda *_, **__: iter(()))  # says that there is none
    drafter, backend = write_smollm2(tmp_path, name), OnCpu("--enforce-eager", env=STAND_INS)
    with serving(tmp_path / "server", smollm2(BLOCK, drafter={"model": str(drafter)}), backend) as server:
        found = drafted_as_ours(server, drafter, prompts, truth)
    print(f"vllm, stand-in, {name}: {found}")
    assert found.agrees, found


def built(folder: Path) -> Path:
    """An INT8 drafter that `build` wrote; INT8 needs no ModelOpt."""
    deployment = {"target": {"model": "smollm2"}, "drafter": {"model": "smollm2"}, "hardware": {"gpu": "none"}}
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps({"deployment": deployment, "build": {"drafter": ["int8"]}}))
    result = CliRunner().invoke(app, ["build", str(recipe), "--output", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return folder / "out/drafter-int8"


def test_a_drafter_that_build_wrote_is_served(prompts: Tokens, truth: Tokens, tmp_path: Path) -> None:
    """On a CPU without VNNI, too, where oneDNN's sums of products of all 8 bits can overflow."""
    drafter = built(tmp_path)
    with serving(tmp_path / "server", smollm2(BLOCK, drafter={"model": str(drafter)})) as server:
        found = drafted_as_ours(server, drafter, prompts, truth)
    print(f"vllm, its kernel, int8 by build: {found}")
    assert found.agrees, found
