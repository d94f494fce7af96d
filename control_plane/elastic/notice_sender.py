"""Sends hosts the notices for their tasks: plans for the machine, and lent capacity (EL9).

Only machines with tasks of jobs that have `life.notice` get them. They are not stored: a control
plane that takes over sends all of them again, and agents accept repetitions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from agent.api.notices import HostNotice, HostNotices, LentCapacity
from control_plane.agents.pool import AgentPool
from control_plane.agents.region import Region
from control_plane.api.elastic import CapacitySignal
from control_plane.api.jobs import JobRecord
from control_plane.api.machines import MachineRecord
from control_plane.broker.core.unavailability import planned
from control_plane.runtime.table import Table
from wire.errors import TwineError

log = logging.getLogger(__name__)
AT_ONCE = 32
TIMEOUT_S = 10.0
RETRY_S = 30.0
"""A host that refused a notice gets it again after this long."""
AGAIN_S = 600.0
"""An accepted notice is sent again after this long."""
_LOOK = 200
"""Jobs that are read between two checks whether other tasks of the loop wait."""


class NoticeSender:
    """Keeps hosts informed; `look` is called every few seconds."""

    def __init__(
        self, region: Region, jobs: Table[JobRecord], pool: AgentPool, number: Callable[[], int]
    ) -> None:
        """Send nothing yet. `number` returns the term of this control plane."""
        self._region, self._jobs, self._pool, self._number = region, jobs, pool, number
        self._said: dict[str, tuple[str, HostNotices, float]] = {}
        """Machine → boot, the notices that it last accepted, and when."""
        self._pauses: dict[str, float] = {}
        """Machine → when to try again, after it refused."""
        self.counts: Counter[str] = Counter()
        """`told` and `failed`, so far."""

    async def look(self, signal: Callable[[str], CapacitySignal | None]) -> None:
        """Send hosts the notices that they lack; `signal` is called per entitlement."""
        wanted = await self._wanted(signal)
        for machine in [name for name in self._said if name not in wanted]:
            wanted[machine] = HostNotices(epoch=self._number())  # withdrawn: no task is left there
        gate = asyncio.Semaphore(AT_ONCE)
        now = self._region.runtime.now()
        due = {name: told for name, told in wanted.items() if self._is_due(name, told, now)}
        await asyncio.gather(*(self._tell(gate, name, told) for name, told in due.items()))
        for name in [n for n in self._said if n not in due and not _says(wanted.get(n))]:
            if now - self._said[name][2] > AGAIN_S:
                del self._said[name]

    async def _wanted(
        self, signal: Callable[[str], CapacitySignal | None]
    ) -> dict[str, HostNotices]:
        """Return by machine the notices for its tasks."""
        asked = dict[str, set[str]]()
        for number, record in enumerate(self._jobs.records()):
            if number % _LOOK == 0:
                await self._region.runtime.checkpoint()
            wish = record.spec.life.notice
            if wish is not None:
                for machine in _machines(record):
                    asked.setdefault(machine, set()).update(wish.capacity_of)
        names = {name for one in asked.values() for name in one}
        states = {name: told for name in names if (told := signal(name)) is not None}
        epoch, found = self._number(), dict[str, HostNotices]()
        for machine, capacity_of in asked.items():
            known = self._region.broker.table.find(machine)
            if known is not None:
                lent = [_capacity(states[name]) for name in sorted(capacity_of & states.keys())]
                found[machine] = HostNotices(epoch=epoch, notices=_notices(known), capacity=lent)
        return found

    def _is_due(self, machine: str, told: HostNotices, now: float) -> bool:
        observed = self._region.observations.observation(machine)
        if not observed.answering or self._pauses.get(machine, now) > now:
            return False
        known = self._said.get(machine)
        if known is None:
            return _says(told)
        boot_id, said, at = known
        if said == told and boot_id == observed.boot_id:
            return _says(told) and now - at > AGAIN_S
        return True

    async def _tell(self, gate: asyncio.Semaphore, machine: str, told: HostNotices) -> None:
        record = self._region.broker.table.find(machine)
        if record is None:
            self._said.pop(machine, None)
            return
        boot_id = self._region.observations.observation(machine).boot_id
        async with gate:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await (await self._pool.get(record)).put_notices(told)
            except (TwineError, TimeoutError) as e:
                self.counts["failed"] += 1
                self._pauses[machine] = self._region.runtime.now() + RETRY_S
                log.warning(
                    "an agent did not accept notices",
                    extra={"machine": machine, "reason": str(e)},
                )
                return
        self._pauses.pop(machine, None)
        self.counts["told"] += 1
        self._said[machine] = boot_id, told, self._region.runtime.now()


def _says(told: HostNotices | None) -> bool:
    return told is not None and bool(told.notices or told.capacity)


def _machines(record: JobRecord) -> Iterable[str]:
    return {task.placement.machine for task in record.tasks if task.placement is not None}


def _notices(record: MachineRecord) -> list[HostNotice]:
    return [
        HostNotice(
            id=event.event_id,
            kind=event.kind.value,
            start=event.start,
            deadline=event.deadline,
            tasks_survive=event.tasks_survive,
            reason=event.reason,
        )
        for event in planned(record)
    ]


def _capacity(signal: CapacitySignal) -> LentCapacity:
    return LentCapacity(
        entitlement=signal.entitlement,
        state=signal.state.value,
        machines=signal.machines,
        wanted=signal.wanted,
        next_deadline=signal.next_deadline,
    )
