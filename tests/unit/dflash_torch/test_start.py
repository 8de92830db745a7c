"""The start of an engine: measurements, their cache, and the choices that depend on them."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.errors import UserError
from dflash_serve.models.compiled import operators
from dflash_serve.models.compiled.build import find_compiler, load_kernels
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth
from dflash_serve.speculation.width import AutoWidth
from dflash_torch import calibration, model_runner
from dflash_torch.backend import EmbeddedBackend
from dflash_torch.calibration import CONTEXT, WORTH, Calibration, choose_dtype, measure, measure_dtype_speed, tabulate
from dflash_torch.engine import start_engine
from dflash_torch.launch import with_operators
from dflash_torch.sampler import Sampler
from dflash_torch.scheduler import Scheduler
from dflash_torch.server import __main__ as server_process
from tests.support.embedded import answers, tiny_engine

Folders = tuple[Path, Path]
COST = CostModel(target={1: 1.0, 16: 1.2}, draft={1: 0.1, 2: 0.2})
PLAINLY = {"engine_args": {"torch": {"operators": "plain"}}}


def deployment(folders: Folders, *, width: int | str = "auto", dtype: str = "auto", **limits: int) -> Deployment:
    flags: dict[str, Any] = {
        "target": {"model": str(folders[0])},
        "drafter": {"model": str(folders[1])},
        "speculation": {"width": width},
        "hardware": {"gpu": "none", "dtype": dtype},
        "limits": {"max_batch_size": 2, **limits},
    }
    return load_deployment(flags=flags)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dflash-serve"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for the measurement of costs."""
    mock = Mock(return_value=Calibration(cost=COST, spread=0.01))
    monkeypatch.setattr(calibration, "measure", mock)
    return mock


@pytest.fixture
def in_bfloat16(folders: Folders, tmp_path: Path) -> Folders:
    """The tiny pair with the target's weights rounded."""
    folder = shutil.copytree(folders[0], tmp_path / "target")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder, folders[1]


def test_costs_are_measured_once_and_kept(folders: Folders, measured: Mock) -> None:
    for _ in range(2):
        policy = start_engine(deployment(folders)).scheduler.policy
        assert isinstance(policy, AutoWidth)
        assert policy.times.measured == COST
    assert measured.call_count == 1


@pytest.mark.parametrize(("width", "expected"), [(3, FixedWidth(3)), ("off", FixedWidth(1)), (1, FixedWidth(1))])
def test_a_given_width_is_not_measured(
    folders: Folders, measured: Mock, width: int | str, expected: FixedWidth
) -> None:
    assert start_engine(deployment(folders, width=width)).scheduler.policy == expected
    measured.assert_not_called()


