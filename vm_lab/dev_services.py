"""The autoscaler and the conveyor of `make dev`, in the process of its region."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from control_plane.autoscaler.daemon import AutoscalerConfig
from control_plane.autoscaler.daemon import serve as serve_autoscaler
from conveyor.cli import run_service
from conveyor.config import ConveyorConfig

START_S = 20.0
"""Most seconds until both serve: on an idle host it takes half a second."""
_LOOK_S = 0.02


@asynccontextmanager
async def services(endpoint: str, folder: Path) -> AsyncIterator[Mapping[str, str]]:
    """Run both next to a control plane; yield the variables by which `twinectl` finds them.

    `folder` has their sockets and their stores.
    """
    autoscaler, conveyor = folder / "autoscaler.sock", folder / "conveyor.sock"
    scaling = AutoscalerConfig(
        endpoint=endpoint, state=str(folder / "autoscaler"), socket=str(autoscaler)
    )
    delivery = ConveyorConfig(
        endpoint=endpoint, state=str(folder / "conveyor"), socket=str(conveyor)
    )
    stopping = asyncio.Event()
    running = [
        asyncio.create_task(serve_autoscaler(scaling, stopping)),
        asyncio.create_task(run_service(delivery, stopping, lambda: None)),
    ]
    try:
        async with asyncio.timeout(START_S):
            while not (autoscaler.exists() and conveyor.exists()):
                for task in running:
                    if task.done():
                        await task
                await asyncio.sleep(_LOOK_S)
        yield {"TWINE_AUTOSCALER": f"unix:{autoscaler}", "TWINE_CONVEYOR": f"unix:{conveyor}"}
    finally:
        stopping.set()
        await asyncio.gather(*running, return_exceptions=True)
