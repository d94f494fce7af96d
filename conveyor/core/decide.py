"""The next action of a pipeline: a pure function of the stored and the observed state.

Level-triggered: acts follow from the record and the jobs, so an act that was lost is decided
again, and one that was carried out is not. Each act is idempotent.

    waiting -> running (step by step) -> done
                 a gate fails -> rolling-back -> rolled-back, or stopped
                 a user: abort -> aborted
"""

from __future__ import annotations

from msgspec.structs import replace

from conveyor.api import FLEET, PipelineSpec, PipelineStage, StageKind
from conveyor.core import evaluation, schedule
from conveyor.core.acts import (
    Jobs,
    is_owned_by_other,
    is_pushed,
    pause_acts,
    push_act,
    target_text,
    targets_text,
)
from conveyor.core.decision import DeliveryDecision, keep_waiting, resume_jobs
from conveyor.core.ending import fail_run, finish_run, pause_jobs_and_end, roll_back, stop_run
from conveyor.core.stages import DeliveryStep, steps, wanted
from conveyor.core.transitions import SERVICE_NAME, ended, logged, with_blocked_time
from conveyor.runs import JobProgress, PipelineRecord, PipelineRun, RunState, StepTime

_HINT = {False: "; create it with twinectl job apply", True: " in the service's configuration"}


def advance(record: PipelineRecord, jobs: Jobs, now: float) -> DeliveryDecision:
    """Return what to store and do.

    `jobs` has the jobs that could be read; `now` is in seconds since 1970.
    """
    run = record.active
    if run is None:
        return _begin_run(record, jobs, now)
    if unread := _unread_jobs(run.spec, jobs):
        return keep_waiting(record, unread)
    removed = [job for job in run.spec.targets if not jobs[job].image]
    is_unable = run.state is RunState.RUNNING or len(removed) == len(jobs)
    if removed and run.ending is None and is_unable:
        reason = f"{targets_text(removed)} no longer exists"
        return stop_run(record, run, RunState.STOPPED, reason, now, leave=removed[0])
    if run.ending is not None:
        return pause_jobs_and_end(record, run, jobs, now)
    if run.state is RunState.ROLLING_BACK:
        return roll_back(record, run, jobs, now)
    return _continue_run(record, run, jobs, now)


# -- the beginning


def _begin_run(record: PipelineRecord, jobs: Jobs, now: float) -> DeliveryDecision:
    """Return the record in which the waiting run has begun, if it may begin."""
    run = record.waiting
    if run is None:
        return DeliveryDecision(record)
    why = _reason_to_wait(record, run, jobs, now)
    if why:
        if run.waits == why:
            return DeliveryDecision(record)
        return DeliveryDecision(replace(record, waiting=replace(run, waits=why)))
    targets = [jobs[job] for job in record.spec.targets]
    if all(job.image == run.image and job.settled for job in targets) and not record.frozen:
        run = ended(run, RunState.DONE, "all tasks already run the image", now)
        good = record.good | dict.fromkeys(record.spec.targets, run.image)
        return DeliveryDecision(replace(record, waiting=None, good=good), ended=(run,))
    back = dict[str, str]()
    for job in record.spec.targets:
        is_settled = jobs[job].settled and job not in record.frozen
        is_known = job in record.good and not is_settled
        back[job] = record.good[job] if is_known else jobs[job].image
    first = steps(record.spec)[0]
    run = replace(
        run,
        state=RunState.RUNNING,
        spec=record.spec,
        back=back,
        steps=(StepTime(name=first.name, began=now),),
        waits="",
    )
    run = logged(run, now, SERVICE_NAME, f"begins {first.name}")
    return DeliveryDecision(replace(record, active=run, waiting=None, good=back))


def _reason_to_wait(record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float) -> str:
    """Return why a run may not begin yet; empty: it may."""
    if unread := _unread_jobs(record.spec, jobs):
        return unread
    for job in record.spec.targets:
        seen, is_paused_by_us = jobs[job], job in record.frozen
        if not seen.image:
            return f"{target_text(job)} does not exist{_HINT[job.startswith(FLEET)]}"
        if seen.frozen and not is_paused_by_us:
            return f"{target_text(job)} is paused by its owner"
        if seen.held:
            return f"{target_text(job)}: {seen.held}"
        if is_owned_by_other(record, seen) and run.trigger != "hand":
            return (
                f"the push of {target_text(job)} belongs to {seen.owner}, who has to give it back"
            )
        if seen.updating and not is_paused_by_us and run.trigger != "hand":
            return f"another update of {target_text(job)} is under way"
    return schedule.block_reason(record.spec, now)


# -- stage by stage


def _continue_run(
    record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float
) -> DeliveryDecision:
    """Return the next decision of a running run, unless another writer changed one of its jobs."""
    for job in run.pushed:
        if is_owned_by_other(record, jobs[job]):
            reason = f"{jobs[job].owner} took over the push of {target_text(job)}"
            return stop_run(record, run, RunState.STOPPED, reason, now, leave=job)
        if jobs[job].image != run.image and jobs[job].went_back:
            return fail_run(record, run, f"{target_text(job)}: {jobs[job].went_back}", now)
        if jobs[job].image != run.image:
            reason = f"{target_text(job)} was changed to image {jobs[job].image} by another writer"
            return stop_run(record, run, RunState.STOPPED, reason, now, leave=job)
    pushed = tuple(
        job for job in run.spec.targets if job in run.pushed or jobs[job].image == run.image
    )
    if pushed != run.pushed:
        run = replace(run, pushed=pushed)
        record = replace(record, active=run)
    if run.paused:
        to_pause = tuple(job for job in run.pushed if job not in record.frozen)
        record = replace(record, frozen=(*record.frozen, *to_pause))
        return keep_waiting(record, "paused", pause_acts(record, jobs))
    if resuming := resume_jobs(record, jobs, dict.fromkeys(run.spec.targets, run.image)):
        return resuming
    plan = steps(run.spec)
    if run.step >= len(plan):
        return finish_run(record, run, jobs, now)
    return _continue_step(record, run, plan[run.step], jobs, now)


