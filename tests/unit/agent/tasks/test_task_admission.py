"""The checks that accept or refuse a request about a task."""

from __future__ import annotations

import pytest
from builders import a_record, a_spec
from msgspec.structs import replace

from agent.api import Limits, TaskState
from agent.runtime.core.records import Instant, Tombstone, Wanted, is_expired
from agent.tasks.core.admission import (
    accept,
    contradiction,
    is_over,
    limits_refusal,
    stale,
    tombstone_of,
)
from agent.tasks.core.lifecycle import LINGERS

RECORD = a_record(spec=a_spec(generation=5, epoch=2))
STONE = Tombstone(task_id="web", generation=5, epoch=2, at=0.0)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("generation", "epoch", "taken"),
    [(4, 2, False), (5, 2, True), (6, 2, True), (9, 1, False), (6, 1, False), (1, 3, True)],
)
def test_an_older_sender_or_generation_is_refused(generation: int, epoch: int, taken: bool) -> None:
    assert (stale(generation, epoch, RECORD) == "") == taken


@pytest.mark.parametrize(
    ("generation", "epoch", "taken"),
    [(4, 2, False), (5, 2, False), (6, 2, True), (6, 1, False), (5, 3, True)],
)
def test_a_late_request_does_not_restore_a_removed_task(
    generation: int, epoch: int, taken: bool
) -> None:
    assert (stale(generation, epoch, STONE) == "") == taken


def test_no_request_is_stale_for_an_unknown_task() -> None:
    assert stale(1, 0, None) == ""


def test_a_refusal_shows_the_state_in_force() -> None:
    by_epoch, by_generation = stale(9, 1, RECORD), stale(4, 2, RECORD)

    assert "epoch 1 is older than 2" in by_epoch
    assert "generation 4 is older than 5" in by_generation


def test_the_same_specification_again_changes_nothing_but_a_newer_epoch_is_kept() -> None:
    assert accept("web", RECORD.spec, RECORD) is None
    newer = accept("web", a_spec(generation=5, epoch=3), RECORD)

    assert newer is not None
    assert newer == replace(RECORD, spec=a_spec(generation=5, epoch=3))


def test_a_newer_epoch_wins_with_any_generation() -> None:
    newer = accept("web", a_spec(generation=5, epoch=3, command=["/other"]), RECORD)

    assert newer is not None
    assert newer.spec.command == ["/other"]


@pytest.mark.behaviour("BUG-AG13")
def test_another_content_of_the_generation_in_force_is_a_contradiction() -> None:
    other = a_spec(generation=5, epoch=2, command=["/other"], limits=Limits(cpu_weight=7))
    refused = contradiction(other, RECORD)

    assert "generation 5 is in force with another content (command, limits)" in refused
    assert contradiction(RECORD.spec, RECORD) == ""
    assert contradiction(replace(other, epoch=3), RECORD) == ""
    assert contradiction(replace(other, generation=6), RECORD) == ""
    assert contradiction(other, replace(RECORD, wanted=Wanted.GONE)) == ""


@pytest.mark.parametrize("state", [TaskState.STOPPED, TaskState.FAILED, TaskState.BACKOFF])
def test_a_new_generation_gives_a_task_that_waits_another_try(state: TaskState) -> None:
    known = a_record(state=state, reason="it ended", streak=7, next_start_at=9.0)
    new = accept("web", a_spec(generation=2), known)

    assert new is not None
    assert (new.state, new.reason, new.streak) == (TaskState.ACCEPTED, "", 0)
    assert new.next_start_at is None


def test_a_task_that_is_wanted_back_while_it_stops_starts_again() -> None:
    new = accept("web", a_spec(generation=2), a_record(wanted=Wanted.GONE))

    assert new is not None
    assert (new.wanted, new.restart_asked) == (Wanted.RUN, True)


def test_a_tombstone_remembers_the_generation_unless_it_was_never_known() -> None:
    now = Instant(7.0, "boot", 3.0)
    expected = Tombstone(task_id="web", generation=5, epoch=2, at=7.0, boot_id="boot", boot_s=3.0)
    assert tombstone_of(RECORD, now) == expected
    assert tombstone_of(a_record(orphan=True), now).generation == 0


@pytest.mark.behaviour("BUG-AG92")
def test_after_a_removal_without_a_generation_only_that_generation_is_refused() -> None:
    stone = replace(STONE, unversioned=True)

    assert stale(4, 2, stone) == ""
    refused = stale(5, 2, stone), stale(9, 1, stone)
    assert [why[:24] for why in refused] == [
        "generation 5 was already",
        "epoch 1 is older than 2,",
    ]


@pytest.mark.behaviour("BUG-AG93")
@pytest.mark.parametrize(
    ("at", "boot_id", "boot_s", "is_old"),
    [
        (1e9, "boot", 86_402.0, False),
        (0.0, "boot", 86_403.0, True),
        (86_500.0, "next", 60.0, False),
        (31 * 86_400.0, "next", 60.0, True),
        (0.0, "next", 86_400.0, True),
    ],
)
def test_the_age_of_a_tombstone_is_the_time_in_which_the_host_was_up(
    at: float, boot_id: str, boot_s: float, is_old: bool
) -> None:
    stone = replace(STONE, at=7.0, boot_id="boot", boot_s=3.0)
    assert is_expired(stone, Instant(at, boot_id, boot_s)) == is_old


def test_a_task_that_does_not_fit_is_refused_with_the_numbers() -> None:
    spec = a_spec(limits=Limits(memory_max_bytes=GIB, cpu_max_cores=2.0))

    assert limits_refusal(spec, 2 * GIB, 2, GIB) == ""
    refused = limits_refusal(spec, 2 * GIB, 2, 3 * GIB // 2)
    assert "memory_max_bytes 1GiB does not fit: the machine has 2GiB" in refused
    assert refused.endswith("already use 1.5GiB")
    assert "cpu_max_cores 2" in limits_refusal(spec, 2 * GIB, 1, 0)


@pytest.mark.parametrize("state", TaskState)
def test_a_task_is_over_once_it_ended_without_a_requested_restart(state: TaskState) -> None:
    task = replace(RECORD, state=state)
    assert is_over(task) == (state in (TaskState.STOPPED, TaskState.FAILED))
    assert not is_over(replace(task, restart_asked=True))
    assert not is_over(replace(task, reason=LINGERS))
