"""The report as one HTML file that needs no network: style and picture are inside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from dflash_serve.proving.bench.plots import colours
from dflash_serve.proving.bench.report import Report, caveats, mean_width
from dflash_serve.proving.bench.results import Point
from dflash_serve.proving.bench.sentence import Comparison

UNKNOWN, DASH, TIMES = "\N{EN DASH}", "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"


def page(report: Report, plot: bytes) -> str:
    """The whole document.

    Args:
        report: what it says.
        plot: the Pareto plot, SVG.
    """
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    unfinished = f'<p class="warn">{escape(next(caveats(report)))}</p>' if report.done < report.planned else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{escape(report.title)}: throughput and interactivity</title>
<style>{style}</style>
</head>
<body>
<main>
<p class="kicker">dflash-serve bench · {escape(report.title)}</p>
<h1>{escape(report.sentence)}</h1>
<p class="facts">{escape(_facts(report))}</p>
{unfinished}
{_figure(report, plot)}
{_ratios(report)}
{_sweep(report)}
{_how(report)}
<h2>Read with care</h2>
<ul>
{_items(caveats(report))}
</ul>
<footer>All figures are in bench.json and bench.csv beside this file, single runs in runs/.</footer>
</main>
</body>
</html>
"""


def _facts(report: Report) -> str:
    environment = report.environment
    facts = [environment.hardware or "hardware not stated", f"commit {', '.join(report.commits) or 'unknown'}"]
    return " · ".join([*facts, ", ".join(report.dates)])


def _figure(report: Report, plot: bytes) -> str:
    users = ", ".join(map(str, report.sweep.concurrencies))
    data = base64.b64encode(plot).decode("ascii")
    alt = f"Throughput against interactivity for {', '.join(report.ways)}"
    return f"""<figure>
<img src="data:image/svg+xml;base64,{data}" alt="{escape(alt)}">
<figcaption>Up and to the right is better. Marks are concurrencies ({users} users), lines are frontiers:
what no other concurrency of that way beats in both. Medians of {_counted(report.sweep.rounds, "round")}.
{_dashes(report)}</figcaption>
</figure>"""


def _dashes(report: Report) -> str:
    drawn = report.comparison is not None and report.comparison.ratio is not None
    return "The dashed line is where the headline cuts the curves." if drawn else ""


def _ratios(report: Report) -> str:
    rows = report.ratios
    if not rows or not rows[0]:
        return ""
    ways = "".join(f"<th>{escape(each.way)}</th>" for each in rows[0])
    body = "".join(_ratio_row(row) for row in rows)
    baseline = escape(report.baseline)
    return f"""<h2>At equal interactivity</h2>
<p class="lead">How many times the throughput of “{baseline}” the other ways give while every user still sees as many
tokens/s: one row for each spot of its curve. One ratio alone would depend on where the curves are cut.
{UNKNOWN} = that way does not get there.</p>
<div class="scroll"><table>
<thead><tr><th>tokens/s/user</th><th>“{baseline}”, tokens/s/{report.device}</th>{ways}</tr></thead>
<tbody>{body}</tbody>
</table></div>"""


def _ratio_row(row: Sequence[Comparison]) -> str:
    cells = "".join(f"<td>{_number(each.ratio, 2, unit=TIMES)}</td>" for each in row)
    return f"<tr><td>{row[0].interactivity:.1f}</td><td>{_number(row[0].baseline_throughput)}</td>{cells}</tr>"


