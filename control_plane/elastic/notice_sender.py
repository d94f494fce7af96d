"""Sends agents the notices for their tasks: plans for the machine, and lent capacity (EL9).

Only machines with tasks of jobs that have `life.notice` get notices. Notices are not stored. A
control plane that takes over sends all of them again, and agents accept repetitions.
"""

from __future__ import annotations

import asyncio
import logging
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
"""An agent that refused notices gets them again after this time."""
RESEND_S = 600.0
"""Accepted notices are sent again after this time."""
_CHECKPOINT_EVERY = 200
"""Jobs that are read between two checks whether other tasks of the loop wait."""


class NoticeSender:
    """Keeps the notices of all agents current; `send_due` is called every few seconds."""

    def __init__(
        self, region: Region, jobs: Table[JobRecord], pool: AgentPool, number: Callable[[], int]
    ) -> None:
        """`number` returns the term of this control plane."""
        self._region, self._jobs, self._pool, self._number = region, jobs, pool, number
        self._accepted: dict[str, tuple[str, HostNotices, float]] = {}
        """Machine → boot, the notices that its agent last accepted, and when."""
        self._pauses: dict[str, float] = {}
        """Machine → when to try again after a failure."""

    async def send_due(self, signal: Callable[[str], CapacitySignal | None]) -> None:
        """Send agents the notices that they lack; `signal` returns the state of an entitlement."""
        wanted = await self._wanted_notices(signal)
        for machine in [name for name in self._accepted if name not in wanted]:
            wanted[machine] = HostNotices(epoch=self._number())  # no task is left: withdraw all
        gate = asyncio.Semaphore(AT_ONCE)
        now = self._region.runtime.now()
        due = {n: notices for n, notices in wanted.items() if self._is_due(n, notices, now)}
        await asyncio.gather(*(self._send(gate, n, notices) for n, notices in due.items()))
        for name in [n for n in self._accepted if n not in due and _is_empty(wanted.get(n))]:
            if now - self._accepted[name][2] > RESEND_S:
                del self._accepted[name]

    async def _wanted_notices(
        self, signal: Callable[[str], CapacitySignal | None]
    ) -> dict[str, HostNotices]:
        """Return machine → the notices for its tasks."""
        entitlements_of = dict[str, set[str]]()
        for number, record in enumerate(self._jobs.records()):
            if number % _CHECKPOINT_EVERY == 0:
                await self._region.runtime.checkpoint()
            request = record.spec.life.notice
            if request is not None:
                for machine in _machines(record):
                    entitlements_of.setdefault(machine, set()).update(request.capacity_of)
        names = set[str]().union(*entitlements_of.values())
        states = {name: state for name in names if (state := signal(name)) is not None}
        epoch, wanted = self._number(), dict[str, HostNotices]()
        for machine, capacity_of in entitlements_of.items():
            found = self._region.broker.table.find(machine)
            if found is not None:
                lent = [_capacity(states[name]) for name in sorted(capacity_of & states.keys())]
                wanted[machine] = HostNotices(epoch=epoch, notices=_notices(found), capacity=lent)
        return wanted

    def _is_due(self, machine: str, notices: HostNotices, now: float) -> bool:
        """Return whether an agent answers and lacks these notices."""
        observed = self._region.observations.observation(machine)
        if not observed.answering or self._pauses.get(machine, now) > now:
            return False
        known = self._accepted.get(machine)
        if known is None:
            return not _is_empty(notices)
        boot_id, accepted, at = known
        if accepted == notices and boot_id == observed.boot_id:
            return not _is_empty(notices) and now - at > RESEND_S
        return True

    async def _send(self, gate: asyncio.Semaphore, machine: str, notices: HostNotices) -> None:
        record = self._region.broker.table.find(machine)
        if record is None:
            self._accepted.pop(machine, None)
            return
        boot_id = self._region.observations.observation(machine).boot_id
        async with gate:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await (await self._pool.get(record)).put_notices(notices)
            except (TwineError, TimeoutError) as e:
                self._pauses[machine] = self._region.runtime.now() + RETRY_S
                log.warning(
                    "an agent did not accept notices",
                    extra={"machine": machine, "reason": str(e)},
                )
                return
        self._pauses.pop(machine, None)
        self._accepted[machine] = boot_id, notices, self._region.runtime.now()


def _is_empty(notices: HostNotices | None) -> bool:
    return notices is None or not (notices.notices or notices.capacity)


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
