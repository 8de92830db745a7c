"""The real server with a tiny pair: speculation changes no token and no distribution, and drafts are accepted.

`test_server` says the same of SmolLM2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.common.store import Store
from dflash_serve.deployment.variables import COST_TABLE
from dflash_serve.verify.subjects import two_servers
from dflash_serve.verify.verification import Verification
from tests.support.copying import write_copying_pair
from tests.support.fleet import Fleet, fleet
from tests.support.prompts import brief
from tests.support.vllm_server import AT_ONCE, BRIEFLY, LIMITS, PATIENCE, OnCpu, Server, served, serving

BLOCK = 8
CHEAP = {"target": {1: 1.0, 512: 1.1}, "draft": {1: 0.01, 64: 0.01}}
"""Costs at which it pays to verify whatever is drafted."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet[Server]]:
    """With drafts at the widths of our scheduler, and without."""
    folder = tmp_path_factory.mktemp("tiny")
    table, limits = folder / "cost.json", {**LIMITS, "max_batch_size": AT_ONCE}
    table.write_text(json.dumps(CHEAP))
    pair = write_copying_pair(folder / "pair", positions=limits["max_model_len"], block_size=BLOCK)
    wanted = {
        "auto": (served(pair, "auto", limits=limits), OnCpu(env={COST_TABLE: str(table)})),
        "plain": (served(pair, "off", limits=limits), OnCpu()),
    }
    with fleet(serving, folder, wanted) as running:
        yield running


def test_verify_finds_greedy_lossless_and_sampling_without_a_difference(servers: Fleet[Server]) -> None:
    urls = [servers[name].ready.result().url for name in ("auto", "plain")]
    pair = two_servers(*(Endpoint(url, timeout=PATIENCE, concurrency=AT_ONCE) for url in urls))
    found = Verification(BRIEFLY, brief(), pair, Store(None, {})).run()
    assert (found.faults, found.reasons) == ({}, ())
    assert (found.verdict, found.unit) == ("lossless", "token ids")
    assert all(one.identical == 4 for one in found.greedy)


def test_drafts_are_accepted(servers: Fleet[Server]) -> None:
    server = servers["auto"].ready.result()
    before = read_acceptance(server.url)
    server.tokens([[9, 8, 7, 6], [9, 8, 7]], 64)
    accepted = read_acceptance(server.url).since(before)
    assert (accepted.acceptance_length or 0) > 1.5
    assert accepted.widths is not None
    assert accepted.widths[BLOCK] > 0
