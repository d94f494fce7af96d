"""Work that operators plan for machines: maintenance, decommission, hardware refresh (RB3, RB11).

An event is stored with each machine; the allocator and the schedulers read it and move tasks away.
Owners of jobs need to do nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from msgspec.structs import replace

from control_plane.api.inventory import MachineScope
from control_plane.api.machines import EventKind, MachineRecord, UnavailabilityEvent
from control_plane.broker.brokers import Brokers, change_each
from control_plane.broker.core.unavailability import DRAINING, began, ended, of_plan
from control_plane.runtime.runtime import Runtime
from wire.errors import FieldError, InvalidInput, NotFound, some_of

log = logging.getLogger(__name__)


class Outages:
    """Plans and ends unavailability of any number of machines."""

    def __init__(self, brokers: Brokers, runtime: Runtime) -> None:
        self._brokers = brokers
        self._runtime = runtime

    async def machines(self, names: Collection[str], scope: MachineScope | None) -> list[str]:
        """Return the machines that are named or in the scope; `NotFound` if there are none."""
        unknown = [name for name in names if self._brokers.table.find(name) is None]
        if unknown:
            raise NotFound(
                f"there is no machine {some_of([repr(name) for name in unknown])}",
                errors=tuple(FieldError(field=n, reason="is not known") for n in unknown),
            )
        found = set(names)
        if scope is not None:
            if scope == MachineScope():
                raise InvalidInput(
                    "give at least one part of a scope: an empty scope is the whole region"
                )
            found |= {record.machine for record in await self._brokers.scan(scope)}
        if not found:
            raise NotFound("no machine is in this scope", hint="twinectl machine list")
        return sorted(found)

    async def plan_unavailability(
        self,
        machines: Collection[str],
        kind: EventKind,
        reason: str,
        start: float | None = None,
        deadline: float | None = None,
        expected_duration_s: float | None = None,
        *,
        tasks_survive: bool = False,
        plan: str = "",
    ) -> list[MachineRecord]:
        """Announce that machines will be unavailable.

        An event of the same kind and plan is replaced. Tasks move away from `start` (None: now) on.
        At `deadline` the work begins in any case. With `tasks_survive`, tasks that are still there
        are not stopped.
        """
        now = self._runtime.date()
        event = UnavailabilityEvent(
            event_id="",
            kind=kind,
            reason=reason,
            start=now if start is None else start,
            deadline=deadline,
            expected_duration_s=expected_duration_s,
            tasks_survive=tasks_survive,
            plan=plan,
        )
        _check_plan(event)

        def change(record: MachineRecord) -> MachineRecord:
            event_id = f"{record.machine}-{plan or kind}-{now:.3f}"
            return began(record, replace(event, event_id=event_id))

        changed = await change_each(self._brokers, machines, change)
        fields = {"machines": len(changed), "kind": kind.value, "reason": reason}
        log.info("unavailability planned", extra=fields)
        return changed

    async def end_plan(self, machines: Collection[str], plan: str) -> None:
        """End the events of a plan for machines that still exist."""
        now = self._runtime.date()
        known = [name for name in machines if self._brokers.table.find(name) is not None]

        def change(record: MachineRecord) -> MachineRecord:
            event = of_plan(record, plan)
            if event is None or event.end is not None:
                return record
            return ended(record, now, (), event.event_id)

        await change_each(self._brokers, known, change)

    async def undrain(self, machines: Collection[str]) -> list[MachineRecord]:
        """End all work that operators have planned for these machines."""
        now = self._runtime.date()
        changed = await change_each(self._brokers, machines, lambda r: ended(r, now, DRAINING))
        log.info("unavailability ended", extra={"machines": len(changed)})
        return changed


def _check_plan(event: UnavailabilityEvent) -> None:
    """Raise `InvalidInput` for work that cannot be planned like this."""
    kind, deadline = event.kind, event.deadline
    if kind not in DRAINING:
        known = ", ".join(kind.value for kind in DRAINING)
        raise InvalidInput(f"{kind.value} cannot be planned; {known} can")
    if deadline is not None and deadline < event.start:
        raise InvalidInput("the deadline is before the start")
    if event.tasks_survive and kind is not EventKind.MAINTENANCE:
        raise InvalidInput(f"tasks do not survive a {kind.value}")
    if event.tasks_survive and (deadline is None or event.expected_duration_s is None):
        raise InvalidInput(
            "work that tasks survive needs a deadline and a duration: they bound the "
            "expected silence",
            hint="--deadline 10m --duration 3m",
        )
