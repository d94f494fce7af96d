"""The loop of the opportunistic scheduler: reads its jobs, chooses work, starts and stops it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from control_plane.api.capacity import EntitlementView
from control_plane.api.elastic import CapacitySignal, CapacityState
from control_plane.api.jobs import JobSpec, JobStatus
from control_plane.api.opportunistic import QueuedState, QueuedWork, WorkQueue, WorkRequest
from control_plane.optimus.core.choosing import (
    RETRY_MAX_S,
    choose_work,
    failed,
    in_order,
    job_of,
    updated_work,
)
from control_plane.process import load_despite_damage
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import Table
from control_plane.store import Store
from control_plane.store.quarantine import forget, quarantined
from control_plane.store.records import WORK
from wire.errors import Conflict, InvalidInput, NotFound, TwineError, Unprocessable

log = logging.getLogger(__name__)
EVERY_S = 15.0
"""Interval of the rounds."""
KEEP_S = 7 * 86_400.0
"""Time for which ended work is shown and counts for its user's share."""
LATE_S = 600.0
"""Time for which a start without an answer may still take effect. The request ends after 30 s, but
an overloaded or stopped front end may carry it out later."""
_PREEMPTED = "work of higher priority needs its machines"


class BestEffortApi(Protocol):
    """The calls to the front end that Optimus makes; `ControlPlaneClient` has all of them."""

    async def get_entitlement(self, name: str) -> EntitlementView: ...
    async def get_signal(self, entitlement: str) -> CapacitySignal: ...
    async def get_job(self, job: str) -> JobStatus: ...
    async def apply_job(self, spec: JobSpec, *, is_new: bool = False) -> JobStatus: ...
    async def stop_job(self, job: str) -> JobStatus: ...


