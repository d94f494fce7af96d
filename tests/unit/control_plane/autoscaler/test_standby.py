"""Standby processes of the services with their own store: autoscaler, Optimus, conveyor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from virtual_time import run

from control_plane.autoscaler import daemon as autoscaler_daemon
from control_plane.autoscaler.daemon import AutoscalerConfig
from control_plane.optimus import daemon as optimus_daemon
from control_plane.optimus.daemon import OptimusConfig
from control_plane.runtime.runtime import Runtime
from conveyor import cli
from conveyor.config import ConveyorConfig
from wire.errors import Busy

START_S = 1_800_000_000.0


class Owned:
    """A store that another process holds until a time of the loop."""

    def __init__(self, *_: Any) -> None:
        """Accept the arguments of a store."""

    async def __aenter__(self) -> Owned:
        if asyncio.get_running_loop().time() < 200.0:
            raise Busy("another process has the store")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Release nothing."""


class Opened(Exception):
    """The service has opened its store."""


async def autoscaler(stopping: asyncio.Event) -> None:
    await autoscaler_daemon.serve(AutoscalerConfig(), stopping)


async def optimus(stopping: asyncio.Event) -> None:
    await optimus_daemon.serve(OptimusConfig(entitlement="batch"), stopping)


async def conveyor(stopping: asyncio.Event) -> None:
    await cli.run_service(ConveyorConfig(), stopping, lambda: None)


def refuse(*_: object) -> None:
    raise Opened


@pytest.mark.behaviour("BUG-CP65")
@pytest.mark.parametrize("opening", [autoscaler, optimus, conveyor])
def test_a_standby_of_a_service_does_not_believe_a_step_of_its_clock(
    opening: Callable[[asyncio.Event], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Formerly the standby first read the date after it had the store, and believed any earlier
    step."""

    async def main() -> None:
        stepped_s = 0.0
        loop = asyncio.get_running_loop()
        runtime = Runtime(lambda: START_S + stepped_s + loop.time(), boot=loop.time)
        for module in (autoscaler_daemon, optimus_daemon, cli):
            monkeypatch.setattr(module, "Runtime", lambda: runtime)
            monkeypatch.setattr(module, "Anchor", refuse)
        monkeypatch.setattr(autoscaler_daemon, "SqliteStore", Owned)
        monkeypatch.setattr(optimus_daemon, "SqliteStore", Owned)
        monkeypatch.setattr(cli, "open_store", Owned)
        waiting = asyncio.ensure_future(opening(asyncio.Event()))
        await asyncio.sleep(100)
        stepped_s = 8 * 86_400.0
        with pytest.raises(Opened):
            await waiting
        assert loop.time() >= 200.0
        assert runtime.date() == pytest.approx(START_S + loop.time(), abs=1.0)

    run(main())