def _continue_step(
    record: PipelineRecord, run: PipelineRun, step: DeliveryStep, jobs: Jobs, now: float
) -> DeliveryDecision:
    """Return what the current step needs next: a push, its soak, its gates, or its end."""
    halted = [job for job in run.pushed if jobs[job].halted]
    if halted:
        return fail_run(record, run, f"{target_text(halted[0])}: {jobs[halted[0]].halted}", now)
    blocked = _owner_block_reason(record, step, jobs)
    run = with_blocked_time(run, bool(blocked), now)
    record = replace(record, active=run)
    time = run.steps[-1]
    if time.reached is None:
        if blocked:
            return keep_waiting(record, blocked)
        if step.stage.kind is not StageKind.ALL and not any(
            wanted(step.stage, jobs[job].size) for job in step.jobs
        ):
            run = logged(run, now, SERVICE_NAME, f"{step.name} is zero tasks at this size")
            return _next_step(replace(record, active=run), run, now)
    pushes = tuple(
        push_act(record, run, step, jobs[job])
        for job in step.jobs
        if not is_pushed(jobs[job], run.image, step.stage)
    )
    reached = not pushes and all(_is_reached(jobs[job], step.stage) for job in step.jobs)
    if run.skip == run.step and not pushes:
        return _next_step(record, run, now, blocked=blocked)
    if time.reached is None and reached:
        restarts = sum(jobs[job].restarts for job in step.jobs)
        time = replace(time, reached=now, restarts=restarts)
        run = replace(run, steps=(*run.steps[:-1], time))
        run = logged(run, now, SERVICE_NAME, f"{step.name} reached: {_counts(step, jobs)}")
        return _apply_gates(replace(record, active=run), run, step, jobs, now)
    if time.reached is None and now - time.began - time.blocked_s > step.stage.reach_s:
        reason = f"{step.name} was not reached within {step.stage.reach_s:g} s"
        return fail_run(record, run, f"{reason}: {_counts(step, jobs)}", now)
    if time.reached is None or pushes:  # another writer may have changed a reached stage
        return keep_waiting(record, f"{step.name}: {_counts(step, jobs)}", pushes)
    return _apply_gates(record, run, step, jobs, now)


def _apply_gates(
    record: PipelineRecord, run: PipelineRun, step: DeliveryStep, jobs: Jobs, now: float
) -> DeliveryDecision:
    """Return the decision that follows from the gates of a step that was reached."""
    result = evaluation.evaluate_stage(run, step.stage, now)
    blocked = _owner_block_reason(record, step, jobs)
    if result.failed:
        return fail_run(record, run, result.failed, now)
    if not all(_is_reached(jobs[job], step.stage) for job in step.jobs):
        late_s = evaluation.soaked_s(run, now) - step.stage.soak_s - step.stage.reach_s
        if late_s > 0 and not blocked:
            return fail_run(record, run, f"{step.name} is not healthy: {_counts(step, jobs)}", now)
        return keep_waiting(record, f"{step.name}: {_counts(step, jobs)}", measure=result.due)
    if result.waits:
        return keep_waiting(record, f"{step.name}: {result.waits}", measure=result.due)
    return _next_step(record, run, now, result.due, blocked)


def _next_step(
    record: PipelineRecord,
    run: PipelineRun,
    now: float,
    due: tuple[str, ...] = (),
    blocked: str = "",
) -> DeliveryDecision:
    """Return the begin of the next step.

    Windows, holds and the owner may delay it. The gates in `due` are measured meanwhile.
    """
    plan, number = steps(run.spec), run.step + 1
    is_last = number >= len(plan)
    if not is_last and (why := schedule.block_reason(run.spec, now) or blocked):
        return keep_waiting(record, f"{plan[number].name}: {why}", measure=due)
    ended = replace(run.steps[-1], ended=now)
    outcome = "skipped" if run.skip == run.step else "passed"
    run = replace(run, step=number, steps=(*run.steps[:-1], ended), verdicts={}, skip=None)
    run = logged(run, now, SERVICE_NAME, f"{ended.name} {outcome}")
    if not is_last:
        run = replace(run, steps=(*run.steps, StepTime(name=plan[number].name, began=now)))
    return DeliveryDecision(replace(record, active=replace(run, waits="")))


# -- parts


def _unread_jobs(spec: PipelineSpec, jobs: Jobs) -> str:
    """Return which jobs of a pipeline were not read; empty: none."""
    missing = [job for job in spec.targets if job not in jobs]
    return f"cannot see {targets_text(missing)}: the front end does not answer" if missing else ""


def _owner_block_reason(record: PipelineRecord, step: DeliveryStep, jobs: Jobs) -> str:
    """Return which job of a step is paused or held by its owner; empty: none."""
    paused = [job for job in step.jobs if jobs[job].frozen and job not in record.frozen]
    if paused:
        return f"{targets_text(paused)} paused by its owner"
    return next(
        (f"{target_text(job)}: {jobs[job].held}" for job in step.jobs if jobs[job].held), ""
    )


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
