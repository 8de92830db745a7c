"""A launch of the embedded engine with a quantised drafter says that it dequantises, and holds the key against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve.adapter.registry import backend
from dflash_serve.checkpoint.storage import Scheme
from dflash_serve.deployment.description import Deployment
from dflash_torch.backend import EmbeddedBackend
from tests.support.tiny import even_config, write_in_layout


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("none", None),
        ("w4a16", None),
        ("fp8", "the drafter's checkpoint is w4a16, not fp8; set it to w4a16"),
    ],
)
def test_the_key_is_honoured_or_an_error_that_says_what_to_do(asked: str, problem: str | None, tmp_path: Path) -> None:
    scheme = Scheme("w4a16", "compressed-tensors", "group", group=32)
    drafter = {"model": str(write_in_layout(tmp_path / "d", scheme, even_config())), "quantization": asked}
    embedded = backend("torch")
    assert isinstance(embedded, EmbeddedBackend)
    launch = embedded.launch(Deployment.model_validate({"target": {"model": "smollm2"}, "drafter": drafter}))
    said = [str(each) for each in launch.problems if each.where == "drafter.quantization"]
    assert (len(said), problem is None or problem in said[0]) == (int(problem is not None), True)
    note = "the drafter's weights are W4A16 (compressed-tensors): this engine dequantises them when it loads them"
    assert note in launch.notes
