"""Decides which work runs and which waits, and evaluates the results of its tasks."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from agent.api import RestartPolicy, RestartWhen, TaskState
from control_plane.api.jobs import JobSpec, JobStatus
from control_plane.api.opportunistic import QueuedState, QueuedWork

RETRY_S, RETRY_MAX_S = 30.0, 1800.0
"""Pause after the first failure; it doubles with each further failure, up to the maximum."""
OPEN = (QueuedState.WAITING, QueuedState.RUNNING)
_Rank = tuple[int, bool, float, float, float, str]


def job_of(work: QueuedWork, entitlement: str) -> JobSpec:
    """Return the job of a piece of work, in this entitlement and without restarts by the agent."""
    return replace(
        work.request.job,
        name=work.name,
        entitlement=entitlement,
        restart=RestartPolicy(when=RestartWhen.NEVER),
    )


def in_order(work: Sequence[QueuedWork], shares: Mapping[str, int]) -> list[QueuedWork]:
    """Return the open work in the order in which it runs.

    Work is sorted by priority. Among equals, running work comes first, then work of the user with
    the least use of its share, then the oldest work. So no work is stopped for other work of the
    same priority.
    """
    rank = _ranks(work, shares)[0]
    return sorted((one for one in work if one.state in OPEN), key=rank)


def _ranks(
    work: Sequence[QueuedWork], shares: Mapping[str, int]
) -> tuple[Callable[[QueuedWork], _Rank], Counter[str], Counter[str]]:
    """Return the rank of open work, with the two counters that it reads.

    These are the use and the running tasks of each user.
    """
    used, tasks = Counter[str](), Counter[str]()
    for one in work:
        used[one.user] += int(one.machine_s)
        if one.state is QueuedState.RUNNING:
            tasks[one.user] += one.request.job.tasks

    def rank(one: QueuedWork) -> _Rank:
        share = shares.get(one.user, 100)
        return (
            -one.request.priority,
            one.state is not QueuedState.RUNNING,
            tasks[one.user] / share,
            used[one.user] / share,
            one.submitted_at,
            one.name,
        )

    return rank, used, tasks


def choose_work(
    work: Sequence[QueuedWork], shares: Mapping[str, int], room: int, now: float
) -> tuple[list[str], list[str]]:
    """Return the names of work to start, and of running work to stop, for at most `room` tasks.

    One piece of work is chosen at a time, so that users take turns by their shares. Work that is
    larger than `room` is chosen only if it comes first; its tasks start as machines arrive.
    """
    running = {one.name for one in work if one.state is QueuedState.RUNNING}
    ready = [one for one in work if one.name in running or one.retry_at <= now]
    picked, taken = set[str](), 0
    rank, used, tasks = _ranks(ready, shares)
    queues = defaultdict[str, deque[QueuedWork]](deque)
    for one in in_order(ready, shares):
        queues[one.user].append(one)
    while queues and taken < max(1, room):
        first = min((queue[0] for queue in queues.values()), key=rank)
        size = first.request.job.tasks
        if taken and taken + size > room and first.name not in running:
            break
        picked.add(first.name)
        taken += size
        used[first.user] += size  # so that other users get their turn
        if first.name in running:
            tasks[first.user] -= size
        queues[first.user].popleft()
        if not queues[first.user]:
            del queues[first.user]
    start = [one.name for one in ready if one.name in picked - running]
    waits = max((one.request.priority for one in ready if one.name in start), default=-1)
    stop = [
        one.name for one in work if one.name in running - picked and one.request.priority < waits
    ]
    return start, stop


def updated_work(
    work: QueuedWork, status: JobStatus | None, now: float, round_s: float
) -> QueuedWork:
    """Return running work as its job's status shows it: still running, done, or failed.

    `round_s` is the time since the last round, which is added to the use of the work.
    """
    if status is None or not status.record.tasks:
        return work
    tasks = status.record.tasks
    ended = [t for t in tasks if t.state in (TaskState.STOPPED, TaskState.FAILED)]
    faulty = [t for t in ended if t.last_exit is not None and t.last_exit.result not in _NO_FAULT]
    work = replace(work, machine_s=work.machine_s + status.running * round_s)
    if faulty and faulty[0].last_exit is not None:
        return failed(work, f"task {faulty[0].index}: {faulty[0].last_exit.result}", now)
    done = [t for t in ended if t.last_exit is not None and t.last_exit.result == "success"]
    if len(done) == len(tasks) == work.request.job.tasks:
        return replace(work, state=QueuedState.DONE, ended_at=now, reason="")
    waiting = next((t.reason for t in tasks if t.placement is None and t.reason), "")
    return replace(work, reason=waiting)


_NO_FAULT = ("success", "lost", "cut-off", "evicted")
"""Results that the work did not cause; the region starts such a task again elsewhere."""


def failed(work: QueuedWork, why: str, now: float) -> QueuedWork:
    """Return work after one more failure: waiting for a retry, or failed finally."""
    failures = work.failures + 1
    if failures >= work.request.attempts:
        state, ended = QueuedState.FAILED, now
        return replace(work, state=state, failures=failures, ended_at=ended, reason=why)
    pause = min(RETRY_S * 2.0 ** (failures - 1), RETRY_MAX_S)
    return replace(
        work, state=QueuedState.WAITING, failures=failures, retry_at=now + pause, reason=why
    )
