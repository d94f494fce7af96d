"""Life of one task: decides the next action from the desired and the observed state.

One pure function handles the first start, every restart, and the adoption of running tasks after a
crash of the agent between any two steps. So there is no separate recovery path that could differ
(docs/adr/0003). `tasks/supervisor.py` observes the host, calls
`decide`, saves the record, carries out the action, and observes again. `restarts.py` has the
back-off.

    accepted → preparing → starting → running ⇄ (healthy | unhealthy)
        ↑                                │ ends
        └──────── backoff ◄──────────────┤
                  stopped / failed ◄─────┴──► stopping → (gone)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from agent.api import Exit, Health, Resources, TaskState
from agent.lease.core.lease import LeaseMoment, ends_at, is_bound, is_cut_off, why_cut_off
from agent.runtime.core.records import (
    AT_REST,
    OVER,
    TaskRecord,
    Wanted,
    has_huge_pages,
    is_up,
    key_of,
)
from agent.tasks.core import gate
from agent.tasks.core.restarts import EVICTED, after_end

LINGERS = "some of its processes survive SIGKILL; waiting for the kernel"
ASKED_AGAIN, CHANGED = "a restart was requested", "its specification changed"
"""Reasons to end the running unit of a task."""

WANTED_AGAIN = "its owner requested it again while it was stopping; it is restarted"
"""Reason of a unit whose stop is not cancelled, because its pre-stop hook may already have run."""

LEAVING = "its host is going down; it starts again after the boot, or elsewhere"


class Action(StrEnum):
    """What the supervisor must do on the host now. Each action is idempotent."""

    PREPARE = "prepare"
    """Make the task's root from its image."""
    START = "start"
    """Start the unit."""
    LIMIT = "limit"
    """Apply the limits of the specification to the running unit."""
    STOP = "stop"
    """Stop the unit, so that systemd unloads it."""
    REMOVE_ROOT = "remove-root"
    FORGET = "forget"
    """Remove the record, because nothing is left on the host."""
    WAIT = "wait"
    """Wait for a change, at most until `until`."""


@dataclass(frozen=True, slots=True)
class ObservedUnit:
    """The state of the task's unit, as systemd reports it."""

    active: str
    sub: str
    result: str
    invocation_id: str
    key: str
    """`key_of` the specification from which the unit was started."""
    exit_code: int | None = None
    exit_signal: str | None = None
    exited_at: float | None = None
    started_at: float | None = None
    why: str = ""
    """Why it ended, if the journal has more details than the result (tasks.core.oomd)."""

    @property
    def lingers(self) -> bool:
        """Whether systemd gave up stopping the unit because some processes cannot be killed.

        Such a unit is inactive and stays loaded while its cgroup has processes. Its name is taken,
        and its root is in use.
        """
        return self.active == "inactive"

    @property
    def ended(self) -> bool:
        """Whether its main process ended without a stop; systemd keeps the unit for the agent."""
        return self.active == "failed" or (self.active == "active" and self.sub == "exited")


