"""The delivery service: reads jobs, decides, stores, then acts, round by round.

A round may be interrupted at any await and begins again from the store: every act follows from the
stored record and the present jobs. The store belongs to one process at a time (a file lock, or a
lease in etcd); before each act the service checks that it still does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from control_plane.runtime.runtime import Runtime
from control_plane.store.records import DamagedRecord
from conveyor.api import ControlRequest, ControlVerb, PipelineSpec, StartRequest
from conveyor.core import commands, decide, judge
from conveyor.core.acts import DeliveryAct, named
from conveyor.core.stages import steps
from conveyor.core.transitions import may_begin_late, observed
from conveyor.gates import GateReader
from conveyor.notifications import Notifications, Notify, notify
from conveyor.push import PushWriter
from conveyor.records import DamagedPipeline, DeliveryRecords, KnownPipeline
from conveyor.runs import (
    JobProgress,
    PipelinePlan,
    PipelineRecord,
    PipelineRun,
    PipelineView,
    PipelineViews,
    RunHistory,
)
from wire.errors import Busy, Conflict, NotFound, TwineError

log = logging.getLogger(__name__)
ROUND_S = 2.0
"""Between two rounds of a pipeline that has a run."""
IDLE_S = 10.0
"""Between two reads of the image store."""
_BACK_OFF_MAX_S = 30.0
VERDICTS_SHOWN = 500
"""Newest verdicts of each run in a history of several: a gate may have thousands in a day."""


class DeliveryService:
    """Carries out the pipelines of a store."""

    def __init__(
        self,
        records: DeliveryRecords,
        writer: PushWriter,
        runtime: Runtime,
        meter: GateReader,
        send: Notify = notify,
        round_s: float = ROUND_S,
        boot: str = "",
    ) -> None:
        """`boot` names this boot of the host; empty: not known."""
        self._records, self._writer, self._runtime, self._meter = records, writer, runtime, meter
        self._notifications = Notifications(runtime, send)
        self._round_s, self._boot = round_s, boot
        self._known: dict[str, KnownPipeline] = {}
        self._damaged: dict[str, DamagedPipeline] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._jobs: dict[str, dict[str, JobProgress]] = {}
        self._trouble: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        """Job → why its last change was refused."""
        self._looked: dict[str, float] = {}
        """Pipeline → when the image store was last read."""
        self._loops: dict[str, asyncio.Task[None]] = {}

    async def load(self) -> None:
        """Read every pipeline; a damaged one is reported, and the others are carried out."""
        self._known, self._damaged = await self._records.all()

    async def run(self) -> None:
        """Carry out all pipelines, including later ones, until cancelled."""
        try:
            while True:
                for name in sorted(self._known.keys() - self._loops.keys()):
                    self._loops[name] = self._runtime.spawn(f"pipeline {name}", self._follow(name))
                for task in [t for t in self._loops.values() if t.done()]:
                    task.result()  # a bug, or the store is lost: end the process
                await asyncio.sleep(min(1.0, self._round_s))
        finally:
            for task in self._loops.values():
                task.cancel()
            await asyncio.gather(*self._loops.values(), return_exceptions=True)
            self._loops.clear()

    async def _follow(self, name: str) -> None:
        pause_s = self._round_s
        while True:
            wake = self._wake.setdefault(name, asyncio.Event())
            wake.clear()
            try:
                await self.round(name)
                trouble = self._trouble.get(name, "")
            except TwineError as e:
                if failure := self._records.failure():
                    raise Busy(f"the service cannot continue: {failure}") from e
                self._trouble[name] = trouble = str(e)
                log.warning("round failed", extra={"pipeline": name, "reason": trouble})
            pause_s = min(2 * pause_s, _BACK_OFF_MAX_S) if trouble else self._pause(name)
            try:
                async with asyncio.timeout(pause_s):
                    await wake.wait()
            except TimeoutError:
                pass

    def _pause(self, name: str) -> float:
        record = self._known[name].record
        is_busy = record.active is not None or record.waiting is not None
        return self._round_s if is_busy else max(self._round_s, IDLE_S)

    # -- one round

    async def round(self, name: str) -> None:
        """Read, decide, store and act once."""
        async with self._lock(name):
            known = await self._fresh(name)
            known = await self._triggered(known)
            record = self._observed(known.record)
            jobs = await self._look(name, record)
            decision = decide.advance(record, jobs, self._runtime.date())
            known = await self._write(known, self._observed(decision.record), decision.ended)
            for act in decision.acts:
                await self._act(name, act)
        await self._clean_up(name)
        if decision.measure and known.record.active is not None:
            await self._measure(name, known.record.active, decision.measure, jobs)
        await self._notify(name)

    async def _fresh(self, name: str) -> KnownPipeline:
        """Return a pipeline as it is stored: another process may have written it."""
        known = await self._records.get(name)
        if known is None:
            raise NotFound(f"there is no pipeline {name!r}", hint="twinectl pipeline apply FILE")
        self._known[name] = known
        return known

    def _observed(self, record: PipelineRecord) -> PipelineRecord:
        """Return a record whose run is noted as observed by this process."""
        run = record.active
        if run is None:
            return record
        return replace(record, active=observed(run, self._boot, self._runtime.date()))

    async def _triggered(self, known: KnownPipeline) -> KnownPipeline:
        trigger, name = known.record.spec.trigger, known.record.spec.name
        self._trouble.pop(name, None)
        now, looked = self._runtime.date(), self._looked.get(name, float("-inf"))
        if not trigger.image or 0 <= now - looked < IDLE_S:
            return known
        self._looked[name] = now
        try:
            newest = await self._writer.newest_image(trigger.image)
        except TwineError as e:
            self._trouble[name] = f"cannot read the image store: {e}"
            return known
        changed, ended = commands.triggered(known.record, newest, now)
        return await self._write(known, changed, ended)

    async def _look(self, name: str, record: PipelineRecord) -> dict[str, JobProgress]:
        """Return the visible jobs of the pipeline's run."""
        run = record.active or record.waiting
        image = run.image if run is not None else ""
        names = record.active.spec.targets if record.active is not None else record.spec.targets
        jobs: dict[str, JobProgress] = {}
        for job in names if run is not None else []:
            try:
                seen = await self._writer.look(job, image)
            except TwineError as e:
                self._trouble[name] = f"cannot read {named(job)}: {e}"
                continue
            jobs[job] = replace(seen, refused=self._refused.get(job, ""))
        self._jobs[name] = jobs
        return jobs

    async def _write(
        self, known: KnownPipeline, record: PipelineRecord, ended: tuple[PipelineRun, ...]
    ) -> KnownPipeline:
        if record == known.record and not ended and known.revision:
            return known
        known = await self._records.write(known, record, ended)
        self._known[record.spec.name] = known
        for run in ended:
            fields = {"pipeline": record.spec.name, "run": run.number, "state": run.state.value}
            log.info("run ended", extra=fields)
            for job in run.spec.targets:
                self._refused.pop(job, None)
        return known

    async def _act(self, name: str, act: DeliveryAct) -> None:
        """Carry out one act; a refusal is kept for the status and tried again in the next round."""
        if failure := self._records.failure():
            raise Busy(f"cannot change jobs: {failure}")
        try:
            await self._writer.write(act)
        except TwineError as e:
            self._refused[act.job] = str(e)
            self._trouble[name] = f"cannot change {named(act.job)}: {e}"
            log.warning("change of a job refused", extra={"job": act.job, "reason": str(e)})
        else:
            self._refused.pop(act.job, None)
            log.info("job changed", extra={"job": act.job, "act": type(act).__name__})

    async def _clean_up(self, name: str) -> None:
        """End the checks of runs that ended, also those that begin late."""
        for number in self._known[name].record.unchecked:
            run = await self._ended_run(name, number)
            try:
                if run is not None:
                    await self._meter.end(run)
            except TwineError as e:
                log.warning("a check was left running", extra={"run": number, "reason": str(e)})
                continue
            if run is not None and may_begin_late(run, self._runtime.date()):
                continue
            await self._strike(name, "unchecked", number)

    async def _ended_run(self, name: str, number: int) -> PipelineRun | None:
        """Return an ended run; None: it is not kept any more, or damaged."""
        try:
            return await self._records.run(name, number)
        except DamagedRecord as e:
            log.warning("a run is left out", extra={"pipeline": name, "reason": str(e)})
            return None

    async def _measure(
        self, name: str, run: PipelineRun, gates: Sequence[str], jobs: dict[str, JobProgress]
    ) -> None:
        """Measure gates outside of the lock, and store the results if the step is the same."""
        step = steps(run.spec)[run.step]
        seen, verdicts = [jobs[job] for job in step.jobs], []
        for gate in gates:
            now = self._runtime.date()
            found = await self._meter.measure(gate, run, seen, now)
            if found is not None:
                verdicts.append(judge.verdict_of(run, step.stage, gate, found, now))
        async with self._lock(name):
            for verdict in verdicts:
                known = await self._fresh(name)
                current = known.record.active
                if current is None or current.number != run.number or current.steps != run.steps:
                    return
                changed = replace(known.record, active=judge.noted(current, verdict))
                await self._write(known, changed, ())

    async def _notify(self, name: str) -> None:
        """Send notifications of unsuccessful runs."""
        for number in self._known[name].record.unsent:
            run = await self._ended_run(name, number)
            if run is not None and not await self._notifications.deliver(name, run):
                continue
            await self._strike(name, "unsent", number)

    async def _strike(self, name: str, field: str, number: int) -> None:
        """Remove a run from a field of the stored pipeline that lists runs."""
        async with self._lock(name):
            known = await self._fresh(name)
            left = tuple(n for n in getattr(known.record, field) if n != number)
            await self._write(known, replace(known.record, **{field: left}), ())

    # -- API

    async def apply(self, spec: PipelineSpec, who: str) -> PipelineView:
        """Create a pipeline or change it."""
        async with self._lock(""), self._lock(spec.name):
            known = await self._records.get(spec.name)
            before = known.record if known is not None else None
            now = self._runtime.date()
            record = commands.applied(before, spec, self._specs(), who, now)
            known = known or KnownPipeline(record, 0)
            await self._write(known, record, ())
        log.info("pipeline applied", extra={"pipeline": spec.name, "who": who})
        return await self.view(spec.name)

    async def start(self, name: str, request: StartRequest, who: str) -> PipelineView:
        """Start a run by hand; `NotFound` if the image store is seen and has no such image."""
        await self._check_image(name, request.image)
        now = self._runtime.date()
        async with self._lock(name):
            known = await self._fresh(name)
            record, ended = commands.started(
                known.record, request.image, "hand", who, request.reason, now
            )
            await self._write(known, record, ended)
        return await self._woken(name)

    async def _check_image(self, name: str, image: str) -> None:
        if not image.startswith("sha256:"):
            return  # a release: each host checks it
        try:
            found = await self._writer.newest_image(image)
        except TwineError as e:
            log.warning("image not checked", extra={"pipeline": name, "reason": str(e)})
            return  # the run waits until the front end answers
        if not found:
            raise NotFound(
                f"cannot start a run of pipeline {name}: the image store has no image {image}",
                hint="twinectl image list",
            )

    async def control(self, name: str, request: ControlRequest, who: str) -> PipelineView:
        """Approve, pause, resume, skip, roll back or abort."""
        async with self._lock(name):
            known = await self._fresh(name)
            is_past = request.verb is ControlVerb.ROLLBACK and known.record.active is None
            last = await self._records.last_change(known.record) if is_past else None
            record, now = self._observed(known.record), self._runtime.date()
            record, ended = commands.controlled(record, request, who, last, now)
            await self._write(known, record, ended)
        log.info("run controlled", extra={"pipeline": name, "verb": request.verb, "who": who})
        return await self._woken(name)

    async def remove(self, name: str) -> None:
        """Remove a pipeline that has no run, and its history."""
        async with self._lock(name):
            found = self._damaged.get(name) or await self._fresh(name)
            record = found.record if isinstance(found, KnownPipeline) else None
            if record is not None and (record.active or record.waiting) is not None:
                raise Conflict(
                    f"cannot remove pipeline {name}: it has a run",
                    hint=f"twinectl pipeline abort {name}",
                )
            for number in record.unchecked if record is not None else ():
                if (run := await self._ended_run(name, number)) is not None:
                    await self._meter.end(run)
            await self._records.remove(name, found.revision)
            for of_it in (self._known, self._damaged, self._trouble, self._jobs, self._looked):
                of_it.pop(name, None)
            self._notifications.forget(name)
            if (task := self._loops.pop(name, None)) is not None:
                task.cancel()

    async def plan(self, spec: PipelineSpec) -> PipelinePlan:
        """Return what applying a pipeline would change and what its next run would do."""
        known = self._known.get(spec.name)
        before = known.record if known is not None else None
        commands.applied(before, spec, self._specs(), "", 0.0)
        jobs = [await self._writer.look(job, "") for job in spec.targets]
        return commands.planned(before, spec, jobs)

    def _specs(self) -> list[PipelineSpec]:
        return [known.record.spec for known in self._known.values()]

    async def views(self) -> PipelineViews:
        """Return all pipelines."""
        pipelines = [await self._view(name, known) for name, known in sorted(self._known.items())]
        damaged = {name: one.reason for name, one in sorted(self._damaged.items())}
        return PipelineViews(pipelines=pipelines, damaged=damaged)

    async def view(self, name: str) -> PipelineView:
        """Return a pipeline as it is now."""
        return await self._view(name, self._known.get(name) or await self._fresh(name))

    async def _view(self, name: str, known: KnownPipeline) -> PipelineView:
        runs = await self._records.runs(known.record, 1)
        return PipelineView(
            record=known.record,
            jobs=list(self._jobs.get(name, {}).values()),
            last=runs[0] if runs else None,
            trouble=self._trouble.get(name, ""),
            now=self._runtime.date(),
        )

    async def history(self, name: str, limit: int, number: int | None) -> RunHistory:
        """Return the newest runs with their newest verdicts, or one run with all of them.

        The run under way comes first.
        """
        record = (await self.view(name)).record
        under_way = [run for run in (record.active, record.waiting) if run is not None]
        runs = [*under_way, *await self._records.runs(record, limit)]
        if number is not None:
            found = await self._records.run(name, number)
            ended = [found] if found is not None else []
            runs = [run for run in (*under_way, *ended) if run.number == number]
            if not runs:
                raise NotFound(f"pipeline {name} has no run {number}, or it is not kept any more")
        runs = runs[:limit]
        most = VERDICTS_SHOWN if number is None else None
        verdicts = {run.number: await self._records.verdicts(name, run, most) for run in runs}
        return RunHistory(runs=runs, verdicts=verdicts)

    async def _woken(self, name: str) -> PipelineView:
        if name in self._wake:
            self._wake[name].set()
        return await self.view(name)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())
