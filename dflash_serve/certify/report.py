"""The certificate: measurements, the verdict of at most six lines, JSON and HTML, and the comparison of two of them.

A ratio of throughputs is decided after three rounds, where it is further from 1 than its rounds are from each other. A
width that changes nothing is called faster by that rule in 2 % of cases after three rounds and in 0.4 % after four
(10^6 simulated sets of independent normal errors); two rounds would give 10 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from dflash_serve.bench.results import LoadRatio
from dflash_serve.bench.settings import AUTO, OFF
from dflash_serve.common.documents import read_json
from dflash_serve.common.reports import counted, html_page, json_text, write_files
from dflash_serve.common.settings import Frozen
from dflash_serve.common.store import differences
from dflash_serve.errors import UserError

JSON, HTML = "certificate.json", "certificate.html"
ACCEPTED, UNKNOWN, REFUSED = "accepted", "could not tell", "refused"  # Verdicts, the best first
EXIT_CODES = {ACCEPTED: 0, UNKNOWN: 3, REFUSED: 1}
FASTER, SLOWER, EQUAL, FEW = "faster", "slower", "no difference shown", "too few rounds"  # Outcomes of a load
COLUMNS = ("users", "served with", "tokens/s", "tokens/s/user", "first token, ms", "against plain", "acceptance length")
DECIDING = 3  # Fewest rounds of a load that decide
LOW = 0.8  # Share of the lowest published acceptance length below which acceptance is low
NEAR_BEST = 0.95  # Share of the highest throughput that the recommended concurrency cap must reach


class Expected(Frozen):
    """Acceptance that the drafter's publisher states, for whole blocks."""

    acceptance_length: float
    survival: list[float] | None
    source: str


class Measurements(Frozen):
    """Everything that a certification measured. The keys `served`, `environment` and `points` are those of a bench."""

    served: dict[str, str]
    environment: dict[str, Any]
    driver: str | None  # Of the GPU
    deployment: dict[str, Any]
    backend: str
    command: list[str]
    choices: list[str]
    request: dict[str, Any]
    settings: dict[str, Any]
    verifications: dict[str, dict[str, Any]]  # By width: plan and findings of `verify`
    loads: dict[str, list[LoadRatio]]  # By width: tokens/s by those of plain serving
    points: list[dict[str, Any]]
    servers: dict[str, dict[str, Any]]
    expected: Expected | None
    doctor: dict[str, Any] | None  # Its verdict and sentences
    not_tested: list[str]
    minutes: float
    needed_minutes: float | None = None  # That a verdict needs at least on this machine

    @property
    def whole(self) -> str:
        """The variant of whole blocks; of running servers, the one that they serve."""
        return next((name for name in self.loads if name != AUTO), AUTO)

    @property
    def acceptance_length(self) -> float | None:
        """Mean of whole blocks over the loads."""
        told = [p["acceptance"]["acceptance_length"] for p in self.points if p["variant"] == self.whole]
        known = [length for length in told if length is not None]
        return sum(known) / len(known) if known else None

    @property
    def low(self) -> bool:
        """Acceptance is far below the published one; where none is, whole blocks are slower at the lowest load."""
        if self.expected is None:
            return any(outcome(each) == SLOWER for each in self.loads[self.whole][:1])
        length = self.acceptance_length
        return length is not None and length < LOW * self.expected.acceptance_length

    @property
    def wrong(self) -> list[str]:
        """Faults other than those of `verify`."""
        failed, found = sum(point["errors"] for point in self.points), []
        if failed:
            found.append(f"{failed} requests failed")
        if cut := sum(point.get("cut", 0) for point in self.points):
            found.append(f"{cut} streams ended early, without a reason")
        if self.low_length and not self.sound:
            found.append(self.low_length)
        doctor = self.doctor if self.doctor and (found or self.doctor["verdict"] == "fault") else {"sentences": ()}
        return found + [f"doctor: {text}" for text in doctor["sentences"]]

    @property
    def low_length(self) -> str:
        """Acceptance beside the published one, if it is low."""
        if not self.low or self.acceptance_length is None or self.expected is None:
            return ""
        published = f"{self.expected.acceptance_length:.2f} published ({self.expected.source})"
        return f"acceptance length {self.acceptance_length:.2f}, {published}"

    @property
    def sound(self) -> bool:
        """The doctor found that the server accepts what the reference does, and no fault of the checkpoint."""
        doctor = self.doctor or {"verdict": "fault"}
        return bool(doctor["verdict"] != "fault" and doctor.get("server", doctor["verdict"]) == "healthy")


