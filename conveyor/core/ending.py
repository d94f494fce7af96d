"""How a run ends: done, rolled back, stopped or aborted."""

from __future__ import annotations

from msgspec.structs import replace

from conveyor.api import FailureAction
from conveyor.core.acts import (
    Jobs,
    PushBack,
    is_owned_by_other,
    pause_acts,
    release_acts,
    targets_text,
    write_reason,
)
from conveyor.core.decision import DeliveryDecision, keep_waiting, resume_jobs
from conveyor.core.transitions import SERVICE_NAME, ended, logged, rolling_back
from conveyor.runs import PipelineRecord, PipelineRun, RunState


def finish_run(
    record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float
) -> DeliveryDecision:
    """Return the end of a run whose steps are over, once the pushes of its jobs are released."""
    acts = release_acts(record, run, run.spec.targets, jobs)
    if acts:
        return keep_waiting(record, "gives the push back", acts)
    previous = {job: image for job, image in record.good.items() if image != run.image}
    record = replace(
        record,
        good=record.good | dict.fromkeys(run.spec.targets, run.image),
        previous=record.previous | previous,
    )
    return _end_run(record, RunState.DONE, "", now)


def fail_run(record: PipelineRecord, run: PipelineRun, reason: str, now: float) -> DeliveryDecision:
    """Return the run after a failure: stopped or rolled back, as its pipeline says."""
    if run.spec.on_failure.action is FailureAction.STOP:
        return stop_run(record, run, RunState.STOPPED, reason, now)
    return DeliveryDecision(replace(record, active=rolling_back(run, SERVICE_NAME, reason, now)))


def stop_run(
    record: PipelineRecord,
    run: PipelineRun,
    state: RunState,
    reason: str,
    now: float,
    leave: str = "",
) -> DeliveryDecision:
    """Return the run that will end in `state` once its jobs are paused; job `leave` is not."""
    run = logged(
        replace(run, ending=state, reason=reason, waits=""), now, SERVICE_NAME, f"stops: {reason}"
    )
    frozen = tuple(job for job in run.pushed if job != leave)
    return DeliveryDecision(replace(record, active=run, frozen=frozen))


def pause_jobs_and_end(
    record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float
) -> DeliveryDecision:
    """Return the end of a run, once all jobs with its image are paused."""
    # a push may have taken effect after the request to end the run
    pushed = tuple(
        job
        for job in run.spec.targets
        if jobs[job].image == run.image and not is_owned_by_other(record, jobs[job])
    )
    run = replace(run, pushed=tuple(dict.fromkeys((*run.pushed, *pushed))))
    record = replace(record, active=run, frozen=pushed)
    acts = pause_acts(record, jobs)
    if acts or run.ending is None:
        return keep_waiting(record, "pauses its jobs", acts)
    return _end_run(record, run.ending, run.reason, now)


def roll_back(record: PipelineRecord, run: PipelineRun, jobs: Jobs, now: float) -> DeliveryDecision:
    """Return the next step of a rollback: push the earlier image, and wait until it runs."""
    by_hand = run.trigger == "rollback"
    changed = [job for job in run.spec.targets if job in run.pushed or jobs[job].image == run.image]
    changed = [job for job in changed if by_hand or not is_owned_by_other(record, jobs[job])]
    if all(run.back[job] == run.image for job in changed) and changed:
        reason = f"{run.reason}; there is no earlier image to go back to"
        return stop_run(record, run, RunState.STOPPED, reason, now)
    acts = tuple(
        PushBack(
            job,
            run.back[job],
            jobs[job].push_version,
            write_reason(record, run, f"rolled back: {run.reason}"),
            by_hand and is_owned_by_other(record, jobs[job]),
        )
        for job in changed
        if jobs[job].image == run.image != run.back[job]
    )
    if acts:
        return keep_waiting(record, f"rolls back {targets_text(changed)}", acts)
    if resuming := resume_jobs(record, jobs, run.back):
        return resuming
    unsettled = [
        job for job in changed if jobs[job].image == run.back[job] and not jobs[job].settled
    ]
    if unsettled:
        counts = ", ".join(
            f"{job}: {jobs[job].held or f'{jobs[job].healthy} of {jobs[job].size} healthy'}"
            for job in unsettled
        )
        return keep_waiting(record, f"rolls back {targets_text(unsettled)} ({counts})")
    restored = [job for job in run.spec.targets if jobs[job].image == run.back[job]]
    if releases := release_acts(record, run, restored, jobs):
        return keep_waiting(record, "gives the push back", releases)
    good = record.good | {job: run.back[job] for job in run.spec.targets}
    return _end_run(replace(record, good=good), RunState.ROLLED_BACK, run.reason, now)


def _end_run(record: PipelineRecord, state: RunState, reason: str, now: float) -> DeliveryDecision:
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
