"""`make dev`: a region to play with, until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from vm_lab import fleet


def test_it_ends_with_its_control_plane(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """BUG-UX73: it stayed without one, and every command said that there is no socket."""

    async def nothing(*_: object) -> None:
        return None

    @asynccontextmanager
    async def a_fleet(_: int) -> AsyncIterator[SimpleNamespace]:
        plane = asyncio.create_task(nothing())
        yield SimpleNamespace(entitle=nothing, deploy=nothing, endpoint="unix:/x", plane=plane)

    async def main() -> None:
        async with asyncio.timeout(60):
            await fleet._stay(2)

    monkeypatch.setattr(fleet, "fleet", a_fleet)
    asyncio.run(main())
    assert capsys.readouterr().err == "error: the control plane ended\n"
