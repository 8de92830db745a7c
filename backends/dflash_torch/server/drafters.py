"""Routes that tell what is served, and that replace the drafter of the running server where a setting allows it.

They follow SGLang's `/update_weights_from_disk` and `/server_info`, where its router reads the name of the model. Like
all of `/v1` they need the API key.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ..swapping import DrafterSwap, Swapped, trim
from .api import ApiError, Strict
from .routes import AsciiJSON, RequestHandler, unless_gone
from .worker import EngineWorker

UPDATE, INFO = "/update_drafter_from_disk", "/server_info"


class UpdateDrafter(Strict):
    """POST /update_drafter_from_disk."""

    model_path: str = Field("", max_length=4096, description="folder of a drafter, as the server sees it")
    back: bool = Field(False, description="take the drafter before the served one instead")

    @model_validator(mode="after")
    def _is_one(self) -> UpdateDrafter:
        if bool(self.model_path) == self.back:
            raise ValueError("model_path: give it, or back: true")
        return self


class DrafterUpdated(BaseModel):
    """The drafter that serves now."""

    success: bool = True  # and `message`: as SGLang's answer has them
    message: str
    revision: int
    drafter: str
    before: str
    load_seconds: float
    pause_seconds: float
    undrafted: int


class ServedDrafter(BaseModel):
    """A drafter since the server started; the last one serves."""

    revision: int
    drafter: str
    steps: float  # Decoding steps while it served, those without a draft included
    tokens_per_step: float | None
    acceptance_length: float | None


class ServerInfo(BaseModel):
    """GET /server_info; the drafters only where they can be replaced."""

    served_model_name: str
    drafters: list[ServedDrafter] | None = None
    block_size: int | None = None
    dtype: str | None = None


class Drafters:
    """The exchange of drafters, one at a time.

    Args:
        folder: drafters below it may be loaded.
    """

    def __init__(self, handler: RequestHandler, folder: Path) -> None:
        self.handler, self.folder = handler, folder
        self._swap: DrafterSwap | None = None
        self._one_at_a_time = asyncio.Lock()

    async def update(self, asked: UpdateDrafter) -> DrafterUpdated:
        """Loads a drafter beside the served one and puts it in place between two steps.

        Raises:
            ApiError, UserError: the server is not ready, another exchange runs, or the drafter cannot be served.
        """
        worker = self._ready()
        if self._one_at_a_time.locked():
            raise ApiError(409, "another drafter is being loaded; ask again later", code="busy")
        async with self._one_at_a_time:
            swap = self._of(worker)
            loaded = await run_in_threadpool(swap.load, asked.model_path or None)
            done = await asyncio.wrap_future(worker.call(lambda: swap.put(loaded)))
            await run_in_threadpool(trim)
        return DrafterUpdated(message=_told(done), **vars(done))

    def info(self) -> ServerInfo:
        """The drafters since the start, and their acceptance.

        Raises:
            ApiError: the server is not ready.
        """
        worker = self._ready()
        swap, now, engine = self._of(worker), worker.snapshot(), worker.engine
        assert engine is not None
        counts = [*now.earlier, *([now.statistics] if now.statistics else [])]
        served = [
            ServedDrafter(
                revision=revision,
                drafter=name,
                steps=one.steps or 0,
                tokens_per_step=one.tokens_per_step,
                acceptance_length=one.acceptance_length,
            )
            for revision, (name, one) in enumerate(zip(swap.names, counts, strict=False))
        ]
        return ServerInfo(
            served_model_name=worker.model, drafters=served, block_size=engine.block_size, dtype=engine.dtype
        )

    def _of(self, worker: EngineWorker) -> DrafterSwap:
        if self._swap is None:
            assert worker.engine is not None
            self._swap = DrafterSwap(worker.engine, self.folder)
        return self._swap

    def _ready(self) -> EngineWorker:
        if self.handler.status != "ready":
            raise ApiError(503, f"the server is not ready: {self.handler.status}", code="not_ready")
        return self.handler.worker


def _told(done: Swapped) -> str:
    return f"revision {done.revision} serves: {done.drafter}; {done.undrafted} answers in flight go on without drafts"


def add_drafter_routes(app: FastAPI, handler: RequestHandler) -> None:
    """Adds `/server_info`, and the exchange of drafters where the settings name a folder of them."""
    if handler.settings.swap_from is None:

        @app.get(INFO)
        async def served() -> ServerInfo:
            return ServerInfo(served_model_name=handler.model)

        return
    drafters = Drafters(handler, handler.settings.swap_from)

    @app.post(UPDATE, responses={200: {"model": DrafterUpdated}})
    async def update_drafter_from_disk(body: UpdateDrafter, request: Request) -> Response:
        """Replaces the drafter; a client that goes before it is loaded leaves the served one in place."""
        try:
            done = await unless_gone(request.receive, drafters.update(body))
        except ClientDisconnect:
            return Response(status_code=499)
        return AsciiJSON(done.model_dump())

    @app.get(INFO)
    async def server_info() -> ServerInfo:
        return drafters.info()
