"""Loops over all machines yield to other coroutines often."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from virtual_time import run
from world import World, a_job, a_region

from control_plane.api.inventory import MachineScope
from control_plane.api.machines import MachineRecord
from control_plane.broker.region_table import RegionTable
from control_plane.broker.service import MachineQuery
from control_plane.roles import ControlPlane
from control_plane.runtime.table import Table

pytestmark = pytest.mark.behaviour("FE1")

LISTED = 10
MACHINES, MOST = 300, 50 + 2 * LISTED
"""Number of machines, and the most that may be processed between two yields to other coroutines."""
QUERIES: dict[str, Callable[[ControlPlane], Awaitable[object]]] = {
    "map": lambda cp: cp.inventory.region_map("state"),
    "load": lambda cp: cp.inventory.region_map("load"),
    "list": lambda cp: cp.inventory.page(MachineQuery(MachineScope(), "none"), "", LISTED),
    "sorted": lambda cp: cp.inventory.page(MachineQuery(MachineScope(), "", "tasks"), "", LISTED),
    "capacity": lambda cp: cp.capacity.report(),
}


@pytest.mark.parametrize("query", QUERIES)
def test_others_have_their_turn_every_few_machines(
    query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps = [0]

    def counted(kind: type) -> None:
        found: Callable[..., MachineRecord | None] = kind.find

        def find(self: object, name: str) -> MachineRecord | None:
            gaps[-1] += name.startswith("m")
            return found(self, name)

        monkeypatch.setattr(kind, "find", find)

    async def main() -> None:
        world = World(a_region(MACHINES))
        async with world.running():
            await world.deployed(a_job(2))
            checkpoint = world.cp._runtime.checkpoint

            async def noted(*, answers: bool = False) -> None:
                gaps.append(0)
                await checkpoint(answers=answers)

            monkeypatch.setattr(world.cp._runtime, "checkpoint", noted)
            counted(RegionTable if query in ("list", "sorted", "capacity") else Table)
            await QUERIES[query](world.cp)
            seen = list(gaps)
        assert sum(seen) >= MACHINES
        assert max(seen) <= MOST

    run(main())
