from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash_serve import SamplingParams
from tests.support.embedded import PROMPTS, answers, tiny_engine
from tests.support.tiny_target import write_tiny_pair

Truth = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models lose more time by sharing their work among threads than by doing it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def truth(folders: tuple[Path, Path]) -> Truth:
    """The greedy answers without speculation, one prompt at a time."""
    engine = tiny_engine(folders, width=1, reuse_prefixes=False)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = [answers(engine, [prompt], params)[0] for prompt in PROMPTS]
    return {tuple(output.prompt_token_ids): output.token_ids for output in outputs}
