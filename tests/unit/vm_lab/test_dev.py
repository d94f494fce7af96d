"""`make dev`: a region to try out, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from vm_lab import fleet


@asynccontextmanager
async def no_services(*_: object) -> AsyncIterator[dict[str, str]]:
    yield {}


@pytest.mark.behaviour("BUG-UX73")
def test_it_ends_with_its_control_plane(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Formerly `make dev` continued without one, and every command reported that there is no
    socket."""

    async def nothing(*_: object) -> None:
        return None

    @asynccontextmanager
    async def a_fleet(_: int) -> AsyncIterator[SimpleNamespace]:
        plane = asyncio.create_task(nothing())
        yield SimpleNamespace(entitle=nothing, deploy=nothing, endpoint="unix:/x", plane=plane)

    async def main() -> None:
        async with asyncio.timeout(60):
            await fleet._run_dev_region(2)

    monkeypatch.setattr(fleet, "fleet", a_fleet)
    monkeypatch.setattr(fleet, "services", no_services)
    asyncio.run(main())
    assert capsys.readouterr().err == "error: the control plane ended\n"


@pytest.mark.behaviour("BUG-UX88")
def test_sigterm_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formerly only Ctrl-C removed /tmp/twine-fleet-*."""

    async def nothing(*_: object) -> None:
        return None

    async def end_region(*_: object) -> None:
        assert list(tmp_path.iterdir()) != []
        signal.raise_signal(signal.SIGTERM)

    @asynccontextmanager
    async def a_fleet(_: int) -> AsyncIterator[SimpleNamespace]:
        with TemporaryDirectory(dir=tmp_path):
            plane = asyncio.create_task(asyncio.Event().wait())
            yield SimpleNamespace(entitle=nothing, deploy=end_region, endpoint="", plane=plane)

    def ends_the_process(*_: object) -> None:
        raise AssertionError("SIGTERM would have ended the process at once")

    monkeypatch.setattr(fleet, "fleet", a_fleet)
    monkeypatch.setattr(fleet, "services", no_services)
    before = signal.signal(signal.SIGTERM, ends_the_process)
    try:
        found = CliRunner().invoke(fleet.dev_command, ["--agents", "2"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (found.exception, found.exit_code) == (None, 0)
    assert list(tmp_path.iterdir()) == []