@dataclass(frozen=True, slots=True)
class ObservedTask:
    """The observed state of a task on the host."""

    unit: ObservedUnit | None
    root: bool
    """Whether its root exists and was made from the image of the specification."""
    leftover: bool = False
    """Whether anything exists at the path of its root."""
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The task after the decision, the next action, and until when to wait for a change."""

    task: TaskRecord
    action: Action
    until: float | None = None
    """Seconds since boot."""


_MAY_BE_STOPPING = (TaskState.STOPPING, TaskState.ACCEPTED)
"""States in which the running unit of a task may already be stopping."""
_ENDED_BY_HOST = ("startup", "liveness", EVICTED)
"""Results of ends that the host decided while the process still ran."""


def decide(
    task: TaskRecord,
    seen: ObservedTask,
    now: LeaseMoment,
    *,
    leaving: bool = False,
    start_refusal: str = "",
) -> Decision:
    """Return what to do next for a task.

    `leaving`: the host is about to go down. `start_refusal` is why the host must start no tasks;
    empty: it may.
    """
    if task.wanted is Wanted.RUN:
        is_old = seen.unit is not None and seen.unit.key != key_of(task.spec)
        task = gate.after_gate(task if is_old else gate.with_gate_begun(task, now), seen.boot_id)
    decision = _decide(task, seen, now, leaving)
    decision = dataclasses.replace(decision, task=gate.without_passed_gate(decision.task, now))
    if task.wanted is Wanted.RUN and gate.is_gate_over(decision.task, now):
        restored = gate.rolled_back(task, "it did not become healthy in time")
        decision = _decide(restored, seen, now, leaving)
    if start_refusal and decision.action in (Action.PREPARE, Action.START):
        waiting = replace(decision.task, state=TaskState.ACCEPTED, reason=start_refusal)
        decision = Decision(waiting, Action.WAIT)
    gate_s = decision.task.gate_boot_s
    if gate_s is None or decision.action is not Action.WAIT:
        return decision
    until = gate_s if decision.until is None else min(gate_s, decision.until)
    return dataclasses.replace(decision, until=until)


def _decide(task: TaskRecord, seen: ObservedTask, now: LeaseMoment, leaving: bool) -> Decision:
    if task.wanted is Wanted.GONE:
        return _while_removing(task, seen)
    if task.cut_off or is_cut_off(task.spec, now):
        return _while_cut_off(task, seen, now)
    if leaving:
        return _while_leaving(task, seen, now)
    unit = seen.unit
    if unit is None:
        return _without_unit(task, seen, now)
    if unit.lingers:
        return _while_lingering(task, unit, seen)
    if unit.key != key_of(task.spec) or task.restart_asked:
        reason = ASKED_AGAIN if task.restart_asked else CHANGED
        return _stop_on_purpose(task, unit, reason, seen)
    if unit.ended:
        return _after_exit(task, unit, seen, now)
    if _ended_by_probe(task, unit):
        return Decision(task, _stop_action(unit))
    if task.state in _MAY_BE_STOPPING and task.ended_invocation == unit.invocation_id:
        return _stop_on_purpose(task, unit, task.reason or WANTED_AGAIN, seen)
    if unit.active in ("active", "reloading"):
        return _while_running(task, unit, seen, now)
    state = TaskState.STOPPING if unit.active == "deactivating" else TaskState.STARTING
    changing = replace(task, state=state, boot_id=seen.boot_id, health=Health.UNKNOWN)
    return Decision(changing, Action.WAIT)


def _ended_by_probe(task: TaskRecord, unit: ObservedUnit) -> bool:
    """Return whether the host ended a unit that still runs, and its end is already counted."""
    end = task.last_exit
    return (
        task.state in AT_REST
        and task.ended_invocation == unit.invocation_id
        and end is not None
        and end.result in _ENDED_BY_HOST
    )


def _while_removing(task: TaskRecord, seen: ObservedTask) -> Decision:
    if seen.unit is not None:
        reason = LINGERS if seen.unit.lingers else task.reason
        return _stop_on_purpose(task, seen.unit, reason, seen)
    gone = replace(task, state=TaskState.STOPPED, health=Health.UNKNOWN, next_start_at=None)
    if seen.root or seen.leftover:
        return Decision(gone, Action.REMOVE_ROOT)
    return Decision(gone, Action.FORGET)


def _while_cut_off(task: TaskRecord, seen: ObservedTask, now: LeaseMoment) -> Decision:
    """End the task. It stays ended after new contact to its control plane.

    By then a copy may run elsewhere. Only a command resets `cut_off` (tasks.core.admission).
    """
    ended = replace(task, restart_asked=False, next_start_at=None, next_start_boot_s=None)
    unit = seen.unit
    if unit is None and task.boot_id and task.boot_id != seen.boot_id:
        ended = _after_reboot(ended, seen, now)
    if unit is None and ended.state in OVER:
        return Decision(ended, Action.WAIT)
    ended = replace(ended, cut_off=True, health=Health.UNKNOWN, reason=why_cut_off(task.spec))
    ran = unit.invocation_id if unit is not None else task.invocation_id
    if ran not in ("", task.ended_invocation):
        end = Exit(result="cut-off", at=now.wall)
        if unit is not None and unit.ended:
            end = replace(end, code=unit.exit_code, signal=unit.exit_signal)
        ended = replace(ended, last_exit=end, invocation_id=ran, ended_invocation=ran)
    if unit is None:
        return Decision(replace(ended, state=TaskState.STOPPED), Action.WAIT)
    ended = replace(ended, state=TaskState.STOPPING, boot_id=seen.boot_id)
    return Decision(ended, _stop_action(unit))


def _while_leaving(task: TaskRecord, seen: ObservedTask, now: LeaseMoment) -> Decision:
    """Stop the running unit as an owner would. Starts nothing: the next boot does."""
    unit = seen.unit
    if unit is None:
        waiting = task if task.state in AT_REST else replace(task, reason=LEAVING)
        return Decision(waiting, Action.WAIT)
    if unit.lingers:
        return _while_lingering(task, unit, seen)
    if unit.ended:
        return _after_exit(task, unit, seen, now)
    return _stop_on_purpose(task, unit, LEAVING, seen)


def _while_lingering(task: TaskRecord, unit: ObservedUnit, seen: ObservedTask) -> Decision:
    """Start nothing while processes survive SIGKILL, and report them as the reason."""
    if task.state in AT_REST:
        return Decision(replace(task, reason=LINGERS, boot_id=seen.boot_id), Action.WAIT)
    return _stop_on_purpose(task, unit, LINGERS, seen)


def _stop_action(unit: ObservedUnit) -> Action:
    """Return the action that ends a unit: `WAIT` if it is stopping or cannot be killed."""
    return Action.WAIT if unit.lingers or unit.active == "deactivating" else Action.STOP


def _stop_on_purpose(
    task: TaskRecord, unit: ObservedUnit, reason: str, seen: ObservedTask
) -> Decision:
    """Stop a unit whose end is expected: it does not count as an end of the task.

    The exit of a unit that had ended before the request is still recorded.
    """
    stopping = replace(
        task,
        state=TaskState.STOPPING,
        reason=reason,
        health=Health.UNKNOWN,
        next_start_at=None,
        boot_id=seen.boot_id,
        invocation_id=unit.invocation_id,
        ended_invocation=unit.invocation_id,
    )
    if unit.ended and task.ended_invocation != unit.invocation_id and unit.exited_at:
        stopping = replace(stopping, last_exit=_exit_of(unit, unit.exited_at))
    return Decision(stopping, _stop_action(unit))


def _while_running(
    task: TaskRecord, unit: ObservedUnit, seen: ObservedTask, now: LeaseMoment
) -> Decision:
    running = replace(
        task,
        state=TaskState.RUNNING,
        boot_id=seen.boot_id,
        next_start_at=None,
        next_start_boot_s=None,
    )
    if task.state is not TaskState.RUNNING:
        running = replace(running, reason="")
    if task.ended_invocation == unit.invocation_id:
        running = replace(running, ended_invocation="")  # its end was recorded, but it still runs
    if task.invocation_id != unit.invocation_id:
        running = replace(
            running,
            invocation_id=unit.invocation_id,
            started_at=unit.started_at,
            started_boot_s=now.boot_s,
            health=Health.UNKNOWN,
            reason="",
            limits=task.limits,
        )
    if task.spec.probe is None:
        health = Health.HEALTHY if is_up(running) else Health.UNKNOWN
        running = replace(running, health=health)
    if running.limits != task.spec.limits or not _has_resources(running):
        return Decision(running, Action.LIMIT)
    return Decision(running, Action.WAIT, ends_at(task.spec, now.contact_s))


def _has_resources(task: TaskRecord) -> bool:
    has_volumes = (task.volumes or {}) == task.spec.volumes
    return has_volumes and (task.resources or Resources()) == task.spec.resources


def _after_exit(
    task: TaskRecord, unit: ObservedUnit, seen: ObservedTask, now: LeaseMoment
) -> Decision:
    """Count the end of the main process once, apply the restart policy, and remove the unit."""
    if task.ended_invocation == unit.invocation_id:
        return Decision(task, Action.STOP)
    end = _exit_of(unit, unit.exited_at or now.wall)
    seen_running = task.invocation_id == unit.invocation_id
    started = replace(
        task,
        started_boot_s=task.started_boot_s if seen_running else None,
        invocation_id=unit.invocation_id,
        started_at=unit.started_at or task.started_at,
        boot_id=seen.boot_id,
    )
    ended = after_end(started, end, now)
    return Decision(replace(ended, reason=unit.why or ended.reason), Action.STOP)


def _without_unit(task: TaskRecord, seen: ObservedTask, now: LeaseMoment) -> Decision:
    task = _account_for_missing_unit(task, seen, now)
    if task.restart_asked:
        task = replace(task, restart_asked=False, state=TaskState.ACCEPTED, reason="")
    if task.state in OVER:
        return Decision(task, Action.WAIT)
    due_s = task.next_start_boot_s or 0.0
    if task.state is TaskState.BACKOFF and now.boot_s < due_s:
        end_s = ends_at(task.spec, now.contact_s)
        return Decision(task, Action.WAIT, due_s if end_s is None else min(due_s, end_s))
    task = replace(task, next_start_at=None, next_start_boot_s=None)
    if not seen.root:
        return Decision(replace(task, state=TaskState.PREPARING), Action.PREPARE)
    spec = task.spec
    # Resources that are also set outside the unit are read back after the start.
    is_confirmed_later = spec.resources.exclusive_cpus or has_huge_pages(spec)
    starting = replace(
        task,
        state=TaskState.STARTING,
        limits=spec.limits,
        resources=None if is_confirmed_later else spec.resources,
        volumes=spec.volumes,
    )
    return Decision(starting, Action.START)


def _account_for_missing_unit(task: TaskRecord, seen: ObservedTask, now: LeaseMoment) -> TaskRecord:
    """Return the task after its unit disappeared, with the reason if its end was not counted."""
    if task.boot_id and task.boot_id != seen.boot_id:
        return _after_reboot(task, seen, now)
    if _has_uncounted_end(task) and task.state in (TaskState.RUNNING, TaskState.STOPPING):
        return after_end(task, Exit(result="external-stop", at=now.wall), now)
    if task.state in (TaskState.RUNNING, TaskState.STOPPING):
        return replace(task, state=TaskState.ACCEPTED, reason="")
    return task


def _has_uncounted_end(task: TaskRecord) -> bool:
    return task.invocation_id not in ("", task.ended_invocation)


def _after_reboot(task: TaskRecord, seen: ObservedTask, now: LeaseMoment) -> TaskRecord:
    """Return the task in a new boot of the host, where nothing of it can run.

    The agent starts it again without a command only if its specification allows that: the owner
    may have started it elsewhere in the meantime (promise P8).
    """
    restarts_itself = task.spec.offline_restart and not is_bound(task.spec)
    restart_asked = task.restart_asked and restarts_itself
    rebooted = replace(task, boot_id=seen.boot_id, restart_asked=restart_asked)
    if task.state in OVER:
        return rebooted
    rebooted = replace(rebooted, health=Health.UNKNOWN, next_start_at=None, next_start_boot_s=None)
    rebooted = replace(rebooted, started_boot_s=None)
    if _has_uncounted_end(task):
        end = Exit(result="lost", at=now.wall)
        rebooted = replace(rebooted, last_exit=end, ended_invocation=task.invocation_id)
    if restarts_itself:
        restarts = task.restarts + _has_uncounted_end(task)
        return replace(rebooted, state=TaskState.ACCEPTED, reason="", restarts=restarts)
    return replace(
        rebooted,
        state=TaskState.STOPPED,
        reason="the host was rebooted; waiting for the owner of the task to start it again",
    )


def _exit_of(unit: ObservedUnit, at: float) -> Exit:
    return Exit(result=unit.result, code=unit.exit_code, signal=unit.exit_signal, at=at)
