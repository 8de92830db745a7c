"""`hardware.dtype: auto`: bfloat16 on a CPU only where it rounds no weight and was measured to be faster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import UserError
from dflash_torch import calibration
from dflash_torch.calibration import WORTH, choose_dtype, measure_dtype_speed
from dflash_torch.engine import start_engine

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
    monkeypatch.setattr(calibration, "measure_dtype_speed", Mock(side_effect=[faster, 1.0]))  # measured once
    assert start_engine(deployment(in_bfloat16)).dtype == expected
    assert start_engine(deployment(in_bfloat16)).dtype == expected


def test_no_weight_is_rounded_and_what_was_asked_for_is_given(
    folders: Folders, in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Mock(return_value=9.0)
    monkeypatch.setattr(calibration, "measure_dtype_speed", measure)
    assert start_engine(deployment(folders[0])).dtype == "float32"
    assert start_engine(deployment(folders[0], "bfloat16")).dtype == "bfloat16"
    assert start_engine(deployment(in_bfloat16, "float32")).dtype == "float32"
    assert str(choose_dtype(deployment(folders[0]), "cuda", compiled=True)) == "torch.bfloat16"
    measure.assert_not_called()


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_cache_that_cannot_be_read_or_written_costs_a_measurement_and_no_more(
    in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("in the way")
    measure = Mock(return_value=2.0)
    monkeypatch.setattr(calibration, "measure_dtype_speed", measure)
    for _ in range(2):
        assert str(choose_dtype(deployment(in_bfloat16), "cpu", compiled=True)) == "torch.bfloat16"
    assert measure.call_count == 2
    assert "measured again next time" in caplog.text


def test_a_cpu_that_packs_no_bfloat16_computes_in_it_all_the_same() -> None:
    """Without AVX-512 or AVX-NE-CONVERT, which oneDNN can be told it has not, and without a compiler."""
    code = (
        "from dflash_torch.calibration import measure_dtype_speed; print(measure_dtype_speed(64, 96, compiled=False))"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) > 0


@pytest.mark.parametrize("compiled", [True, False])
def test_the_measurement_is_a_ratio_of_two_times(compiled: bool) -> None:
    assert 0.01 < measure_dtype_speed(64, 96, compiled=compiled) < 100


def test_a_folder_without_weights_is_refused(in_bfloat16: Path) -> None:
    (in_bfloat16 / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        choose_dtype(deployment(in_bfloat16), "cpu", compiled=True)