class Certificate(Measurements):
    """Measurements with their verdict."""

    verdict: str
    lines: list[str]
    width: str | None  # None = no width was measured in enough rounds
    max_batch_size: int | None
    start: dict[str, str]
    """Environment from which `width: auto` starts with the survival that was measured."""


def outcome(ratio: LoadRatio) -> str:
    """`FASTER`, `SLOWER`, `EQUAL` or `FEW`, by the rule above."""
    spread = ratio.highest - ratio.lowest
    if ratio.rounds < DECIDING:
        return FEW
    return FASTER if ratio.lowest - 1 > spread else SLOWER if 1 - ratio.highest > spread else EQUAL


def conclude(found: Measurements) -> Certificate:
    """The verdict: accepted = lossless at every width, faster at one load at least, and nothing wrong."""
    lossless, line = _lossless(found)
    outcomes = [outcome(each) for each in chain(*found.loads.values())]
    slower = SLOWER in outcomes and FASTER not in outcomes
    verdict = ACCEPTED if lossless and FASTER in outcomes else UNKNOWN
    if lossless is False or found.wrong or slower:
        verdict = REFUSED
    name = OFF if slower else _best_width(found)
    cap = None if name is None else _cap(found, name)
    width = None if name is None else name.removeprefix("fixed ")
    sound = f" ({found.low_length}; the server accepts what the reference does)" if found.low_length else ""
    nothing = f"nothing was found{sound}" if found.points else "not known, no load was measured"
    advice = "nothing is recommended" if width is None else f"recommended: width {width}"
    advice += f", at most {cap} requests at once" if cap else ""
    if verdict == UNKNOWN and (found.needed_minutes or 0) > found.minutes:
        advice += f"; a verdict needs at least {found.needed_minutes:.0f} minutes here (--minutes)"
    # Reasons stand in the report alone, so that the line can be read.
    of_verify = (text.partition(" (")[0] for each in found.verifications.values() for text in each["findings"]["scope"])
    untested = dict.fromkeys([*found.not_tested, *of_verify])
    lines = [
        line,
        *(
            f"{each} against plain, tokens/s by users: "
            + ("; ".join(f"{ratio} at {ratio.users}: {outcome(ratio)}" for ratio in ratios) or "not measured")
            for each, ratios in found.loads.items()
        ),
        f"{verdict}; {advice}",
        f"wrong: {'; '.join(found.wrong) or nothing}",
        f"not tested: {'; '.join(untested) or 'nothing was left out'}",
    ]
    told = [point["acceptance"]["survival"] or [] for point in found.points if point["variant"] == found.whole]
    survival = ",".join(f"{share:.4f}" for share in max(told, key=len, default=[]))
    start = {"DFLASH_SERVE_SURVIVAL": survival} if survival else {}
    more = {"verdict": verdict, "lines": lines, "width": width, "max_batch_size": cap, "start": start}
    return Certificate(**dict(found), **more)


def _lossless(found: Measurements) -> tuple[bool | None, str]:
    # None = could not tell
    told = {name: each["findings"] for name, each in found.verifications.items()}
    broken = [
        f"{name}: {fault} ({place})" for name, one in told.items() for fault, place in dict(one["faults"]).items()
    ]
    if broken:
        return False, f"not lossless: {'; '.join(broken)}"
    lossless = [name for name in found.loads if name in told and told[name]["verdict"] == "lossless"]
    if len(lossless) == len(found.loads):
        sampled = all(each["sampled"] for each in told.values())
        return True, f"lossless: {', '.join(lossless)}; {'greedy and sampled' if sampled else 'greedy'}"
    why = {name: [*told[name]["reasons"]] if name in told else ["there was no time"] for name in found.loads}
    open_ = (f"{name}: {'; '.join(reasons[:1])}" for name, reasons in why.items() if name not in lossless)
    return None, f"could not tell whether it is lossless: {'; '.join(open_)}"


