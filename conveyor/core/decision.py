"""The decision of one round: the record to store, and the acts that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from conveyor.core.acts import DeliveryAct, Jobs, SetFrozen
from conveyor.runs import PipelineRecord, PipelineRun


@dataclass(frozen=True, slots=True)
class DeliveryDecision:
    """The record to store first, runs that ended, and the acts that follow."""

    record: PipelineRecord
    acts: tuple[DeliveryAct, ...] = ()
    ended: tuple[PipelineRun, ...] = ()
    measure: tuple[str, ...] = ()
    """Gates of the current step to measure."""


def keep_waiting(
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


def resume_jobs(
    record: PipelineRecord, jobs: Jobs, target: Mapping[str, str]
) -> DeliveryDecision | None:
    """Return the acts that resume the jobs which this service paused; None: none can be resumed.

    `target` has the image that each job should want. A job that wants another one stays paused, so
    that no more of its tasks get that image.
    """
    ready = [j for j in record.frozen if j not in target or jobs[j].image == target[j]]
    acts = tuple(SetFrozen(job, False) for job in ready if job in jobs and jobs[job].frozen)
    if acts:
        return keep_waiting(record, "resumes its jobs", acts)
    if not ready:
        return None
    still_paused = tuple(job for job in record.frozen if job not in ready)
    return DeliveryDecision(replace(record, frozen=still_paused))
