"""Quantised drafters of SmolLM2 on vLLM's real server on a CPU: they change no token and draft as their numbers do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.quantised_smollm2 import (
    BLOCK,
    SERVED,
    STREAMS,
    TOKENS,
    WITHIN,
    Tokens,
    drafted_as_ours,
    encoded_prompts,
    write_smollm2,
)
from tests.support.vllm_server import serving, smollm2

pytestmark = [pytest.mark.model, pytest.mark.thorough]


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    return encoded_prompts()


@pytest.fixture(scope="module")
def truth(prompts: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """The answers of vLLM without speculation."""
    with serving(tmp_path_factory.mktemp("plain"), smollm2("off")) as server:
        return server.tokens(prompts, TOKENS, STREAMS)


@pytest.mark.parametrize("name", SERVED["vllm"])
def test_vllms_own_kernels_draft_as_the_numbers_do(name: str, prompts: Tokens, truth: Tokens, tmp_path: Path) -> None:
    """They round the activations, too."""
    drafter = write_smollm2(tmp_path, name)
    with serving(tmp_path / "server", smollm2(BLOCK, drafter={"model": str(drafter)})) as server:
        found = drafted_as_ours(server, drafter, prompts, truth)
    print(f"vllm, its kernel, {name}: {found}")
    assert found.ratio[0] == pytest.approx(1, abs=WITHIN)