def _best_width(found: Measurements) -> str | None:
    # `auto`, unless whole blocks are faster than it in every round at every load; None = neither was measured enough
    decided = {name: {r.users: r for r in many if r.rounds >= DECIDING} for name, many in found.loads.items()}
    auto, fixed = decided.get(AUTO, {}), decided[found.whole]
    if not auto:
        faster = any(outcome(each) == FASTER for each in fixed.values())
        return found.whole if faster or (fixed and AUTO not in found.loads) else None
    better = [users in auto and one.lowest > auto[users].highest for users, one in fixed.items()]
    every = len(fixed) == len(found.loads[found.whole])
    return found.whole if better and all(better) and every else AUTO


def _cap(found: Measurements, name: str) -> int | None:
    # the smallest load that nearly has the highest throughput, among those at which the width is not slower
    slower = {each.users for each in found.loads.get(name, ()) if outcome(each) == SLOWER}
    points = [p for p in found.points if p["variant"] == name and p["concurrency"] not in slower]
    best = max((point["throughput_per_device"] for point in points), default=0.0)
    return min((p["concurrency"] for p in points if p["throughput_per_device"] >= NEAR_BEST * best), default=None)


def write_certificate(certificate: Certificate, folder: Path) -> None:
    """Writes JSON and HTML, each whole or not at all.

    Raises:
        UserError: a file cannot be written.
    """
    value = certificate.model_dump(mode="json")
    page = {"it": value, "title": value["served"]["Target"], "columns": COLUMNS, "rows": table(certificate)}
    write_files(folder, {JSON: json_text(value), HTML: html_page("dflash_serve.certify", **page)})


def table(found: Measurements) -> list[list[str]]:
    """A row of `COLUMNS` for each load and width."""
    ratios = {(name, each.users): f"{each}: {outcome(each)}" for name, many in found.loads.items() for each in many}
    rows = []
    for point in sorted(found.points, key=lambda each: each["concurrency"]):
        users, name, length = point["concurrency"], point["variant"], point["acceptance"]["acceptance_length"]
        figures = [point[key] for key in ("throughput_per_device", "interactivity", "first_token_ms")]
        rate, *others = ("unknown" if value is None else f"{value:.1f}" for value in figures)
        spread = f" ({point['lowest']:.1f} to {point['highest']:.1f})" if point["rounds"] > 1 else ""
        rows.append([str(users), name, rate + spread, *others, ratios.get((name, users), "")])
        rows[-1].append("" if length is None else f"{length:.2f}")
    return rows


def read_certificate(path: Path) -> Certificate:
    """A certificate that was written before.

    Raises:
        UserError: it cannot be read, or is no certificate of this version.
    """
    value = read_json(path)
    try:
        return Certificate.model_validate(value)
    except ValueError:
        do = "give the certificate.json of `dflash-serve certify`"
        raise UserError("not a certificate of this version", where=str(path), do=do) from None


def compare(old: Certificate, new: Certificate) -> tuple[bool, list[str]]:
    """True where the new verdict is worse, or a throughput is below the old range; and all changes."""
    lines, order = list(_changes(old, new)), list(EXIT_CODES)
    worse = order.index(new.verdict) > order.index(old.verdict)
    before = {(p["variant"], p["concurrency"]): p for p in old.points}
    for point in new.points:
        was = before.get((point["variant"], point["concurrency"]), point)
        if point["highest"] < was["lowest"] or point["lowest"] > was["highest"]:
            change = point["throughput_per_device"] / was["throughput_per_device"] - 1
            lines.append(f"{point['variant']}, {counted(point['concurrency'], 'user')}: tokens/s {change:+.0%}")
            worse |= point["highest"] < was["lowest"] and min(point["rounds"], was["rounds"]) >= DECIDING
    return worse, [*lines, *(f"now wrong: {text}" for text in new.wrong if text not in old.wrong)]


def _changes(old: Certificate, new: Certificate) -> Iterator[str]:
    fields = ("verdict", "width", "driver", "environment", "deployment", "request", "expected")
    kept, found = (one.model_dump(mode="json", include=set(fields)) for one in (old, new))
    for side in (kept, found):
        del side["environment"]["date"]
    return (f"{name}: {before} before, {now} now" for name, now, before in differences(found, kept))
