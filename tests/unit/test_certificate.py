"""The verdict of a certification, its exit code and its six lines, and the comparison of two certificates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.bench.results import LoadRatio
from dflash_serve.certify.report import (
    COLUMNS,
    Certificate,
    Expected,
    Measurements,
    conclude,
    read_certificate,
    table,
    write_certificate,
)
from tests.house import ROOT
from tests.support.command_line import call

Spread = tuple[float, float, float]
Verdict = tuple[str, dict[str, str], tuple[str, ...]]
LOSSLESS: Verdict = ("lossless", {}, ())
OPEN: Verdict = ("could not tell", {}, ("nothing shows that it speculates",))
BROKEN: Verdict = ("not lossless", {"stale state": "greedy, prompt 2, position 5"}, ())
FAST, SLOW, EVEN = (1.5, 1.45, 1.55), (0.8, 0.78, 0.82), (1.0, 0.9, 1.1)


def ratios(name: str, spreads: dict[int, Spread], rounds: int) -> list[LoadRatio]:
    return [
        LoadRatio(variant=name, baseline="off", users=users, ratio=mid, lowest=low, highest=high, rounds=rounds)
        for users, (mid, low, high) in spreads.items()
    ]


FASTER = ratios("fixed 8", {1: FAST, 8: EVEN}, 3)
EQUAL = ratios("fixed 8", {1: EVEN}, 3)
TESTED = {"sampled": [{}], "scope": ["min-p 0.5 (HTTP 400)"]}


def point(name: str, users: int, rate: float, length: float | None) -> dict[str, Any]:
    accepted = {"acceptance_length": length, "survival": None if length is None else [0.6, 0.3]}
    figures = {"interactivity": rate, "first_token_ms": None, "rounds": 3, "errors": 0, "acceptance": accepted}
    spread = {"throughput_per_device": rate * users, "lowest": 0.98 * rate * users, "highest": 1.02 * rate * users}
    return {"variant": name, "concurrency": users, **figures, **spread}


def measured(
    fixed: Verdict = LOSSLESS,
    auto: Verdict | None = LOSSLESS,
    speed: dict[int, Spread] | None = None,
    rounds: int = 3,
    length: float = 2.0,
    version: str = "0.5.0",
    **more: Any,
) -> Measurements:
    speed = {1: FAST, 8: EVEN} if speed is None else speed
    told = {name: each for name, each in (("fixed 8", fixed), ("auto", auto)) if each is not None}
    verified = {
        name: {"plan": {}, "findings": {"verdict": verdict, "faults": faults, "reasons": why, **TESTED}}
        for name, (verdict, faults, why) in told.items()
    }
    given: dict[str, Any] = {
        "served": {"Target": "smollm2"},
        "environment": {"versions": {"sglang": version}, "date": "2026-11-26"},
        "driver": None,
        "deployment": {},
        "backend": "sglang",
        "command": [],
        "choices": [],
        "request": {},
        "settings": {},
        "verifications": verified,
        "loads": {name: ratios(name, speed, rounds) for name in ("fixed 8", "auto")},
        "points": [
            point(name, users, 20.0 * (speed[users][0] if name != "off" else 1), None if name == "off" else length)
            for name in ("off", "fixed 8", "auto")
            for users in speed
        ],
        "servers": {},
        "expected": Expected(acceptance_length=2.1, survival=None, source="chat, its card"),
        "doctor": None,
        "not_tested": [],
        "minutes": 14.0,
    }
    return Measurements(**{**given, **more})


def test_the_six_lines_of_an_accepted_deployment() -> None:
    found = conclude(measured(not_tested=["auto at 32 users"]))
    assert found.lines == [
        "lossless: fixed 8, auto; greedy and sampled",
        "fixed 8 against plain, tokens/s by users: 1.50\N{MULTIPLICATION SIGN} (1.45 to 1.55) at 1: faster; "
        "1.00\N{MULTIPLICATION SIGN} (0.90 to 1.10) at 8: no difference shown",
        "auto against plain, tokens/s by users: 1.50\N{MULTIPLICATION SIGN} (1.45 to 1.55) at 1: faster; "
        "1.00\N{MULTIPLICATION SIGN} (0.90 to 1.10) at 8: no difference shown",
        "accepted; recommended: width auto, at most 8 requests at once",
        "wrong: nothing was found",
        "not tested: auto at 32 users; min-p 0.5",
    ]
    assert found.start == {"DFLASH_SERVE_SURVIVAL": "0.6000,0.3000"}


ILL = {"verdict": "fault", "sentences": ["a fault: *stale context*"]}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "lossy": ({"fixed": BROKEN}, "refused", "not lossless: fixed 8: stale state (greedy, prompt 2, position 5)"),
    "open": ({"auto": OPEN}, "could not tell", "auto: nothing shows that it speculates"),
    "unverified": ({"auto": None}, "could not tell", "auto: there was no time"),
    "slow": ({"speed": {1: SLOW, 8: SLOW}}, "refused", "recommended: width off"),
    "undecided": ({"speed": {1: EVEN}}, "could not tell", "no difference shown"),
    "two rounds": ({"rounds": 2}, "could not tell", "too few rounds"),
    "unmeasured": ({"speed": {}}, "could not tell", "could not tell; nothing is recommended"),
    "nothing seen": ({"speed": {}}, "could not tell", "wrong: not known, no load was measured"),
    "too short": ({"speed": {}, "needed_minutes": 21.4}, "could not tell", "a verdict needs at least 21 minutes here"),
    "auto unmeasured": ({"loads": {"fixed 8": EQUAL, "auto": []}}, "could not tell", "nothing is recommended"),
    "auto unmeasured, fixed faster": ({"loads": {"fixed 8": FASTER, "auto": []}}, "accepted", "recommended: width 8"),
    "damaged drafter": ({"length": 1.1}, "refused", "wrong: acceptance length 1.10, 2.10 published (chat, its card)"),
    "doctor": ({"length": 1.1, "doctor": ILL}, "refused", "doctor: a fault: *stale context*"),
    "slow, unpublished": ({"expected": None, "doctor": ILL}, "refused", "wrong: doctor: a fault"),
    "hard prompts": (
        {"length": 1.1, "doctor": {"verdict": "could not tell", "server": "healthy", "sentences": ["healthy"]}},
        "accepted",
        "wrong: nothing was found (acceptance length 1.10, 2.10 published (chat, its card); the server",
    ),
    "healthy": ({"doctor": {"verdict": "healthy", "sentences": ["healthy"]}}, "accepted", "wrong: nothing"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_names_what_is_wrong(name: str) -> None:
    changes, verdict, words = CASES[name]
    found = conclude(measured(**changes))
    assert found.verdict == verdict
    assert len(found.lines) <= 6
    assert words in "\n".join(found.lines)


def written(folder: Path, certificate: Certificate) -> Path:
    folder.mkdir()
    write_certificate(certificate, folder)
    return folder / "certificate.json"


def test_two_certificates_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = written(tmp_path / "old", conclude(measured()))
    cores = " here; ".join(["2 cores"] * 20)  # long, with the words of another message
    other = written(tmp_path / "other", conclude(measured(environment={"versions": {}, "date": "", "hardware": cores})))
    call(monkeypatch, "certify", "--compare", old, other)
    assert f"environment.hardware: None before, {cores} now" in capsys.readouterr().out.splitlines()
    same = written(tmp_path / "same", conclude(measured(environment={"versions": {}, "date": "later"})))
    new = written(tmp_path / "new", conclude(measured(version="0.5.1", speed={1: (1.2, 1.15, 1.25), 8: EVEN})))
    assert call(monkeypatch, "certify", "--compare", old, new) == 1
    assert capsys.readouterr().out.splitlines() == [
        "environment.versions.sglang: 0.5.0 before, 0.5.1 now",
        "fixed 8, 1 user: tokens/s -20%",
        "auto, 1 user: tokens/s -20%",
        "worse",
    ]
    assert call(monkeypatch, "certify", "--compare", new, old) == 0  # faster is not worse
    assert call(monkeypatch, "certify", "--compare", old, same) == 0
    (tmp_path / "no.json").write_text(json.dumps({"points": []}))
    assert call(monkeypatch, "certify", "--compare", old, tmp_path / "no.json") == 2
    assert "not a certificate of this version" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_the_examples_of_the_docs_are_the_committed_reports(engine: str) -> None:
    report = ROOT / f"benchmarks/results/certify-smollm2-{engine}.json"
    found, page = read_certificate(report), (ROOT / "docs/certify.md").read_text()
    measurements = {name: value for name, value in dict(found).items() if name in Measurements.model_fields}
    assert conclude(Measurements(**measurements)).lines == found.lines
    rows = ["| " + " | ".join(row) + " |" for row in (COLUMNS, *table(found)) if engine == "embedded"]
    assert [line for line in (*found.lines, *rows) if line not in page.splitlines()] == []
