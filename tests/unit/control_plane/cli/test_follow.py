"""What a command that waits for a job prints, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace

from agent.api import Exit
from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus, TaskPhase, TaskRecord
from control_plane.api.updates import OnFailure, Rollout, UpdatePolicy
from control_plane.cli import follow
from wire.errors import Busy, Forbidden, TwineError, Unreachable

SPEC = JobSpec(name="web", entitlement="e", tasks=1, image="sha256:" + "1" * 64, command=["x"])


def a_status(restarts: int, detail: str = "", phase: JobPhase = JobPhase.PROGRESSING) -> JobStatus:
    task = TaskRecord(
        index=0,
        version=1,
        generation=1,
        phase=TaskPhase.STARTING,
        restarts=restarts,
        last_exit=Exit(result="exit-code", code=3, at=1.0) if restarts else None,
    )
    record = JobRecord(name="web", spec=SPEC, version=1, specs={1: SPEC}, tasks=[task])
    return JobStatus(
        record=record, phase=phase, wanted=1, running=0, healthy=0, updated=0, detail=detail
    )


class Client:
    """Answers with one status after another, and repeats the last one."""

    def __init__(self, statuses: Sequence[JobStatus | TwineError]) -> None:
        self._statuses = list(statuses)
        self.log: bytes | None = None

    async def get_job(self, _name: str) -> JobStatus:
        status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        if isinstance(status, TwineError):
            raise status
        return status

    async def job_logs(self, job: str, index: int, **options: object) -> AsyncIterator[bytes]:
        assert options == {"tail": 1, "previous": True}
        if self.log is None:
            raise Unreachable(f"{job}-{index} cannot be asked")
        yield self.log


def waited(monkeypatch: pytest.MonkeyPatch, *statuses: JobStatus | TwineError) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.0)
    asyncio.run(follow.wait_stable(Client(statuses), "web", 5.0))  # type: ignore[arg-type]


@pytest.mark.behaviour("BUG-UX1")
def test_waiting_ends_early_on_a_crash_loop_and_names_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("starting", "backs off", "not healthy")
    crashing = [a_status(n, words[n % 3]) for n in range(follow.CRASH_LOOP + 1)]
    with pytest.raises(follow.NotReached, match="web-0 crashes in a loop: 3 restarts") as found:
        waited(monkeypatch, *crashing)
    assert "last with exit code 3" in str(found.value)
    assert "twinectl job logs web 0 --previous" in found.value.hint
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(set(lines)) == 3  # once for each of the alternating lines


@pytest.mark.behaviour("BUG-UX1")
def test_restarts_before_the_wait_do_not_count_as_a_crash_loop() -> None:
    loops = follow.CrashLoops()
    assert loops.check(a_status(50)) is None
    assert loops.check(a_status(52)) is None
    assert loops.check(a_status(53)) is not None


@pytest.mark.behaviour("BUG-UX1")
def test_an_update_with_its_own_failure_policy_has_more_time_to_roll_back() -> None:
    spec = replace(SPEC, update=UpdatePolicy(on_failure=OnFailure.ROLLBACK))
    loops = follow.CrashLoops()

    def judged(restarts: int) -> JobStatus:
        status = a_status(restarts)
        rollout = Rollout(version=1, passed=True)
        return replace(status, record=replace(status.record, spec=spec, rollout=rollout))

    assert loops.check(judged(0)) is None
    assert loops.check(judged(follow.CRASH_LOOP)) is None
    assert loops.check(judged(follow.CRASH_LOOP_OF_UPDATE)) is not None


@pytest.mark.behaviour("BUG-UX5")
def test_a_version_rolled_back_before_the_first_poll_counts_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job is stable again, but not with the version that was applied."""
    monkeypatch.setattr(follow, "POLL_S", 0.0)
    status = replace(a_status(0, phase=JobPhase.STABLE), wanted=0)
    back = Rollout(version=3, returns_from=2, passed=True, reason="version 2 failed on 1 task")
    record = replace(status.record, version=3, rollout=back)
    client = Client([replace(status, record=record)])
    with pytest.raises(follow.NotReached, match="version 2 failed on 1 task"):
        asyncio.run(follow.wait_stable(client, "web", 5.0, 2))  # type: ignore[arg-type]


@pytest.mark.behaviour("BUG-UX5")
@pytest.mark.parametrize("log", [None, b"", b"12:00:00\tweb-4\tno such file: /bin/bad\n"])
def test_a_failed_update_quotes_the_last_output_of_its_task(
    monkeypatch: pytest.MonkeyPatch, log: bytes | None
) -> None:
    """The message has the exit code. An unavailable log hides no failure."""
    monkeypatch.setattr(follow, "POLL_S", 0.0)
    why = "version 2 failed on 1 task, recently on web-4 (it is backing off, exit code 127)"
    record = replace(
        a_status(0).record, version=3, rollout=Rollout(version=3, returns_from=2, reason=why)
    )
    client = Client([replace(a_status(0), record=record)])
    client.log = log
    with pytest.raises(follow.NotReached) as failed:
        asyncio.run(follow.wait_stable(client, "web", 5.0, 2))  # type: ignore[arg-type]
    lines = "; last output of web-4: no such file: /bin/bad" if log else ""
    assert str(failed.value) == f"job web: {why}{lines}"
    assert "twinectl job logs web 4 --previous" in failed.value.hint


@pytest.mark.behaviour("BUG-UX173")
def test_waiting_continues_while_another_control_plane_takes_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Formerly only an unreachable front end was tried again."""
    away = Busy("shard 1 does not answer: it may have been replaced")
    stable = replace(a_status(0, phase=JobPhase.STABLE), healthy=1, updated=1)
    waited(monkeypatch, a_status(0), away, stable)
    assert "retrying: shard 1 does not answer" in capsys.readouterr().err
    with pytest.raises(Forbidden):
        waited(monkeypatch, a_status(0), Forbidden("ann may not call this"), stable)
