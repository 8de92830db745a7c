"""`dflash-serve top`: live figures of a running server, of any engine, in the terminal."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflash_serve.answers.prompts import read_prompt_set
from dflash_serve.cli import options
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import LiveFigures, MetricsSource
from dflash_serve.client.peers import lagging
from dflash_serve.common.extras import need
from dflash_serve.common.http import read_api_key
from dflash_serve.common.reports import number
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams

Url = Annotated[str, typer.Option(help="Address of a running server, of any engine.")]
Interval = Annotated[float, typer.Option(help="Seconds between two looks at its metrics.", min=0.1)]
PROBE = "Where the server shows no metrics: ask one of the bundled prompts each interval, for its answer's acceptance."
Probe = Annotated[bool, typer.Option("--probe", help=PROBE)]
Once = Annotated[bool, typer.Option("--once", help="Look for one interval, print and stop.")]
BARS = "▁▂▃▄▅▆▇█"
REMEMBERED = 40  # Intervals of the small curves
TOKENS = 64  # Longest answer to a probe, as in `doctor`
BAR = 24  # Characters of a full bar


def top(
    url: Url,
    metrics_url: options.MetricsUrl = None,
    interval: Interval = 2.0,
    once: Once = False,
    probe: Probe = False,
    api_key_file: options.ApiKeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Watch a server: acceptance length, survival by slot, widths, tokens/s, users and queue. Ctrl-C ends it."""
    need("prove", "httpx", "prometheus_client")
    key = read_api_key(api_key_file)
    source = MetricsSource(url, tuple(metrics_url or ()), key)
    if probe and metrics_url:
        raise UserError("the workers' metrics tell it", where="--probe", do="leave it out, or --metrics-url")
    endpoint = Endpoint(source.url, api_key=key)
    looks = _probes(endpoint, interval, once=once) if probe else _looks(source, interval, once=once)
    console = Console(markup=False, emoji=False)
    try:
        if as_json:
            seen = deque[LiveFigures](maxlen=REMEMBERED)
            for now in looks:
                if isinstance(now, str):
                    typer.echo(json.dumps({"error": now}))
                    continue
                seen.append(now)
                typer.echo(json.dumps({**now.as_json(), "behind": [str(one) for one in lagging(seen)]}))
        elif once or not console.is_terminal:
            for page in _pages(url, looks):
                console.print(page)
        else:
            waiting = f"{url}: the first figures come after one interval; Ctrl-C ends this"
            with Live(waiting, console=console, screen=True, auto_refresh=False) as live:
                for page in _pages(url, looks):
                    live.update(page, refresh=True)
    except KeyboardInterrupt:  # how one leaves it
        raise typer.Exit from None


def _looks(source: MetricsSource, interval: float, *, once: bool) -> Iterator[LiveFigures | str]:
    """Figures of interval after interval, or of one; a text where the server did not answer.

    Raises:
        UserError: nothing answers at first, or what answers has no metrics of an engine that we know.
    """
    before = source.require()
    while True:
        time.sleep(interval)
        try:
            now = source.read()
            yield LiveFigures.between(before, now)
            before = now
        except UserError as error:
            if once:
                raise
            yield str(error)
        if once:
            break


def _probes(endpoint: Endpoint, interval: float, *, once: bool) -> Iterator[LiveFigures | str]:
    """Figures of an own request in interval after interval; a text where it was not answered.

    Raises:
        UserError: nothing answers at first, or answers do not tell their drafted tokens.
    """
    answered = False
    for prompt in cycle(read_prompt_set(None)):
        begun = time.monotonic()
        try:
            reply = endpoint.complete(prompt, SamplingParams(temperature=0, max_tokens=TOKENS))
            if reply.acceptance is None:
                do = "give --metrics-url for each worker behind it"
                raise UserError("its answers' usage has no accepted_prediction_tokens", where=endpoint.base, do=do)
            answered = True
            yield LiveFigures.of_answer(reply.acceptance, reply.completion_tokens, time.monotonic() - begun)
        except UserError as error:
            if once or not answered:
                raise
            yield str(error)
        if once:
            break
        time.sleep(max(0.0, begun + interval - time.monotonic()))


def _pages(url: str, looks: Iterable[LiveFigures | str]) -> Iterator[Table | str]:
    seen = deque[LiveFigures](maxlen=REMEMBERED)
    for now in looks:
        if isinstance(now, str):
            yield now
            continue
        seen.append(now)
        yield _page(url, seen)


def _page(url: str, seen: Sequence[LiveFigures]) -> Table:
    page, now = Table.grid(padding=(0, 2)), seen[-1]
    rates, lengths = _curve(one.tokens_per_second for one in seen), _curve(one.acceptance_length for one in seen)
    page.add_row(Text(now.engine or "", style="bold"), url)
    page.add_row("tokens/s", f"{number(now.tokens_per_second, 1):>9}  {rates}")
    page.add_row("  a user", f"{number(now.tokens_per_second_per_user, 1):>9}")
    page.add_row("users", f"{number(now.running, 0):>9}  and {number(now.queued, 0)} in the queue")
    share = None if now.kv_cache_usage is None else 100 * now.kv_cache_usage
    page.add_row("K/V cache", f"{number(share, 1):>9}" + ("" if share is None else " %"))
    page.add_row("acceptance τ", f"{number(now.acceptance_length, 2):>9}  {lengths}")
    page.add_row("tokens/step", f"{number(now.tokens_per_step, 2):>9}")
    page.add_row("mean width", f"{number(now.mean_width, 2):>9}")
    page.add_row("headroom", f"{number(now.headroom, 2):>9}  {_curve(one.headroom for one in seen)}")
    if now.trimmed:
        page.add_row("survival", "trimmed blocks: the engine does not report which slots it verified")
    for slot, survival in enumerate(now.survival, start=1):
        page.add_row("survival" if slot == 1 else "", f"{f'slot {slot}':>9}  {_bar(survival)} {number(survival, 2)}")
    for n, (width, part) in enumerate((now.widths or {}).items()):
        page.add_row("widths" if n == 0 else "", f"{f'{width}':>9}  {_bar(part)} {part:.0%} of steps")
    for n, (worker, one) in enumerate((now.workers or {}).items()):
        figures = f"{number(one.acceptance_length, 2):>9}  {number(one.tokens_per_second, 1):>9} tokens/s"
        page.add_row("τ by worker" if n == 0 else "", f"{figures}  {number(one.running, 0):>4} users  {worker}")
    for laggard in lagging(seen):
        page.add_row("", Text(str(laggard), style="bold"))
    return page


def _bar(share: float | None) -> str:
    return ("█" * round(BAR * (share or 0))).ljust(BAR, "·")


def _curve(values: Iterable[float | None]) -> str:
    """One character for each value, from 0 to the highest; a gap for an unknown value."""
    known = list(values)
    most = max((value for value in known if value is not None), default=0) or 1
    heights = (None if value is None else round(value / most * (len(BARS) - 1)) for value in known)
    return "".join(" " if height is None else BARS[height] for height in heights)
