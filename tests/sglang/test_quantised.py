"""Quantised drafters of SmolLM2 on SGLang's real server on a CPU: no token changes, and they draft as their numbers do.

SGLang has no quantised product for a CPU without AMX, so those of `tests/support/sglang_kernels.py` stand in. Its tiles
do not fit SmolLM2's drafter in W4A16 and W8A16, nor do FP8 blocks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.quantised_smollm2 import (
    BLOCK,
    OF_GPUS,
    STAND_INS,
    STREAMS,
    TOKENS,
    Tokens,
    drafted_as_ours,
    encoded_prompts,
    write_smollm2,
)
from tests.support.sglang_server import FORKED, OnCpu, serving, smollm2

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif("DFLASH_SERVE_TEST_LAYOUTS" not in os.environ, reason="make test-layouts"),
]


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    return encoded_prompts()


@pytest.fixture(scope="module")
def truth(prompts: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """The answers of SGLang without speculation."""
    with serving(tmp_path_factory.mktemp("plain"), smollm2("off"), OnCpu("--disable-overlap-schedule")) as server:
        return server.tokens(prompts, TOKENS, STREAMS)


@pytest.mark.parametrize("name", OF_GPUS["sglang"])
def test_a_quantised_drafter_changes_no_token_and_drafts_as_its_numbers_do(
    name: str, prompts: Tokens, truth: Tokens, tmp_path: Path
) -> None:
    drafter = write_smollm2(tmp_path, name)
    with serving(tmp_path / "server", smollm2(BLOCK, str(drafter)), OnCpu(env={**FORKED, **STAND_INS})) as server:
        found = drafted_as_ours(server, drafter, prompts, truth)
    print(f"sglang, stand-in, {name}: {found}")
    assert found.agrees, found
