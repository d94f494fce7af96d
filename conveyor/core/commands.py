"""Commands of users and triggers on a pipeline: each returns the record to store, or refuses."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from conveyor.api import ControlRequest, ControlVerb, PipelineSpec
from conveyor.core import judge, schedule
from conveyor.core.acts import named
from conveyor.core.stages import stage_gates, steps
from conveyor.core.transitions import WHO, ended, logged, rolling_back
from conveyor.runs import (
    GateOutcome,
    GateVerdict,
    PipelineRecord,
    PipelineRun,
    RunState,
    StepTime,
    short,
)
from wire.errors import Conflict, Forbidden, InvalidInput


def applied(
    known: PipelineRecord | None,
    spec: PipelineSpec,
    others: Sequence[PipelineSpec],
    who: str,
    now: float,
) -> PipelineRecord:
    """Return the record of a pipeline that is created or changed.

    A running run keeps its file.
    """
    for other in others:
        if other.name != spec.name and (shared := sorted({*other.targets} & {*spec.targets})):
            raise Conflict(
                f"cannot apply pipeline {spec.name}: {named(shared[0])} belongs to pipeline"
                f" {other.name}",
                hint="each has one pipeline; take it out of the other file first",
            )
    if known is None:
        return PipelineRecord(spec=spec, version=1, applied_by=who, applied_at=now, looked=now)
    version = known.version + 1
    return replace(known, spec=spec, version=version, applied_by=who, applied_at=now)


def started(
    record: PipelineRecord, image: str, trigger: str, who: str, reason: str, now: float
) -> tuple[PipelineRecord, tuple[PipelineRun, ...]]:
    """Return the record with a waiting run, and the run that it supersedes."""
    active = record.active
    if image.startswith("sha256:") == bool(record.spec.fleets):
        what = "fleets takes releases" if record.spec.fleets else "jobs takes digests"
        raise InvalidInput(
            f"cannot start a run of {short(image)}: pipeline {record.spec.name} of {what}",
            hint="a release is such as 0.2.0, a digest such as sha256:…",
        )
    if active is not None and active.image == image and active.state is RunState.RUNNING:
        raise Conflict(
            f"cannot start a run of {short(image)}: run {active.number} of pipeline"
            f" {record.spec.name} delivers it already",
            hint=f"twinectl pipeline status {record.spec.name}",
        )
    run = PipelineRun(
        number=record.next_run, image=image, trigger=trigger, by=who, created=now, spec=record.spec
    )
    why = f": {reason}" if reason else ""
    what = "release" if record.spec.fleets else "image"
    run = logged(run, now, who, f"starts {what} {image} ({trigger}){why}")
    gone: tuple[PipelineRun, ...] = ()
    if record.waiting is not None:
        by = f"run {run.number} has a newer image"
        gone = (ended(record.waiting, RunState.SUPERSEDED, by, now),)
    version, number = record.version + 1, record.next_run + 1
    return replace(record, waiting=run, next_run=number, version=version), gone


def triggered(
    record: PipelineRecord, newest: str, now: float
) -> tuple[PipelineRecord, tuple[PipelineRun, ...]]:
    """Return the record after a look at the newest image of the trigger's name; empty: none.

    An image starts one run, when it becomes the newest. It does not supersede a waiting run that a
    user started: the image is checked again once that run has begun.
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
    return started(record, newest, kind, WHO, f"newest {trigger.image}", now)


def controlled(
    record: PipelineRecord, request: ControlRequest, who: str, last: PipelineRun | None, now: float
) -> tuple[PipelineRecord, tuple[PipelineRun, ...]]:
    """Return the record after a user's request, and the runs that it ended.

    Raises `Conflict` if the user decided on an earlier version of the pipeline.
    """
    if request.expect is not None and request.expect != record.version:
        reason = f"it is at version {record.version}, not {request.expect}"
        raise _refused(record, request, reason)
    changed, gone = _controlled(record, request, who, last, now)
    return replace(changed, version=record.version + 1), gone


def _controlled(
    record: PipelineRecord, request: ControlRequest, who: str, last: PipelineRun | None, now: float
) -> tuple[PipelineRecord, tuple[PipelineRun, ...]]:
    if request.verb in (ControlVerb.SKIP, ControlVerb.ABORT) and not request.reason:
        raise InvalidInput(
            f"{request.verb} needs a reason, which the history keeps", hint="--reason TEXT"
        )
    run = record.active
    if run is None:
        if request.verb is ControlVerb.ROLLBACK:
            return _rollback_of_the_past(record, last, request, who, now), ()
        return _without_run(record, request, who, now)
    if run.ending is not None:
        raise _refused(record, request, f"run {run.number} is ending: {run.reason}")
    if request.verb is ControlVerb.ABORT:
        return _aborted(record, run, request, who, now)
    if run.state is RunState.ROLLING_BACK:
        reason = f"run {run.number} is already rolling back: {run.reason}"
        raise _refused(record, request, reason, "wait for its end, or abort it")
    match request.verb:
        case ControlVerb.PAUSE:
            changed = _paused(record, run, request, who, now)
        case ControlVerb.RESUME:
            changed = _resumed(record, run, request, who, now)
        case ControlVerb.SKIP:
            changed = _skipped(record, run, request, who, now)
        case ControlVerb.APPROVE:
            changed = _approved(record, run, request, who, now)
        case _:
            reason = f"asked for by {who}{_because(request)}"
            changed = replace(record, active=rolling_back(run, who, reason, now))
    return changed, ()


def _refused(
    record: PipelineRecord, request: ControlRequest, reason: str, hint: str = ""
) -> Conflict:
    hint = hint or f"twinectl pipeline status {record.spec.name}"
    verb = "roll back" if request.verb is ControlVerb.ROLLBACK else request.verb
    return Conflict(f"cannot {verb} pipeline {record.spec.name}: {reason}", hint=hint)


