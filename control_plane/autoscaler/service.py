"""The loop of the autoscaler: lists the jobs in brief, measures, decides, writes sizes, stores.

It reads the sizes of jobs from the front end each minute. Any failure leaves sizes as they are. A
second process with another store is harmless: a size is written only if the job still has the size
that was read, and speed limits use observed sizes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Protocol

from msgspec.structs import replace

from control_plane.api.autoscale import Autoscale, AutoscaleMode, Headroom, LoadSignal
from control_plane.api.inventory import MachineScope
from control_plane.api.jobs import JobBrief, JobBriefs, JobStatus
from control_plane.api.machines import Machines
from control_plane.api.sizings import Recommendation, Simulation, SizingView, SizingViews
from control_plane.autoscaler import stored_jobs
from control_plane.autoscaler.core.history import SLOT_S
from control_plane.autoscaler.core.latency import load_at_limit
from control_plane.autoscaler.core.observing import (
    LoadReading,
    capacity_of,
    msbs_of,
    observation_of,
    policy_of,
)
from control_plane.autoscaler.core.replay import simulate
from control_plane.autoscaler.signals import AT_ONCE, LoadSource
from control_plane.autoscaler.sizes import NewSize, SizeWriter
from control_plane.autoscaler.stored_jobs import AutoscaledJob
from control_plane.runtime.runtime import Runtime
from control_plane.store import Store
from wire.errors import NotFound, TwineError, Unprocessable

log = logging.getLogger(__name__)
EVERY_S = 60.0
MACHINES_S = 600.0
"""Time between two lists of the machines: the MSBs of an entitlement change seldom."""
FORGET_S = 7 * 86_400.0
"""Time for which the history of a deleted job is kept."""
RETRY_FIRST_S = 2.0


class JobsApi(Protocol):
    """The calls with which the autoscaler reads jobs; `ControlPlaneClient` has all of them."""

    async def list_job_briefs(self) -> JobBriefs:
        """Return all jobs in brief."""
        ...

    async def get_job(self, job: str) -> JobStatus:
        """Return one job whole."""
        ...

    async def list_machines(self, scope: MachineScope | None = None) -> Machines:
        """Return machines of a scope."""
        ...


class Autoscaler:
    """Evaluates all jobs with `[autoscale]` once a minute."""

    def __init__(
        self,
        runtime: Runtime,
        jobs: JobsApi,
        store: Store,
        sources: dict[LoadSignal, LoadSource],
        writer: SizeWriter,
        every_s: float = EVERY_S,
    ) -> None:
        """`sources` has no entry for a signal that this process cannot measure."""
        self.runtime, self._api, self._store = runtime, jobs, store
        self._sources, self._writer, self._every_s = sources, writer, every_s
        self._jobs: dict[str, AutoscaledJob] = {}
        self._statuses: dict[str, JobStatus] = {}
        self._revisions: dict[str, int] = {}
        """Job → revision that its brief had when it was read whole."""
        self._unread: dict[str, str] = {}
        """Job → why it could not be read in this round: its size is not changed."""
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._written: dict[str, str] = {}
        self._msbs_of_machines: dict[str, tuple[float, dict[str, str]]] = {}
        """Entitlement → when its machines were listed, and machine → MSB."""
        self._unlisted: dict[str, TwineError] = {}
        """Entitlement → why its machines could not be listed in this round."""
        self.failing = ""
        """Why the last round failed or left jobs out; empty: it evaluated all jobs."""
        self.round_at = 0.0
        self.round_s = 0.0
        """How long the last round took."""
        self.counts: Counter[str] = Counter()
        """Counts since the start: `up`, `down`, `refused`, `held`, `rounds`, `failed rounds`, and
        `read`: whole jobs that were read."""

    async def run(self) -> None:
        """Load the stored state, then evaluate until cancelled."""
        self._jobs = await stored_jobs.load(self._store)
        log.info("autoscaler has read its store", extra={"jobs": len(self._jobs)})
        while True:
            began = self.runtime.now()
            await self.try_round()
            pause_s = self._every_s - (self.runtime.now() - began)
            await self.runtime.sleep(max(RETRY_FIRST_S, pause_s))

    async def try_round(self) -> None:
        """Run one round; a failure is stored in `failing`, and sizes stay as they are."""
        began = self.runtime.now()
        try:
            await self.round()
        except TwineError as e:
            self.counts["failed rounds"] += 1
            if not self.failing:
                log.warning("sizes are held", extra={"reason": str(e)})
            self.failing = str(e)
        else:
            unread = self._describe_unread()
            if unread and not self.failing:
                log.warning("sizes of some jobs are held", extra={"reason": unread})
            elif self.failing and not unread:
                log.info("sizes follow the load again")
            self.failing, self.round_at = unread, self.runtime.date()
        self.counts["rounds"] += 1
        self.round_s = self.runtime.now() - began

    async def round(self) -> None:
        """Evaluate all jobs once; raise a `TwineError` if jobs or store do not answer.

        A job that cannot be read is left out, for example while its shard is away.
        """
        listed = await self._api.list_job_briefs()
        now = self.runtime.date()
        briefs = [brief for brief in listed.jobs if brief.autoscale is not None]
        self._unread, self._unlisted = {}, {}
        read = await asyncio.gather(*map(self._read, briefs))
        autoscaled = [(s, p) for s in read if s is not None and (p := policy_of(s)) is not None]
        stale = {n: s for n, s in self._statuses.items() if n in self._unread and n in self._jobs}
        self._statuses = stale | {status.record.name: status for status, _ in autoscaled}
        for name in self._unread.keys() & self._jobs.keys():
            self._jobs[name].seen_at = now
        for source in self._sources.values():
            source.forget(set(self._statuses))
        readings = await asyncio.gather(*(self._measure(s, p) for s, p in autoscaled))
        changed, due = dict[str, AutoscaledJob](), list[tuple[JobStatus, Recommendation]]()
        for (status, policy), reading in zip(autoscaled, readings, strict=True):
            await self.runtime.checkpoint()
            name = status.record.name
            job = self._jobs.setdefault(name, AutoscaledJob())
            before = job.sizing.history.slot, job.sizing.state.sizes
            job.seen_at = now
            try:
                found = await self._evaluate(job, status, policy, reading)
            except TwineError as e:
                self._unread[name] = str(e)
                continue
            if policy.mode is AutoscaleMode.APPLY and found.tasks != found.was:
                due.append((status, found))
            if before != (job.sizing.history.slot, job.sizing.state.sizes):
                changed[name] = job
        await self._write(due)
        deleted = [n for n, job in self._jobs.items() if now - job.seen_at > FORGET_S]
        for name in deleted:
            del self._jobs[name]
            self._revisions.pop(name, None)
            self._written.pop(name, None)
        await stored_jobs.save(self._store, changed, deleted)

    async def _read(self, brief: JobBrief) -> JobStatus | None:
        """Return the status of a job; the whole job is read only if its revision changed.

        None: it is gone, or it cannot be read now. The healthy tasks always come from the brief,
        because their number changes without a new revision.
        """
        known = self._statuses.get(brief.name)
        if known is None or self._revisions.get(brief.name) != brief.revision:
            async with self._gate:
                try:
                    known = await self._api.get_job(brief.name)
                except NotFound:
                    return None
                except TwineError as e:
                    self._unread[brief.name] = str(e)
                    return None
            self._revisions[brief.name] = brief.revision
            self.counts["read"] += 1
        return replace(known, healthy=brief.healthy)

    async def _measure(self, status: JobStatus, policy: Autoscale) -> LoadReading:
        source = self._sources.get(policy.signal)
        if source is None:
            return LoadReading(missing=f"this autoscaler has no source for {policy.signal.value}")
        signal = f"{policy.signal.value} {policy.query}"
        job = self._jobs.get(status.record.name)
        if job is not None and job.signal == signal:
            return await source.measure(status, policy)
        past, reading = await source.past(status, policy), await source.measure(status, policy)
        job = self._jobs[status.record.name] = AutoscaledJob(signal=signal)
        if past is None and reading.load is None:
            job.signal = ""  # the source did not answer: the next round reads the past again
        for at, load in past or ():
            job.sizing.history.add(at, load)
        return reading

    async def _evaluate(
        self, job: AutoscaledJob, status: JobStatus, policy: Autoscale, reading: LoadReading
    ) -> Recommendation:
        now = self.runtime.date()
        msbs = await self._msbs(status, policy, now)
        seen = observation_of(status, policy, now, reading, msbs)
        found = job.sizing.advance(policy, seen)
        job.last = found
        if found.held:
            self.counts["held"] += 1
        return found

    async def _write(self, due: list[tuple[JobStatus, Recommendation]]) -> None:
        refused = await self._writer.write([NewSize(s, f.tasks, f.reason) for s, f in due])
        for status, found in due:
            self._record_write(status.record.name, found, refused.get(status.record.name, ""))

    def _describe_unread(self) -> str:
        """Return how many jobs the last round left out, with the reason for one; empty: none."""
        if not self._unread:
            return ""
        name, why = min(self._unread.items())
        return f"could not read {len(self._unread)} jobs, such as {name}: {why}"

    def _record_write(self, name: str, found: Recommendation, why: str) -> None:
        """Count and log a written size; `why` is the reason of its refusal, empty: none."""
        extra = {"job": name, "tasks": found.tasks, "was": found.was, "reason": found.reason}
        if why:
            self.counts["refused"] += 1
            self._written[name] = f"{found.was} to {found.tasks} was refused: {why}"
            log.warning("size was refused", extra={**extra, "reason": why})
        else:
            self.counts["up" if found.tasks > found.was else "down"] += 1
            self._written[name] = f"{found.was} to {found.tasks}"
            log.info("size changed", extra=extra)

    async def _msbs(self, status: JobStatus, policy: Autoscale, now: float) -> int:
        """Return the number of MSBs that a job is spread over, if its policy needs that; else 0.

        If the machines cannot be listed now, an earlier list counts. Without one this raises.
        """
        if policy.headroom is not Headroom.MSB:
            return 0
        entitlement = status.record.spec.entitlement
        listed_at, msb_of = self._msbs_of_machines.get(entitlement, (0.0, {}))
        if not 0 <= now - listed_at < MACHINES_S and entitlement not in self._unlisted:
            try:
                listed = await self._api.list_machines(MachineScope(entitlement=entitlement))
            except TwineError as e:
                self._unlisted[entitlement] = e
            else:
                records = [view.record for view in listed.machines]
                msb_of = {r.machine: f"{r.location.datacenter}/{r.location.msb}" for r in records}
                self._msbs_of_machines[entitlement] = now, msb_of
        if not msb_of and entitlement in self._unlisted:
            raise self._unlisted[entitlement]
        return msbs_of(status.record, msb_of)

    # -- views

    def views(self) -> SizingViews:
        """Return all autoscaled jobs, by name."""
        found = [self._view(status) for _, status in sorted(self._statuses.items())]
        return SizingViews(sizings=found, failing=self.failing, round_at=self.round_at)

    def view(self, name: str) -> SizingView:
        """Return one autoscaled job with its history, or raise `NotFound`."""
        view, history = self._view(self._status_of(name)), self._jobs[name].sizing.history
        return replace(view, loads=history.recent(), day_peaks=history.day_peaks())

    def _status_of(self, name: str) -> JobStatus:
        status = self._statuses.get(name)
        if status is None:
            raise NotFound(
                f"job {name!r} is not autoscaled, or was not listed yet",
                hint="its job file needs an [autoscale] table (docs/autoscaling.md)",
            )
        return status

    def _view(self, status: JobStatus) -> SizingView:
        record, job = status.record, self._jobs[status.record.name]
        policy, state = record.spec.autoscale, job.sizing.state
        assert policy is not None
        learnt, first = state.learnt, job.sizing.history.first
        latency = policy.latency
        return SizingView(
            job=record.name,
            entitlement=record.spec.entitlement,
            mode=policy.mode,
            tasks=record.spec.tasks,
            healthy=status.healthy,
            recommendation=job.last,
            written=self._written.get(record.name, ""),
            start_s=max(state.starts) if state.starts else None,
            forecasts_held=learnt.held / learnt.scored if learnt.scored else None,
            history_from=first * float(SLOT_S) if first else None,
            carried=load_at_limit(state.latency, latency.limit_s) if latency is not None else None,
            latency_at=state.latency.at or None,
        )

    async def simulation(self, name: str, other: Autoscale) -> Simulation:
        """Return the cost of another policy over the history of a job; raises `NotFound`."""
        status = self._status_of(name)
        spec, job = status.record.spec, self._jobs[name]
        assert spec.autoscale is not None
        starts = job.sizing.state.starts
        policies = job.sizing.resolved(spec.autoscale)[0], job.sizing.resolved(other)[0]
        if unknown := [p for p in policies if p.target is None]:
            raise Unprocessable(job.sizing.resolved(unknown[0])[1], hint="add autoscale.target")
        msbs = await self._msbs(status, other, self.runtime.date())
        return await self.runtime.offload(
            simulate,
            name,
            job.sizing.history.points(),
            policies,
            capacity_of(spec, spec.autoscale.signal),
            msbs,
            starts,
        )
