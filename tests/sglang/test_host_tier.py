"""The real server with HiCache: K/V of target and drafter come back from host memory, which `verify --warm` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.client.endpoint import Endpoint
from dflash_serve.verify.questions import VerifyPlan
from dflash_serve.verify.subjects import one_server
from dflash_serve.verify.warm import FEWEST, WarmVerification
from tests.support.prompts import word_problems
from tests.support.sglang_server import PATIENCE, OnCpu, serving, smollm2

pytestmark = [pytest.mark.model, pytest.mark.thorough]
POOL = 2048
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    *("--hicache-ratio", "4", "--max-total-tokens", str(POOL)),
)
PLAN = VerifyPlan(prompts=FEWEST, prompts_sha256="", max_tokens=24, samples=0, dtype="float32")
CHEAP = {"target": {1: 1.0, 64: 1.1}, "draft": {1: 0.01, 8: 0.01}}
"""Costs at which it pays to verify whatever is drafted."""


def test_prompts_come_back_from_host_memory_with_the_drafter_s_k_v(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(json.dumps(CHEAP))
    env = {"DFLASH_SERVE_COST_TABLE": str(tmp_path / "cost.json")}
    with serving(tmp_path / "server", smollm2("auto"), OnCpu(*HICACHE, env=env)) as server:
        pair = one_server(Endpoint(server.url, timeout=PATIENCE, concurrency=4))
        found = WarmVerification(PLAN, word_problems(FEWEST), pair).run()
    assert found.reload is not None
    assert found.reload.pool_tokens == POOL
    assert (found.reload.reloaded_tokens or 0) > 0.8 * found.reload.prompt_tokens, found.headline
    assert found.verdict == "lossless", found.headline
