"""Finds changes of machines whose events an allocator missed.

It reads the brokers' latest changes often, and compares all machines rarely. Both run in short
steps, so that other work of the loop does not wait for a large region.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from control_plane.agents.ports import KnownMachines
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.runtime.runtime import Runtime
from control_plane.store import Compacted

STEP = 1_000
"""Machines that are compared between two pauses of a full comparison."""
TURN = 100
"""Machines that are updated between two checkpoints of the loop: some 3 ms."""
_RESYNC_S = 600.0
"""Least time between two full comparisons. These find changes only after a mistake, and compute for
about a second with 50,000 machines."""
_RESYNC_PAUSE_S = 0.5
"""Pause after each step of a full comparison, so that it uses a small share of the CPU."""


class Resync:
    """Updates machines in the index of one allocator."""

    def __init__(
        self,
        broker: KnownMachines,
        index: RegionIndex,
        refresh: Callable[[Iterable[str]], None],
        runtime: Runtime,
    ) -> None:
        """`refresh(machines)` updates machines in the index."""
        self._broker, self._index = broker, index
        self._refresh, self._runtime = refresh, runtime
        self._seen: dict[str, int] = {}
        """Data center → the revision of its broker up to which all changes are known."""

    async def run(self, every_s: float) -> None:
        """Read the latest changes every `every_s` seconds, and compare everything rarely."""
        whole_at = self._runtime.now() + _RESYNC_S
        while True:
            await self._runtime.sleep(every_s)
            await self._read_changes()
            if self._runtime.now() >= whole_at:
                await self.compare(_RESYNC_PAUSE_S)
                whole_at = self._runtime.now() + _RESYNC_S

    async def _read_changes(self) -> None:
        """Update the machines that brokers have changed since the last call."""
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
        """Compare the whole index with the brokers' records (AL2)."""
        await self.read_brokers(pause_s)
        known = list(self._index.machines)
        for start in range(0, len(known), STEP):
            part = known[start : start + STEP]
            await self.in_turns([n for n in part if self._broker.table.find(n) is None])
            await asyncio.sleep(pause_s)

    async def read_brokers(self, pause_s: float = 0.0) -> None:
        """Update all machines of all brokers."""
        for broker in list(self._broker.by_datacenter.values()):
            names = list(broker.table)
            for start in range(0, len(names), STEP):
                await self.in_turns(names[start : start + STEP])
                await asyncio.sleep(pause_s)

    async def in_turns(self, machines: Sequence[str]) -> None:
        """Update machines, with a checkpoint after each hundred."""
        for start in range(0, len(machines), TURN):
            self._refresh(machines[start : start + TURN])
            await self._runtime.checkpoint()
