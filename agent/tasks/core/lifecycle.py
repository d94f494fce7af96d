"""Life of one task: what to do next, given what is wanted and what is seen.

One pure function serves the first start, every restart, the repair after a crash of the
agent between any two steps, and the adoption of tasks that ran on meanwhile: there is no
separate recovery path that could differ (docs/adr/0003). `tasks/supervisor.py` observes
the host, calls `decide`, saves the record, carries out the action, and observes again.

    accepted → preparing → starting → running ⇄ (healthy | unhealthy)
        ↑                                │ ends
        └──────── backoff ◄──────────────┤
                  stopped / failed ◄─────┴──► stopping → (gone)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from dataclasses import replace as with_
from enum import StrEnum

from msgspec.structs import replace

from agent.api import Exit, Health, Resources, RestartWhen, TaskState
from agent.lease.core.lease import LeaseMoment, ends_at, is_bound, is_cut_off, why_cut_off
from agent.runtime.core.records import TaskRecord, Wanted, is_up, key_of
from agent.tasks.core.exits import describe
from agent.tasks.core.gate import after_gate, begun_gate, gone_back, is_late, passed_gate

LINGERS = "processes of it are left that even SIGKILL does not end; waiting for the kernel"

ASKED_AGAIN, CHANGED = "restart was asked for", "its specification changed"
"""Why what runs of a task is to end."""

WANTED_AGAIN = "it was about to end when it was wanted again; it is restarted"
"""Its hook may have run and its stop be under way, so what runs is not taken back."""

LEAVING = "its host is going down; it starts again after the boot, or elsewhere"

LONG_RUN_S = 600.0
"""A task that ran for so long before it ended starts its back-off again (RestartPolicy)."""


class Action(StrEnum):
    """What the supervisor must do on the host now. Each is idempotent."""

    PREPARE = "prepare"
    """Make the task's root from its image."""
    START = "start"
    """Start the unit."""
    LIMIT = "limit"
    """Bring the running unit to the limits of the specification."""
    STOP = "stop"
    """Stop the unit; it goes away."""
    REMOVE_ROOT = "remove-root"
    FORGET = "forget"
    """Nothing is left on the host: drop the record."""
    REST = "rest"
    """Wait for something to happen, at most until `until`."""


@dataclass(frozen=True, slots=True)
class SeenUnit:
    """The state of the task's unit, as systemd reports it."""

    active: str
    sub: str
    result: str
    invocation_id: str
    key: str
    """`key_of` the specification it was started from."""
    exit_code: int | None = None
    exit_signal: str | None = None
    exited_at: float | None = None
    started_at: float | None = None
    why: str = ""
    """Why it ended, where the journal has more than its result (tasks.core.oomd)."""

    @property
    def lingers(self) -> bool:
        """Whether systemd gave up on it while processes are left that nothing can kill.

        Such a unit is inactive and stays loaded as long as its cgroup is not empty; its name
        is taken, and what it ran from is in use.
        """
        return self.active == "inactive"

    @property
    def ended(self) -> bool:
        """Whether its main process ended by itself; the unit is kept until we looked."""
        return self.active == "failed" or (self.active == "active" and self.sub == "exited")


@dataclass(frozen=True, slots=True)
class SeenTask:
    """What is seen of a task on the host."""

    unit: SeenUnit | None
    root: bool
    """Whether its root exists, made from the image of the specification."""
    leftover: bool = False
    """Whether there is something at its root at all, fit or not."""
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The task after the decision, what to do, and when to look again at the latest."""

    task: TaskRecord
    action: Action
    until: float | None = None
    """Seconds since boot."""


_GOING = (TaskState.STOPPING, TaskState.ACCEPTED)
"""States in which what runs of a task may already be on its way out, whatever is wanted since."""
_AT_REST = (TaskState.BACKOFF, TaskState.STOPPED, TaskState.FAILED)
EVICTED = "evicted"
"""Result of the end of a task that had to go for the others' sake."""
_BY_HOST = ("startup", "liveness", EVICTED)
"""Ends that the host found while the process still ran."""
_JITTER = 0.25
"""Share of a pause that differs from task to task, so that what ended together does not start
together."""


