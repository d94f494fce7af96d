"""Health verdicts, and the text that describes an exit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from builders import a_record
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Exit, Health, Probe
from agent.lease.core.lease import LeaseMoment
from agent.tasks.core.exits import describe
from agent.tasks.core.health import Streak, after_answer
from agent.tasks.core.restarts import after_end

PROBE = Probe(port=80, successes=2, failures=3)


def _verdicts(answers: Sequence[bool], probe: Probe = PROBE) -> list[Health]:
    streak, found = Streak(), []
    for ok in answers:
        streak = after_answer(streak, ok, probe)
        found.append(streak.health)
    return found


def test_a_task_is_healthy_after_enough_good_answers_in_a_row() -> None:
    assert _verdicts([True, False, True, True])[-2:] == [Health.UNKNOWN, Health.HEALTHY]


def test_a_lost_answer_is_no_verdict_but_enough_of_them_are() -> None:
    verdicts = _verdicts([True, True, False, False, True, False, False, False])

    assert verdicts[1:7] == [Health.HEALTHY] * 6
    assert verdicts[7] is Health.UNHEALTHY


@pytest.mark.behaviour("BUG-AG11")
def test_bad_answers_of_a_task_that_starts_do_not_speak_against_it() -> None:
    """A slow starter was unhealthy after a second."""
    streak = Streak()
    for _ in range(20):
        streak = after_answer(streak, False, PROBE, starting=True)
    assert streak == Streak()

    # Failures after the period count from then on, …
    late = [after_answer(streak, False, PROBE)]
    late += [after_answer(late[-1], False, PROBE)]
    late += [after_answer(late[-1], False, PROBE)]
    assert [s.health for s in late] == [Health.UNKNOWN, Health.UNKNOWN, Health.UNHEALTHY]
    # … and the first healthy answer ends the period.
    was_healthy = Streak(Health.HEALTHY)
    for _ in range(PROBE.failures):
        was_healthy = after_answer(was_healthy, False, PROBE, starting=True)
    assert was_healthy.health is Health.UNHEALTHY


@given(st.lists(st.booleans()), st.integers(1, 4), st.integers(1, 4))
def test_a_verdict_changes_only_after_its_number_of_answers(
    answers: list[bool], successes: int, failures: int
) -> None:
    probe = Probe(port=80, successes=successes, failures=failures)
    verdicts = [Health.UNKNOWN, *_verdicts(answers, probe)]
    for index, ok in enumerate(answers):
        if verdicts[index + 1] is not verdicts[index]:
            needed = successes if ok else failures
            assert answers[index + 1 - needed : index + 1] == [ok] * needed


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Exit(result="success", code=0, at=0), "it ended with exit code 0"),
        (Exit(result="exit-code", code=3, at=0), "it ended with exit code 3"),
        (Exit(result="signal", signal="SIGSEGV", at=0), "it was ended by signal SIGSEGV"),
        (Exit(result="success", signal="SIGTERM", at=0), "it was ended by signal SIGTERM"),
        (Exit(result="oom-kill", signal="SIGKILL", at=0), "more memory than its limit"),
        (Exit(result="timeout", signal="SIGKILL", at=0), "did not end in time"),
        (Exit(result="external-stop", at=0), "stopped by another program"),
        (Exit(result="lost", at=0), "the host was rebooted"),
        (Exit(result="protocol", at=0), "it ended: protocol"),
    ],
)
def test_an_end_is_described_in_text(end: Exit, text: str) -> None:
    assert text in describe(end)


def test_a_run_over_its_limit_is_distinguished_from_a_late_stop() -> None:
    """systemd reports "timeout" for both."""
    end = Exit(result="timeout", signal="SIGKILL", at=0)

    assert describe(end, ran_s=91, max_run_s=90) == (
        "it ran for longer than its max_run_s (1m30s) and was ended"
    )
    assert "did not end in time after its stop" in describe(end, ran_s=20, max_run_s=90)
    assert "did not end in time after its stop" in describe(end, ran_s=20)


@pytest.mark.behaviour("F-17", "F-18")
@pytest.mark.parametrize("code", range(200, 244))
def test_every_exit_code_of_systemd_is_described(code: int) -> None:
    text = describe(Exit(result="exit-code", code=code, at=0))

    assert f"exit code {code}" in text


@pytest.mark.parametrize("code", [200, 203, 217, 226])
def test_a_failed_step_before_the_command_is_reported_as_never_started(code: int) -> None:
    assert describe(Exit(result="exit-code", code=code, at=0)).startswith("it never started: ")
    assert "never" not in describe(Exit(result="success", code=code, at=0))


@pytest.mark.behaviour("BUG-AG95")
def test_a_program_that_ran_may_end_with_a_code_of_systemd() -> None:
    """After days of work its end was explained with a step before its start."""
    now, end = LeaseMoment(1e9, 500.0), Exit(result="exit-code", code=226, at=1e9)
    ran = after_end(a_record(started_boot_s=100.0), end, now)
    unseen = after_end(a_record(started_boot_s=None), end, now)

    assert ran.reason == "it ended with exit code 226"
    assert unseen.reason.startswith("it never started: its mount namespace")


def test_a_working_directory_that_is_missing_is_thought_of() -> None:
    """systemd has one code for both a missing and an inaccessible folder."""
    assert "does the image have it" in describe(Exit(result="exit-code", code=200, at=0))
