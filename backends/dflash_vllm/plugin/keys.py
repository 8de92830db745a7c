"""Middleware of vLLM's server (`--middleware`): an API key closes every route but the probes and the metrics.

vLLM's own check covers /v1, /v2, /inference and /cohere (entrypoints/serve/middleware/authenticate.py); /invocations,
which answers the same requests, /tokenize and the rest are open without this class.
"""

from __future__ import annotations

import os

from dflash_serve.common.key_guard import ASGIApp, KeyGuard, Receive, Scope, Send
from dflash_vllm.facts import FACTS

OPEN_PATHS = {FACTS.probes.started, FACTS.probes.live, FACTS.probes.ready, FACTS.metrics.path, f"{FACTS.metrics.path}/"}


class EveryRoute:
    """Guards all routes by the keys that vLLM itself was given: `--api-key`, else VLLM_API_KEY."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._guard: KeyGuard | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Asks for a key; vLLM's arguments are known from the first call on."""
        if self._guard is None:
            keys = scope["app"].state.args.api_key or [os.environ.get("VLLM_API_KEY", "")]
            self._guard = KeyGuard(self.app, [key for key in keys if key], OPEN_PATHS, preflights=True)
        await self._guard(scope, receive, send)
