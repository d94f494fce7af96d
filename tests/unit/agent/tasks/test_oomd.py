"""Kills by systemd-oomd, with the messages from the journal of a Debian 13 guest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import a_record, a_spec, a_unit, seen

from agent.api import Limits, Resources, TaskState
from agent.lease.core.lease import LeaseMoment
from agent.resources.core.limits import limit_properties, live_properties
from agent.tasks.core.lifecycle import decide
from agent.tasks.core.oomd import OOMD_KILL, end_log_command, killed, may_be_oomd, with_oomd_end

UNIT = "twine-task-web.service"
GROUP = f"/workload.slice/workload-local.slice/{UNIT}"
WHY = "memory pressure for /workload.slice being 40.35% > 30.00% for > 1s with reclaim activity"
WORDS = f"Killed {GROUP} due to {WHY}\n"
NOTE = f"{UNIT}: systemd-oomd killed 1 process(es) in this unit.\n"
ENDED = a_unit(active="failed", sub="failed", result="oom-kill", exit_signal="SIGKILL")


def test_the_journal_is_read_only_after_an_end_for_lack_of_memory() -> None:
    assert may_be_oomd(ENDED)
    assert not may_be_oomd(a_unit(active="failed", sub="failed", result="exit-code"))
    assert not may_be_oomd(a_unit(active="deactivating", sub="final-sigkill", result="oom-kill"))
    command = end_log_command(ENDED, 1000.0)
    assert f"INVOCATION_ID={ENDED.invocation_id}" in command
    assert command[-2:] == ["+", "_SYSTEMD_UNIT=systemd-oomd.service"]


@pytest.mark.behaviour("F-14")
@pytest.mark.parametrize(
    ("journal_text", "why"),
    [
        (WORDS + NOTE, f"its host was short of memory: {WHY}"),
        (WORDS, f"its host was short of memory: {WHY}"),
        (NOTE, "its host was short of memory (journalctl -u systemd-oomd)"),
    ],
)
def test_the_killer_of_a_task_is_its_result_and_its_reason(journal_text: str, why: str) -> None:
    """Its restart policy decides what follows."""
    unit = with_oomd_end(ENDED, UNIT, journal_text)
    assert (unit.result, unit.exit_signal) == (OOMD_KILL, "SIGKILL")
    record = a_record(state=TaskState.RUNNING, invocation_id=unit.invocation_id)
    task = decide(record, seen(unit), LeaseMoment(1000.0, 1000.0, 1000.0)).task
    assert task.state is TaskState.BACKOFF
    assert task.last_exit is not None
    assert task.last_exit.result == OOMD_KILL
    assert task.reason == f"systemd-oomd killed it, since {why}"


@pytest.mark.parametrize(
    "journal_text",
    [
        "",
        WORDS.replace("task-web", "task-webb"),
        WORDS.replace("task-web", "task-a-web"),
        NOTE.replace("task-web", "task-webb"),
        f"hello: {WORDS}",
    ],
)
def test_an_oomd_kill_of_another_unit_does_not_change_the_end_of_a_unit(journal_text: str) -> None:
    assert with_oomd_end(ENDED, UNIT, journal_text) == ENDED


def test_kills_outside_the_slice_of_tasks_do_not_count() -> None:
    other = "Killed /user.slice/user-0.slice/session-1.scope due to memory used (1) / total (2)"
    assert killed(f"Considered 3 cgroups\n{WORDS}{other}\n") == {GROUP: WHY}


@pytest.mark.behaviour("AG8")
def test_a_task_with_a_promise_goes_last_and_one_within_it_never() -> None:
    """Only this property passes a promise to systemd-oomd; it ends together with the promise."""

    def preference(**promise: int) -> object:
        spec = a_spec(limits=Limits(memory_max_bytes=8 << 20), resources=Resources(**promise))
        return limit_properties(spec).get("ManagedOOMPreference")

    assert preference() is None
    assert preference(io_weight=10) == "none"
    assert preference(memory_min_bytes=4 << 20) == preference(memory_low_bytes=4 << 20) == "avoid"
    assert preference(memory_low_bytes=8 << 20) == "omit"
    before = Resources(memory_min_bytes=4 << 20)
    assert live_properties(a_spec(), before)["ManagedOOMPreference"] == "none"


@pytest.mark.behaviour("BUG-AG111")
def test_a_kill_of_the_run_before_is_not_the_end_of_this_run() -> None:
    """systemd-oomd names the unit only, and the unit of the next run has the same name."""
    ended_s = ENDED.exited_at or 1000.0
    short = replace(ENDED, exited_at=ended_s, started_at=ended_s - 5.25)
    long = replace(ENDED, exited_at=ended_s, started_at=ended_s - 3600.0)
    assert f"--since=@{ended_s - 5.25:.3f}" in end_log_command(short, ended_s)
    assert f"--since=@{ended_s - 60.0:.3f}" in end_log_command(long, ended_s)