def decide(
    task: TaskRecord, seen: SeenTask, now: LeaseMoment, *, leaving: bool = False, barred: str = ""
) -> Decision:
    """Return what to do next for a task; `leaving`: its host is about to go down, `barred`: why
    it starts no tasks.
    """
    if task.wanted is Wanted.RUN:
        is_old = seen.unit is not None and seen.unit.key != key_of(task.spec)
        task = after_gate(task if is_old else begun_gate(task, now), seen.boot_id)
    decision = _decide(task, seen, now, leaving)
    decision = with_(decision, task=passed_gate(decision.task, now))
    if task.wanted is Wanted.RUN and is_late(decision.task, now):
        back = gone_back(task, "it did not get healthy in time")
        decision = _decide(back, seen, now, leaving)
    if barred and decision.action in (Action.PREPARE, Action.START):
        waiting = replace(decision.task, state=TaskState.ACCEPTED, reason=barred)
        decision = Decision(waiting, Action.REST)
    gate_s = decision.task.gate_boot_s
    if gate_s is None or decision.action is not Action.REST:
        return decision
    return with_(decision, until=gate_s if decision.until is None else min(gate_s, decision.until))


def _decide(task: TaskRecord, seen: SeenTask, now: LeaseMoment, leaving: bool) -> Decision:
    if task.wanted is Wanted.GONE:
        return _towards_gone(task, seen)
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
        return _let_go(task, unit, reason, seen)
    if unit.ended:
        return _after_end(task, unit, seen, now)
    if _ended_by_probe(task, unit):
        return Decision(task, _stop(unit))
    if task.state in _GOING and task.ended_invocation == unit.invocation_id:
        return _let_go(task, unit, task.reason or WANTED_AGAIN, seen)
    if unit.active in ("active", "reloading"):
        return _while_running(task, unit, seen, now)
    state = TaskState.STOPPING if unit.active == "deactivating" else TaskState.STARTING
    between = replace(task, state=state, boot_id=seen.boot_id, health=Health.UNKNOWN)
    return Decision(between, Action.REST)


def _ended_by_probe(task: TaskRecord, unit: SeenUnit) -> bool:
    """Return whether a unit that still runs was given up because of a probe, and counted."""
    end = task.last_exit
    return (
        task.state in _AT_REST
        and task.ended_invocation == unit.invocation_id
        and end is not None
        and end.result in _BY_HOST
    )


def _towards_gone(task: TaskRecord, seen: SeenTask) -> Decision:
    if seen.unit is not None:
        reason = LINGERS if seen.unit.lingers else task.reason
        return _let_go(task, seen.unit, reason, seen)
    gone = replace(task, state=TaskState.STOPPED, health=Health.UNKNOWN, next_start_at=None)
    if seen.root or seen.leftover:
        return Decision(gone, Action.REMOVE_ROOT)
    return Decision(gone, Action.FORGET)


def _while_cut_off(task: TaskRecord, seen: SeenTask, now: LeaseMoment) -> Decision:
    """End the task and keep it ended, even when contact to its control plane is restored: by then
    a copy may run elsewhere. Only a command resets `cut_off` (tasks.core.admission).
    """
    here = replace(task, restart_asked=False, next_start_at=None, next_start_boot_s=None)
    unit = seen.unit
    if unit is None and task.boot_id and task.boot_id != seen.boot_id:
        here = _after_reboot(here, seen, now)
    if unit is None and here.state in (TaskState.STOPPED, TaskState.FAILED):
        return Decision(here, Action.REST)
    here = replace(here, cut_off=True, health=Health.UNKNOWN, reason=why_cut_off(task.spec))
    ran = unit.invocation_id if unit is not None else task.invocation_id
    if ran not in ("", task.ended_invocation):
        end = Exit(result="cut-off", at=now.wall)
        if unit is not None and unit.ended:
            end = replace(end, code=unit.exit_code, signal=unit.exit_signal)
        here = replace(here, last_exit=end, invocation_id=ran, ended_invocation=ran)
    if unit is None:
        return Decision(replace(here, state=TaskState.STOPPED), Action.REST)
    here = replace(here, state=TaskState.STOPPING, boot_id=seen.boot_id)
    return Decision(here, _stop(unit))


def _while_leaving(task: TaskRecord, seen: SeenTask, now: LeaseMoment) -> Decision:
    """End what runs, as an owner would, and start nothing: the boot to come does, if anything."""
    unit = seen.unit
    if unit is None:
        waiting = task if task.state in _AT_REST else replace(task, reason=LEAVING)
        return Decision(waiting, Action.REST)
    if unit.lingers:
        return _while_lingering(task, unit, seen)
    return _after_end(task, unit, seen, now) if unit.ended else _let_go(task, unit, LEAVING, seen)


