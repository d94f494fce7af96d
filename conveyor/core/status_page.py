"""The status of a pipeline as a page of text that takes ten seconds to read.

First line: what the pipeline does now and what it waits for. Then one line per step, one per gate
of the current step with its numbers, one per job.
"""

from __future__ import annotations

from collections.abc import Iterable

from conveyor.api import FLEET
from conveyor.core.acts import target_text
from conveyor.core.stages import stage_gates, steps
from conveyor.runs import GateVerdict, PipelineRun, PipelineView, RunState, short_image
from wire.units import seconds_text

_TASKS = "tasks run the new image"
_MARKS = {"pass": "ok", "fail": "FAIL", "no-data": "NO DATA"}


def status_lines(view: PipelineView) -> list[str]:
    """Return the page, line by line."""
    record, run = view.record, view.record.active or view.record.waiting
    name = record.spec.name
    if run is None:
        lines = [f"pipeline {name}: idle"]
        if view.last is not None:
            lines.append(f"  last: {run_line(view.last)}")
    else:
        lines = [f"pipeline {name}: {run_line(run)}"]
        if run.waits:
            lines.append(f"  now: {run.waits}")
        lines += _step_lines(run, view.now)
        lines += _gate_lines(run)
    if view.trouble:
        lines.append(f"  trouble: {view.trouble}")
    for job in view.jobs:
        what = "hosts run the new release" if job.job.startswith(FLEET) else _TASKS
        lines.append(
            f"  {target_text(job.job)}: {job.new} of {job.size} {what},"
            f" {job.new_healthy} healthy{', paused' if job.frozen else ''}"
        )
    good = sorted({short_image(image) for image in record.good.values()})
    if good:
        lines.append(f"  last finished: {', '.join(good)}")
    if record.active is not None and record.waiting is not None:
        lines.append(f"  next: run {record.waiting.number}, {record.waiting.content}")
    return lines


def run_line(run: PipelineRun) -> str:
    """Return a run in a line."""
    state = "paused" if run.paused else run.state.value
    why = f": {run.reason}" if run.reason else ""
    return f"run {run.number} of {run.content} {state}{why}"


def _step_lines(run: PipelineRun, now: float) -> Iterable[str]:
    done = [step.name for step in run.steps if step.ended is not None]
    for step in run.steps:
        mark = "x" if step.ended is not None else ">"
        took = seconds_text(round(max(0.0, (step.ended or now) - step.began)))
        yield f"  [{mark}] {step.name}, {took}"
    if run.state in (RunState.WAITING, RunState.RUNNING):
        for later in steps(run.spec)[run.step + (len(run.steps) > 0) :]:
            if later.name not in done:
                yield f"  [ ] {later.name}"


def _gate_lines(run: PipelineRun) -> Iterable[str]:
    for name, verdict, waits in gates_now(run):
        yield f"      gate {name}: {waits if verdict is None else verdict_text(verdict)}"


def gates_now(run: PipelineRun) -> Iterable[tuple[str, GateVerdict | None, str]]:
    """Yield each gate of the present step, its verdict, and what it waits for without one."""
    plan = steps(run.spec)
    if run.state is not RunState.RUNNING or run.step >= len(plan):
        return
    for name, gate in stage_gates(run.spec, plan[run.step].stage).items():
        waits = "not measured yet"
        if gate.approval is not None:
            waits = f"waits for {' or '.join(gate.approval.by) or 'approval'}"
        yield name, run.verdicts.get(name), waits


def verdict_text(verdict: GateVerdict) -> str:
    """Return a verdict in a line."""
    times = f" ({verdict.in_a_row} in a row)" if verdict.in_a_row > 1 else ""
    return f"{_MARKS[verdict.outcome]}: {verdict.reason}{times}"
