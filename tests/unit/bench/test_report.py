"""The report says what was measured, and nothing that was not; it needs no network."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from dflash_serve.bench.aiperf import RequestSettings
from dflash_serve.bench.results import ReportData, Run, as_html, as_json, colours
from dflash_serve.common.provenance import Environment, environment
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.speculation.statistics import AcceptanceStatistics
from tests.support.bench_sites import settings

SOME = AcceptanceStatistics(50, 130, 45, [50, 40], [30, 15], {1: 50, 2: 10, 4: 40}, "dflash-serve")
NONE = AcceptanceStatistics.unknown()
TIMES = "\N{MULTIPLICATION SIGN}"
DEPLOYMENT = Deployment(target=Model(model="t"))


def run(name: str, users: int, turn: int, rate: float, acceptance: AcceptanceStatistics, **more: object) -> Run:
    figures = {"first_token_ms": 20.0, "first_token_p99_ms": 90.0, "inter_token_ms": 1e3 / rate, "interactivity": rate}
    figures |= {"output_tokens": 512.0, "seconds": 10.0, "throughput": rate * users}
    which = {"variant": name, "concurrency": users, "round": turn, "requests": 8, "errors": 0}
    made = {"acceptance": acceptance, "started": "2026-11-21T10:00:00+00:00", "commit": "abc"}
    return Run.model_validate({**which, **figures, **made, **more})


RUNS = [
    *(run("off", users, turn, 20 / users**0.2 + turn, NONE) for users in (1, 2) for turn in range(3)),
    *(run("auto <8>", users, turn, 40 / users**0.5 + turn, SOME) for users in (1, 2) for turn in range(3)),
]


def report(runs: list[Run], *, rounds: int = 3, planned: int = 12, served: str | Deployment = "http://a") -> ReportData:
    return ReportData(
        settings=settings(concurrency=(1, 2), rounds=rounds, devices=2),
        request=RequestSettings(
            dataset="p.jsonl", prompts_sha256="f" * 64, output_tokens=64, ignore_eos=False, temperature=0.0
        ),
        variants={"off": served, "auto <8>": served},
        runs=runs,
        planned=planned,
        environment=Environment(
            hardware="2 x H200",
            python="3.11.7",
            versions={"aiperf": "0.13.0"},
            omp_wait_policy=None,
            commit="abc",
            date="2026-11-21T10:00:00+00:00",
        ),
    )


def test_points_are_medians_over_rounds_by_device() -> None:
    first = report(RUNS).points[0]
    assert (first.variant, first.concurrency, first.rounds) == ("off", 1, 3)
    assert (first.lowest, first.throughput_per_device, first.highest) == (10, 10.5, 11)
    assert first.interactivity == 21
    assert first.requests == 24


def test_acceptance_is_over_all_rounds() -> None:
    auto = report(RUNS).points[2]
    assert auto.acceptance.acceptance_length == pytest.approx(1.9)
    assert (auto.acceptance.verifications, auto.survival) == (150, [0.6, 0.375])
    assert auto.mean_width == pytest.approx(2.3)


def test_the_json_holds_it_all() -> None:
    found = json.loads(json.dumps(as_json(report(RUNS))))
    assert found["sentence"] == report(RUNS).sentence
    assert found["loads"]["auto <8>"][0]["ratio"] == pytest.approx(41 / 21)
    assert found["comparison"] is None
    assert found["points"][0]["acceptance"]["acceptance_length"] is None
    assert found["runs"] == {"done": 12, "planned": 12}


def test_the_headline_is_the_ratio_at_each_load_with_its_spread_and_no_single_cut() -> None:
    """One number of many would be chosen by whoever chooses where the curves are cut."""
    said = "“auto <8>” against “off”, tokens/s: 1.95x (1.91 to 2.00) at 1 user, 1.59x (1.56 to 1.62) at 2."
    assert report(RUNS).sentence == said.replace("x ", f"{TIMES} ")
    single = report([one for one in RUNS if one.round == 0], rounds=1)
    assert single.sentence == f"“auto <8>” against “off”, tokens/s: 2.00{TIMES} at 1 user, 1.62{TIMES} at 2."


def at(interactivity: float, runs: list[Run] = RUNS) -> ReportData:
    found = report(runs)
    return replace(found, settings=found.settings.model_copy(update={"interactivity": interactivity}))


def test_an_interactivity_that_was_asked_for_is_compared_too() -> None:
    """`auto` is compared even where another variant is better; without it the best of the others is."""
    asked = at(20.0)
    assert asked.comparison is not None
    assert asked.sentence.endswith(asked.comparison.sentence())
    assert f"1.95{TIMES} (1.91 to 2.00) at 1 user" in asked.sentence
    better = [run("fixed", 1, turn, 99, NONE) for turn in range(3)]
    every = [*better, *(one.model_copy(update={"variant": one.variant.removesuffix(" <8>")}) for one in RUNS)]
    for names, expected in ((("off", "auto", "fixed"), "auto"), (("off", "fixed"), "fixed"), (("off",), None)):
        found = replace(
            at(20.0, [one for one in every if one.variant in names]), variants=dict.fromkeys(names, "http://a")
        )
        assert (found.comparison and found.comparison.variant) == expected
    unknown = [one.model_copy(update={"interactivity": None}) if one.variant == "off" else one for one in RUNS]
    assert at(20.0, unknown).comparison is None


def test_every_point_of_the_baselines_frontier_is_a_row() -> None:
    rows = report(RUNS).ratios
    assert [[each.variant for each in row] for row in rows] == [["auto <8>"]] * 2
    assert [row[0].interactivity for row in rows] == sorted(row[0].interactivity for row in rows)


def test_a_load_that_only_one_variant_was_measured_at_has_no_ratio() -> None:
    alone = [one for one in RUNS if one.variant == "off" or one.concurrency == 1]
    assert [each.users for each in report(alone).loads["auto <8>"]] == [1]
    assert "at 2" not in report(alone).sentence
    assert report([one for one in RUNS if one.variant == "off"]).sentence.startswith("One variant was measured")
    assert "<td>2</td><td>\N{EN DASH}</td>" in as_html(report(alone))


class Addresses(HTMLParser):
    """What a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        assert tag not in ("script", "link", "iframe")


