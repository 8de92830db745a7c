"""The bundled drafter with a Markov head is put together in the cache, once, from what we ship."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash_serve.checkpoint import source
from dflash_serve.checkpoint.files import SINGLE
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.models.drafter import read_hot_tokens


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source._with_head.cache_clear()
    yield Path(source.drafter_source(source.WITH_HEAD))
    source._with_head.cache_clear()


def test_it_is_the_plain_drafter_and_a_head_whose_biases_are_those_of_hot_tokens(folder: Path) -> None:
    plain, made = open_checkpoint(source.BUNDLED_DRAFTER), open_checkpoint(folder)
    assert (plain.config, made.problems) == (made.config and made.config.model_copy(update={"markov": None}), [])
    tensors, own = load_tensors(made), load_tensors(plain)
    assert all(torch.equal(tensors.pop(name), tensor) for name, tensor in own.items())
    assert sorted(tensors) == ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    hot = read_hot_tokens(folder, 49152)
    for table in tensors.values():
        assert not table[sorted(set(range(49152)) - set(hot or []))].any()
        assert table[hot].any(dim=1).float().mean() > 0.5


def test_a_broken_copy_is_made_anew(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"cut off")
    source._with_head.cache_clear()
    assert source.drafter_source(source.WITH_HEAD) == folder
    assert open_checkpoint(folder).problems == []
