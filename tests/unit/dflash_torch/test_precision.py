"""`hardware.dtype: auto`: bfloat16 on a CPU only where it rounds no weight and was measured to be faster."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import UserError
from dflash_torch import precision
from dflash_torch.precision import WORTH, choose_dtype, how_much_faster
from dflash_torch.start import start_engine

Folders = tuple[Path, Path]


def deployment(target: Path, dtype: str = "auto") -> Deployment:
    flags: dict[str, Any] = {"target": {"model": str(target)}, "hardware": {"gpu": "none", "dtype": dtype}}
    return load_deployment(flags=flags | {"limits": {"max_batch_size": 1}})


@pytest.fixture
def in_bfloat16(folders: Folders, tmp_path: Path) -> Path:
    """The tiny target with its weights rounded."""
    folder = shutil.copytree(folders[0], tmp_path / "target")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("faster", "expected"), [(WORTH + 0.01, "bfloat16"), (WORTH - 0.01, "float32")])
def test_weights_in_bfloat16_are_computed_with_in_what_is_faster(
    in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch, faster: float, expected: str
) -> None:
    monkeypatch.setattr(precision, "how_much_faster", lambda *given, **options: faster)
    assert start_engine(deployment(in_bfloat16)).dtype == expected


def test_no_weight_is_rounded_and_what_was_asked_for_is_given(
    folders: Folders, in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Mock(return_value=9.0)
    monkeypatch.setattr(precision, "how_much_faster", measure)
    assert start_engine(deployment(folders[0])).dtype == "float32"
    assert start_engine(deployment(folders[0], "bfloat16")).dtype == "bfloat16"
    assert start_engine(deployment(in_bfloat16, "float32")).dtype == "float32"
    assert str(choose_dtype(deployment(folders[0]), "cuda")) == "torch.bfloat16"
    measure.assert_not_called()


@pytest.mark.parametrize("compiled", [True, False])
def test_the_measurement_is_a_ratio_of_two_times(compiled: bool) -> None:
    assert 0.01 < how_much_faster(64, 96, compiled=compiled) < 100


def test_a_folder_without_weights_is_refused(in_bfloat16: Path) -> None:
    (in_bfloat16 / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        choose_dtype(deployment(in_bfloat16), "cpu")
