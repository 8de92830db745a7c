"""The ASGI application: routes, errors and the door, and the worker's start and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.types import ASGIApp

from .door import Door
from .errors import FAULTS, install
from .routes import add_routes
from .service import Service


def create_app(service: Service) -> FastAPI:
    """The application without its door, for the OpenAPI document."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.launch(asyncio.get_running_loop())
        yield
        service.worker.stop()

    app = FastAPI(
        title="dflash-serve",
        version=version("dflash-serve"),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=FAULTS,
    )
    install(app)
    add_routes(app, service)
    return app


def guarded(service: Service) -> ASGIApp:
    """The application as it is served."""
    return Door(create_app(service), service.settings, service.keys)
