"""The next action of a pipeline: a pure function of the stored and the observed state.

Level-triggered: acts follow from the record and the jobs, so an act that was lost is decided
again, and one that was carried out is not. Each act is idempotent.

    waiting -> running (step by step) -> done
                 a gate fails -> rolling-back -> rolled-back, or stopped
                 a user: abort -> aborted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from conveyor.api import FLEET, FailureAction, PipelineSpec, PipelineStage, StageKind
from conveyor.core import judge, schedule
from conveyor.core.acts import (
    DeliveryAct,
    Jobs,
    PushBack,
    SetFrozen,
    all_named,
    freezing,
    giving_back,
    is_pushed,
    is_taken,
    named,
    reason_for,
    to_push,
)
from conveyor.core.stages import DeliveryStep, steps, wanted
from conveyor.core.transitions import WHO, ended, logged, rolling_back, timed
from conveyor.runs import JobProgress, PipelineRecord, PipelineRun, RunState, StepTime

_HINT = {False: "; create it with twinectl job apply", True: " in the service's configuration"}


@dataclass(frozen=True, slots=True)
class DeliveryDecision:
    """The record to store first, runs that ended, and the acts that follow."""

    record: PipelineRecord
    acts: tuple[DeliveryAct, ...] = ()
    ended: tuple[PipelineRun, ...] = ()
    measure: tuple[str, ...] = ()
    """Gates of the current step to measure."""


def advance(record: PipelineRecord, jobs: Jobs, now: float) -> DeliveryDecision:
    """Return what to store and do; `jobs`: the visible ones, `now`: seconds since 1970."""
    run = record.active
    if run is None:
        return _begin(record, jobs, now)
    if unseen := _unseen(run.spec, jobs):
        return _wait(record, unseen)
    gone = [job for job in run.spec.targets if not jobs[job].image]
    if gone and run.ending is None and (run.state is RunState.RUNNING or len(gone) == len(jobs)):
        reason = f"{all_named(gone)} no longer exists"
        return _stop(record, run, RunState.STOPPED, reason, now, leave=gone[0])
    if run.ending is not None:
        return _freeze_and_end(record, run, jobs, now)
    if run.state is RunState.ROLLING_BACK:
        return _roll_back(record, run, jobs, now)
    return _run(record, run, jobs, now)


# -- the beginning


def _begin(record: PipelineRecord, jobs: Jobs, now: float) -> DeliveryDecision:
    run = record.waiting
    if run is None:
        return DeliveryDecision(record)
    why = _why_not_begin(record, run, jobs, now)
    if why:
        if run.waits == why:
            return DeliveryDecision(record)
        return DeliveryDecision(replace(record, waiting=replace(run, waits=why)))
    seen_all = [jobs[job] for job in record.spec.targets]
    if all(seen.image == run.image and seen.settled for seen in seen_all) and not record.frozen:
        run = ended(run, RunState.DONE, "all tasks already run the image", now)
        good = record.good | dict.fromkeys(record.spec.targets, run.image)
        return DeliveryDecision(replace(record, waiting=None, good=good), ended=(run,))
    good = dict(record.good)
    for job in record.spec.targets:
        seen = jobs[job]
        if job not in good or (seen.settled and job not in record.frozen):
            good[job] = seen.image
    kept = {job: good[job] for job in record.spec.targets}
    first = steps(record.spec)[0]
    run = replace(
        run,
        state=RunState.RUNNING,
        spec=record.spec,
        back=kept,
        steps=(StepTime(name=first.name, began=now),),
        waits="",
    )
    run = logged(run, now, WHO, f"begins {first.name}")
    return DeliveryDecision(replace(record, active=run, waiting=None, good=kept))


def _why_not_begin(record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float) -> str:
    """Return why a run may not begin yet; empty: it may."""
    if unseen := _unseen(record.spec, jobs):
        return unseen
    for job in record.spec.targets:
        seen, ours = jobs[job], job in record.frozen
        if not seen.image:
            return f"{named(job)} does not exist{_HINT[job.startswith(FLEET)]}"
        if seen.frozen and not ours:
            return f"{named(job)} is paused by its owner"
        if seen.held:
            return f"{named(job)}: {seen.held}"
        if is_taken(record, seen) and run.trigger != "hand":
            return f"the push of {named(job)} belongs to {seen.owner}, who has to give it back"
        if seen.updating and not ours and run.trigger != "hand":
            return f"another update of {named(job)} is under way"
    return schedule.held_back(record.spec, now)


# -- stage by stage


def _run(record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float) -> DeliveryDecision:
    for job in run.pushed:
        if is_taken(record, jobs[job]):
            reason = f"{jobs[job].owner} took over the push of {named(job)}"
            return _stop(record, run, RunState.STOPPED, reason, now, leave=job)
        if jobs[job].image != run.image and jobs[job].went_back:
            return _failed(record, run, f"{named(job)}: {jobs[job].went_back}", now)
        if jobs[job].image != run.image:
            reason = f"{named(job)} was changed to image {jobs[job].image} by another writer"
            return _stop(record, run, RunState.STOPPED, reason, now, leave=job)
    seen = tuple(
        job for job in run.spec.targets if job in run.pushed or jobs[job].image == run.image
    )
    if seen != run.pushed:
        run = replace(run, pushed=seen)
        record = replace(record, active=run)
    if run.paused:
        more = tuple(job for job in run.pushed if job not in record.frozen)
        record = replace(record, frozen=(*record.frozen, *more))
        return _wait(record, "paused", freezing(record, jobs))
    if thawing := _thaw(record, jobs, dict.fromkeys(run.spec.targets, run.image)):
        return thawing
    plan = steps(run.spec)
    if run.step >= len(plan):
        return _finish(record, run, jobs, now)
    return _step(record, run, plan[run.step], jobs, now)


def _step(
    record: PipelineRecord, run: PipelineRun, step: DeliveryStep, jobs: Jobs, now: float
) -> DeliveryDecision:
    """Return what the current step needs: push, soak, gates, or its end."""
    halted = [job for job in run.pushed if jobs[job].halted]
    if halted:
        return _failed(record, run, f"{named(halted[0])}: {jobs[halted[0]].halted}", now)
    blocked = _blocked(record, step, jobs)
    run = timed(run, bool(blocked), now)
    record = replace(record, active=run)
    time = run.steps[-1]
    if time.reached is None:
        if blocked:
            return _wait(record, blocked)
        if step.stage.kind is not StageKind.ALL and not any(
            wanted(step.stage, jobs[job].size) for job in step.jobs
        ):
            run = logged(run, now, WHO, f"{step.name} is zero tasks at this size")
            return _next(replace(record, active=run), run, now)
    pushes = tuple(
        to_push(record, run, step, jobs[job])
        for job in step.jobs
        if not is_pushed(jobs[job], run.image, step.stage)
    )
    reached = not pushes and all(_is_reached(jobs[job], step.stage) for job in step.jobs)
    if run.skip == run.step and not pushes:
        return _next(record, run, now, blocked=blocked)
    if time.reached is None and reached:
        restarts = sum(jobs[job].restarts for job in step.jobs)
        time = replace(time, reached=now, restarts=restarts)
        run = replace(run, steps=(*run.steps[:-1], time))
        run = logged(run, now, WHO, f"{step.name} reached: {_counts(step, jobs)}")
        return _judged(replace(record, active=run), run, step, jobs, now)
    if time.reached is None and now - time.began - time.blocked_s > step.stage.reach_s:
        reason = f"{step.name} was not reached within {step.stage.reach_s:g} s"
        return _failed(record, run, f"{reason}: {_counts(step, jobs)}", now)
    if time.reached is None or pushes:  # another writer may have changed a reached stage
        return _wait(record, f"{step.name}: {_counts(step, jobs)}", pushes)
    return _judged(record, run, step, jobs, now)


def _judged(
    record: PipelineRecord, run: PipelineRun, step: DeliveryStep, jobs: Jobs, now: float
) -> DeliveryDecision:
    """Return the decision that follows from the gates of a step that was reached."""
    found, blocked = judge.judged(run, step.stage, now), _blocked(record, step, jobs)
    if found.failed:
        return _failed(record, run, found.failed, now)
    if not all(_is_reached(jobs[job], step.stage) for job in step.jobs):
        late_s = judge.soaked_s(run, now) - step.stage.soak_s - step.stage.reach_s
        if late_s > 0 and not blocked:
            return _failed(record, run, f"{step.name} is not healthy: {_counts(step, jobs)}", now)
        return _wait(record, f"{step.name}: {_counts(step, jobs)}", measure=found.due)
    if found.waits:
        return _wait(record, f"{step.name}: {found.waits}", measure=found.due)
    return _next(record, run, now, found.due, blocked)


def _next(
    record: PipelineRecord,
    run: PipelineRun,
    now: float,
    due: tuple[str, ...] = (),
    blocked: str = "",
) -> DeliveryDecision:
    """Return the next step, or that windows and holds delay it: gates are still measured."""
    plan, number = steps(run.spec), run.step + 1
    is_last = number >= len(plan)
    if not is_last and (why := schedule.held_back(run.spec, now) or blocked):
        return _wait(record, f"{plan[number].name}: {why}", measure=due)
    ended = replace(run.steps[-1], ended=now)
    word = "skipped" if run.skip == run.step else "passed"
    run = replace(run, step=number, steps=(*run.steps[:-1], ended), verdicts={}, skip=None)
    run = logged(run, now, WHO, f"{ended.name} {word}")
    if not is_last:
        run = replace(run, steps=(*run.steps, StepTime(name=plan[number].name, began=now)))
    return DeliveryDecision(replace(record, active=replace(run, waits="")))


def _finish(record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float) -> DeliveryDecision:
    acts = giving_back(record, run, run.spec.targets, jobs)
    if acts:
        return _wait(record, "gives the push back", acts)
    before = {job: image for job, image in record.good.items() if image != run.image}
    record = replace(
        record,
        good=record.good | dict.fromkeys(run.spec.targets, run.image),
        previous=record.previous | before,
    )
    return _end(record, RunState.DONE, "", now)


# -- failures


def _failed(record: PipelineRecord, run: PipelineRun, reason: str, now: float) -> DeliveryDecision:
    if run.spec.on_failure.action is FailureAction.STOP:
        return _stop(record, run, RunState.STOPPED, reason, now)
    return DeliveryDecision(replace(record, active=rolling_back(run, WHO, reason, now)))


def _stop(
    record: PipelineRecord,
    run: PipelineRun,
    state: RunState,
    reason: str,
    now: float,
    leave: str = "",
) -> DeliveryDecision:
    """Return the run with an end that freezes its jobs in their present state."""
    run = logged(replace(run, ending=state, reason=reason, waits=""), now, WHO, f"stops: {reason}")
    frozen = tuple(job for job in run.pushed if job != leave)
    return DeliveryDecision(replace(record, active=run, frozen=frozen))


def _freeze_and_end(
    record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float
) -> DeliveryDecision:
    # A push may have arrived that was not seen yet when the end was asked for.
    pushed = tuple(
        job
        for job in run.spec.targets
        if jobs[job].image == run.image and not is_taken(record, jobs[job])
    )
    run = replace(run, pushed=tuple(dict.fromkeys((*run.pushed, *pushed))))
    record = replace(record, active=run, frozen=pushed)
    acts = freezing(record, jobs)
    if acts or run.ending is None:
        return _wait(record, "pauses its jobs", acts)
    return _end(record, run.ending, run.reason, now)


def _roll_back(
    record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float
) -> DeliveryDecision:
    by_hand = run.trigger == "rollback"
    ours = [job for job in run.spec.targets if job in run.pushed or jobs[job].image == run.image]
    ours = [job for job in ours if by_hand or not is_taken(record, jobs[job])]
    if all(run.back[job] == run.image for job in ours) and ours:
        reason = f"{run.reason}; there is no earlier image to go back to"
        return _stop(record, run, RunState.STOPPED, reason, now)
    acts = tuple(
        PushBack(
            job,
            run.back[job],
            jobs[job].push_version,
            reason_for(record, run, f"rolled back: {run.reason}"),
            by_hand and is_taken(record, jobs[job]),
        )
        for job in ours
        if jobs[job].image == run.image != run.back[job]
    )
    if acts:
        return _wait(record, f"rolls back {all_named(ours)}", acts)
    if thawing := _thaw(record, jobs, run.back):
        return thawing
    going = [job for job in ours if jobs[job].image == run.back[job] and not jobs[job].settled]
    if going:
        counts = ", ".join(
            f"{j}: {jobs[j].held or f'{jobs[j].healthy} of {jobs[j].size} healthy'}" for j in going
        )
        return _wait(record, f"rolls back {all_named(going)} ({counts})")
    there = [job for job in run.spec.targets if jobs[job].image == run.back[job]]
    if giving := giving_back(record, run, there, jobs):
        return _wait(record, "gives the push back", giving)
    good = record.good | {job: run.back[job] for job in run.spec.targets}
    return _end(replace(record, good=good), RunState.ROLLED_BACK, run.reason, now)


# -- parts


def _unseen(spec: PipelineSpec, jobs: Jobs) -> str:
    """Return which jobs of a pipeline were not read; empty: none."""
    missing = [job for job in spec.targets if job not in jobs]
    return f"cannot see {all_named(missing)}: the front end does not answer" if missing else ""


def _blocked(record: PipelineRecord, step: DeliveryStep, jobs: Jobs) -> str:
    """Return which job of a step is paused or held by its owner; empty: none."""
    paused = [job for job in step.jobs if jobs[job].frozen and job not in record.frozen]
    if paused:
        return f"{all_named(paused)} paused by its owner"
    return next((f"{named(job)}: {jobs[job].held}" for job in step.jobs if jobs[job].held), "")


def _end(record: PipelineRecord, state: RunState, reason: str, now: float) -> DeliveryDecision:
    assert record.active is not None
    run = ended(record.active, state, reason, now)
    unsent = record.unsent
    if state is not RunState.DONE and run.spec.on_failure.notify:
        unsent = (*unsent, run.number)
    unchecked = record.unchecked
    if any(gate.command is not None for gate in run.spec.gates.values()):
        unchecked = (*unchecked, run.number)
    record = replace(record, active=None, unsent=unsent, unchecked=unchecked)
    return DeliveryDecision(record, ended=(run,))


def _wait(
    record: PipelineRecord,
    why: str,
    acts: tuple[DeliveryAct, ...] = (),
    measure: tuple[str, ...] = (),
) -> DeliveryDecision:
    """Return the unchanged record, with what its run waits for."""
    run = record.active
    if run is not None and run.waits != why:
        record = replace(record, active=replace(run, waits=why))
    return DeliveryDecision(record, acts, measure=measure)


def _thaw(record: PipelineRecord, jobs: Jobs, target: Mapping[str, str]) -> DeliveryDecision | None:
    """Return the acts that resume jobs of this service, once they want their target image.

    Before that they stay paused, so that their old target is not updated any further. None: no job
    can be resumed yet.
    """
    ready = [j for j in record.frozen if j not in target or jobs[j].image == target[j]]
    acts = tuple(SetFrozen(job, False) for job in ready if job in jobs and jobs[job].frozen)
    if acts:
        return _wait(record, "resumes its jobs", acts)
    if not ready:
        return None
    left = tuple(job for job in record.frozen if job not in ready)
    return DeliveryDecision(replace(record, frozen=left))


def _is_reached(seen: JobProgress, stage: PipelineStage) -> bool:
    if stage.kind is StageKind.ALL:
        return seen.settled
    return seen.new_healthy >= wanted(stage, seen.size)


def _counts(step: DeliveryStep, jobs: Jobs) -> str:
    parts = []
    for job in step.jobs:
        seen = jobs[job]
        target = wanted(step.stage, seen.size)
        why = f": {seen.refused}" if seen.refused else ""
        counts = f"{seen.new_healthy} of {target} new tasks healthy"
        parts.append(f"{job} {counts} (size {seen.size}){why}")
    return ", ".join(parts)
