"""The acts of a run on a job, and how a pipeline recognizes its own push by its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from control_plane.api.intent_changes import REASON_MAX
from conveyor.api import FLEET, PipelineStage
from conveyor.core.stages import DeliveryStep, push_of
from conveyor.runs import JobProgress, PipelineRecord, PipelineRun


@dataclass(frozen=True, slots=True)
class PushStage:
    """Write the push of a job: the image, on the stage's part of the tasks."""

    job: str
    image: str
    stage: PipelineStage
    expect: int
    """Version of the push that it replaces. If there is a newer one the write is refused, and the
    next round decides again."""
    reason: str
    take_over: bool = False


@dataclass(frozen=True, slots=True)
class PushBack:
    """Write the push of a job: an earlier image on all tasks."""

    job: str
    image: str
    expect: int
    reason: str
    take_over: bool = False


@dataclass(frozen=True, slots=True)
class SetFrozen:
    """Pause the job's update, or resume it."""

    job: str
    frozen: bool


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release the push of a job to the next writer."""

    job: str
    expect: int
    reason: str


DeliveryAct = PushStage | PushBack | SetFrozen | GiveBack
Jobs = Mapping[str, JobProgress]


def target_text(target: str) -> str:
    """Return a target as text: `job web`, `fleet agents`."""
    kind = "fleet" if target.startswith(FLEET) else "job"
    return f"{kind} {target.removeprefix(FLEET)}"


def targets_text(targets: Sequence[str]) -> str:
    """Return targets of one kind as text: `jobs api, web`."""
    if targets and targets[0].startswith(FLEET):
        return ", ".join(map(target_text, targets))
    return f"job{'s' if len(targets) > 1 else ''} {', '.join(targets)}"


def is_pushed(seen: JobProgress, image: str, stage: PipelineStage) -> bool:
    """Return whether the job wants the push of a stage."""
    part = push_of(stage)
    return seen.image == image and (seen.push.share, seen.push.tasks) == (part.share, part.tasks)


def is_owned_by_other(record: PipelineRecord, seen: JobProgress) -> bool:
    """Return whether another writer or pipeline owns the push of a job."""
    return bool(seen.owner) and not seen.push_reason.startswith(_reason_prefix(record))


def _reason_prefix(record: PipelineRecord) -> str:
    return f"pipeline {record.spec.name}, run "


def write_reason(record: PipelineRecord, run: PipelineRun, what: str) -> str:
    """Return the reason of a write; its prefix shows later rounds which pipeline wrote it."""
    return f"{_reason_prefix(record)}{run.number}: {what}"[:REASON_MAX]


def push_act(
    record: PipelineRecord, run: PipelineRun, step: DeliveryStep, seen: JobProgress
) -> PushStage:
    """Return the write that brings a job to a step."""
    reason, is_first = write_reason(record, run, step.name), seen.job not in run.pushed
    take_over = run.trigger == "hand" and is_first and is_owned_by_other(record, seen)
    return PushStage(seen.job, run.image, step.stage, seen.push_version, reason, take_over)


def pause_acts(record: PipelineRecord, jobs: Jobs) -> tuple[DeliveryAct, ...]:
    """Return the acts that pause the jobs of `record.frozen` that are not paused yet."""
    return tuple(SetFrozen(j, True) for j in record.frozen if j in jobs and not jobs[j].frozen)


def release_acts(
    record: PipelineRecord, run: PipelineRun, names: list[str], jobs: Jobs
) -> tuple[DeliveryAct, ...]:
    """Return the acts that release the pushes which the pipeline owns, at the end of a run."""
    return tuple(
        GiveBack(job, jobs[job].push_version, write_reason(record, run, "is over"))
        for job in names
        if jobs[job].owner and not is_owned_by_other(record, jobs[job])
    )
