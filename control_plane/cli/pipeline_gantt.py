"""A run of a pipeline as a Gantt chart in SVG: its steps, its gates, and its tasks' events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from control_plane.api.operations import Cause, JobEvent, OperationKind, OperationState
from control_plane.web.core.gantt import Chart, chart
from conveyor.runs import GateVerdict, PipelineRun

_LEFT, _WIDTH, _ROW, _HEAD = 150, 850, 18, 26
_COLOURS = {
    "done": "#2e7d32",
    "failed": "#c62828",
    "withdrawn": "#9e9e9e",
    "running": "#1565c0",
}
_OUTCOMES = {
    "pass": OperationState.DONE,
    "fail": OperationState.FAILED,
    "no-data": OperationState.WITHDRAWN,
}


def gantt_svg(
    run: PipelineRun,
    verdicts: Sequence[GateVerdict],
    events: Sequence[JobEvent],
    now: float,
) -> str:
    """Return the chart of a run; `events` are those of its jobs, `now` in seconds since 1970."""
    window = (run.created, max(run.ended or now, run.created + 1))
    gates = sorted({v.gate for v in verdicts})
    names = [f"{i + 1} {step.name}" for i, step in enumerate(run.steps)]
    parts: tuple[tuple[list[str], list[JobEvent]], ...] = (
        ([*names], _step_events(run, window[1])),
        ([f"gate {name}" for name in gates], _gate_events(gates, verdicts)),
        ([], [e for e in events if e.task is not None and e.end >= run.created]),
    )
    drawn = [(labels, chart(found, (), window)) for labels, found in parts]
    drawn = [(labels, one) for labels, one in drawn if one.rows]
    height = sum(_HEAD + _ROW * len(one.rows) for _, one in drawn) + 24
    body, top = [], 24
    for labels, one in drawn:
        body.append(_section(labels, one, top))
        top += _HEAD + _ROW * len(one.rows)
    title = f"run {run.number} of {run.spec.name}, {run.content}: {run.state.value}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 10} {height}"'
        ' font-family="sans-serif" font-size="11">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="4" y="15">{escape(title)}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _step_events(run: PipelineRun, until: float) -> list[JobEvent]:
    found = []
    for index, step in enumerate(run.steps):
        cause = Cause.ROLLBACK if step.name == "rollback" else Cause.RELEASE
        end = step.ended if step.ended is not None else until
        failed = run.reason != "" and index + 1 < len(run.steps) and _is_rollback(run, index + 1)
        outcome = OperationState.FAILED if failed else OperationState.DONE
        middle = step.reached if step.reached is not None else end
        for start, stop, reason in ((step.began, middle, "push"), (middle, end, "soak and gates")):
            if stop > start:
                found.append(_event(index, cause, outcome, f"{step.name}: {reason}", start, stop))
    return found


def _is_rollback(run: PipelineRun, index: int) -> bool:
    return run.steps[index].name == "rollback"


def _gate_events(gates: Sequence[str], verdicts: Sequence[GateVerdict]) -> list[JobEvent]:
    return [
        _event(gates.index(v.gate), Cause.RELEASE, _OUTCOMES[v.outcome], v.reason, v.at, v.at)
        for v in verdicts
    ]


def _event(
    task: int, cause: Cause, outcome: OperationState, reason: str, start: float, end: float
) -> JobEvent:
    return JobEvent(
        task=task,
        operation="",
        kind=OperationKind.UPDATE,
        cause=cause,
        outcome=outcome,
        reason=reason,
        start=start,
        end=end,
    )


def _section(labels: Sequence[str], one: Chart, top: int) -> str:
    lines = []
    bottom = top + _HEAD + _ROW * len(one.rows)
    for left, at in one.ticks:
        x = _LEFT + _WIDTH * left / 100
        stamp = time.strftime("%H:%M:%S", time.gmtime(at))
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 12}" y2="{bottom}" stroke="#ddd"/>'
        )
        lines.append(f'<text x="{x:.1f}" y="{top + 10}" fill="#666" font-size="9">{stamp}</text>')
    for number, row in enumerate(one.rows):
        y = top + 16 + _ROW * number
        label = labels[row.task or 0] if labels else f"task {row.task}"
        lines.append(f'<text x="4" y="{y + 11}">{escape(label[:24])}</text>')
        for bar in row.bars:
            x, width = _LEFT + _WIDTH * bar.left / 100, max(3.0, _WIDTH * bar.width / 100)
            colour = _COLOURS.get(bar.outcome, "#1565c0")
            lines.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="14" rx="2"'
                f' fill="{colour}"><title>{escape(bar.title)}</title></rect>'
            )
    return "\n".join(lines)
