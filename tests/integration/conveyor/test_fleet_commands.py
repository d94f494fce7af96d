"""The commands of a fleet are processes that end with the call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from conveyor.config import FleetSettings
from conveyor.fleet_hosts import CommandHosts
from wire.errors import HostError


def runs(pid: int) -> bool:
    """Return whether a process runs; one that was killed may still have an entry."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.behaviour("BUG-CP154")
async def test_a_command_that_is_given_up_leaves_no_process(tmp_path: Path):
    """Formerly a process that an ended command had started stayed, one for each command."""
    pid_file = tmp_path / "pid"
    install = ["sh", "-c", f"sleep 300 & echo $! > {pid_file}"]
    fleet = FleetSettings(install=install, install_timeout_s=1.0)
    hosts = CommandHosts(None)  # type: ignore[arg-type]
    with pytest.raises(HostError, match="sh did not end within 1 s"):
        await hosts.install(fleet, "m1", "0.2.0")
    pid = int(pid_file.read_text())
    async with asyncio.timeout(5):  # the kernel ends it soon after the signal
        while runs(pid):
            await asyncio.sleep(0.01)
