"""Reads the autoscaler and the conveyor, which are programs with APIs of their own, for pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from control_plane.api.sizings import AUTOSCALER_ROUTES, SizingView, SizingViews
from conveyor.client import ConveyorClient
from conveyor.routes import IDENTITY
from conveyor.runs import PipelineView, PipelineViews, RunHistory
from wire import tls
from wire.client import WireClient, answer_as
from wire.errors import NotFound, TwineError, Unreachable

SERVICE_S = 3.0
"""Seconds that a page waits for a service."""
_SIZINGS = {route.name: route for route in AUTOSCALER_ROUTES}


class ServiceReader:
    """Asks each service with a connection of its own, so that either may restart or be absent."""

    def __init__(self, autoscaler: str = "", conveyor: str = "", credential: str = "") -> None:
        """Path of a socket, and a URL with the file of a user; empty: there is no such service."""
        self._autoscaler, self._conveyor, self._credential = autoscaler, conveyor, credential

    async def sizings(self) -> SizingViews:
        """Return all autoscaled jobs, or raise `Unreachable`."""
        async with self._autoscaler_client() as client:
            return answer_as(SizingViews, await client.call(_SIZINGS["list_sizings"]))

    async def sizing(self, job: str) -> SizingView:
        """Return one autoscaled job with its history; raises `NotFound`, `Unreachable`."""
        async with self._autoscaler_client() as client:
            return answer_as(SizingView, await client.call(_SIZINGS["get_sizing"], job=job))

    async def pipelines(self) -> PipelineViews:
        """Return all pipelines, or raise `Unreachable`."""
        async with self._conveyor_client() as client:
            return await client.list_pipelines()

    async def pipeline(self, name: str) -> PipelineView:
        """Return a pipeline; raises `NotFound`, `Unreachable`."""
        async with self._conveyor_client() as client:
            return await client.get_pipeline(name)

    async def runs(self, name: str, limit: int, run: int | None = None) -> RunHistory:
        """Return the newest runs, or one; raises `NotFound`, `Unreachable`."""
        async with self._conveyor_client() as client:
            return await client.history(name, limit, run)

    @asynccontextmanager
    async def _autoscaler_client(self) -> AsyncIterator[WireClient]:
        address = f"unix:{self._autoscaler}" if self._autoscaler else ""
        async with (
            _name_service_in_errors("autoscaler", address),
            WireClient(address, timeout_s=SERVICE_S) as client,
        ):
            yield client

    @asynccontextmanager
    async def _conveyor_client(self) -> AsyncIterator[ConveyorClient]:
        async with _name_service_in_errors("conveyor", self._conveyor):
            context = None
            if self._credential and not self._conveyor.startswith("unix:"):
                held = await asyncio.to_thread(tls.load, Path(self._credential))
                context = tls.client_context(held, IDENTITY)
            async with ConveyorClient(self._conveyor, context, timeout_s=SERVICE_S) as client:
                yield client


@asynccontextmanager
async def _name_service_in_errors(name: str, address: str) -> AsyncIterator[None]:
    """Raise `Unreachable` with the service's name and its setting for all failures of a call."""
    hint = f"start it (docs/web.md), or set `{name}` in the configuration of the control plane"
    if not address:
        raise Unreachable(f"this control plane has no address of the {name}", hint=hint)
    try:
        yield
    except NotFound:
        raise
    except TwineError as e:
        raise Unreachable(f"the {name} cannot be read: {e}", hint=hint) from e
