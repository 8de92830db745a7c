"""Words of a plan on its choice: limits, memory, widths, and where speculation does not pay."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.deployment.layers import load_deployment
from dflash_serve.planning import search
from dflash_serve.planning.pair import read_pair
from dflash_serve.planning.prediction import OperatingPoint, Predictor
from dflash_serve.planning.step_times import shortened
from tests.support.golden_deployments import hub
from tests.support.planned import hybrid_target
from tests.unit.planning.test_plan import LENGTH, PAIR, answer, by_roofline, plan

__all__ = ["by_roofline", "hub"]
pytestmark = pytest.mark.usefixtures("hub")
SHORT = (*LENGTH, "--gpu", "l40s", "--isl", "64", "--osl", "64")


def given(folder: Path, **fields: Any) -> str:
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump({"target": {"model": PAIR[1]}, "drafter": {"model": PAIR[3]}, **fields}))
    return str(path)


def test_where_the_target_alone_fits_plain_decoding_is_planned(tmp_path: Path) -> None:
    target = str(hybrid_target(tmp_path / "hybrid"))
    little = {"target": {"model": target}, "drafter": None, "kv_cache": {"memory_fraction": 0.03}}
    told = answer(tmp_path / "out", given(tmp_path, **little), *SHORT)
    assert told["chosen"]["variant"] == "off"
    assert told["requests_that_fit"]["TP 1"]["speculative"] == 0 < told["requests_that_fit"]["TP 1"]["plain"]
    assert told["verdict"][1].endswith("No setting with speculation fits.")
    assert told["verdict"][2].startswith("TP 1 has no room for the drafter. Nothing was run")
    missed = r"Only plain decoding fits: beside the drafter \d+\.\d GB are missing on each GPU: TP 1\."
    assert any(re.fullmatch(missed, caution) for caution in told["cautions"])
    methods = answer(
        tmp_path / "out",
        given(tmp_path, **little),
        *SHORT,
        "--methods",
        "mtp",
    )
    assert methods["methods"][1]["why_not"] == "TP 1 has no room for a drafter"


@pytest.mark.parametrize(
    ("target", "words", "said"),
    [
        (
            "openai/gpt-oss-120b", ("--gpu", "l40s", "--count", "7"),
            r"GB are missing on each GPU for one request of 2048 tokens; give --count 2, where TP 2 fits, or a",
        ),
        (
            "moonshotai/Kimi-K2.5", ("--gpu", "gb10", "--count", "2"),
            r"with TP 1, [\d.]+ GB are missing .*; give a GPU with more memory$",
        ),
        (
            "openai/gpt-oss-120b", ("--gpu", "l40s", "--tensor", "1"),
            r"; give --count 2 --tensor 2, where TP 2 fits, or a GPU with more memory$",
        ),
    ],
)  # fmt: skip
def test_what_would_fit_is_advised(tmp_path: Path, target: str, words: tuple[str, ...], said: str) -> None:
    error = str(plan(tmp_path / "out", "--target", target, *LENGTH, *words).exception)
    assert re.search(said, error), error


def test_a_gpu_that_has_no_others_in_its_node_is_advised_no_more_gpus(tmp_path: Path) -> None:
    error = str(plan(tmp_path, *PAIR, *LENGTH, "--gpu", "gb10", "--slo-interactivity", "9000").exception)
    assert error.endswith("or another GPU")
    assert "more GPUs" not in error


@pytest.mark.parametrize(
    ("slo", "met"), [("10", None), ("750", "τ 4.50 and τ 6.00"), ("1200", "τ 6.00")]
)  # fmt: skip
def test_the_part_of_a_band_that_meets_the_limits_is_named(tmp_path: Path, slo: str, met: str | None) -> None:
    gives = answer(tmp_path, *PAIR, "--gpu", "b200", "--slo-interactivity", slo)["verdict"][1]
    found = re.search("; the limits are met only at (.+?)[.] With", gives)
    assert (found and found[1]) == met


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ({}, "faster than plain decoding at every batch that has room for it"),
        ({512: 0.9, 256: 0.9}, "slower than plain decoding from batch 256 on"),
        ({4: 0.9, 8: 0.9}, "slower than plain decoding at batch 4 to 8, and faster at all others"),
        ({4: 0.9, 512: 0.9}, "slower than plain decoding at batch 4 and from batch 512 on, and faster at all others"),
    ],
)  # fmt: skip
def test_batches_at_which_a_fixed_width_loses_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speeds: dict[int, float], said: str
) -> None:
    curve = Predictor.curve

    def slowed(self: Predictor, variant: str, *words: Any) -> list[OperatingPoint]:
        points = curve(self, variant, *words)
        fast = {"off": 1.0}.get(variant)
        return [replace(each, throughput=each.batch * (fast or speeds.get(each.batch, 1.1))) for each in points]

    monkeypatch.setattr(Predictor, "curve", slowed)
    monkeypatch.setattr(search, "BATCHES", (1, 4, 8, 256, 512))
    told = answer(tmp_path, *PAIR, *LENGTH, "--gpu", "b200", "--isl", "64", "--osl", "64")
    assert f"with a fixed width of 16 is {said}" in told["verdict"][2]


def test_a_width_that_is_given_is_planned(tmp_path: Path) -> None:
    told = answer(tmp_path / "a", given(tmp_path, speculation={"width": 4}), *LENGTH, "--gpu", "b200")
    assert {point["variant"] for point in told["points"]} == {"off", "fixed 4"}
    assert {point["width"] for point in told["points"]} == {1, 4}
    assert load_deployment(tmp_path / "a" / "deployment.yaml").speculation.width == 4
    assert "speculation.width: 4 is given: only it and off were compared." in told["cautions"]
    told = answer(tmp_path / "b", given(tmp_path, speculation={"width": "off"}), *LENGTH, "--gpu", "b200")
    assert "speculation.width: off is given, and the plan compares it with speculation." in told["cautions"]


def test_without_a_limit_a_plan_that_does_not_speculate_says_what_it_sought(tmp_path: Path) -> None:
    target = ("--target", str(hybrid_target(tmp_path / "hybrid")), "--acceptance-length", "2.5", "--gpu", "h200")
    said = "This is the most tokens/s/GPU, whatever one user gets: --slo-interactivity keeps"
    told = answer(tmp_path / "a", *target)
    assert told["chosen"]["variant"] == "off"
    assert any(caution.startswith(said) for caution in told["cautions"])
    told = answer(tmp_path / "b", *target, "--slo-interactivity", "1")
    assert not any(caution.startswith(said) for caution in told["cautions"])


def test_a_window_of_the_drafter_is_priced_and_its_k_v_are_kept(tmp_path: Path) -> None:
    words = (*LENGTH, "--gpu", "b200", "--isl", "30000", "--osl", "1000")
    whole = answer(tmp_path / "a", given(tmp_path), *words)
    bound = answer(tmp_path / "b", given(tmp_path, speculation={"draft_window": 1024}), *words)
    assert bound["requests_that_fit"] == whole["requests_that_fit"]
    assert len(bound["points"]) == len(whole["points"])
    for one, other in zip(bound["points"], whole["points"], strict=True):
        if one["variant"].startswith("fixed"):
            assert one["step_ms"] < other["step_ms"]
    given_window = read_pair(load_deployment(Path(given(tmp_path, speculation={"draft_window": 1024}))))
    assert {kind.window for kind in given_window.drafter.layers} == {1024}


def test_a_reason_is_cut_between_words() -> None:
    told = shortened("perf database error: " + "a non-positive placeholder " * 9)
    assert len(told) <= 140
    assert {*told.split()} <= {"perf", "database", "error:", "a", "non-positive", "placeholder", "..."}
    assert shortened("no row") == "no row"


def test_the_best_of_speculation_speculates_and_the_bench_asks_for_users_that_fit(tmp_path: Path) -> None:
    done = plan(tmp_path, *PAIR, "--gpu", "b200", "--acceptance-length", "1.02")
    assert done.exception is None, done.exception
    told = json.loads((tmp_path / "plan.json").read_text())
    pays = r"Speculation does not pay here: its best gives [\d,]+ \(TP 1, batch \d+, width (\d+)\)"
    (width,) = re.findall(pays, done.stdout)
    assert int(width) > 1
    (loads,) = re.findall(r"^next: dflash-serve bench .* --concurrency (\S+) ", done.stdout, re.MULTILINE)
    assert max(map(int, loads.split(","))) == told["requests_that_fit"]["TP 1"]["speculative"] < told["chosen"]["batch"]


def test_a_width_that_follows_the_load_down_to_one_is_off_there(tmp_path: Path) -> None:
    few = given(tmp_path, limits={"max_batch_size": 64})
    told = answer(tmp_path / "out", few, "--acceptance-length", "1.02", "--gpu", "b200")
    assert (told["chosen"]["variant"], told["chosen"]["width"]) == ("auto", 1)
    assert "width auto (off at full load)" in told["verdict"][0]


def test_only_the_copies_of_a_pair_that_decode_are_counted(tmp_path: Path) -> None:
    words = (
        *PAIR,
        *LENGTH,
        "--gpu",
        "b200",
        "--count",
        "4",
        "--tensor",
        "1",
        "--isl",
        "100",
        "--osl",
        "8000",
        "--pair",
    )
    told, halves = answer(tmp_path, *words), load_deployment(tmp_path / "deployment.yaml").pair
    assert halves is not None
    decode, batch = halves.decode.replicas, told["chosen"]["batch"]
    assert decode == 3
    said = f"at most {batch} requests at once on each copy that decodes, {3 * batch} on all 3."
    assert told["verdict"][0].endswith(said)
