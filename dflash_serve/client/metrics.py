"""Acceptance as a server's own metrics tell it. Which engine it is, the installed backends say."""

from __future__ import annotations

from dflash_serve.backend import backend, installed
from dflash_serve.common.http import Connection
from dflash_serve.common.prometheus import Scrape
from dflash_serve.speculation.statistics import AcceptanceStatistics


def read_acceptance(url: str, *, api_key: str | None = None, timeout: float = 30.0) -> AcceptanceStatistics:
    """Asks a server for its metrics, and every installed backend whether they are its engine's.

    Args:
        url: of the server, with or without `/v1`.
        api_key: sent as a bearer token.
        timeout: seconds.

    Returns:
        A reading; all unknown where the server has no metrics (SGLang without --enable-metrics).

    Raises:
        UserError: no server answers, or its metrics cannot be read.
    """
    connection = Connection(url, api_key, timeout)
    return recognised(Scrape(connection.text, connection.base))


def recognised(scrape: Scrape) -> AcceptanceStatistics:
    """What the first backend that knows these metrics reads from them; unknown where none does."""
    for name in installed():
        found = backend(name).facts.read_acceptance(scrape)
        if found is not None:
            return found
    return AcceptanceStatistics.unknown()
