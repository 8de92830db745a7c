"""The real server with tiny DFlash2 and DSpark pairs: the tokens are those without speculation, and it takes as many
steps as our own loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from dflash_serve import SamplingParams
from dflash_serve.checkpoint.writer import write_drafter
from tests.support.embedded import answers, tiny_engine
from tests.support.fleet import Fleet, fleet
from tests.support.heads import CONVOLUTION, SELECTOR, SHIFTED, VANILLA
from tests.support.sglang_server import OnCpu, Server, deployment, serving, tiny_pair
from tests.support.tiny import random_tensors

PROMPTS = ["the quick brown fox", '{"name": [1', "over the lazy dog jumps", "fox fox fox"]
BLOCK, TOKENS = 8, 32
DFLASH2 = {"convolution": CONVOLUTION, "selector": SELECTOR}
PAIRS: Mapping[str, tuple[dict[str, Any], int]] = {
    "DFlash2": (DFLASH2, BLOCK),
    "DFlash2, narrow": (DFLASH2, 3),
    "DSpark": ({"markov": VANILLA, **SHIFTED}, BLOCK),
}
"""Heads of the drafter, and the width that is verified."""
IN_STEP = "--disable-overlap-schedule"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A target, and a drafter of each kind."""
    made = {}
    for name, (heads, _) in PAIRS.items():
        folder = tmp_path_factory.mktemp(name)
        target, config = tiny_pair(folder, BLOCK, **heads)
        tensors = {key: tensor.bfloat16().float() for key, tensor in random_tensors(config).items()}  # as prepared
        write_drafter(folder / "drafter", config, tensors, dialect="modelopt")
        made[name] = target, folder / "drafter"
    return made


@pytest.fixture(scope="module")
def servers(folders: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet[Server]]:
    plain = deployment(next(iter(folders.values())), requests=4, width="off"), OnCpu(IN_STEP)
    wanted = {
        name: (deployment(models, requests=4, width=PAIRS[name][1]), OnCpu(IN_STEP)) for name, models in folders.items()
    }
    with fleet(serving, tmp_path_factory.mktemp("servers"), {"plain": plain, **wanted}) as running:
        yield running


@pytest.fixture(scope="module")
def truth(servers: Fleet[Server]) -> list[list[int]]:
    """What the same server answers without speculation."""
    server = servers["plain"].ready.result()
    tokens = server.tokens(PROMPTS, TOKENS)
    servers["plain"].left.set()
    return tokens


@pytest.mark.parametrize("name", PAIRS)
def test_it_answers_as_without_speculation_and_accepts_as_our_loop(
    name: str, servers: Fleet[Server], truth: list[list[int]], folders: dict[str, tuple[Path, Path]]
) -> None:
    server = servers[name].ready.result()
    found = [server.generate(prompt, TOKENS) for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:  # sampled and greedy requests in the same steps
        asked = [{"temperature": 1e-5}, {"temperature": 0.8}, {}, {"temperature": 1.2, "top_p": 0.9}]
        sampled = list(
            pool.map(lambda one: server.generate(one[0], TOKENS, **one[1]), zip(PROMPTS, asked, strict=True))
        )
    refused = {"min_p": 0.5, **({"presence_penalty": 0.5} if name == "DSpark" else {})}
    for field, value in refused.items():
        with pytest.raises(HTTPError) as error:
            server.generate(PROMPTS[0], TOKENS, temperature=1.0, **{field: value})
        assert field in error.value.read().decode()
    servers[name].left.set()
    assert [answer["output_ids"] for answer in found] == truth
    assert [len(answer["output_ids"]) for answer in sampled] == [TOKENS] * 4
    assert [sampled[at]["output_ids"] for at in (0, 2)] == [truth[at] for at in (0, 2)]
    if PAIRS[name][1] < BLOCK:
        return
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    ours = [answers(tiny_engine(folders[name], width=BLOCK), [prompt], params)[0] for prompt in PROMPTS]
    assert [output.token_ids for output in ours] == truth
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in found]
    wanted = [output.statistics.verifications for output in ours]
    assert all(abs(a - b) <= 1 for a, b in zip(steps, wanted, strict=True)), (steps, wanted)  # the last block is cut
