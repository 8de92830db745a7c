"""Hugging Face's cache with the published models in it: configurations, and drafters' weights without their bytes.

Whatever asks the hub, offline, is answered from here by its own code; nothing is patched but where the cache lies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from dflash_serve.checkpoint.config import expected_tensors
from dflash_serve.checkpoint.reader import read_config
from tests.unit.checkpoint.published import PUBLISHED
from tests.unit.checkpoint.published_heads import PUBLISHED_DRAFTERS, config_json
from tests.unit.tensorrt_llm.published_targets import TARGETS

REVISION = "0" * 40
WITH_HEADS = ("z-lab/Qwen3.8-27B-DFlash2", "deepseek-ai/dspark_qwen3_8b_block7")


def offline_hub(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Fills `folder` and makes it the hub, as long as `patch` lasts."""
    for name, config in TARGETS.items():
        _add(folder, name, config)
    drafters: dict[str, Mapping[str, object]] = {f"z-lab/{row.name}": row.config_json() for row in PUBLISHED}
    drafters |= {one.repository: config_json(one) for one in PUBLISHED_DRAFTERS if one.repository in WITH_HEADS}
    for name, described in drafters.items():
        snapshot = _add(folder, name, described)
        write_hollow(snapshot / "model.safetensors", expected_tensors(read_config(snapshot)[0]))
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def _add(folder: Path, name: str, config: Mapping[str, object]) -> Path:
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot


def write_hollow(path: Path, shapes: Mapping[str, tuple[int, ...]], *, header_only: bool = False) -> None:
    """A safetensors file of bf16 tensors: its header is real, its data a hole of the right length, or left out."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        start, size = end, 2
        for length in shape:
            size *= length
        end = start + size
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (0 if header_only else end))
