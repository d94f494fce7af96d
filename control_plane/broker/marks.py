"""Writes the health checker's verdicts: marks many machines at a time as down or up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from control_plane.api.machine_commands import MachineCommand, MarkDown, MarkUp
from control_plane.api.machines import MachineState
from control_plane.broker.brokers import Brokers
from control_plane.runtime.runtime import Runtime

log = logging.getLogger(__name__)
TOGETHER = 32
"""Machines of one transaction. One turn of the loop calls all listeners for all of them, which
takes a few milliseconds for 32 machines."""

TRUE_S = 1.0
"""A failure whose write has not begun by then is dropped, and the health checker decides again."""


class Marks:
    """Writes whether machines are up. Machines that changed in the meantime are left out."""

    def __init__(self, brokers: Brokers, runtime: Runtime) -> None:
        self._brokers, self._runtime = brokers, runtime

    async def down(self, reasons: Mapping[str, str], still_holds: Callable[[str], bool]) -> None:
        """Record failures (RB3) of machines for which `still` holds when it is sent."""
        down = MachineState.DOWN
        for name in await self._send(
            list(reasons), lambda n: self._down(reasons[n]), still_holds, down
        ):
            log.warning("machine down", extra={"machine": name, "reason": reasons[name]})

    async def up(self, names: Sequence[str], still_holds: Callable[[str], bool]) -> None:
        """Record the end of failures of machines for which `still` holds when it is sent."""
        for name in await self._send(names, lambda _: MarkUp(), still_holds, MachineState.UP):
            log.info("machine up", extra={"machine": name})

    def _down(self, reason: str) -> MarkDown:
        return MarkDown(reason=reason, until=self._runtime.date() + TRUE_S)

    async def _send(
        self,
        machines: Sequence[str],
        command: Callable[[str], MachineCommand],
        still_holds: Callable[[str], bool],
        state: MachineState,
    ) -> list[str]:
        """Send a command to each machine; return those that are in the state afterwards."""
        table = self._brokers.table
        known = [n for n in machines if (r := table.find(n)) is not None and r.state is not state]
        for broker, its_machines in self._brokers.split(known).items():
            for first in range(0, len(its_machines), TOGETHER):
                names = [
                    name for name in its_machines[first : first + TOGETHER] if still_holds(name)
                ]
                revisions = {name: broker.table.revision(name) for name in names}
                await broker.carry_out({name: command(name) for name in names}, revisions)
        return [n for n in known if (r := table.find(n)) is not None and r.state is state]
