"""Rows of pipelines and of their runs. Values of a pipeline's file, as URLs, are left out."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.core.stages import steps
from conveyor.core.status_page import gates_now
from conveyor.runs import PipelineRun, PipelineView, RunState

_ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in a line."""

    number: int
    brings: str
    image: str
    state: str
    trigger: str
    by: str
    created: float
    ended: float | None
    step: str
    """The step that it is in, or ended in: `2 of 3, 50 %`; empty: none began."""
    detail: str
    """What it waits for, or why it ended."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of a run."""

    name: str
    state: str
    began: float | None = None
    reached: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """A pipeline in a line."""

    name: str
    jobs: list[str]
    fleets: list[str]
    run: RunRow | None
    """The active run, else the waiting one, else the last one."""
    next: RunRow | None
    """The run that waits for the active one."""
    trouble: str


def pipeline_row(view: PipelineView) -> PipelineRow:
    """Return a pipeline with its present or last run."""
    record, spec = view.record, view.record.spec
    run = record.active or record.waiting or view.last
    later = record.waiting if record.active is not None else None
    return PipelineRow(
        spec.name,
        spec.jobs,
        spec.fleets,
        run_row(run) if run is not None else None,
        run_row(later) if later is not None else None,
        view.trouble,
    )


def run_row(run: PipelineRun) -> RunRow:
    """Return a run in a line."""
    plan = [step.name for step in steps(run.spec)]
    now = run.steps[-1].name if run.steps else ""
    return RunRow(
        run.number,
        run.content,
        run.image,
        "paused" if run.paused else run.state.value,
        run.trigger,
        run.by,
        run.created,
        run.ended,
        f"{plan.index(now) + 1} of {len(plan)}, {now}" if now in plan else now,
        run.waits or run.reason,
    )


def step_rows(run: PipelineRun) -> list[StepRow]:
    """Return the steps of a run that began, and those that follow."""
    begun = [
        StepRow(step.name, _state_of(run, number), step.began, step.reached, step.ended)
        for number, step in enumerate(run.steps)
    ]
    if run.state not in (RunState.WAITING, RunState.RUNNING):
        return begun
    later = steps(run.spec)[run.step + (len(run.steps) > 0) :]
    return [*begun, *(StepRow(step.name, "not begun") for step in later)]


def _state_of(run: PipelineRun, number: int) -> str:
    step = run.steps[number]
    if step.ended is None:
        return "paused" if run.paused else run.state.value
    after = run.steps[number + 1].name if number + 1 < len(run.steps) else ""
    if after == step.name:
        return "begun again"
    failed = not after and run.state in (RunState.STOPPED, RunState.ABORTED)
    return "stopped" if failed or after == _ROLLBACK else "done"


def gate_rows(run: PipelineRun) -> list[tuple[str, str, str, float | None]]:
    """Return name, outcome, numbers and time of each gate of the present step."""
    return [
        (name, verdict.outcome.value, verdict.reason, verdict.at)
        if verdict is not None
        else (name, "waiting", waits, None)
        for name, verdict, waits in gates_now(run)
    ]
