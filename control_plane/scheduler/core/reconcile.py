"""Folds the reports of agents into a job's record.

The record is the desired state. `observe` advances it, the scheduler stores it, and only then sends
the commands derived from it (`task_commands`). A crash in between repeats a command; the generation
makes every command idempotent.

    pending -> starting -> running -> draining -> stopping -> (gone) pending or removed
                  any of them, machine down -> lost -> starting elsewhere, or here again
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from math import inf

from msgspec.structs import replace

from agent.api import DisconnectPolicy, Health, RestartWhen, TaskState, TaskStatus
from control_plane.agents.core.observed import ObservedMachine, View
from control_plane.agents.core.restored import predates_restore
from control_plane.api.jobs import (
    JobRecord,
    TaskPhase,
    TaskRecord,
    spec_of,
    task_id,
)
from control_plane.api.machines import UnavailabilityEvent
from control_plane.api.operations import STOP, Cause, OperationKind
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.copies import (
    ENDED,
    LeftBehind,
    ended_in_s,
    reason_to_wait,
    staying,
)
from control_plane.scheduler.core.operations import is_being_removed
from control_plane.scheduler.core.task_versions import placement_version, version_after_stop

_RETRY_FIRST_S, _RETRY_MAX_S = 2.0, 60.0
_GIVE_UP_S = 60.0
"""A task that its machine refuses for this long is moved to another."""
_BY_ITSELF = ("exit-code", "signal", "core-dump", "oom-kill", "timeout", "watchdog")
"""Results of a task that ran and failed, in systemd's words; with the policy `never` they end it. A
task that did not start, or ended because of its host, is started again."""
_NOT_STARTED = range(200, 244)
"""Exit codes by which systemd says that it could not start the program (systemd.exec(5))."""
_LEFT = (TaskPhase.DRAINING, TaskPhase.STOPPING, TaskPhase.LOST)
"""Phases in which a task may wait for its certain end on a machine that is down."""


def observe(record: JobRecord, view: View, now: Moment) -> JobRecord:
    """Return the record updated from the observed state; the same one if nothing changed.

    No voluntary operation begins here.
    """
    fold = _Fold(record, view, now)
    tasks, same = list[TaskRecord](), True
    for task in record.tasks:
        moved = fold.task(_with_start_time(task, now))
        same = same and moved is task
        if moved is not None:
            tasks.append(moved)
    fold.left_behind.drop_gone(view)
    after = fold.left_behind.into(record)
    if same and after is record and fold.generation == record.generation:
        return record
    return replace(after, tasks=tasks, generation=fold.generation)


def available(task: TaskRecord, view: View) -> bool:
    """Return whether a task serves: listed, and its machine answers."""
    if task.phase is not TaskPhase.RUNNING or not task.listed or task.placement is None:
        return False
    machine = view.get(task.placement.machine)
    return machine is not None and machine.up and machine.answering


def serves_unchanged(job: str, task: TaskRecord, statuses: Mapping[str, TaskStatus]) -> bool:
    """Return whether a task serves and `observe` would leave its record as it is.

    `statuses` are those of the tasks on its machine, which is up, ready and assigned to the job's
    entitlement.
    """
    status = statuses.get(task_id(job, task.index))
    return (
        status is not None
        and status.generation == task.generation
        and status.state is TaskState.RUNNING
        and status.health is Health.HEALTHY
        and task.phase is TaskPhase.RUNNING
        and task.listed
        and _with_status(task, status) is task
    )


def next_round_at(record: JobRecord, now: Moment, view: View | None = None) -> float | None:
    """Return when (steady) the job needs its next round even without an event."""
    times = [task.retry_at for task in record.tasks if task.retry_at > 0]
    for task in record.tasks:
        if task.phase is TaskPhase.RUNNING:
            continue
        if task.phase in _LEFT and task.placement is not None and view is not None:
            spec, machine = spec_of(record, task), view.get(task.placement.machine)
            wait_s = ended_in_s(spec, task_id(record.name, task.index), machine)
            if 0 < wait_s < inf:
                times.append(now.steady + wait_s)
        if task.phase is TaskPhase.DRAINING:
            begun = now.steady if task.begun is None else task.begun
            times.append(begun + spec_of(record, task).update.drain_s)
    return max(now.steady, min(times)) if times else None


class _Fold:
    """One pass over a job's tasks."""

    def __init__(self, record: JobRecord, view: View, now: Moment) -> None:
        self.generation = record.generation
        self._record = record
        self._view = view
        self._now = now
        self.left_behind = LeftBehind(record)
        self._staying = staying(record.leaving, view)

    def task(self, task: TaskRecord) -> TaskRecord | None:
        """Return the task updated from its observed state; None: it is removed."""
        if task.placement is None:
            return self._unplaced(task)
        machine = self._view.get(task.placement.machine)
        match task.phase:
            case TaskPhase.STARTING | TaskPhase.RUNNING:
                if machine is None or not machine.up or not self._is_held(task, machine):
                    return self._unlisted(task, TaskPhase.LOST, _unusable_reason(task))
                return self._on_usable_machine(task, machine)
            case TaskPhase.DRAINING:
                if machine is None or not machine.up:
                    return self._on_lost_machine(task, machine)
                drain_s = spec_of(self._record, task).update.drain_s
                if self._now.spent_s(task) >= drain_s:
                    return self._in_phase(
                        task, TaskPhase.STOPPING, generation=self._next_generation()
                    )
            case TaskPhase.STOPPING:
                if machine is None or not machine.up:
                    return self._on_lost_machine(task, machine)
                return self._stopping(task, machine)
            case TaskPhase.PARKED:
                return self._parked(task, machine)
            case TaskPhase.LOST:
                if machine is None or not self._is_held(task, machine):
                    return self._on_lost_machine(task, machine, keep_version=True)
                return self._returned(task, machine)
        return task

    def _is_held(self, task: TaskRecord, machine: ObservedMachine) -> bool:
        """Return whether a machine is assigned to the entitlement of a task's own version."""
        return machine.held_by(spec_of(self._record, task).entitlement)

    def _unplaced(self, task: TaskRecord) -> TaskRecord:
        spec = self._record.specs.get(placement_version(self._record, task), self._record.spec)
        waits = reason_to_wait(self._record, task, spec)
        return replace(task, reason=waits) if waits and not task.reason else task

    def _on_usable_machine(self, task: TaskRecord, machine: ObservedMachine) -> TaskRecord | None:
        if not machine.answering:
            return task
        status = machine.tasks.get(task_id(self._record.name, task.index))
        if status is None or status.generation < task.generation:
            if task.phase is TaskPhase.RUNNING:
                return self._restarted(task, "the agent no longer knows it")
            refused = machine.refused.get(task_id(self._record.name, task.index))
            if refused and self._now.spent_s(task) >= _GIVE_UP_S:
                return self._moved_away(task, refused)
            if not refused and not machine.ready:
                refused = "its machine has not proved the entitlement's profile yet"
            if not refused and (old := self._staying.get(task_id(self._record.name, task.index))):
                refused = f"its remains on {old} are removed first"
            return replace(task, reason=refused) if refused and refused != task.reason else task
        if status.generation > task.generation:
            self.generation = max(self.generation, status.generation)
            if not predates_restore(status, machine.restored):
                return self._restarted(task, "another caller changed it on its machine")
            # the restored store is older than the task, which runs until its owner acts
            task = replace(task, generation=status.generation)
        task = _with_status(task, status)
        if status.state is TaskState.RUNNING and status.health is Health.HEALTHY:
            if task.phase is TaskPhase.RUNNING and task.listed:
                return task
            return self._in_phase(task, TaskPhase.RUNNING, listed=True, attempts=0, retry_at=0.0)
        if task.listed:
            task = self._in_phase(task, task.phase, listed=False)
        return self._ended(task, status) if status.state in ENDED else task

    def _on_lost_machine(
        self, task: TaskRecord, machine: ObservedMachine | None, *, keep_version: bool = False
    ) -> TaskRecord | None:
        """Return a task whose machine is lost, or left the entitlement, until its certain end.

        A task that is reported running there is stopped first.
        """
        name = task_id(self._record.name, task.index)
        wait_s = ended_in_s(spec_of(self._record, task), name, machine)
        if wait_s == 0.0:
            return self._without_place(task, left_behind=True, keep_version=keep_version)
        if wait_s == inf and task.phase is not TaskPhase.STOPPING:
            return self._in_phase(task, TaskPhase.STOPPING, generation=self._next_generation())
        return task

    def _moved_away(self, task: TaskRecord, refused: str) -> TaskRecord | None:
        """Return the task without its machine, which refuses it again and again.

        A command whose answer was lost may still arrive there. So a task that must have no second
        copy leaves only after the agent confirmed a stop, which overrides that command.
        """
        assert task.placement is not None
        task = replace(task, avoid=task.placement.machine, reason=refused)
        if spec_of(self._record, task).disconnect.policy is DisconnectPolicy.STOP:
            return self._in_phase(task, TaskPhase.STOPPING, generation=self._next_generation())
        gone = self._without_place(task, left_behind=True, keep_version=True)
        return gone and replace(gone, reason=refused)

    def _ended(self, task: TaskRecord, status: TaskStatus) -> TaskRecord:
        """Return a task that ended and that its agent does not restart: restarted or left ended."""
        result = status.last_exit.result if status.last_exit else ""
        if result == "lost":
            return self._restarted(task, "its machine was rebooted")
        if result == "cut-off":
            return self._restarted(
                task, "its machine was cut off and ended it, as its job requests"
            )
        when = spec_of(self._record, task).restart.when
        finished = status.state is TaskState.STOPPED and result == "success"
        by_itself = status.state is TaskState.STOPPED or _failed_by_itself(status)
        ended = by_itself and when is RestartWhen.NEVER
        if ended or (finished and when is RestartWhen.ON_FAILURE):
            return replace(task, reason=f"it ended, and its restart policy is {when}")
        if not task.retry_at:
            pause = min(_RETRY_FIRST_S * 2.0 ** min(task.attempts, 16), _RETRY_MAX_S)
            return replace(task, retry_at=self._now.steady + pause)
        if self._now.steady < task.retry_at:
            return task
        again = self._restarted(task, status.reason or "it had ended")
        return replace(again, attempts=task.attempts + 1)

    def _stopping(self, task: TaskRecord, machine: ObservedMachine) -> TaskRecord | None:
        name = task_id(self._record.name, task.index)
        status = machine.tasks.get(name)
        if not machine.answering:
            return task
        if status is None:
            if machine.stopped.get(name, 0) < task.generation:
                return task
            if (
                event := _awaited_maintenance(task, machine)
            ) is not None and not self._record.stopping:
                return self._in_phase(task, TaskPhase.PARKED, reason=event.reason, state=None)
            return self._without_place(task)
        if status.generation > task.generation:
            self.generation = max(self.generation, status.generation)
            return replace(task, generation=self._next_generation())
        return replace(task, state=status.state, health=status.health)

    def _parked(self, task: TaskRecord, machine: ObservedMachine | None) -> TaskRecord | None:
        """Return a task that was stopped for maintenance; it restarts there when that is over."""
        if machine is None or not self._is_held(task, machine):
            return self._without_place(task)
        if machine.leaving:  # still under maintenance, or leaving for good after all
            return task if machine.returning else self._without_place(task)
        if not machine.up:
            return self._without_place(task)
        return self._restarted(task, "the maintenance is over") if machine.answering else task

    def _returned(self, task: TaskRecord, machine: ObservedMachine) -> TaskRecord | None:
        """Return a lost task whose machine may be back before it was placed elsewhere."""
        if not (machine.up and machine.answering):
            return task if task.reason else replace(task, reason=_unusable_reason(task))
        status = machine.tasks.get(task_id(self._record.name, task.index))
        if status is not None and status.generation == task.generation:
            task = self._in_phase(task, TaskPhase.STARTING, reason="its machine is back")
            return self._on_usable_machine(task, machine)
        return self._restarted(task, "its machine is back without it")

    def _restarted(self, task: TaskRecord, reason: str) -> TaskRecord:
        task = replace(task, generation=self._next_generation(), state=None)
        return self._unlisted(task, TaskPhase.STARTING, reason)

    def _unlisted(self, task: TaskRecord, phase: TaskPhase, reason: str) -> TaskRecord:
        unseen = {"listed": False, "health": Health.UNKNOWN, "retry_at": 0.0}
        return self._in_phase(task, phase, reason=reason, **unseen)

    def _without_place(
        self, task: TaskRecord, *, left_behind: bool = False, keep_version: bool = False
    ) -> TaskRecord | None:
        """Return a task without a place, which waits for one; None: it is removed."""
        if left_behind:
            self.left_behind.add(task)
            left = self.left_behind.into(self._record)
            keep_version = keep_version or reason_to_wait(left, task, left.spec) != ""
        if self._record.stopping or is_being_removed(task):
            return None
        return TaskRecord(
            index=task.index,
            version=task.version if keep_version else version_after_stop(self._record, task),
            generation=task.generation,
            since=self._now.wall,
            begun=self._now.steady,
            avoid=_left_voluntarily(task) or task.avoid,
            operation=task.operation,
            extra=task.extra,
        )

    def _next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def _in_phase(self, task: TaskRecord, phase: TaskPhase, **changes: object) -> TaskRecord:
        since, begun = self._now.wall, self._now.steady
        return replace(task, phase=phase, since=since, begun=begun, **changes)