def _while_lingering(task: TaskRecord, unit: SeenUnit, seen: SeenTask) -> Decision:
    """Start nothing while processes are left, and report it; they end when the kernel can."""
    if task.state in (TaskState.BACKOFF, TaskState.STOPPED, TaskState.FAILED):
        return Decision(replace(task, reason=LINGERS, boot_id=seen.boot_id), Action.REST)
    return _let_go(task, unit, LINGERS, seen)


def _stop(unit: SeenUnit) -> Action:
    """Return how to end a unit: `REST` if it is stopping or cannot be killed, else `STOP`."""
    return Action.REST if unit.lingers or unit.active == "deactivating" else Action.STOP


def _let_go(task: TaskRecord, unit: SeenUnit, reason: str, seen: SeenTask) -> Decision:
    """Stop a unit that its owner wants removed: its end is expected, and not held against the task.

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
    return Decision(stopping, _stop(unit))


def _while_running(task: TaskRecord, unit: SeenUnit, seen: SeenTask, now: LeaseMoment) -> Decision:
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
        running = replace(running, ended_invocation="")  # it was given up, and runs all the same
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
    return Decision(running, Action.REST, ends_at(task.spec, now.heard_s))


def _is_proved_by_kernel(resources: Resources) -> bool:
    """Return whether a task is given what is not its unit's alone: it is read back at once."""
    pages = resources.hugepages_2mib or resources.hugepages_1gib
    return bool(resources.exclusive_cpus or pages)


def _has_resources(task: TaskRecord) -> bool:
    if (task.volumes or {}) != task.spec.volumes:
        return False
    return (task.resources or Resources()) == task.spec.resources


def _after_end(task: TaskRecord, unit: SeenUnit, seen: SeenTask, now: LeaseMoment) -> Decision:
    """The main process ended by itself: count it once, let the unit go, apply the policy."""
    if task.ended_invocation == unit.invocation_id:
        return Decision(task, Action.STOP)
    end = _exit_of(unit, unit.exited_at or now.wall)
    noticed = task.invocation_id == unit.invocation_id
    started = replace(
        task,
        started_boot_s=task.started_boot_s if noticed else None,
        invocation_id=unit.invocation_id,
        started_at=unit.started_at or task.started_at,
        boot_id=seen.boot_id,
    )
    ended = _ended(started, end, now)
    return Decision(replace(ended, reason=unit.why or ended.reason), Action.STOP)


def _without_unit(task: TaskRecord, seen: SeenTask, now: LeaseMoment) -> Decision:
    task = _account_for_missing_unit(task, seen, now)
    if task.restart_asked:
        task = replace(task, restart_asked=False, state=TaskState.ACCEPTED, reason="")
    if task.state in (TaskState.STOPPED, TaskState.FAILED):
        return Decision(task, Action.REST)
    due_s = task.next_start_boot_s or 0.0
    if task.state is TaskState.BACKOFF and now.boot_s < due_s:
        end_s = ends_at(task.spec, now.heard_s)
        return Decision(task, Action.REST, due_s if end_s is None else min(due_s, end_s))
    task = replace(task, next_start_at=None, next_start_boot_s=None)
    if not seen.root:
        return Decision(replace(task, state=TaskState.PREPARING), Action.PREPARE)
    starting = replace(task, state=TaskState.STARTING, limits=task.spec.limits)
    resources = None if _is_proved_by_kernel(task.spec.resources) else task.spec.resources
    starting = replace(starting, resources=resources, volumes=task.spec.volumes)
    return Decision(starting, Action.START)


def _account_for_missing_unit(task: TaskRecord, seen: SeenTask, now: LeaseMoment) -> TaskRecord:
    """A unit that was seen and is gone without a counted end: say why, once."""
    if task.boot_id and task.boot_id != seen.boot_id:
        return _after_reboot(task, seen, now)
    if _uncounted(task) and task.state in (TaskState.RUNNING, TaskState.STOPPING):
        return _ended(task, Exit(result="external-stop", at=now.wall), now)
    if task.state in (TaskState.RUNNING, TaskState.STOPPING):
        return replace(task, state=TaskState.ACCEPTED, reason="")
    return task


def _uncounted(task: TaskRecord) -> bool:
    return task.invocation_id not in ("", task.ended_invocation)


