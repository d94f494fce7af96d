"""Hosts of a fleet are probed several at a time, in their order, and never all at once."""

from __future__ import annotations

import asyncio

import pytest

from conveyor import fleet_hosts
from conveyor.config import FleetSettings
from conveyor.fleet_hosts import PROBES, CommandHosts
from wire.errors import HostError

pytestmark = pytest.mark.behaviour("CV3", "BUG-CP120")


async def test_probes_run_side_by_side_up_to_their_limit(monkeypatch: pytest.MonkeyPatch):
    """A fleet of 1,000 silent hosts took 30 s for each of them, in each round."""
    running, most = set[str](), 0

    async def run(command: list[str], timeout_s: float) -> str:
        nonlocal most
        running.add(command[-1])
        most = max(most, len(running))
        for _ in range(5):
            await asyncio.sleep(0)
        running.discard(command[-1])
        if command[-1] == "h007":
            raise HostError("probe ended with 255: no route")
        return "0.2.0\n"

    monkeypatch.setattr(fleet_hosts, "_run", run)
    names = [f"h{number:03}" for number in range(3 * PROBES)]
    fleet = FleetSettings(install=["x"], hosts=names, probe=["ssh", "$host"])
    hosts = CommandHosts(None)  # type: ignore[arg-type]
    both = await asyncio.gather(hosts.observe(fleet), hosts.observe(fleet))
    assert most == PROBES
    for seen in both:
        assert [one.name for one in seen] == names
        assert [one.name for one in seen if not one.is_healthy] == ["h007"]