def _sweep(report: Report) -> str:
    colour = colours(report.ways)
    best = {
        users: max((p.throughput_per_device for p in report.points if p.concurrency == users), default=0.0)
        for users in report.sweep.concurrencies
    }
    rows = []
    for way in report.ways:
        dot = f'<span class="dot" style="background:{colour[way]}"></span>'
        rows.append(f'<tr class="way"><td colspan="8">{dot}{escape(way)}</td></tr>')
        rows += [_row(p, best.get(p.concurrency), colour[way]) for p in report.points if p.way == way]
    return f"""<h2>The sweep</h2>
<p class="lead">τ is the acceptance length: tokens gained per verification, the bonus token counted. Survival is the
share of steps in which slot 1, 2, … was accepted, where it was verified. Width is the mean number of slots verified
a step, the anchor counted. All three are the engine's own metrics, read before and after each run. The best
throughput of each concurrency is bold.</p>
<div class="scroll"><table>
<thead><tr><th>users</th><th>tokens/s/{report.device}</th><th>tokens/s/<br>user</th>
<th>first token, ms<br>median (p99)</th><th>between<br>tokens, ms</th><th>τ</th><th>width</th>
<th class="slots">survival by slot</th></tr></thead>
<tbody>
{"".join(rows)}
</tbody>
</table></div>"""


def _row(point: Point, best: float | None, colour: str) -> str:
    strong = ' class="best"' if best == point.throughput_per_device else ""
    spread = f'<span class="range">{point.lowest:.1f}{DASH}{point.highest:.1f}</span>' if point.rounds > 1 else ""
    tail = f' <span class="range">({_number(point.first_token_p99_ms, 0)})</span>'
    acceptance = point.acceptance
    cells = [
        f"<td>{point.concurrency}</td>",
        f"<td><span{strong}>{point.throughput_per_device:.1f}</span>{spread}</td>",
        f"<td>{_number(point.interactivity)}</td>",
        f"<td>{_number(point.first_token_ms, 0)}{tail}</td>",
        f"<td>{_number(point.inter_token_ms)}</td>",
        f"<td>{_number(acceptance.acceptance_length, 2)}</td>",
        f"<td>{_number(mean_width(acceptance), 1)}</td>",
        f'<td class="slots">{_bars(acceptance.survival, colour)}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>\n"


def _bars(survival: Sequence[float] | None, colour: str) -> str:
    """Little bars and the numbers."""
    if not survival:
        return UNKNOWN
    width = 7 * len(survival)
    bars = "".join(
        f'<rect x="{7 * slot}" y="{14 - 14 * share:.1f}" width="5" height="{max(0.8, 14 * share):.1f}"/>'
        for slot, share in enumerate(survival)
    )
    picture = f'<svg width="{width}" height="14" fill="{colour}" aria-hidden="true">{bars}</svg>'
    return picture + " ".join(f"{share:.2f}".lstrip("0") or "0" for share in survival)


def _how(report: Report) -> str:
    work, sweep, environment = report.workload, report.sweep, report.environment
    length = f"{work.output_tokens} tokens" if work.ignore_eos else f"at most {work.output_tokens} tokens"
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    policy = f", OMP_WAIT_POLICY={environment.omp_wait_policy}" if environment.omp_wait_policy else ""
    requests = ", ".join(f"{sweep.requests(users)} at {users}" for users in sweep.concurrencies)
    terms = [
        *report.served,
        ("Prompts", f"{work.dataset}" + (f" (sha256 {work.prompts_sha256[:12]})" if work.prompts_sha256 else "")),
        ("Answers", f"{length}, " + ("greedy" if work.temperature == 0 else f"temperature {work.temperature:g}")),
        ("Requests a run", f"{requests} users, streamed; {'after' if report.warm_up else 'without'} a warm-up run"),
        ("Order", report.order),
        ("Figures", "aiperf's; token counts are the servers' own"),
        ("Tokens/s/user", "median over a run's requests of 1 / inter-token latency, then over rounds"),
        ("Devices", f"{_counted(report.devices, report.device)}: throughput is divided by that"),
        ("Hardware", (environment.hardware or "not stated") + policy),
        ("Versions", f"Python {environment.python}, {versions}"),
        ("Commit", ", ".join(report.commits) or "unknown"),
        ("Date", f"{', '.join(report.dates)} (UTC)"),
    ]
    rows = "\n".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in terms)
    return f"<h2>How it was measured</h2>\n<dl>\n{rows}\n</dl>"


def _items(texts: Iterable[str]) -> str:
    return "\n".join(f"<li>{escape(text)}</li>" for text in texts)


def _number(value: float | None, digits: int = 1, *, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}{unit}"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