def _after_reboot(task: TaskRecord, seen: SeenTask, now: LeaseMoment) -> TaskRecord:
    """Return the task in a new boot of the host, where nothing of it can run.

    Whatever it was about to do, it starts again by itself only where its specification allows it:
    meanwhile its owner may have started it elsewhere (promise P8).
    """
    alone = task.spec.offline_restart and not is_bound(task.spec)
    here = replace(task, boot_id=seen.boot_id, restart_asked=task.restart_asked and alone)
    if task.state in (TaskState.STOPPED, TaskState.FAILED):
        return here
    here = replace(here, health=Health.UNKNOWN, next_start_at=None, next_start_boot_s=None)
    here = replace(here, started_boot_s=None)
    if _uncounted(task):
        end = Exit(result="lost", at=now.wall)
        here = replace(here, last_exit=end, ended_invocation=task.invocation_id)
    if alone:
        restarts = task.restarts + _uncounted(task)
        return replace(here, state=TaskState.ACCEPTED, reason="", restarts=restarts)
    return replace(
        here,
        state=TaskState.STOPPED,
        reason="the host was rebooted; waiting for the owner of the task to start it again",
    )


def _exit_of(unit: SeenUnit, at: float) -> Exit:
    return Exit(result=unit.result, code=unit.exit_code, signal=unit.exit_signal, at=at)


def ended_by_host(task: TaskRecord, end: Exit, now: LeaseMoment) -> TaskRecord:
    """Return the task after this host found it broken while its process still runs."""
    return _ended(task, end, now)


def _ended(task: TaskRecord, end: Exit, now: LeaseMoment) -> TaskRecord:
    """Return the task after an end that was not asked for, by its restart policy."""
    ran_s = _ran_s(task, end, now)
    policy = task.spec.restart
    again = policy.when is RestartWhen.ALWAYS or (
        policy.when is RestartWhen.ON_FAILURE and end.result != "success"
    )
    ended = replace(
        task,
        last_exit=end,
        ended_invocation=task.invocation_id,
        health=Health.UNKNOWN,
        reason=describe(end, ran_s=ran_s, max_run_s=task.spec.life.max_run_s),
    )
    if not again:
        return replace(ended, state=TaskState.STOPPED, next_start_at=None, next_start_boot_s=None)
    streak = 0 if ran_s >= LONG_RUN_S else task.streak
    pause_s = backoff_s(task, streak)
    return replace(
        ended,
        state=TaskState.BACKOFF,
        streak=streak + 1,
        restarts=task.restarts + 1,
        next_start_at=now.wall + pause_s,
        next_start_boot_s=now.boot_s + pause_s,
    )


def _ran_s(task: TaskRecord, end: Exit, now: LeaseMoment) -> float:
    """Return for how long it ran; by systemd's own stamps where it was not seen running."""
    if task.started_boot_s is not None:
        return now.boot_s - task.started_boot_s
    return end.at - task.started_at if task.started_at else 0.0


def backoff_s(task: TaskRecord, streak: int) -> float:
    """Return the pause before the next start: doubled with each one, up to the maximum.

    From it goes up to a quarter, which differs from task to task and from start to start.
    """
    policy = task.spec.restart
    pause_s = min(policy.backoff_s * 2.0 ** min(streak, 30), policy.backoff_max_s)
    name = f"{task.task_id}/{task.restarts}/{streak}".encode()
    share = int(hashlib.sha256(name).hexdigest()[:8], 16) / 0xFFFFFFFF
    return pause_s * (1.0 - _JITTER * share)


def after_failure(task: TaskRecord, reason: str, now: LeaseMoment, *, retry: bool) -> TaskRecord:
    """Return the task after a step towards its start could not be done.

    With `retry` it waits as after an end of its own; without, only a new specification helps.
    """
    if not retry:
        return replace(
            task,
            state=TaskState.FAILED,
            reason=reason,
            next_start_at=None,
            next_start_boot_s=None,
        )
    pause_s = backoff_s(task, task.streak)
    return replace(
        task,
        state=TaskState.BACKOFF,
        reason=reason,
        streak=task.streak + 1,
        next_start_at=now.wall + pause_s,
        next_start_boot_s=now.boot_s + pause_s,
    )


def evicted(task: TaskRecord, why: str, now: LeaseMoment) -> TaskRecord:
    """Return the task after it had to go: ended, by its restart policy; itself if it does not run.

    What still runs is stopped by the decision that follows.
    """
    if task.state is not TaskState.RUNNING or task.wanted is not Wanted.RUN:
        return task
    return replace(ended_by_host(task, Exit(result=EVICTED, at=now.wall), now), reason=why)
