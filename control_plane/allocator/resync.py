"""Makes up for changes of machines that an allocator did not hear of.

It often looks at what brokers changed, and rarely compares everything. Both go on in turns, so that
the other work of the loop does not wait for a large region.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from control_plane.agents.ports import KnownMachines
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.runtime.runtime import Runtime
from control_plane.store import Compacted

STEP = 1_000
"""Machines that are looked at between two pauses of a comparison of everything."""
TURN = 100
"""Machines that are looked at before others may have their turn: some 3 ms."""
_RESYNC_S = 600.0
"""Least time between two comparisons of everything, which find nothing unless there is a
mistake: of 50,000 machines one takes about a second of computing."""
_RESYNC_PAUSE_S = 0.5
"""After each of these steps, so that keeping up costs little of a large region's time."""


class Resync:
    """Has an allocator read machines again; one of each allocator."""

    def __init__(
        self,
        broker: KnownMachines,
        index: RegionIndex,
        refresh: Callable[[Iterable[str]], None],
        runtime: Runtime,
    ) -> None:
        """`refresh(machines)` has the index read them again."""
        self._broker, self._index = broker, index
        self._refresh, self._runtime = refresh, runtime
        self._seen: dict[str, int] = {}
        """Data center → the revision of its broker up to which nothing can be missed."""

    async def run(self, every_s: float) -> None:
        """Look at what changed every so often, and at everything now and then."""
        whole_at = self._runtime.now() + _RESYNC_S
        while True:
            await self._runtime.sleep(every_s)
            await self._look_at_changes()
            if self._runtime.now() >= whole_at:
                await self.compare(_RESYNC_PAUSE_S)
                whole_at = self._runtime.now() + _RESYNC_S

    async def _look_at_changes(self) -> None:
        """Take in what brokers changed since this was done last, heard of or not."""
        for datacenter, broker in list(self._broker.by_datacenter.items()):
            seen, self._seen[datacenter] = self._seen.get(datacenter), broker.table.latest
            try:
                names = dict.fromkeys(
                    name for name, *_ in broker.table.changes(seen or broker.table.latest)
                )
            except Compacted:
                names = dict.fromkeys(broker.table)
            await self.in_turns(list(names))

    async def compare(self, pause_s: float = 0.0) -> None:
        """Compare the whole index with the brokers, whatever was heard or missed (AL2)."""
        await self.look_at_brokers(pause_s)
        known = list(self._index.machines)
        for start in range(0, len(known), STEP):
            part = known[start : start + STEP]
            await self.in_turns([n for n in part if self._broker.table.find(n) is None])
            await asyncio.sleep(pause_s)

    async def look_at_brokers(self, pause_s: float = 0.0) -> None:
        """Take in all machines of all brokers."""
        for broker in list(self._broker.by_datacenter.values()):
            names = list(broker.table)
            for start in range(0, len(names), STEP):
                await self.in_turns(names[start : start + STEP])
                await asyncio.sleep(pause_s)

    async def in_turns(self, machines: Sequence[str]) -> None:
        """Take in machines; others may have their turn after each hundred."""
        for start in range(0, len(machines), TURN):
            self._refresh(machines[start : start + TURN])
            await self._runtime.checkpoint()
