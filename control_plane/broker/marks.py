"""Marks of machines that failed and came back, many at a time: the health checker's writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from control_plane.api.machines import (
    EventKind,
    MachineRecord,
    MachineState,
    UnavailabilityEvent,
)
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.unavailability import began, ended
from control_plane.runtime.runtime import Runtime

log = logging.getLogger(__name__)
TOGETHER = 32
"""Machines of one transaction. Everybody hears of all of them in one turn of the loop: of so many
in a few milliseconds."""


class Marks:
    """Writes whether machines are up. What changed meanwhile is left as it is."""

    def __init__(self, brokers: Brokers, runtime: Runtime) -> None:
        """Write nothing yet."""
        self._brokers, self._runtime = brokers, runtime

    async def down(self, reasons: Mapping[str, str], still: Callable[[str], bool]) -> None:
        """Record failures (RB3) of machines of which `still` holds when it is written."""

        def change(record: MachineRecord) -> MachineRecord:
            if record.state is MachineState.DOWN or not still(record.machine):
                return record
            now, reason = self._runtime.date(), reasons[record.machine]
            event = UnavailabilityEvent(
                event_id=f"{record.machine}-{EventKind.FAILURE}-{now:.3f}",
                kind=EventKind.FAILURE,
                reason=reason,
                start=now,
            )
            return replace(began(record, event), state=MachineState.DOWN)

        for name in await self._change(list(reasons), change, MachineState.DOWN):
            log.warning("machine down", extra={"machine": name, "reason": reasons[name]})

    async def up(self, names: Sequence[str], still: Callable[[str], bool]) -> None:
        """Record the end of failures of machines of which `still` holds when it is written."""

        def change(record: MachineRecord) -> MachineRecord:
            if record.state is MachineState.UP or not still(record.machine):
                return record
            record = ended(record, self._runtime.date(), (EventKind.FAILURE,))
            return replace(record, state=MachineState.UP)

        for name in await self._change(names, change, MachineState.UP):
            log.info("machine up", extra={"machine": name})

    async def _change(
        self,
        names: Sequence[str],
        change: Callable[[MachineRecord], MachineRecord],
        state: MachineState,
    ) -> list[str]:
        """Return those that are in a state now and were not."""
        table = self._brokers.table
        known = [n for n in names if (r := table.find(n)) is not None and r.state is not state]
        for broker, there in self._brokers.split(known).items():
            for first in range(0, len(there), TOGETHER):
                await broker.change_many(there[first : first + TOGETHER], change)
        return [n for n in known if (r := table.find(n)) is not None and r.state is state]
