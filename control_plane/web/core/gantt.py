"""Operations of a job as a Gantt chart: one row a task, one bar an operation.

The article on the job control plane shows operations of a job that way. Rows without an operation
in the window are left out, so a job of 10,000 tasks shows only tasks with operations. The
page draws the first rows (`chart`); a script draws any others from numbers (`pack`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import ceil
from typing import Any

from control_plane.api.jobs import TaskRecord
from control_plane.api.operations import WAITING, JobEvent, Operation, OperationState

ROWS_MAX = 60
"""Rows that are drawn by the server; more are on the next page, or drawn by the script."""
MIN_WIDTH = 0.15
"""Percent of the window that the shortest bar takes, so that it is visible and clickable."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One operation; `left` and `width` are percent of the window."""

    left: float
    width: float
    kind: str
    cause: str
    outcome: str
    """State of the operation: `done`, `failed`, `running`, `proposed`, …"""
    start: float
    end: float | None
    """None: it has not ended."""
    title: str
    """A description of the operation in one sentence, for the tooltip and for screen readers."""


@dataclass(frozen=True, slots=True)
class Row:
    """The bars of one task, by time; None: operations of the job as a whole."""

    task: int | None
    bars: list[Bar] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Chart:
    """A window of time with its rows and its ticks."""

    begin: float
    end: float
    rows: list[Row]
    ticks: list[tuple[float, float]]
    """(percent, seconds since 1970)."""
    hidden: int
    """Rows that are on other pages."""


def chart(
    events: Iterable[JobEvent],
    tasks: Iterable[TaskRecord],
    window: tuple[float, float],
    first: int = 0,
) -> Chart:
    """Return the chart of a window (begin, end in seconds since 1970) from row `first` on."""
    begin, end = window
    order, ended, current = _group_by_task(events, tasks, window)
    tasks_shown = order[first : first + ROWS_MAX]
    rows = []
    for task in tasks_shown:
        bars = [_bar(e, e.outcome, e.start or e.end, e.end, window) for e in ended[task]]
        if task in current:
            now = current[task]
            bars.append(_bar(now, now.state, now.began, None, window))
        rows.append(Row(task, sorted(bars, key=lambda bar: bar.start)))
    return Chart(begin, end, rows, ticks_of(begin, end), len(order) - first - len(tasks_shown))


Current = dict[int | None, Operation]


def _group_by_task(
    events: Iterable[JobEvent], tasks: Iterable[TaskRecord], window: tuple[float, float]
) -> tuple[list[int | None], dict[int | None, list[JobEvent]], Current]:
    """Return the tasks with an operation in a window, their ended operations and current ones."""
    begin, end = window
    ended: dict[int | None, list[JobEvent]] = defaultdict(list)
    for event in events:
        if event.end >= begin and (event.start or event.end) <= end:
            ended[event.task].append(event)
    current: Current = {
        task.index: task.operation
        for task in tasks
        if task.operation is not None and task.operation.began <= end
    }
    return (
        sorted({*ended, *current}, key=lambda task: -1 if task is None else task),
        ended,
        current,
    )


def pack(
    events: Iterable[JobEvent], tasks: Iterable[TaskRecord], window: tuple[float, float]
) -> dict[str, Any]:
    """Return all rows of a window as numbers: 10,000 rows with 100,000 bars are 2.5 MB.

    `tasks` and `counts` have an item for each row: its task (−1: the job as a whole) and how many
    bars it has. `bars` has five numbers for each bar, row after row by time: its start in tenths of
    a second after `begin`, its length in tenths of a second (−1: it continues), its style as an
    index of `looks`, and its source and target machines as indexes of `words`. A style is [kind,
    cause, state, reason, approved], as indexes of `words`.
    """
    order, ended, current = _group_by_task(events, tasks, window)
    packer, counts, bars = _Packer(window[0]), list[int](), list[int]()
    for task in order:
        row = [packer.bar(e, e.start or e.end, e.end, e.outcome) for e in ended[task]]
        if task in current:
            row.append(packer.bar(current[task], current[task].began, None, current[task].state))
        row.sort()
        counts.append(len(row))
        bars.extend(chain.from_iterable(row))
    return {
        "begin": window[0],
        "end": window[1],
        "tasks": [-1 if task is None else task for task in order],
        "counts": counts,
        "bars": bars,
        "looks": packer.looks,
        "words": [*packer.words],
    }


class _Packer:
    """Turns bars into numbers, and keeps the tables that decode them."""

    __slots__ = ("_begin", "_known", "looks", "words")

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._known: dict[tuple[int, int, int, str, str], int] = {}
        self.looks: list[list[int]] = []
        self.words = {"": 0}

    def bar(
        self,
        operation: JobEvent | Operation,
        start: float,
        end: float | None,
        state: OperationState,
    ) -> tuple[int, ...]:
        """Return the five numbers of a bar."""
        at, words = round(10 * (start - self._begin)), self.words
        length = -1 if end is None else round(10 * (end - self._begin)) - at
        # Members of an enumeration are compared by identity: their own hash is slow.
        style = (
            id(operation.kind),
            id(operation.cause),
            id(state),
            operation.reason,
            operation.approved,
        )
        if (number := self._known.get(style)) is None:
            number = self._known[style] = len(self.looks)
            parts = (
                operation.kind.value,
                operation.cause.value,
                state.value,
                operation.reason,
                operation.approved,
            )
            self.looks.append([words.setdefault(word, len(words)) for word in parts])
        source = words.setdefault(operation.from_machine, len(words))
        return at, length, number, source, words.setdefault(operation.to_machine, len(words))


def _bar(
    operation: JobEvent | Operation,
    state: OperationState,
    start: float,
    end: float | None,
    window: tuple[float, float],
) -> Bar:
    state_text = f"waits ({state})" if state in WAITING else state
    parts = [f"{operation.kind} because of {operation.cause}: {state_text}"]
    parts += [_machines_text(operation.from_machine, operation.to_machine), operation.reason]
    parts += [f"approved by {operation.approved}"] if operation.approved else []
    title = ", ".join(part for part in parts if part)
    left, width = _position(start, window[1] if end is None else end, window)
    return Bar(left, width, operation.kind, operation.cause, state, start, end, title)


def _position(start: float, end: float, window: tuple[float, float]) -> tuple[float, float]:
    """Return left edge and width in percent, cut to the window."""
    begin, until = window
    span = max(until - begin, 1e-9)
    left = 100 * (max(start, begin) - begin) / span
    width = 100 * (min(end, until) - max(start, begin)) / span
    return min(left, 100 - MIN_WIDTH), max(width, MIN_WIDTH)


def _machines_text(source: str, target: str) -> str:
    if source and target and source != target:
        return f"from {source} to {target}"
    return f"on {target or source}" if target or source else ""


_TICK_STEPS_S = (1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 86_400, 7 * 86_400)
_TICKS = 8


def ticks_of(begin: float, end: float) -> list[tuple[float, float]]:
    """Return at most `_TICKS` round times within the window."""
    span = end - begin
    longest = _TICK_STEPS_S[-1]
    long_step = ceil(span / longest / _TICKS) * longest  # for spans of more than eight weeks
    step = next((s for s in _TICK_STEPS_S if span / s <= _TICKS), long_step)
    first = (int(begin // step) + 1) * step
    times: Sequence[float] = range(first, int(end) + 1, step)
    return [(100 * (at - begin) / max(span, 1e-9), float(at)) for at in times]
