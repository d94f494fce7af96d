"""Which task is evicted when memory is short, and how many tasks start at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import a_record

from agent.api import Resources, RestartPolicy, RestartWhen, TaskState
from agent.host.core.pressure import (
    CHECKS_TO_EVICT,
    FULL_S,
    PAUSE_S,
    HostPressure,
    ShortageWatch,
    TaskMemory,
    at_own_limits,
    recently_full,
    starts_at_once,
    victim,
    watched,
    why_evicted,
)
from agent.lease.core.lease import LeaseMoment
from agent.resources.core.limits import protected_bytes
from agent.runtime.core.records import Wanted
from agent.tasks.core.restarts import evicted

MIB = 1 << 20


@pytest.mark.behaviour("F-11")
@pytest.mark.parametrize(
    ("waits", "number"),
    [
        (HostPressure(), 8),
        (HostPressure(agent=0.19, tasks=0.19), 8),
        (HostPressure(agent=0.2), 2),
        (HostPressure(agent=0.5), 1),
        (HostPressure(agent=1.0, tasks=1.0), 1),
        (HostPressure(tasks=0.2), 1),
    ],
)
def test_starts_are_let_in_by_what_the_agent_waits_for(waits: HostPressure, number: int) -> None:
    assert starts_at_once(4, waits) == number
    assert starts_at_once(1, HostPressure()) == 4


@pytest.mark.behaviour("F-14")
def test_a_task_is_evicted_only_after_a_lasting_shortage_and_then_none_for_a_while() -> None:
    watch, short = ShortageWatch(), HostPressure(tasks=0.9)
    for check in range(CHECKS_TO_EVICT - 1):
        watch, evicts = watched(watch, short, float(check))
        assert not evicts
    watch, evicts = watched(watch, short, 10.0)
    assert evicts
    for _ in range(CHECKS_TO_EVICT + 1):
        watch, evicts = watched(watch, short, 10.0 + PAUSE_S - 1)
        assert not evicts
    for check in range(CHECKS_TO_EVICT):
        watch, evicts = watched(watch, short, 10.0 + PAUSE_S + check)
    assert evicts


def test_one_good_measurement_ends_a_shortage() -> None:
    watch = ShortageWatch(checks=CHECKS_TO_EVICT - 1)
    watch, evicts = watched(watch, HostPressure(tasks=0.39), 1.0)
    assert (watch.checks, evicts) == (0, False)


@pytest.mark.behaviour("F-14")
def test_the_task_with_most_beyond_its_promise_in_the_slice_with_most_is_evicted() -> None:
    """The largest task of all is not chosen."""
    loads = [
        TaskMemory("large", "front", 300 * MIB),
        TaskMemory("a", "back", 200 * MIB),
        TaskMemory("b", "back", 150 * MIB, started_at=1.0),
        TaskMemory("kept", "back", 900 * MIB, protected_bytes=900 * MIB),
    ]
    chosen = victim(loads)
    assert chosen
    assert chosen.task_id == "a"
    why = why_evicted(chosen, HostPressure(tasks=0.63))
    assert "63% of the last 10 s" in why
    assert "200MiB" in why.replace(" ", "")
    assert "(back)" in why


def test_the_last_started_of_equal_tasks_is_evicted_and_promises_are_kept() -> None:
    twins = [TaskMemory(t, "x", 9 * MIB, started_at=at) for t, at in (("old", 1.0), ("new", 2.0))]
    chosen = victim(twins)
    assert chosen
    assert chosen.task_id == "new"
    assert victim([TaskMemory("kept", "x", 9 * MIB, protected_bytes=9 * MIB)]) is None
    assert protected_bytes(Resources(memory_min_bytes=2, memory_low_bytes=3)) == 3


def test_an_eviction_is_an_end_by_the_restart_policy() -> None:
    now = LeaseMoment(boot_s=100.0, wall=1000.0, contact_s=100.0)
    task = a_record(state=TaskState.RUNNING, invocation_id="i1", started_boot_s=50.0)
    gone = evicted(task, "why", now)
    assert (gone.state, gone.reason, gone.restarts) == (TaskState.BACKOFF, "why", 1)
    assert gone.last_exit
    assert gone.last_exit.result == "evicted"
    once = a_record(
        spec=a_record().spec.__class__(
            image=task.spec.image, command=["x"], restart=RestartPolicy(when=RestartWhen.NEVER)
        ),
        state=TaskState.RUNNING,
    )
    assert evicted(once, "why", now).state is TaskState.STOPPED
    leaving = a_record(state=TaskState.RUNNING, wanted=Wanted.GONE)
    assert evicted(leaving, "why", now) is leaving


@pytest.mark.behaviour("F-14")
def test_a_task_that_waits_at_its_own_limit_is_no_shortage_of_the_host() -> None:
    """Also right after the OOM killer freed memory in the task.

    Another waiting task is a shortage.
    """
    full = TaskMemory("full", "shop", 99, limit_bytes=100, waits=0.8)
    room = TaskMemory("room", "shop", 50, limit_bytes=100, waits=0.5)
    still = TaskMemory("still", "shop", 50, limit_bytes=100, waits=0.01)
    known = recently_full({}, [full, still], 5.0)
    emptied = replace(full, memory_bytes=1)

    assert known == {"full": 5.0}
    assert at_own_limits([full, still], known) == ["full"]
    assert at_own_limits([emptied, still], recently_full(known, [emptied], 5.0 + FULL_S - 1)) == [
        "full"
    ]
    assert at_own_limits([emptied, still], recently_full(known, [emptied], 5.0 + FULL_S)) == []
    assert at_own_limits([full, room], known) == []
    assert at_own_limits([still], known) == []
    assert not TaskMemory("unknown", "shop", 99).is_full
