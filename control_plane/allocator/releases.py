"""Blocks machines that are being given to another pool, until the store confirms the write.

The decision to give a machine back comes first, the store's confirmation later. If the outcome of
the write is unknown, the store may still make it seconds later. Then the machine stays blocked
until its broker has read it again.
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
"""Errors that show that nothing was written, or that a newer record was read."""


class Releases:
    """The machines that are being given back."""

    def __init__(
        self, broker: KnownMachines, index: RegionIndex, refresh: Callable[[Iterable[str]], None]
    ) -> None:
        """`refresh(machines)` updates machines in the index."""
        self._broker, self._index, self._refresh = broker, index, refresh
        self._under_way: dict[str, None] = {}
        self._in_doubt: dict[str, None] = {}

    def __contains__(self, machine: str) -> bool:
        """Return whether a machine is blocked here, whatever its agent reports."""
        return machine in self._under_way or machine in self._in_doubt

    async def give_back(self, machine: Machine) -> None:
        """Give a machine to the free pool; from now on no task is placed there."""
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

    async def resolve_outcomes(self) -> None:
        """Read machines again for which the outcome of a write is unknown."""
        for name in list(self._in_doubt):
            try:
                await self._broker.resolve_outcome(name)
            except NotFound:
                pass  # the machine left the region
            except TwineError as e:
                log.info("machine ownership is unknown", extra={"machine": name, "reason": str(e)})
                continue
            self._in_doubt.pop(name, None)
            self._refresh([name])
