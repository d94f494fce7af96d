"""The delivery service: in each round it reads the jobs, decides, stores the decision, then acts.

Every act follows from the stored record and the present jobs. So a round that was interrupted
begins again from the store. One process at a time owns the store (by a file lock, or a lease in
etcd). The service checks before each act that it still does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from control_plane.runtime.runtime import Runtime
from conveyor.api import ControlRequest, ControlVerb, PipelineSpec, StartRequest
from conveyor.core import commands, decide, evaluation
from conveyor.core.acts import DeliveryAct, target_text
from conveyor.core.stages import steps
from conveyor.core.transitions import check_may_begin, observed
from conveyor.gates import GateMeasurements
from conveyor.notifications import Notifications, Notify, notify
from conveyor.push import PushWriter
from conveyor.records import DamagedPipeline, DeliveryRecords, StoredPipeline
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
"""Interval between two rounds of a pipeline that has a run."""
IDLE_S = 10.0
"""Interval between two reads of the image store, and between rounds without a run."""
_BACK_OFF_MAX_S = 30.0
"""Longest pause after rounds that failed."""
VERDICTS_SHOWN = 500
"""Newest verdicts of each run in a history of several: a gate may have thousands in a day."""


class DeliveryService:
    """Carries out the pipelines of a store."""

    def __init__(
        self,
        records: DeliveryRecords,
        writer: PushWriter,
        runtime: Runtime,
        meter: GateMeasurements,
        send: Notify = notify,
        round_s: float = ROUND_S,
        boot: str = "",
    ) -> None:
        """`boot` names this boot of the host; empty: not known."""
        self._records, self._writer, self._runtime, self._meter = records, writer, runtime, meter
        self._notifications = Notifications(runtime, send)
        self._round_s, self._boot = round_s, boot
        self._known: dict[str, StoredPipeline] = {}
        self._damaged: dict[str, DamagedPipeline] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._jobs: dict[str, dict[str, JobProgress]] = {}
        """Pipeline → its jobs in the last round."""
        self._trouble: dict[str, str] = {}
        """Pipeline → why the last round could not read or change something."""
        self._refused: dict[str, str] = {}
        """Job → why its last change was refused."""
        self._image_read_at: dict[str, float] = {}
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
                    self._loops[name] = self._runtime.spawn(
                        f"pipeline {name}", self._run_rounds(name)
                    )
                for task in [t for t in self._loops.values() if t.done()]:
                    task.result()  # a bug, or the store is lost: end the process
                await asyncio.sleep(min(1.0, self._round_s))
        finally:
            for task in self._loops.values():
                task.cancel()
            await asyncio.gather(*self._loops.values(), return_exceptions=True)
            self._loops.clear()

    async def _run_rounds(self, name: str) -> None:
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
            pause_s = min(2 * pause_s, _BACK_OFF_MAX_S) if trouble else self._pause_s(name)
            try:
                async with asyncio.timeout(pause_s):
                    await wake.wait()
            except TimeoutError:
                pass

    def _pause_s(self, name: str) -> float:
        record = self._known[name].record
        is_busy = record.active is not None or record.waiting is not None
        return self._round_s if is_busy else max(self._round_s, IDLE_S)

    # -- one round

    async def round(self, name: str) -> None:
        """Carry out one round of a pipeline."""
        async with self._lock(name):
            known = await self._read_stored(name)
            known = await self._triggered(known)
            record = self._observed(known.record)
            jobs = await self._read_jobs(name, record)
            decision = decide.advance(record, jobs, self._runtime.date())
            known = await self._write(known, self._observed(decision.record), decision.ended)
            for act in decision.acts:
                await self._carry_out(name, act)
        await self._clean_up(name)
        if decision.measure and known.record.active is not None:
            await self._measure(name, known.record.active, decision.measure, jobs)
        await self._notify(name)

    async def _read_stored(self, name: str) -> StoredPipeline:
        """Return a pipeline from the store: another process may have written it."""
        known = await self._records.get(name)
        if known is None:
            raise NotFound(f"there is no pipeline {name!r}", hint="twinectl pipeline apply FILE")
        self._known[name] = known
        return known

    def _observed(self, record: PipelineRecord) -> PipelineRecord:
        """Return the record with the time at which this process observed its run."""
        run = record.active
        if run is None:
            return record
        return replace(record, active=observed(run, self._boot, self._runtime.date()))

    async def _triggered(self, known: StoredPipeline) -> StoredPipeline:
        trigger, name = known.record.spec.trigger, known.record.spec.name
        self._trouble.pop(name, None)
        now, read_at = self._runtime.date(), self._image_read_at.get(name, float("-inf"))
        if not trigger.image or 0 <= now - read_at < IDLE_S:
            return known
        self._image_read_at[name] = now
        try:
            newest = await self._writer.newest_image(trigger.image)
        except TwineError as e:
            self._trouble[name] = f"cannot read the image store: {e}"
            return known
        changed, ended = commands.triggered(known.record, newest, now)
        return await self._write(known, changed, ended)

    async def _read_jobs(self, name: str, record: PipelineRecord) -> dict[str, JobProgress]:
        """Return the progress of the jobs of the pipeline's run; unreadable ones are left out."""
        run = record.active or record.waiting
        image = run.image if run is not None else ""
        names = record.active.spec.targets if record.active is not None else record.spec.targets
        jobs: dict[str, JobProgress] = {}
        for job in names if run is not None else []:
            try:
                progress = await self._writer.read_progress(job, image)
            except TwineError as e:
                self._trouble[name] = f"cannot read {target_text(job)}: {e}"
                continue
            jobs[job] = replace(progress, refused=self._refused.get(job, ""))
        self._jobs[name] = jobs
        return jobs

    async def _write(
        self, known: StoredPipeline, record: PipelineRecord, ended: tuple[PipelineRun, ...]
    ) -> StoredPipeline:
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

    async def _carry_out(self, name: str, act: DeliveryAct) -> None:
        """Carry out one act. A refusal is shown in the status, and the next round decides again."""
        if failure := self._records.failure():
            raise Busy(f"cannot change jobs: {failure}")
        try:
            await self._writer.write(act)
        except TwineError as e:
            self._refused[act.job] = str(e)
            self._trouble[name] = f"cannot change {target_text(act.job)}: {e}"
            log.warning("change of a job refused", extra={"job": act.job, "reason": str(e)})
        else:
            self._refused.pop(act.job, None)
            log.info("job changed", extra={"job": act.job, "act": type(act).__name__})

    async def _clean_up(self, name: str) -> None:
        """Stop the checks of ended runs, including checks that begin late."""
        for number in self._known[name].record.unchecked:
            run = await self._records.find_run(name, number)
            try:
                if run is not None:
                    await self._meter.end(run)
            except TwineError as e:
                log.warning("a check was left running", extra={"run": number, "reason": str(e)})
                continue
            if run is not None and check_may_begin(run, self._runtime.date()):
                continue
            await self._remove_number(name, "unchecked", number)

    async def _measure(
        self, name: str, run: PipelineRun, gates: Sequence[str], jobs: dict[str, JobProgress]
    ) -> None:
        """Measure gates without the pipeline's lock; store the results if the step is the same."""
        step = steps(run.spec)[run.step]
        progress, verdicts = [jobs[job] for job in step.jobs], []
        for gate in gates:
            now = self._runtime.date()
            measured = await self._meter.measure(gate, run, progress, now)
            if measured is not None:
                verdicts.append(evaluation.verdict_of(run, step.stage, gate, measured, now))
        async with self._lock(name):
            for verdict in verdicts:
                known = await self._read_stored(name)
                current = known.record.active
                if current is None or current.number != run.number or current.steps != run.steps:
                    return
                changed = replace(known.record, active=evaluation.with_verdict(current, verdict))
                await self._write(known, changed, ())

    async def _notify(self, name: str) -> None:
        """Send notifications of unsuccessful runs."""
        for number in self._known[name].record.unsent:
            run = await self._records.find_run(name, number)
            if run is not None and not await self._notifications.deliver(name, run):
                continue
            await self._remove_number(name, "unsent", number)

    async def _remove_number(self, name: str, field: str, number: int) -> None:
        """Remove the number of a run from a field of the stored pipeline."""
        async with self._lock(name):
            known = await self._read_stored(name)
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
            known = known or StoredPipeline(record, 0)
            await self._write(known, record, ())
        log.info("pipeline applied", extra={"pipeline": spec.name, "who": who})
        return await self.view(spec.name)

    async def start(self, name: str, request: StartRequest, who: str) -> PipelineView:
        """Start a run by hand; `NotFound` if the image store answers and has no such image."""
        await self._check_image(name, request.image)
        now = self._runtime.date()
        async with self._lock(name):
            known = await self._read_stored(name)
            record, ended = commands.started(
                known.record, request.image, "hand", who, request.reason, now
            )
            await self._write(known, record, ended)
        return await self._wake_and_view(name)

    async def _check_image(self, name: str, image: str) -> None:
        if not image.startswith("sha256:"):
            return  # a release: each host checks it
        try:
            digest = await self._writer.newest_image(image)
        except TwineError as e:
            log.warning("image not checked", extra={"pipeline": name, "reason": str(e)})
            return  # the run waits until the front end answers
        if not digest:
            raise NotFound(
                f"cannot start a run of pipeline {name}: the image store has no image {image}",
                hint="twinectl image list",
            )

    async def control(self, name: str, request: ControlRequest, who: str) -> PipelineView:
        """Approve, pause, resume, skip, roll back or abort."""
        async with self._lock(name):
            known = await self._read_stored(name)
            is_past = request.verb is ControlVerb.ROLLBACK and known.record.active is None
            last = await self._records.last_change(known.record) if is_past else None
            record, now = self._observed(known.record), self._runtime.date()
            record, ended = commands.controlled(record, request, who, last, now)
            await self._write(known, record, ended)
        log.info("run controlled", extra={"pipeline": name, "verb": request.verb, "who": who})
        return await self._wake_and_view(name)

    async def remove(self, name: str) -> None:
        """Remove a pipeline that has no run, and its history."""
        async with self._lock(name):
            stored = self._damaged.get(name) or await self._read_stored(name)
            record = stored.record if isinstance(stored, StoredPipeline) else None
            if record is not None and (record.active or record.waiting) is not None:
                raise Conflict(
                    f"cannot remove pipeline {name}: it has a run",
                    hint=f"twinectl pipeline abort {name}",
                )
            for number in record.unchecked if record is not None else ():
                if (run := await self._records.find_run(name, number)) is not None:
                    await self._meter.end(run)
            await self._records.remove(name, stored.revision)
            for by_name in (self._known, self._damaged, self._trouble, self._jobs):
                by_name.pop(name, None)
            self._image_read_at.pop(name, None)
            self._notifications.forget(name)
            if (task := self._loops.pop(name, None)) is not None:
                task.cancel()

    async def plan(self, spec: PipelineSpec) -> PipelinePlan:
        """Return what applying a pipeline would change and what its next run would do."""
        known = self._known.get(spec.name)
        before = known.record if known is not None else None
        commands.applied(before, spec, self._specs(), "", 0.0)
        jobs = [await self._writer.read_progress(job, "") for job in spec.targets]
        return commands.planned(before, spec, jobs)

    def _specs(self) -> list[PipelineSpec]:
        return [known.record.spec for known in self._known.values()]

    async def views(self) -> PipelineViews:
        """Return all pipelines."""
        pipelines = [await self._view(name, known) for name, known in sorted(self._known.items())]
        damaged = {name: pipeline.reason for name, pipeline in sorted(self._damaged.items())}
        return PipelineViews(pipelines=pipelines, damaged=damaged)

    async def view(self, name: str) -> PipelineView:
        """Return a pipeline."""
        return await self._view(name, self._known.get(name) or await self._read_stored(name))

    async def _view(self, name: str, known: StoredPipeline) -> PipelineView:
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
            past = await self._records.run(name, number)
            ended = [past] if past is not None else []
            runs = [run for run in (*under_way, *ended) if run.number == number]
            if not runs:
                raise NotFound(f"pipeline {name} has no run {number}, or it is not kept any more")
        runs = runs[:limit]
        verdicts_max = VERDICTS_SHOWN if number is None else None
        verdicts = {
            run.number: await self._records.verdicts(name, run, verdicts_max) for run in runs
        }
        return RunHistory(runs=runs, verdicts=verdicts)

    async def _wake_and_view(self, name: str) -> PipelineView:
        if name in self._wake:
            self._wake[name].set()
        return await self.view(name)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())
