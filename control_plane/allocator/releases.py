"""Machines on their way to the free pool: no task starts there until the store confirms it.

The decision to give a machine back comes first, the store's confirmation later. The outcome of a
write may also be unknown, and the write may happen seconds later. Then the machine is still in its
pool for us, and in no pool for the store, until the broker has read it again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from control_plane.agents.ports import KnownMachines
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.region_index import RegionIndex
from wire.errors import Busy, Conflict, NotFound, TwineError

log = logging.getLogger(__name__)
_KNOWN = (Conflict, NotFound, Busy)
"""Errors that prove that nothing was written, or that a newer record was read."""


class Releases:
    """Which machines are being given back; an actor that only the allocator has."""

    def __init__(
        self, broker: KnownMachines, index: RegionIndex, refresh: Callable[[Iterable[str]], None]
    ) -> None:
        """`refresh(machines)` has the index read them again."""
        self._broker, self._index, self._refresh = broker, index, refresh
        self._under_way: dict[str, None] = {}
        self._in_doubt: dict[str, None] = {}

    def __contains__(self, machine: str) -> bool:
        """Return whether nothing may be placed on a machine, whatever is reported of it."""
        return machine in self._under_way or machine in self._in_doubt

    async def give_back(self, machine: Machine) -> None:
        """Give a machine to the free pool; no task is placed there from this moment on."""
        name = machine.name

        async def release() -> None:
            await self._broker.release(name, revision=self._broker.table.revision(name))

        await self.pass_on(name, release)

    async def pass_on(self, name: str, write: Callable[[], Awaitable[object]]) -> None:
        """Run a write that gives an empty machine to another pool; block it meanwhile."""
        if name in self._under_way:
            return
        self._under_way[name] = None
        self._index.block(name, "is being given back")
        try:
            await write()
        except _KNOWN:
            self._in_doubt.pop(name, None)
            raise
        except BaseException:
            self._in_doubt[name] = None
            raise
        else:
            self._in_doubt.pop(name, None)
        finally:
            del self._under_way[name]
            self._refresh([name])

    async def find_out(self) -> None:
        """Read machines again for which the outcome of a write is unknown."""
        for name in list(self._in_doubt):
            try:
                await self._broker.find_out(name)
            except NotFound:
                pass  # it left the region
            except TwineError as e:
                log.info("machine ownership is unknown", extra={"machine": name, "reason": str(e)})
                continue
            self._in_doubt.pop(name, None)
            self._refresh([name])