class Optimus:
    """Runs queued work on the machines that are lent to one entitlement."""

    def __init__(
        self,
        runtime: Runtime,
        api: BestEffortApi,
        store: Store,
        entitlement: str,
        shares: Mapping[str, int],
        ahead: int,
        every_s: float = EVERY_S,
    ) -> None:
        """`ahead`: the most tasks, besides the running ones, that may wait for machines."""
        self._runtime, self._api, self._entitlement = runtime, api, entitlement
        self._shares, self._ahead, self._every_s = shares, ahead, every_s
        self._table = Table(store, WORK, QueuedWork, "work")
        self._capacity, self._failing = "", ""
        self._placed: dict[str, dict[int, str]] = {}
        """Work → task → machine, as last observed."""
        self._fully_placed = set[str]()
        """Work whose tasks all had a machine when it was last observed."""
        self._running = 0
        self._to_stop = set[str]()
        """Work that must not run; after a restart of this process its job may still exist."""
        self._damaged = set[str]()
        """Work whose record was set aside."""

    async def load(self) -> None:
        """Read the queue; records that cannot be read are set aside."""
        await load_despite_damage(self._table.load, [self._table.store])
        aside = await quarantined(self._table.store)
        self._damaged = {k.removeprefix(WORK) for k in aside if k.startswith(WORK)}
        self._to_stop = {
            w.name for w in self._table.records() if w.state is not QueuedState.RUNNING
        }

    async def check(self) -> None:
        """Raise `Unprocessable` if the entitlement has machines of its own."""
        spec = (await self._api.get_entitlement(self._entitlement)).record.spec
        if spec.machines != 0 or not spec.borrows:
            raise Unprocessable(
                f"entitlement {self._entitlement!r} is not only for best-effort work",
                hint="set machines = 0 and elastic.borrow in it (docs/elastic.md)",
            )

    async def run(self) -> None:
        """Run a round every `every_s` seconds until cancelled."""
        while True:
            try:
                await self.run_round()
                self._failing = ""
            except TwineError as e:
                self._failing = str(e)
                log.warning("no work was chosen", extra={"reason": str(e)})
            await self._runtime.sleep(self._every_s)

    async def run_round(self) -> None:
        """Update the work from its jobs, then start and stop work accordingly."""
        await self.check()
        self._capacity = (await self._api.get_signal(self._entitlement)).state.value
        now, self._running = self._runtime.date(), 0
        for name in sorted(self._to_stop):
            await self._stop(name)
        for work in self._table.records():
            if work.state is QueuedState.RUNNING:
                await self._update_if_running(work.name, now)
            elif _is_expired(work, now):
                async with self._table.lock(work.name):
                    if self._table.find(work.name) is work:
                        await self._table.commit(work.name, None)
        room = self._running + self._ahead
        start, stop = choose_work(self._table.records(), self._shares, room, now)
        for name in stop:
            async with self._table.lock(name):
                if (one := self._in_state(name, QueuedState.RUNNING)) is not None:
                    await self._end(replace(one, state=QueuedState.WAITING, reason=_PREEMPTED))
        for name in start:
            await self._start_if_waiting(name, now)
        for work in self._table.records():
            if work.doubt_until > now and work.name not in start:
                await self._stop_late(work.name)

    async def _stop_late(self, name: str) -> None:
        """Stop the job of work that must not run, because a start may have taken effect late."""
        async with self._table.lock(name):
            work = self._table.find(name)
            if work is not None and work.state is not QueuedState.RUNNING:
                await self._stop(name)

    def _in_state(self, name: str, state: QueuedState) -> QueuedWork | None:
        """Return the present record of work; None: it was cancelled, or has another state.

        The caller holds the work's lock, so that no user cancels it before the next change.
        """
        known = self._table.find(name)
        return known if known is not None and known.state is state else None

    async def _update_if_running(self, name: str, now: float) -> None:
        async with self._table.lock(name):
            if (work := self._in_state(name, QueuedState.RUNNING)) is not None:
                await self._update_work(work, now)

    async def _update_work(self, work: QueuedWork, now: float) -> None:
        try:
            status = await self._api.get_job(work.name)
        except NotFound:
            await self._table.commit(work.name, replace(work, state=QueuedState.WAITING))
            return
        if taken := self._other_owner(status):
            waiting = replace(work, state=QueuedState.WAITING, reason=taken)
            await self._table.commit(work.name, waiting)
            return
        self._running += status.running
        places = {t.index: t.placement.machine for t in status.record.tasks if t.placement}
        before = self._placed.get(work.name, {})
        moves = sum(before.get(task, machine) != machine for task, machine in places.items())
        self._placed[work.name] = before | places
        if len(places) >= work.request.job.tasks:
            self._fully_placed.add(work.name)
        else:
            self._fully_placed.discard(work.name)
        after = updated_work(replace(work, moves=work.moves + moves), status, now, self._every_s)
        if after.state is not QueuedState.RUNNING:
            await self._end(after)
        elif after != work:
            await self._table.commit(work.name, after)

    async def _end(self, after: QueuedWork) -> None:
        """Store that work no longer runs, then stop its job: a failure counts once."""
        self._to_stop.add(after.name)
        await self._table.commit(after.name, after)
        await self._stop(after.name)

    async def _start_if_waiting(self, name: str, now: float) -> None:
        async with self._table.lock(name):
            if (work := self._in_state(name, QueuedState.WAITING)) is not None:
                await self._start_job(work, now)

    async def _start_job(self, work: QueuedWork, now: float) -> None:
        try:
            existing = await self._api.get_job(work.name)
        except NotFound:
            pass
        else:  # the job of the last attempt still exists, or another job has its name
            if taken := self._other_owner(existing):
                if work.reason != taken:
                    await self._table.commit(work.name, replace(work, reason=taken))
            elif not existing.record.stopping:  # an earlier start took effect without an answer
                running = replace(work, state=QueuedState.RUNNING, reason="")
                await self._table.commit(work.name, running)
            return
        # stored first: a job that is not recorded would never be stopped
        running = replace(work, state=QueuedState.RUNNING, reason="")
        await self._table.commit(work.name, replace(running, doubt_until=now + LATE_S))
        try:
            await self._api.apply_job(job_of(work, self._entitlement), is_new=True)
        except (InvalidInput, Conflict, Unprocessable) as e:
            await self._end(failed(running, str(e), now))  # an earlier start may have taken effect
        except TwineError as e:
            if e.retryable:
                raise
            # a missing right or image: other work is started meanwhile
            later = replace(work, retry_at=now + RETRY_MAX_S, reason=str(e))
            await self._table.commit(work.name, later)
        else:
            await self._table.commit(work.name, running)

    async def _stop(self, name: str) -> None:
        self._placed.pop(name, None)
        self._fully_placed.discard(name)
        with suppress(NotFound):
            if not self._other_owner(await self._api.get_job(name)):
                await self._api.stop_job(name)
        self._to_stop.discard(name)

    def _other_owner(self, found: JobStatus) -> str:
        """Return why a job does not belong to the work with its name; empty if it does."""
        spec = found.record.spec
        if spec.entitlement == self._entitlement:
            return ""
        return f"entitlement {spec.entitlement} has a job {spec.name}: the name is taken"

    # -- for users

    def queue(self) -> WorkQueue:
        """Return all work: the open work in the order in which it is chosen, then ended work."""
        records = [one for one in self._table.records() if not one.is_cancelled]
        order = in_order(records, self._shares)
        ended = [one for one in records if one.ended_at is not None]
        return WorkQueue(
            entitlement=self._entitlement,
            capacity=self._capacity_now(),
            failing=self._failing,
            work=[*order, *sorted(ended, key=lambda one: -(one.ended_at or 0.0))],
            damaged=sorted(self._damaged),
        )

    def _capacity_now(self) -> str:
        """Return the region's last capacity report, or a lower state if work waits for machines.

        The region knows of a task only after the round that starts it. Empty: there is no report,
        because the last round failed or none has ended.
        """
        if self._failing:
            return ""
        now = self._runtime.date()
        is_short = any(
            one.name not in self._fully_placed
            if one.state is QueuedState.RUNNING
            else one.state is QueuedState.WAITING
            and one.reason in ("", _PREEMPTED)
            and one.retry_at <= now
            for one in self._table.records()
        )
        if self._capacity != CapacityState.FULL or not is_short:
            return self._capacity
        return CapacityState.SHORT if any(self._placed.values()) else CapacityState.ABSENT

    async def submit(self, name: str, request: WorkRequest, user: str) -> QueuedWork:
        """Accept a piece of work; `Conflict` if another piece has the name."""
        if request.job.entitlement != self._entitlement:
            raise InvalidInput(
                f"cannot accept work {name!r}: job.entitlement: {request.job.entitlement!r} is not"
                f" {self._entitlement!r}, the entitlement of this queue",
                hint=f"set entitlement = {self._entitlement!r} there, or apply the file as a job",
            )
        if request.job.tasks < 1:
            raise InvalidInput(f"cannot accept work {name!r}: job.tasks: 0 tasks have no effect")
        async with self._table.lock(name):
            known = self._table.find(name)
            if name in self._damaged:
                raise Conflict(
                    f"cannot accept work {name!r}: the stored record of work {name!r} is damaged",
                    hint=f"choose another name, or as root: twinectl work cancel {name}",
                )
            if known is not None and known.is_cancelled:
                wait_s = max(0.0, known.doubt_until - self._runtime.date()) + self._every_s
                raise Conflict(
                    f"cannot accept work {name!r}: other work of this name was cancelled, and its"
                    " start may still come through",
                    hint=f"choose another name, or submit it again in {wait_s:.0f} s",
                )
            if known is not None:
                if known.request == request and known.user == user:
                    return known
                raise Conflict(
                    f"there is already work {name!r}, of {known.user}: {known.state}",
                    hint="choose another name; to change work, cancel it"
                    f" (twinectl work cancel {name}) and submit it again",
                )
            made = QueuedWork(
                name=name, user=user, request=request, submitted_at=self._runtime.date()
            )
            await self._table.commit(name, made)
            return made

    async def cancel(self, name: str) -> None:
        """Stop a piece of work and delete it; `NotFound` if there is none."""
        async with self._table.lock(name):
            if name in self._damaged:
                await self._stop(name)
                await forget(self._table.store, WORK + name)
                self._damaged.discard(name)
                return
            work, now = self._table.get(name), self._runtime.date()
            if work.is_cancelled:
                raise NotFound(f"there is no work {name!r}: it was cancelled")
            if work.state is QueuedState.RUNNING or name in self._to_stop:
                await self._stop(name)
            kept = replace(work, state=QueuedState.FAILED, is_cancelled=True, ended_at=now)
            await self._table.commit(name, kept if work.doubt_until > now else None)


def _is_expired(work: QueuedWork, now: float) -> bool:
    """Return whether ended work need not be kept any longer."""
    if work.is_cancelled:
        return now >= work.doubt_until
    return work.ended_at is not None and now - work.ended_at > KEEP_S
