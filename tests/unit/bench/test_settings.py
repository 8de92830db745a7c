"""Variants, the order of runs, and what aiperf is told and tells."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.adapter.registry import backend, server_backend
from dflash_serve.bench.aiperf import Aiperf, Dataset, Job, RequestSettings, find_aiperf, read_figures
from dflash_serve.bench.runner import Bench
from dflash_serve.bench.settings import (
    Cell,
    deployed_variants,
    endpoint_variants,
    find_variants,
    metrics_urls,
    overlay_variants,
    schedule,
)
from dflash_serve.deployment.description import Deployment, Model, Speculation
from dflash_serve.errors import UserError
from tests.support.bench_sites import settings
from tests.support.paper_models import write_paper_drafter, write_paper_target

DEPLOYMENT = Deployment(target=Model(model="t"), drafter=Model(model="d"), speculation=Speculation(block_size=8))
SETTINGS = settings(concurrency=(1, 4, 16), rounds=3, requests_per_user=2, min_requests=5)
IN_TURN = SETTINGS.model_copy(update={"in_turn": True})
REQUEST = RequestSettings(dataset="p", prompts_sha256=None, output_tokens=64, ignore_eos=False, temperature=0.0)


def test_variants_are_the_deployment_at_each_width() -> None:
    variants = deployed_variants(DEPLOYMENT, ["off", "fixed", "auto", "3", "8"], backend("torch"))
    assert list(variants) == ["off", "fixed 8", "auto", "fixed 3"]  # 8 is the whole block
    assert [deployment.speculation.width for deployment in variants.values()] == ["off", 8, "auto", 3]
    assert all(deployment.target == DEPLOYMENT.target for deployment in variants.values())


def test_endpoints_are_named_urls() -> None:
    variants = endpoint_variants(["ours=http://a:8000/v1", "sglang=https://b/"])
    assert variants == {"ours": "http://a:8000", "sglang": "https://b"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://a:8000"], "not NAME=http"),
        (["a=b"], "not NAME=http"),
        (["=http://a"], "not NAME=http"),
        (["a=http://a", "a=http://b"], "two variants are called 'a'"),
    ],
)
def test_an_endpoint_without_name_or_url_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        endpoint_variants(words)


@pytest.mark.parametrize(("word", "said"), [("fast", "'fast' is no variant of serving"), ("auto", "is no drafter")])
def test_a_variant_that_cannot_be_served_is_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        deployed_variants(
            DEPLOYMENT if word == "fast" else Deployment(target=Model(model="t")), [word], backend("torch")
        )


@pytest.mark.parametrize(("engine", "refused"), [("sglang", False), ("tensorrt-llm", True)])
def test_auto_is_not_measured_where_it_is_the_same_as_fixed(engine: str, refused: bool, tmp_path: Path) -> None:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    deployment = Deployment(target=Model(model=str(target)), drafter=Model(model=str(drafter)))
    asked = settings(backend=engine, variants=("fixed", "auto"))
    if not refused:
        assert list(find_variants(asked, deployment)[0]) == ["fixed 8", "auto"]
        return
    with pytest.raises(UserError, match="verifies the whole block in every step, as fixed does") as caught:
        find_variants(asked, deployment)
    assert caught.value.where == "--variants auto"


def test_a_null_of_a_variant_removes_a_key_that_is_there_and_is_else_a_value(tmp_path: Path) -> None:
    args = {"tensorrt-llm": {"cuda_graph_config": {"enable_padding": False}, "lora_config": {"a": 1}}}
    deployment = Deployment.model_validate({"target": {"model": "x"}, "engine_args": args})
    over = tmp_path / "over.yaml"
    over.write_text(
        "limits: {max_batch_size: null, max_queued_requests: null}\n"
        "engine_args: {tensorrt-llm: {cuda_graph_config: null, moe_config: null, lora_config: {b: null}}}"
    )
    found = overlay_variants(deployment, [f"plain={over}"], server_backend("tensorrt-llm"))["plain"]
    assert found.engine_args == {"tensorrt-llm": {"moe_config": None, "lora_config": {"a": 1, "b": None}}}
    assert "max_queued_requests" not in found.limits.model_fields_set


def test_side_by_side_all_variants_take_turns_at_every_concurrency() -> None:
    cells = schedule(["off", "fixed", "auto"], SETTINGS)
    for start in range(0, len(cells), 3):
        together = cells[start : start + 3]
        assert {cell.variant for cell in together} == {"off", "fixed", "auto"}
        assert len({cell[1:] for cell in together}) == 1
    first = Counter(cell.variant for cell in cells[::3])
    assert max(first.values()) - min(first.values()) <= 1  # nobody is always first


def test_in_turn_a_server_is_started_once_a_round() -> None:
    cells = schedule(["off", "auto"], IN_TURN)
    changes = sum(one.variant != two.variant for one, two in pairwise(cells))
    assert changes <= 2 * SETTINGS.rounds - 1
    assert [cells[0].variant, cells[6].variant] == ["off", "auto"]  # another one is first in the second round


@pytest.mark.parametrize("in_turn", [False, True])
def test_every_run_is_made_once(in_turn: bool) -> None:
    cells = schedule(["off", "auto"], IN_TURN if in_turn else SETTINGS)
    assert len(cells) == len(set(cells)) == 2 * 3 * 3
    assert set(cells) == {Cell(w, c, r) for w in ("off", "auto") for c in (1, 4, 16) for r in range(3)}


def test_no_run_of_a_server_takes_a_prompt_that_another_took() -> None:
    taken: dict[str, list[int]] = {"off": [], "auto": []}
    for cell in schedule(list(taken), SETTINGS):
        first = SETTINGS.prompts_before(cell)
        taken[cell.variant] += range(first, first + SETTINGS.requests(cell.concurrency))
    assert sorted(taken["off"]) == sorted(taken["auto"]) == list(range(3 * (5 + 8 + 32)))


TOKENIZER = Model(model="/tok")


def argv(tokenizer: Model = TOKENIZER, **more: Any) -> list[str]:
    request, dataset = REQUEST.model_copy(update=more), Dataset("p", flags=("--input-file", "p"))
    return Aiperf(dataset, request, tokenizer).argv(Job("http://a", "m", 4, 8, Path("out")))


def test_aiperf_is_told_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_serve.bench.aiperf.find_aiperf", lambda: ["aiperf"])
    words = argv()
    told = dict(pairwise(words))
    assert (told["--concurrency"], told["--request-count"], told["--osl"]) == ("4", "8", "64")
    assert told["--request-rate"] == "1000"  # without one it looks for free users all the time, on a core of its own
    assert (told["--model"], told["--url"], told["--tokenizer"]) == ("m", "http://a", "/tok")
    assert "--streaming" in words
    assert "--use-server-token-count" in words
    assert json.loads(told["--extra-inputs"]) == {"temperature": 0.0}
    longer = argv(ignore_eos=True, temperature=0.7)
    assert json.loads(longer[longer.index("--extra-inputs") + 1]) == {"temperature": 0.7, "ignore_eos": True}


def test_aiperf_takes_the_tokenizer_of_the_commit_that_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dflash_serve.bench.aiperf.find_aiperf", lambda: ["aiperf"])
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    pinned = Model(model="org/model", revision="1" * 40)
    monkeypatch.setattr(
        "dflash_serve.bench.runner.read_deployment", lambda _: (Deployment(target=pinned, drafter=None), None)
    )
    monkeypatch.setattr("dflash_serve.bench.runner.find_variants", lambda *_: ({"off": "http://a"}, None))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    asked = settings(target=str(target), drafter=str(drafter), dataset=str(tmp_path / "p.jsonl"))
    assert Bench(asked).aiperf.tokenizer == pinned
    assert Bench(asked.model_copy(update={"tokenizer": "a/b"})).aiperf.tokenizer == Model(model="a/b")
    told = dict(pairwise(argv(pinned)))
    assert (told["--tokenizer"], told["--tokenizer-revision"]) == ("org/model", "1" * 40)
    assert "--tokenizer-revision" not in argv(Model(model=str(target), revision="target"))


def test_a_key_is_never_on_the_command_line_nor_somebody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dflash_serve.bench.aiperf.find_aiperf", lambda: ["aiperf"])
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ours = Aiperf(Dataset("p"), REQUEST, Model(model=str(tmp_path)), api_key="sk-ours")
    assert "sk-ours" not in " ".join(ours.argv(Job("http://a", "m", 1, 1, tmp_path)))
    assert ours.environment()["OPENAI_API_KEY"] == "sk-ours"
    open_door = Aiperf(Dataset("p"), REQUEST, Model(model="org/model")).environment()
    assert "OPENAI_API_KEY" not in open_door
    assert open_door["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in ours.environment()  # a folder needs no hub, and aiperf would take it for an id


def test_an_aiperf_on_path_will_do_and_without_one_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dflash_serve.bench.aiperf.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"aiperf: not installed; pip install 'dflash-serve\[bench\]'"):
        find_aiperf()
    (tmp_path / "aiperf").write_text("#!/bin/sh\n")
    (tmp_path / "aiperf").chmod(0o755)
    assert find_aiperf() == [str(tmp_path / "aiperf")]


REPORT: dict[str, Any] = {
    "schema_version": "1.4",
    "request_count": {"unit": "requests", "avg": 8.0},
    "benchmark_duration": {"unit": "sec", "avg": 0.54},
    "total_output_tokens": {"unit": "tokens", "avg": 128.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 235.7},
    "output_token_throughput_per_user": {"unit": "tokens/sec/user", "avg": 207.1, "p50": 243.1},
    "time_to_first_token": {"unit": "ms", "avg": 26.8, "p50": 27.9, "p99": 34.5},
    "inter_token_latency": {"unit": "ms", "avg": 6.0, "p50": 4.1},
    "error_summary": [],
}
"""From an export of aiperf 0.13.0."""
REFUSED = [{"error_details": {"code": 429, "type": "TooManyRequests", "message": "queue\n is full"}, "count": 3}]


def test_figures_are_aiperfs_and_a_missing_one_is_unknown() -> None:
    found = read_figures(REPORT, where="x")
    assert (found.requests, found.errors, found.output_tokens, found.seconds) == (8, 0, 128, 0.54)
    assert (found.throughput, found.interactivity) == (235.7, 243.1)
    assert (found.first_token_ms, found.first_token_p99_ms, found.inter_token_ms) == (27.9, 34.5, 4.1)
    found = read_figures({**REPORT, "inter_token_latency": None, "error_summary": REFUSED}, where="x")
    assert (found.inter_token_ms, found.errors, found.cut) == (None, 3, 0)
    found = read_figures({**REPORT, "usage_completion_tokens": {"unit": "tokens", "avg": 16.0, "count": 6}}, where="x")
    assert found.cut == 2, "streams without usage, their last event, ended early"
    with pytest.raises(UserError, match=r"no request was answered, 3 failed \(queue is full\)"):
        read_figures({"error_summary": REFUSED}, where="x")


def test_acceptance_by_answers_is_aiperfs_section_else_their_usage() -> None:
    def total(**values: float) -> dict[str, Any]:
        return {f"total_{name}": {"unit": "tokens", "avg": value} for name, value in values.items()}

    assert read_figures(REPORT, where="x").told is None
    usage = {"completion": 128.0, "accepted_prediction": 80.0, "rejected_prediction": 40.0}
    by_usage = REPORT | total(**{f"usage_{name}_tokens": value for name, value in usage.items()})
    told = read_figures(by_usage, where="x").told
    assert told is not None
    assert (told.verifications, told.drafted, told.accepted) == (128 - 8 - 80, 120, 80)  # eight prefills
    assert told.acceptance_length == 3
    cut = {**by_usage, "usage_completion_tokens": {"unit": "tokens", "avg": 32.0, "count": 4}}
    told = read_figures(cut, where="x").told
    assert told is not None
    assert told.verifications == 128 - 4 - 80, "four streams ended before their usage"
    section = {"pooled_spec_decode_acceptance_histogram": {"0": 10, "1": 6, "3": 4}, **total(draft_tokens=60.0)}
    told = read_figures(by_usage | section, where="x").told
    assert told is not None
    assert (told.verifications, told.drafted, told.accepted) == (20, 60, 18)
    assert told.acceptance_lengths == {1: 10, 2: 6, 4: 4}


def test_metrics_of_workers_belong_to_a_running_server() -> None:
    asked = ["far=http://one:1", "far=http://two:2/metrics"]
    assert metrics_urls(asked, ["far", "near"]) == {"far": ("http://one:1", "http://two:2/metrics")}
    for wrong, why in (("http://one:1", "not NAME="), ("x=http://one:1", "no --url 'x'"), ("far=one:1", "not NAME=")):
        with pytest.raises(UserError, match=why):
            metrics_urls([wrong], ["far"])


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("print('ERROR    Tokenizer not found'); raise SystemExit(1)", r"exit code 1 \(ERROR Tokenizer not found\)"),
        ("print('ERROR  no tokenizer\\nERROR  stopped\\n| Cause: Error')", r"exit code 0 \(ERROR no tokenizer\)"),
        ("pass", r"exit code 0 \(it said nothing\)"),
    ],
)
def test_an_aiperf_that_fails_is_quoted(
    program: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dflash_serve.bench.aiperf.find_aiperf", lambda: [sys.executable, "-c", program])
    with pytest.raises(UserError, match=why):
        Aiperf(Dataset("p"), REQUEST, None).run(Job("http://a", "m", 1, 1, tmp_path / "run"))