def _because(request: ControlRequest) -> str:
    return f": {request.reason}" if request.reason else ""


def _without_run(
    record: PipelineRecord, request: ControlRequest, who: str, now: float
) -> tuple[PipelineRecord, tuple[PipelineRun, ...]]:
    """Return the record if no run has begun: a waiting one can be aborted."""
    run = record.waiting
    if run is not None and request.verb is ControlVerb.ABORT:
        run = ended(run, RunState.ABORTED, f"aborted by {who}{_because(request)}", now)
        return replace(record, waiting=None), (run,)
    if run is not None:
        raise _refused(record, request, f"run {run.number} has not begun: {run.waits}")
    raise _refused(record, request, "it has no run", "twinectl pipeline start")


def _aborted(
    record: PipelineRecord, run: PipelineRun, request: ControlRequest, who: str, now: float
) -> tuple[PipelineRecord, tuple[PipelineRun, ...]]:
    reason = f"aborted by {who}{_because(request)}"
    gone: tuple[PipelineRun, ...] = ()
    if record.waiting is not None:
        gone = (ended(record.waiting, RunState.SUPERSEDED, f"run {run.number} was {reason}", now),)
    run = logged(replace(run, ending=RunState.ABORTED, reason=reason), now, who, reason)
    return replace(record, active=run, waiting=None, frozen=run.pushed), gone


def _paused(
    record: PipelineRecord, run: PipelineRun, request: ControlRequest, who: str, now: float
) -> PipelineRecord:
    if run.paused:
        raise _refused(record, request, f"run {run.number} is already paused")
    run = logged(replace(run, paused=True), now, who, f"pauses{_because(request)}")
    return replace(record, active=run)


def _resumed(
    record: PipelineRecord, run: PipelineRun, request: ControlRequest, who: str, now: float
) -> PipelineRecord:
    """Return the resumed run; its step is observed again from its beginning."""
    if not run.paused:
        raise _refused(record, request, f"run {run.number} is not paused")
    last = run.steps[-1]
    again = run.steps
    if last.ended is None:
        ended_ = replace(last, ended=now)
        again = (*run.steps[:-1], ended_, StepTime(name=last.name, began=now))
    run = replace(run, paused=False, steps=again, verdicts={}, waits="")
    return replace(record, active=logged(run, now, who, f"resumes{_because(request)}"))


def _skipped(
    record: PipelineRecord, run: PipelineRun, request: ControlRequest, who: str, now: float
) -> PipelineRecord:
    plan = steps(run.spec)
    if run.paused or run.step >= len(plan):
        why = "is paused" if run.paused else "has no step left"
        raise _refused(record, request, f"run {run.number} {why}")
    what = f"skips {plan[run.step].name}{_because(request)}"
    return replace(record, active=logged(replace(run, skip=run.step), now, who, what))


def _approved(
    record: PipelineRecord, run: PipelineRun, request: ControlRequest, who: str, now: float
) -> PipelineRecord:
    plan = steps(run.spec)
    if run.step >= len(plan) or run.steps[-1].reached is None or run.paused:
        why = "is paused" if run.paused else f"waits for no approval yet; its step: {run.waits}"
        raise _refused(record, request, f"run {run.number} {why}")
    gates = stage_gates(run.spec, plan[run.step].stage)
    asked = {n: g.approval for n, g in gates.items() if g.approval is not None}
    if request.gate and request.gate not in asked:
        names = f"for {', '.join(asked)}" if asked else "for no approval"
        why = f"{plan[run.step].name} does not wait for {request.gate!r} but {names}"
        raise _refused(record, request, why)
    wanted = {n: a for n, a in asked.items() if request.gate in ("", n)}
    wanted = {n: a for n, a in wanted.items() if n not in run.verdicts}
    mine = [n for n, a in wanted.items() if not a.by or who.removeprefix("user:") in a.by]
    if not wanted:
        raise _refused(record, request, f"{plan[run.step].name} waits for no approval")
    if not mine:
        allowed = ", ".join(sorted({name for a in wanted.values() for name in a.by}))
        raise Forbidden(f"{who} may not approve {', '.join(wanted)}", hint=f"it is for {allowed}")
    for name in mine:
        verdict = GateVerdict(
            gate=name,
            step=run.step,
            at=now,
            outcome=GateOutcome.PASS,
            reason=f"approved by {who}{_because(request)}",
            by=who,
        )
        run = judge.noted(run, verdict)
        run = logged(run, now, who, f"approves {name}{_because(request)}")
    return replace(record, active=run)


def _rollback_of_the_past(
    record: PipelineRecord,
    last: PipelineRun | None,
    request: ControlRequest,
    who: str,
    now: float,
) -> PipelineRecord:
    """Return the record with a run that only rolls back an ended one."""
    if last is None or last.state is RunState.ROLLED_BACK:
        raise _refused(record, request, "no run made a change that is still in force")
    back = record.good if last.state is not RunState.DONE else record.previous
    missing = [job for job in last.pushed if back.get(job) in (None, last.image)]
    if missing:
        raise _refused(record, request, f"no earlier image of job {missing[0]} is known")
    run = PipelineRun(
        number=record.next_run,
        image=last.image,
        trigger="rollback",
        by=who,
        created=now,
        spec=last.spec,
        back={job: back.get(job, last.image) for job in last.spec.targets},
        step=last.step,
        pushed=last.pushed,
    )
    run = rolling_back(run, who, f"asked for by {who}{_because(request)}", now)
    return replace(record, active=run, next_run=record.next_run + 1)
