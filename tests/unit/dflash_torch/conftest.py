from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve import SamplingParams
from tests.support.embedded import PROMPTS, tiny_engine
from tests.support.tiny_target import write_tiny_pair

Truth = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def truth(folders: tuple[Path, Path]) -> Truth:
    """The greedy answers without speculation, one prompt at a time."""
    engine = tiny_engine(folders, width=1, reuse_prefixes=False)
    answers = {}
    for prompt in PROMPTS:
        list(engine.stream([prompt], [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)]))
        answers[tuple(engine.tokenise(prompt))] = engine.outputs()[0].token_ids
    return answers
