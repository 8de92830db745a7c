"""Acceptance comes from a report, a length or a published task, and without any it is a band."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.doctor.lengths import FEWEST_STEPS
from dflash_serve.errors import UserError
from dflash_serve.planning.acceptance import BAND, band, from_length, from_report, of_task
from tests.house import ROOT

MEASURED = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(("wide", "narrow"), [(6.33, 5.09), (5.29, 4.44), (3.50, 3.18)])
def test_a_narrower_width_is_foreseen_from_the_published_length_of_the_whole_block(wide: float, narrow: float) -> None:
    """Table 8 of the paper: a drafter trained with 16 slots, served with 16 and with 8."""
    found = from_length(wide, 16, "table 8")
    assert found.length(16) == pytest.approx(wide)
    assert found.length(8) == pytest.approx(narrow, rel=0.05)
    assert found.length(1) == 1


@pytest.mark.parametrize("length", [1.0, 16.0, 0.5, 40.0])
def test_an_impossible_length_is_refused(length: float) -> None:
    with pytest.raises(UserError, match="no acceptance length of a block of 16"):
        from_length(length, 16, "")


def test_nothing_known_is_a_band_never_one_number() -> None:
    assert [each.length(16) for each in band(16)] == pytest.approx(BAND)


def test_a_published_task_is_that_of_the_named_drafter_and_says_whose_it_is() -> None:
    found = of_task("mt-bench", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 16)
    assert found.length(16) == pytest.approx(4.24)
    assert found.source.startswith(
        "published for z-lab/Qwen3-8B-DFlash-b16 with Qwen/Qwen3-8B at MT-Bench: greedy, B 16"
    )
    coder = of_task("humaneval", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash", 16)
    assert coder.length(16) == pytest.approx(8.09)
    narrow = of_task("gsm8k", "openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash", 4)
    assert narrow.length(4) == pytest.approx(3.3, rel=0.05)  # its card says 3.3
    with pytest.raises(UserError, match="did you mean gsm8k"):
        of_task("gsm8", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 16)


def test_without_a_drafter_it_is_said_that_the_figure_is_another_drafters() -> None:
    found = of_task("math500", "Qwen/Qwen3-8B", None, 16)
    assert found.length(16) == pytest.approx(7.87)
    assert "published for z-lab/Qwen3-8B-DFlash-b16 with Qwen/Qwen3-8B" in found.source
    assert found.source.endswith("the drafter of this plan is another, assumed one")


@pytest.mark.parametrize(
    ("target", "drafter", "words"),
    [
        ("mistral/x", None, "no acceptance was published for a drafter of mistral/x"),
        ("someone/Qwen3-8B-finance", None, "no acceptance was published for a drafter of someone/Qwen3-8B-finance"),
        (
            "someone/Qwen3-8B-finance",
            "z-lab/Qwen3-8B-DFlash-b16",
            r"the figures of z-lab/Qwen3-8B-DFlash-b16 are for Qwen/Qwen3-8B\)",
        ),
        (
            "Qwen/Qwen3-8B",
            "someone/mine",
            r"someone/mine with Qwen/Qwen3-8B; .*--acceptance-length 6.54 assumes that of z-lab/Qwen3-8B-DFlash-b16",
        ),
    ],
)
def test_a_name_that_begins_alike_inherits_nothing(target: str, drafter: str | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        of_task("gsm8k", target, drafter, 16)


def test_a_folder_goes_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    found = of_task("gsm8k", str(tmp_path / "Qwen3-8B"), "z-lab/Qwen3-8B-DFlash-b16", 16)
    assert "with Qwen/Qwen3-8B" in found.source


def test_survival_of_a_report_of_evaluate() -> None:
    path = MEASURED / "acceptance-smollm2-48.json"
    with pytest.raises(UserError, match=r"which task\?; give --task one of: gsm8k"):
        from_report(path, None, 8)
    found = from_report(path, "gsm8k", 8)
    report = json.loads(path.read_text())["tasks"]["gsm8k"]["as it is"]
    assert found.length(8) == pytest.approx(report["acceptance_length"], rel=0.02)
    assert len(from_report(path, "gsm8k", 16).survival) == 15, "slots that were not measured go on falling"


@pytest.mark.parametrize(
    ("context", "lengths", "first"), [(100, "0-127", 0.9), (5000, "4096-8191", 0.5), (65_000, "4096-8191", 0.5)]
)
def test_a_report_with_acceptance_by_length_gives_that_of_the_plan_s_contexts(
    tmp_path: Path, context: int, lengths: str, first: float
) -> None:
    few = {"survival": [0.1, 0.1], "steps": FEWEST_STEPS - 1}
    by = {
        "0-127": {"survival": [0.9, 0.8], "steps": 900},
        "128-255": few,
        "4096-8191": {"survival": [0.5, 0.2], "steps": 900},
        "8192-16383": {"survival": [None, None], "steps": 900},
    }
    tasks = {name: {"as it is": {"survival": [0.7, 0.6]}} for name in ("gsm8k", "chat")}
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"tasks": tasks, "by": {"length": by}}))
    found = from_report(path, None, 3, context)
    assert found.survival[0] == first
    assert f"contexts of {lengths} tokens" in found.source
    assert from_report(path, "chat", 3, context).survival[0] == 0.7, "the task that was asked for"
    path.write_text(json.dumps({"tasks": {"chat": tasks["chat"]}, "by": {"length": {"0-127": few}}}))
    assert from_report(path, None, 3, context).survival[0] == 0.7, "no range has steps enough"
    path.write_text(json.dumps({"tasks": tasks, "by": {"length": {"long": {"survival": [1], "steps": 900}}}}))
    with pytest.raises(UserError, match="no report"):
        from_report(path, None, 3, context)


def test_a_published_length_of_another_block_says_what_was_published() -> None:
    found = of_task("gsm8k", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 8)
    assert found.name == "τ 5.02"
    assert found.source.startswith(
        "from the τ 6.54 that was published for z-lab/Qwen3-8B-DFlash-b16 with Qwen/Qwen3-8B"
    )
    assert ": greedy, B 16 (" in found.source


def test_a_task_may_be_written_as_its_publishers_do() -> None:
    for task in ("GSM8K", "gsm8k"):
        assert of_task(task, "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 16).length(16) == pytest.approx(6.54)


def test_slots_that_were_not_measured_are_counted_and_a_rise_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    def report(*survival: float | None) -> Path:
        path.write_text(json.dumps({"tasks": {"chat": {"as it is": {"survival": survival}}}}))
        return path

    assert from_report(report(0.9, 0.8), "Chat", 16).source.endswith(
        "chat of report.json, 2 of 15 slots; the 13 others are extrapolated"
    )
    assert from_report(report(0.9, 0.8), None, 3).source == "measured: chat of report.json"
    assert from_report(report(0.9, 0.6, 0.62), None, 4).survival == (0.9, 0.6, 0.6), "few steps"
    assert from_report(report(0.9, None, 0.1), None, 3).survival == pytest.approx((0.9, 0.81)), "slot 2 is unknown"
    with pytest.raises(UserError, match="its survival rises"):
        from_report(report(0.5, 0.9), None, 3)


def test_survival_of_a_report_of_bench() -> None:
    found = from_report(MEASURED / "serving-vllm-2core" / "bench.json", None, 8)
    assert 1.5 < found.length(8) < 3
    assert list(found.survival) == sorted(found.survival, reverse=True)


def test_another_file_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("[]", '{"tasks": {"x": {}}}', '{"points": [{}]}'):
        path.write_text(text)
        with pytest.raises(UserError, match="no report"):
            from_report(path, None, 8)
    path.write_text('{"points": [{"variant": "off", "acceptance": {"survival": null}}]}')
    with pytest.raises(UserError, match="it tells no survival"):
        from_report(path, None, 8)
    for share in ("1.5", "-0.1", "NaN"):
        path.write_text(f'{{"tasks": {{"x": {{"as it is": {{"survival": [0.5, {share}]}}}}}}}}')
        with pytest.raises(UserError, match="a share of its survival is not from 0 to 1"):
            from_report(path, None, 8)
    with pytest.raises(UserError, match="cannot be read"):
        from_report(tmp_path / "none.json", None, 8)
