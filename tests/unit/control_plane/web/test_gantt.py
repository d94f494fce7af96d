"""Operations of a job as bars, drawn by the server or packed for the script."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.jobs import TaskRecord
from control_plane.api.operations import (
    Cause,
    JobEvent,
    Operation,
    OperationKind,
    OperationState,
)
from control_plane.web.core.gantt import ROWS_MAX, chart, pack, ticks_of

pytestmark = pytest.mark.behaviour("FE1", "FE7")


def event(task: int | None, start: float, end: float, **more: object) -> JobEvent:
    fields = {"kind": OperationKind.UPDATE, "cause": Cause.RELEASE, "outcome": OperationState.DONE}
    return JobEvent(task=task, operation="o", start=start, end=end, **{**fields, **more})


def test_a_bar_is_where_its_operation_was_in_the_window() -> None:
    (row,) = chart([event(3, 150, 175)], [], (100, 200)).rows
    (bar,) = row.bars
    assert (row.task, bar.left, bar.width) == (3, 50, 25)
    assert bar.title == "update because of release: done"


def test_a_running_operation_reaches_the_end_of_the_window_with_its_reason() -> None:
    operation = Operation(
        id="1",
        task=0,
        kind=OperationKind.MOVE,
        cause=Cause.MAINTENANCE,
        began=180,
        reason="m1",
        from_machine="m1",
        to_machine="m2",
    )
    task = TaskRecord(index=0, version=1, generation=1, operation=operation)
    ((bar,),) = [row.bars for row in chart([], [task], (100, 200)).rows]
    assert (bar.left, bar.width, bar.end) == (80, 20, None)
    assert bar.title == ("move because of maintenance: waits (proposed), from m1 to m2, m1")


def test_operations_of_the_job_as_a_whole_come_first_and_rows_are_by_task() -> None:
    rows = chart([event(2, 1, 2), event(None, 1, 2), event(0, 1, 2)], [], (0, 10)).rows
    assert [row.task for row in rows] == [None, 0, 2]


def test_operations_that_ended_before_the_window_are_not_shown() -> None:
    assert chart([event(0, 10, 20), event(1, 300, 301)], [], (100, 200)).rows == []


def test_more_rows_than_a_page_are_counted_and_on_the_next_page() -> None:
    events = [event(n, 1, 2) for n in range(ROWS_MAX + 7)]
    assert chart(events, [], (0, 10)).hidden == 7
    assert [row.task for row in chart(events, [], (0, 10), ROWS_MAX).rows] == list(
        range(ROWS_MAX, ROWS_MAX + 7)
    )


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1e9), st.floats(0, 1e6)), max_size=30),
    st.floats(0, 1e9),
    st.floats(0.1, 1e6),
)
def test_every_bar_lies_within_the_window(given_events, begin, span) -> None:
    events = [event(task, start, start + length) for task, start, length in given_events]
    for row in chart(events, [], (begin, begin + span)).rows:
        for bar in row.bars:
            assert 0 <= bar.left <= 100
            assert bar.width > 0
            assert bar.left + bar.width <= 100.2


@given(st.lists(st.tuples(st.integers(0, 90), st.floats(0, 100), st.floats(0, 100)), max_size=99))
def test_packed_rows_contain_the_same_data_as_the_chart(given_events) -> None:
    events = [
        event(
            *(task, start, start + length),
            **{"reason": f"r{task}", "approved": "zk 1"},
            **{"from_machine": f"m{task}", "to_machine": "m9"},
        )
        for task, start, length in given_events
    ]
    found, window = pack(events, [], (0, 200)), (0, 200)
    drawn = [row for first in (0, ROWS_MAX) for row in chart(events, [], window, first).rows]
    assert found["tasks"] == [row.task for row in drawn]
    assert found["counts"] == [len(row.bars) for row in drawn]
    bars, words = [(row.task, bar) for row in drawn for bar in row.bars], found["words"]
    packed_bars = list(zip(*[iter(found["bars"])] * 5, strict=True))
    for (start, _, look, *places), (task, known) in zip(packed_bars, bars, strict=True):
        assert abs(start / 10 - known.start) <= 0.051
        kind, cause, state, reason, approved = (words[n] for n in found["looks"][look])
        assert (kind, cause, state) == (known.kind, known.cause, known.outcome)
        assert (reason, approved) == (f"r{task}", "zk 1")
        assert [words[place] for place in places] == [f"m{task}", "m9"]


@pytest.mark.behaviour("BUG-UX181")
@given(st.floats(0, 4e10), st.floats(1.0, 4e10))
def test_a_chart_of_any_span_has_few_ticks_within_it(begin: float, span: float) -> None:
    ticks = ticks_of(begin, begin + span)
    assert len(ticks) <= 8
    assert all(0 <= percent <= 100 + 1e-6 for percent, _ in ticks)
