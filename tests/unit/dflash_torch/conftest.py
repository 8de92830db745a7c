from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_serve import SamplingParams
from dflash_serve.models.kv_cache import KVCache
from tests.support.embedded import PROMPTS, answers, tiny_engine
from tests.support.tiny_target import write_tiny_pair

Truth = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module", autouse=True)
def everything_in_one_thread(one_thread: None) -> None:
    """All tests of this folder run tiny models."""


@pytest.fixture(scope="session", autouse=True)
def unwritten_rows_are_nan() -> Iterator[None]:
    """A K/V cache on a CPU is not initialised: no test's answer may depend on a row that was not written."""
    make = KVCache.__init__

    def spoilt(self: KVCache, **shape: Any) -> None:
        make(self, **shape)
        if self.keys.device.type == "cpu":
            self.keys.fill_(float("nan"))
            self.values.fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "__init__", spoilt)
        yield


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
