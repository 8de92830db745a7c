"""EAGLE-3 on the real server, as bench starts it: the tokens are those of the plain server, and acceptance is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_serve.bench.settings import deployed_variants, overlay_variants
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.deployment.description import Deployment
from tests.support.eagle3 import write_eagle3_head
from tests.support.fleet import Fleet, fleet
from tests.support.sglang_server import OnCpu, Server, serving
from tests.support.tiny_target import write_tiny_target

PROMPTS = ["the quick brown fox", '{"name": [1', "over the lazy dog jumps", "fox fox fox"]
DRAFTED, TOKENS = 3, 32


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet[Server]]:
    folder = tmp_path_factory.mktemp("eagle3")
    target = write_tiny_target(folder / "target", positions=512)
    head = write_eagle3_head(folder / "head", target)
    fields = {"target": {"model": str(target)}, "limits": {"max_batch_size": 4}}
    backend = OnCpu("--disable-overlap-schedule", env={"TORCHDYNAMO_DISABLE": "1"})
    deployment, example = Deployment.model_validate(fields), "examples/bench/eagle3.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEAD", str(head))
        drafting = overlay_variants(deployment, [f"eagle3={Path(__file__).parents[2] / example}"], backend)
    variants = {"plain": deployed_variants(deployment, ["off"], backend)["off"], **drafting}
    wanted = {name: (variant, backend) for name, variant in variants.items()}
    with fleet(serving, tmp_path_factory.mktemp("servers"), wanted) as running:
        yield running


def test_it_answers_as_the_plain_server_and_its_acceptance_is_read(servers: Fleet[Server]) -> None:
    plain = servers["plain"].ready.result()
    truth = plain.tokens(PROMPTS, TOKENS)
    servers["plain"].left.set()
    server = servers["eagle3"].ready.result()
    before = read_acceptance(server.url)
    found = [server.generate(prompt, TOKENS) for prompt in PROMPTS]
    told = read_acceptance(server.url).since(before)
    servers["eagle3"].left.set()
    assert [answer["output_ids"] for answer in found] == truth
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in found)
    assert told.verifications == steps > 0
    assert told.drafted == DRAFTED * steps
    assert told.accepted == len(PROMPTS) * (TOKENS - 1) - steps
