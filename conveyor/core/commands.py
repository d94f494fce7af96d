"""Commands of users and triggers on a pipeline: each returns the record to store, or refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from conveyor.api import ControlRequest, ControlVerb, PipelineSpec
from conveyor.core import evaluation, schedule
from conveyor.core.acts import target_text
from conveyor.core.stages import stage_gates, step_text, steps
from conveyor.core.transitions import SERVICE_NAME, ended, logged, rolling_back
from conveyor.runs import (
    GateOutcome,
    GateVerdict,
    JobProgress,
    PipelinePlan,
    PipelineRecord,
    PipelineRun,
    RunState,
    StepTime,
    short_image,
)
from wire.errors import Conflict, Forbidden, InvalidInput

Changed = tuple[PipelineRecord, tuple[PipelineRun, ...]]
"""The record to store, and the runs that ended."""


def applied(
    known: PipelineRecord | None,
    spec: PipelineSpec,
    others: Sequence[PipelineSpec],
    who: str,
    now: float,
) -> PipelineRecord:
    """Return the record of a pipeline that is created or changed.

    The run under way keeps the file that it began with. Raises `Conflict` if one of `others` has
    one of its targets.
    """
    for other in others:
        if other.name != spec.name and (shared := sorted({*other.targets} & {*spec.targets})):
            raise Conflict(
                f"cannot apply pipeline {spec.name}: {target_text(shared[0])} belongs to pipeline"
                f" {other.name}",
                hint="each has one pipeline; take it out of the other file first",
            )
    if known is None:
        return PipelineRecord(spec=spec, version=1, applied_by=who, applied_at=now, looked=now)
    before, after = known.spec.trigger, spec.trigger
    is_same = (before.schedule, before.zone) == (after.schedule, after.zone)
    return replace(
        known,
        spec=spec,
        version=known.version + 1,
        applied_by=who,
        applied_at=now,
        looked=known.looked if is_same else now,  # times before the change start nothing
    )


def planned(
    known: PipelineRecord | None, spec: PipelineSpec, jobs: Sequence[JobProgress]
) -> PipelinePlan:
    """Return what applying a pipeline would change, and what its next run would do."""
    changed = [
        name
        for name in spec.__struct_fields__
        if known is None or getattr(known.spec, name) != getattr(spec, name)
    ]
    missing = [target_text(job.job) for job in jobs if not job.image]
    warnings = [f"{name} does not exist; runs wait until it does" for name in missing]
    plan, sizes = steps(spec), {job.job: job.size for job in jobs}
    warnings += [
        f"stage {step.name} has neither soak nor gate"
        for step in plan
        if not step.stage.gates and not step.stage.soak_s
    ]
    texts = [step_text(step, sizes) for step in plan]
    return PipelinePlan(changed=changed, steps=texts, warnings=warnings)


def started(
    record: PipelineRecord, image: str, trigger: str, who: str, reason: str, now: float
) -> Changed:
    """Return the record with a waiting run, and the run that it supersedes."""
    active = record.active
    if image.startswith("sha256:") == bool(record.spec.fleets):
        what = "fleets takes releases" if record.spec.fleets else "jobs takes digests"
        raise InvalidInput(
            f"cannot start a run of {short_image(image)}: pipeline {record.spec.name} of {what}",
            hint="a release is such as 0.2.0, a digest such as sha256:…",
        )
    if active is not None and active.image == image and active.state is RunState.RUNNING:
        raise Conflict(
            f"cannot start a run of {short_image(image)}: run {active.number} of pipeline"
            f" {record.spec.name} delivers it already",
            hint=f"twinectl pipeline status {record.spec.name}",
        )
    run = PipelineRun(
        number=record.next_run, image=image, trigger=trigger, by=who, created=now, spec=record.spec
    )
    why = f": {reason}" if reason else ""
    what = "release" if record.spec.fleets else "image"
    run = logged(run, now, who, f"starts {what} {image} ({trigger}){why}")
    superseded: tuple[PipelineRun, ...] = ()
    if record.waiting is not None:
        by = f"run {run.number} has a newer image"
        superseded = (ended(record.waiting, RunState.SUPERSEDED, by, now),)
    version, number = record.version + 1, record.next_run + 1
    return replace(record, waiting=run, next_run=number, version=version), superseded


def triggered(record: PipelineRecord, newest: str, now: float) -> Changed:
    """Return the record after a check of its trigger: a new image starts a run.

    `newest` is the newest image of the trigger's name; empty: there is none. A run that a user
    started and that waits is not superseded: the image is checked again once that run has begun.
    """
    trigger = record.spec.trigger
    if record.waiting is not None and record.waiting.trigger == "hand":
        return record, ()
    kind = "image"
    if trigger.schedule:
        last = schedule.last_start(trigger.schedule, trigger.zone, now)
        if last is None or (record.looked is not None and last <= record.looked):
            return record, ()
        record, kind = replace(record, looked=now), "schedule"
    if not newest or newest == record.last_image:
        return record, ()
    record = replace(record, last_image=newest)
    under_way = [run.image for run in (record.active, record.waiting) if run is not None]
    is_everywhere = all(record.good.get(job) == newest for job in record.spec.targets)
    if newest in under_way or is_everywhere:
        return record, ()
    return started(record, newest, kind, SERVICE_NAME, f"newest {trigger.image}", now)


@dataclass(frozen=True, slots=True)
class _Request:
    """A user's request to control a pipeline, and the pipeline's record."""

    record: PipelineRecord
    control: ControlRequest
    who: str
    now: float

    @property
    def reason_suffix(self) -> str:
        return f": {self.control.reason}" if self.control.reason else ""

    def logged(self, run: PipelineRun, what: str) -> PipelineRun:
        """Return the run with the request in its log."""
        return logged(run, self.now, self.who, f"{what}{self.reason_suffix}")

    def rolling_back(self, run: PipelineRun) -> PipelineRun:
        reason = f"asked for by {self.who}{self.reason_suffix}"
        return rolling_back(run, self.who, reason, self.now)

    def refused(self, reason: str, hint: str = "") -> Conflict:
        name = self.record.spec.name
        hint = hint or f"twinectl pipeline status {name}"
        verb = "roll back" if self.control.verb is ControlVerb.ROLLBACK else self.control.verb
        return Conflict(f"cannot {verb} pipeline {name}: {reason}", hint=hint)


def controlled(
    record: PipelineRecord, request: ControlRequest, who: str, last: PipelineRun | None, now: float
) -> Changed:
    """Return the record after a user's request, and the runs that it ended.

    Raises `Conflict` if the user decided on an earlier version of the pipeline.
    """
    command = _Request(record, request, who, now)
    if request.expect is not None and request.expect != record.version:
        raise command.refused(f"it is at version {record.version}, not {request.expect}")
    changed, ended_runs = _controlled(command, last)
    return replace(changed, version=record.version + 1), ended_runs


def _controlled(request: _Request, last: PipelineRun | None) -> Changed:
    record, verb, run = request.record, request.control.verb, request.record.active
    if verb in (ControlVerb.SKIP, ControlVerb.ABORT) and not request.control.reason:
        raise InvalidInput(f"{verb} needs a reason, which the history keeps", hint="--reason TEXT")
    if run is None:
        if verb is ControlVerb.ROLLBACK:
            return _rollback_of_ended_run(request, last), ()
        return _without_run(request)
    if run.ending is not None:
        raise request.refused(f"run {run.number} is ending: {run.reason}")
    if verb is ControlVerb.ABORT:
        return _aborted(request, run)
    if run.state is RunState.ROLLING_BACK:
        reason = f"run {run.number} is already rolling back: {run.reason}"
        raise request.refused(reason, "wait for its end, or abort it")
    match verb:
        case ControlVerb.PAUSE:
            run = _paused(request, run)
        case ControlVerb.RESUME:
            run = _resumed(request, run)
        case ControlVerb.SKIP:
            run = _skipped(request, run)
        case ControlVerb.APPROVE:
            run = _approved(request, run)
        case _:
            run = request.rolling_back(run)
    return replace(record, active=run), ()


def _without_run(request: _Request) -> Changed:
    """Return the record if no run has begun: a waiting one can be aborted."""
    run = request.record.waiting
    if run is not None and request.control.verb is ControlVerb.ABORT:
        reason = f"aborted by {request.who}{request.reason_suffix}"
        aborted = ended(run, RunState.ABORTED, reason, request.now)
        return replace(request.record, waiting=None), (aborted,)
    if run is not None:
        raise request.refused(f"run {run.number} has not begun: {run.waits}")
    raise request.refused("it has no run", "twinectl pipeline start")


def _aborted(request: _Request, run: PipelineRun) -> Changed:
    record, reason = request.record, f"aborted by {request.who}{request.reason_suffix}"
    superseded: tuple[PipelineRun, ...] = ()
    if record.waiting is not None:
        why = f"run {run.number} was {reason}"
        superseded = (ended(record.waiting, RunState.SUPERSEDED, why, request.now),)
    run = replace(run, ending=RunState.ABORTED, reason=reason)
    run = logged(run, request.now, request.who, reason)
    return replace(record, active=run, waiting=None, frozen=run.pushed), superseded


def _paused(request: _Request, run: PipelineRun) -> PipelineRun:
    if run.paused:
        raise request.refused(f"run {run.number} is already paused")
    return request.logged(replace(run, paused=True), "pauses")


def _resumed(request: _Request, run: PipelineRun) -> PipelineRun:
    """Return the resumed run; its step is observed again from its beginning."""
    if not run.paused:
        raise request.refused(f"run {run.number} is not paused")
    last, again = run.steps[-1], run.steps
    if last.ended is None:
        over = replace(last, ended=request.now)
        again = (*run.steps[:-1], over, StepTime(name=last.name, began=request.now))
    run = replace(run, paused=False, steps=again, verdicts={}, waits="")
    return request.logged(run, "resumes")


def _skipped(request: _Request, run: PipelineRun) -> PipelineRun:
    plan = steps(run.spec)
    if run.paused or run.step >= len(plan):
        why = "is paused" if run.paused else "has no step left"
        raise request.refused(f"run {run.number} {why}")
    return request.logged(replace(run, skip=run.step), f"skips {plan[run.step].name}")


def _approved(request: _Request, run: PipelineRun) -> PipelineRun:
    plan, who, gate = steps(run.spec), request.who, request.control.gate
    if run.step >= len(plan) or run.steps[-1].reached is None or run.paused:
        why = "is paused" if run.paused else f"waits for no approval yet; its step: {run.waits}"
        raise request.refused(f"run {run.number} {why}")
    step = plan[run.step]
    gates = stage_gates(run.spec, step.stage)
    approvals = {name: g.approval for name, g in gates.items() if g.approval is not None}
    if gate and gate not in approvals:
        names = f"for {', '.join(approvals)}" if approvals else "for no approval"
        raise request.refused(f"{step.name} does not wait for {gate!r} but {names}")
    missing = {
        name: approval
        for name, approval in approvals.items()
        if gate in ("", name) and name not in run.verdicts
    }
    if not missing:
        raise request.refused(f"{step.name} waits for no approval")
    user = who.removeprefix("user:")
    permitted = [name for name, a in missing.items() if not a.by or user in a.by]
    if not permitted:
        allowed = ", ".join(sorted({name for a in missing.values() for name in a.by}))
        raise Forbidden(f"{who} may not approve {', '.join(missing)}", hint=f"it is for {allowed}")
    for name in permitted:
        verdict = GateVerdict(
            gate=name,
            step=run.step,
            at=request.now,
            outcome=GateOutcome.PASS,
            reason=f"approved by {who}{request.reason_suffix}",
            by=who,
        )
        run = request.logged(evaluation.with_verdict(run, verdict), f"approves {name}")
    return run


def _rollback_of_ended_run(request: _Request, last: PipelineRun | None) -> PipelineRecord:
    """Return the record with a new run that only rolls back an ended one."""
    record = request.record
    if last is None or last.state is RunState.ROLLED_BACK:
        raise request.refused("no run made a change that is still in force")
    back = record.good if last.state is not RunState.DONE else record.previous
    missing = [job for job in last.pushed if back.get(job) in (None, last.image)]
    if missing:
        raise request.refused(f"no earlier image of job {missing[0]} is known")
    run = PipelineRun(
        number=record.next_run,
        image=last.image,
        trigger="rollback",
        by=request.who,
        created=request.now,
        spec=last.spec,
        back={job: back.get(job, last.image) for job in last.spec.targets},
        step=last.step,
        pushed=last.pushed,
    )
    run = request.rolling_back(run)
    return replace(record, active=run, next_run=record.next_run + 1)
