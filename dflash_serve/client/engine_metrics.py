"""Acceptance as a server's own metrics tell it, under one definition for all engines."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from dflash_serve.client.acceptance_reading import AcceptanceReading
from dflash_serve.client.engine_formats import read_iterations, read_text
from dflash_serve.errors import UserError

__all__ = ["AcceptanceReading", "read_acceptance"]


def read_acceptance(url: str, *, api_key: str | None = None, timeout: float = 30.0) -> AcceptanceReading:
    """Asks a server for its metrics and tells engines apart by what they hold.

    Args:
        url: of the server, with or without `/v1`.
        api_key: sent as a bearer token.
        timeout: seconds.

    Returns:
        A reading; all unknown where the server has no metrics (SGLang without --enable-metrics).

    Raises:
        UserError: no server answers, or its metrics cannot be read.
    """
    base = url.rstrip("/").removesuffix("/v1")
    text = _get(f"{base}/metrics", api_key, timeout)
    iterations = _iterations(text) if text is not None else None
    if iterations is None:
        return read_text(text or "", where=f"{base}/metrics")
    # TensorRT-LLM: its Prometheus text knows slots where perf metrics are on; otherwise the iterations know more.
    other = read_text(_get(f"{base}/prometheus/metrics", api_key, timeout) or "", where=f"{base}/prometheus/metrics")
    return other if other.steps is not None else read_iterations(iterations, other)


def _iterations(text: str) -> list[Any] | None:
    """TensorRT-LLM's list of iterations; None where the text is something else."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _get(url: str, api_key: str | None, timeout: float) -> str | None:
    """The text at a URL; None where the server has no such page."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=timeout) as response:  # noqa: S310
            return bytes(response.read()).decode("utf-8", "replace")
    except HTTPError as error:
        if error.code in (404, 405, 501):
            return None
        do = "give its API key" if error.code in (401, 403) else ""
        raise UserError(f"answers {error.code}", where=url, do=do) from None
    except (URLError, OSError, ValueError) as error:
        raise UserError(f"no server answers ({getattr(error, 'reason', error)})", where=url) from None
