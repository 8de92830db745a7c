"""An API key closes every route of SGLang's own server but health and metrics, web sockets included."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from dflash_sglang.plugin import install
from tests.support.server_routes import open_to, routes_of

OPEN = {"/health", "/health_generate", "/ready"}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's application with the middleware that it adds for `--api-key`, our plug-in loaded; there is no engine."""
    monkeypatch.setenv("SGLANG_PLATFORM", "torch_cpu")
    registry = import_module("sglang.srt.plugins.hook_registry").HookRegistry
    install()
    registry.apply_hooks()
    app = import_module("sglang.srt.entrypoints.http_server").app
    before = list(app.user_middleware)
    import_module("sglang.srt.utils.auth").add_api_key_middleware(app, api_key="secret", admin_api_key=None)
    app.middleware_stack = None
    yield app
    app.user_middleware, app.middleware_stack = before, None


def test_a_key_closes_every_route_but_health_and_metrics(app: Any) -> None:
    every = set(routes_of(app.routes))
    assert {("POST", "/invocations"), ("POST", "/generate"), ("WEBSOCKET", "/v1/realtime")} <= every
    assert {path for _, path in open_to(app, None)} == OPEN
    assert {path for _, path in open_to(app, "wrong")} == OPEN
    assert open_to(app, "secret") == every