def test_where_passes_are_padded_all_is_captured_ahead_and_a_step_has_one_width(
    folders: Folders, measured: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = start_engine(deployment(folders)).scheduler
    assert isinstance(scheduler.policy, AutoWidth)
    assert (scheduler.policy.allowed_widths, scheduler.target_runner.captured) == (None, {})
    begin = model_runner.Runner.__init__  # as on a GPU
    monkeypatch.setattr(model_runner.Runner, "__init__", lambda self, cache, **_: begin(self, cache, static=True))
    scheduler = start_engine(deployment(folders)).scheduler
    assert isinstance(scheduler.policy, AutoWidth)
    assert scheduler.policy.allowed_widths == (1, 2, 4)
    assert {shape.width for shape, _ in scheduler.target_runner.captured} == {1, 2, 4}


def test_costs_of_other_kernels_are_measured_again(
    folders: Folders, measured: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after another compiler: a machine that multiplies faster now must not draft by what it took before."""
    start_engine(deployment(folders))
    start_engine(deployment(folders).model_copy(update=PLAINLY))
    before = measured.call_count
    monkeypatch.setattr(operators, "kernels_id", lambda: "others")
    start_engine(deployment(folders).model_copy(update=PLAINLY))
    assert measured.call_count == before
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    start_engine(deployment(folders))
    assert measured.call_count == before + 1


def test_a_cache_that_cannot_be_written_costs_a_measurement_and_no_more(
    in_bfloat16: Folders,
    measured: Mock,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache.parent.write_text("in the way")
    speed = Mock(return_value=2.0)
    monkeypatch.setattr(calibration, "measure_dtype_speed", speed)
    for _ in range(2):
        assert start_engine(deployment(in_bfloat16)).dtype == "bfloat16"
    assert (measured.call_count, speed.call_count) == (2, 2)
    assert caplog.text.count("measured again next time") == 4


def test_costs_are_measured_where_the_model_is_shorter_than_the_measurement(folders: Folders) -> None:
    engine = start_engine(deployment(folders, max_model_len=32))
    params = SamplingParams(temperature=0, ignore_eos=True)
    assert len(answers(engine, [[5, 6, 7]], params)[0].token_ids) == 29


def test_the_made_up_contexts_of_a_measurement_are_finite(folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    """The logits of others are NaN, and such a step ends its request early."""
    speculator = tiny_engine(folders).scheduler.speculator
    assert speculator is not None
    measure(speculator.target, speculator.drafter, speculator.block_size, 2)
    assert "NaN" not in caplog.text


def test_what_the_host_does_for_a_step_is_a_part_of_its_cost(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU most of a small model's step: without it, drafts looked three times as dear as they were."""
    speculator = tiny_engine(folders).scheduler.speculator
    assert speculator is not None
    sample = Sampler.__call__

    def slowly(*given: Any) -> Any:
        time.sleep(0.02)
        return sample(*given)

    monkeypatch.setattr(Sampler, "__call__", slowly)
    monkeypatch.setattr(calibration, "LONG_CONTEXT", CONTEXT)  # on a busy machine the cost of a context is a guess
    cost = measure(speculator.target, speculator.drafter, speculator.block_size, 2).cost
    assert all(cost.of_step(rows, 0) > 0.02 for rows in (1, 2, 8))
    assert cost.of_step(1, 1) - cost.of_step(1, 0) < 0.02  # which samples nothing


def test_what_the_contexts_cost_is_counted_once() -> None:
    entries, long = 4, 1024
    rows, drafts = [1, 2, 3, 4, 8, 16, 32], [1, 2, 4]
    contexts = {n: 1 if n <= 8 else entries for n in rows}  # one block up to 8
    seconds = {("target", n): 10 + n + CONTEXT * (0.01 * contexts[n] + 0.005 * n) for n in rows}
    seconds |= {("draft", n): 2 + n + 0.02 * CONTEXT * n for n in drafts}
    seconds |= {("target_context", n): 10 + n + long * (0.01 + 0.005 * n) for n in (1, 8)}
    seconds |= {("draft_context", 1): 3 + 0.02 * long}
    cost = tabulate(seconds, entries, long)
    assert [cost.of_step(n, 0) for n in rows] == pytest.approx([10 + n for n in rows])
    of_contexts = 500 * (0.03 * 4 + 0.005 * 32)
    assert cost.step_seconds([8, 8, 8, 8], 4 * 500) == pytest.approx(10 + 32 + of_contexts + 2 + 4)


@pytest.mark.parametrize(
    ("longer", "expected"),
    [
        ({}, (0.0, 0.0, 0.0)),  # no longer context fits
        ({("target_context", 1): 1.5, ("target_context", 4): 2.9, ("draft_context", 1): 0.9}, (0.0, 0.0, 0.0)),
        # A further row costs at most as much as the first, which reads the context.
        ({("target_context", 1): 2.1, ("target_context", 4): 9.0, ("draft_context", 1): 1.0}, (0.0, 0.001, 0.0)),
    ],
    ids=["none", "slower than a long one", "steep"],
)
def test_a_context_never_costs_less_than_nothing(
    longer: dict[tuple[str, int], float], expected: tuple[float, float, float]
) -> None:
    cost = tabulate({("target", 1): 2.0, ("target", 4): 3.0, ("draft", 1): 1.0} | longer, 1, CONTEXT + 100)
    assert (cost.target_context, cost.target_attention, cost.draft_context) == pytest.approx(expected)


@pytest.mark.parametrize(("faster", "expected"), [(WORTH + 0.01, "bfloat16"), (WORTH - 0.01, "float32")])
def test_weights_in_bfloat16_are_computed_with_in_what_is_faster(
    in_bfloat16: Folders, monkeypatch: pytest.MonkeyPatch, faster: float, expected: str
) -> None:
    monkeypatch.setattr(calibration, "measure_dtype_speed", Mock(side_effect=[faster]))  # measured once
    assert start_engine(deployment(in_bfloat16, width="off")).dtype == expected
    assert start_engine(deployment(in_bfloat16, width="off")).dtype == expected


def test_no_weight_is_rounded_and_what_was_asked_for_is_given(
    folders: Folders, in_bfloat16: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Mock(return_value=9.0)
    monkeypatch.setattr(calibration, "measure_dtype_speed", measure)
    assert start_engine(deployment(folders, width="off")).dtype == "float32"
    assert start_engine(deployment(folders, width="off", dtype="bfloat16")).dtype == "bfloat16"
    assert start_engine(deployment(in_bfloat16, width="off", dtype="float32")).dtype == "float32"
    assert str(choose_dtype(deployment(folders), "cuda", compiled=True)) == "torch.bfloat16"
    measure.assert_not_called()
    (in_bfloat16[0] / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        choose_dtype(deployment(in_bfloat16), "cpu", compiled=True)


def test_a_cpu_that_packs_no_bfloat16_computes_in_it_all_the_same() -> None:
    """Without AVX-512 or AVX-NE-CONVERT, which oneDNN can be told it has not, and without a compiler."""
    assert 0.01 < measure_dtype_speed(64, 96, compiled=True) < 100
    code = "from dflash_torch.calibration import measure_dtype_speed as speed; print(speed(64, 96, compiled=False))"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert 0.01 < float(found.stdout) < 100


def test_operators_are_compiled_unless_deployment_or_environment_say_otherwise_and_change_no_answer(
    folders: Folders,
) -> None:
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    load_kernels.cache_clear()  # a test before this one may have hidden the compiler
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    names, found = [], []
    for width in ("off", 4):
        given = deployment(folders, width=width)
        assert with_operators(given, "auto") is given
        for each in (given, given.model_copy(update=PLAINLY), with_operators(given, "plain")):
            engine = start_engine(each)
            names.append(engine.scheduler.target.operators.name)
            found.append([output.token_ids for output in answers(engine, ["the quick brown fox", "over"], params)])
    assert names == ["compiled", "plain", "plain"] * 2
    assert found == found[:1] * 6


def test_the_servers_process_never_looks_at_what_its_start_made_for_garbage(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedBackend, "engine", lambda *_: Mock())
    try:
        server_process._start(deployment(folders))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_flashinfer_is_refused_where_it_cannot_run(folders: Folders, measured: Mock) -> None:
    asked = deployment(folders).model_copy(update={"engine_args": {"torch": {"operators": "flashinfer"}}})
    with pytest.raises(UserError, match="needs a GPU and half precision"):
        start_engine(asked)


def test_engines_for_comparison_prepare_their_passes(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a GPU captures their graphs in the answers that are timed."""
    prepared: list[Scheduler] = []
    monkeypatch.setattr(Scheduler, "prepare", lambda scheduler: prepared.append(scheduler))
    engine = tiny_engine(folders)
    made = [engine.plain(), engine.fixed(3), engine.fixed(3, fault="features zeroed")]
    assert prepared == [each.scheduler for each in made[:2]]