def _left_voluntarily(task: TaskRecord) -> str:
    """Return the machine that a task left voluntarily; empty: none."""
    known = task.operation
    if known is None or known.kind is not OperationKind.MOVE:
        return ""
    return known.from_machine if known.cause in (Cause.REBALANCE, Cause.OWNER) else ""


def _awaited_maintenance(task: TaskRecord, machine: ObservedMachine) -> UnavailabilityEvent | None:
    """Return the maintenance after which a stopped task restarts on its machine; None: none."""
    known = task.operation
    is_parked = known is not None and known.instead == STOP and machine.returning
    return machine.departure if is_parked else None


def _unusable_reason(task: TaskRecord) -> str:
    return f"machine {task.placement.machine} is not usable" if task.placement is not None else ""


def _with_start_time(task: TaskRecord, now: Moment) -> TaskRecord:
    """Return a task from the store, with its durations counted from now."""
    return task if task.begun is not None else replace(task, begun=now.steady)


def _with_status(task: TaskRecord, status: TaskStatus) -> TaskRecord:
    """Return the task with its agent's report; the same one if the report is unchanged."""
    address = own_address(status.addresses[0]) if status.addresses else ""
    if (
        task.state is status.state
        and task.health is status.health
        and task.restarts == status.restarts
        and task.reason == status.reason
        and task.invocation_id == status.invocation_id
        and task.last_exit == status.last_exit
        and task.address == address
    ):
        return task
    return replace(
        task,
        state=status.state,
        health=status.health,
        reason=status.reason,
        invocation_id=status.invocation_id,
        restarts=status.restarts,
        last_exit=status.last_exit,
        address=address,
    )


@lru_cache(maxsize=1 << 16)
def own_address(text: str) -> str:
    """Return an address of a task's private network for clients; empty if it is not valid.

    An agent's address goes into the configuration of proxies, so it must be a unicast address that
    can be another host's: not link-local, loopback or multicast, and without a zone (any text).
    """
    try:
        found = ip_address(text)
    except ValueError:
        return ""
    if "%" in text:
        return ""
    no = found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified
    return "" if no else str(found)


def _failed_by_itself(status: TaskStatus) -> bool:
    """Return whether a task ran and failed, not because of its host."""
    last = status.last_exit
    return last is not None and last.result in _BY_ITSELF and last.code not in _NOT_STARTED