def test_the_page_fetches_nothing() -> None:
    parser = Addresses()
    parser.feed(as_html(report(RUNS)))
    assert parser.found == []
    assert not re.search(r"url\(|@import", as_html(report(RUNS)))


def test_the_page_says_the_sentence_the_hardware_and_the_commit_and_escapes_names() -> None:
    text = as_html(report(RUNS))
    assert "“auto &lt;8&gt;” against “off”" in text
    assert "<8>" not in text
    for word in (
        "2 x H200",
        "commit abc",
        "off, auto &lt;8&gt;: throughput",
        "sha256 ffffffffffff",
        "aiperf 0.13.0",
        "8 at 1, 8 at 2 users",
    ):
        assert word in text
    assert ">1.90<" in text  # tau


def test_unknown_figures_are_dashes_never_zeros() -> None:
    unknown = [run("off", 1, 0, 20, NONE, first_token_ms=None, first_token_p99_ms=None)]
    row = as_html(report(unknown, rounds=1, planned=1)).split('<tr class="variant">')[1]
    assert row.count("\N{EN DASH}") == 5  # first token, its p99, tau, width, survival
    assert ">0<" not in row


def test_caveats_follow_from_what_happened() -> None:
    def said(changed: ReportData) -> str:
        return as_html(changed).partition("Read with care")[2]

    calm = report(RUNS)
    assert "Incomplete" not in said(calm)
    assert "Incomplete: 12 of 36 runs" in said(replace(calm, planned=36))
    assert "One round" in said(report([r for r in RUNS if r.round == 0], rounds=1, planned=4))
    assert "2 commits: abc, def-dirty" in said(
        report([*RUNS[:-1], RUNS[-1].model_copy(update={"commit": "def-dirty"})])
    )
    assert "aiperf ran on the same machine" not in said(calm)
    assert "aiperf ran on the same machine" in said(report(RUNS, served=DEPLOYMENT))
    assert "3 requests failed" in said(report([*RUNS[1:], RUNS[0].model_copy(update={"errors": 3})]))
    assert "ended early" not in said(calm)
    assert "2 streams ended early" in said(report([*RUNS[1:], RUNS[0].model_copy(update={"cut": 2})]))
    noisy = [*RUNS[1:], RUNS[0].model_copy(update={"throughput": 60.0})]
    assert "Rounds scatter by up to 177%" in said(report(noisy))


def test_the_environment_is_looked_up_here_and_left_unknown_for_servers_elsewhere() -> None:
    assert environment(None, local=False).hardware is None
    assert environment("8 x B200", local=True).hardware == "8 x B200"
    assert environment(None, local=True).hardware
    assert "dflash-serve" in environment(None, local=True).versions


def test_the_plot_has_a_line_a_mark_for_each_load_and_a_name_for_every_variant() -> None:
    asked = at(20.0)
    page = as_html(asked)
    plot = page[page.index("<svg viewBox") :].partition("</svg>")[0] + "</svg>"
    texts = [element.text for element in ElementTree.fromstring(plot).iter("text")]
    assert (plot.count("<polyline"), plot.count('r="4"')) == (2, 4)
    assert {"off", "auto <8>", "1", "2"} <= set(texts)
    assert asked.comparison is not None
    assert f"{asked.comparison.ratio:.2f}{TIMES}" in texts
    for colour in colours(["off", "auto <8>"]).values():
        assert colour in plot
