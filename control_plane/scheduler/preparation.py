"""Takes free machines in advance, so that they verify a profile before a task moves there (HP15).

A move for a better spread can wait: the task serves where it is until there is a machine where it
can start at once. If no task moves to the taken machine, it is given back like any other.
"""

from __future__ import annotations

import logging

from control_plane.agents.region import Region
from control_plane.allocator.core.spread import Target
from control_plane.broker.core.assignment import FREE
from control_plane.scheduler.ports import Places
from wire.errors import TwineError

log = logging.getLogger(__name__)
_KEPT_S = 900.0
"""How long a machine is kept empty for a task: a profile switch with a boot takes minutes."""


class PreparedMachines:
    """Takes free machines in advance for tasks that will move there."""

    def __init__(self, region: Region, places: Places) -> None:
        self._broker, self._observations = region.broker, region.observations
        self._runtime, self._places = region.runtime, places
        self._until: dict[str, float] = {}
        """Taken machine → until when it is kept (time of the loop)."""
        self._taking: set[str] = set()

    def is_proved(self, target: Target) -> bool:
        """Return whether a machine is ready, so that a task can start there at once."""
        record = self._broker.table.find(target.machine)
        return record is not None and not target.is_taken and self._observations.ready(record)

    def keeps(self, machine: str) -> bool:
        """Return whether an empty machine stays in its pool for a task that will move there."""
        until = self._until.get(machine)
        if until is not None and until <= self._runtime.now():
            del self._until[machine]
            return False
        return until is not None

    async def take(self, machine: str, pool: str) -> None:
        """Take a free machine for a pool, if its quota allows and no other pool takes it."""
        record = self._broker.table.find(machine)
        if record is None or record.entitlement != FREE or machine in self._taking:
            return
        self._taking.add(machine)
        try:
            self._until[machine] = self._runtime.now() + _KEPT_S
            if not await self._places.take(machine, pool):
                self._until.pop(machine, None)
        except TwineError as e:
            self._until.pop(machine, None)
            fields = {"machine": machine, "reason": str(e)}
            log.info("machine could not be prepared in advance", extra=fields)
        except Exception:  # else it would end the rounds of all jobs
            self._until.pop(machine, None)
            log.exception("machine could not be prepared in advance", extra={"machine": machine})
        finally:
            self._taking.discard(machine)
