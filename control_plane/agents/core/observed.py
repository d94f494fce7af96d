"""Machines as the scheduler observes them: the last reports of broker and agent in one value."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.api import TaskState, TaskStatus
from control_plane.api.machines import UnavailabilityEvent


class ObservedMachine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A machine of a job, as its agent and the broker last reported it.

    A round of a job makes one for each of its machines: a dataclass takes four times as long.
    """

    up: bool
    """Not declared down."""
    answering: bool
    """Its tasks were listed since it last became reachable, so `tasks` is what runs."""
    ready: bool
    """Runs the entitlement's verified profile, so tasks may start (HP15)."""
    homes: frozenset[str] | None = None
    """The entitlements of the job's versions whose tasks may run here, as the machine is assigned
    now; None: those of every version."""
    departure: UnavailabilityEvent | None = None
    """Why its tasks must move away now: maintenance, decommission, a loan that is called back."""
    overdue: bool = False
    """The deadline for that has passed, so the tasks leave regardless of the budget."""
    plans: tuple[UnavailabilityEvent, ...] = ()
    """What is planned for it and has not ended, including future work."""
    known: bool = True
    """It is down, or this process has listed its tasks: the known state of its tasks is true."""
    excused: bool = False
    """It cannot be reached because of work that was announced, and its tasks run on."""
    returning: bool = False
    """It is being taken for maintenance only and will return."""
    tasks: Mapping[str, TaskStatus] = msgspec.field(default_factory=dict)
    stopped: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Task id → generation of the last stop that the agent confirmed."""
    refused: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Task id → why the agent refused the last command about it."""
    restored: int = 0
    """The term in which the store was restored from a copy; 0: it never was."""
    no_report_s: float = 0.0
    """Of a machine that is down or does not answer: since the last certain answer of its agent, or
    since the start of this process without one. Pauses of this process count. An answer takes time:
    the agent had its request before that."""

    @property
    def leaving(self) -> bool:
        """Return whether its tasks must move away now."""
        return self.departure is not None

    def held_by(self, entitlement: str) -> bool:
        """Return whether the machine is assigned to the pool of an entitlement of the job."""
        return self.homes is None or entitlement in self.homes


View = Mapping[str, ObservedMachine]


def is_empty(tasks: Mapping[str, TaskStatus]) -> bool:
    """Return whether no task of a machine is alive, so that it may be rebooted."""
    return all(s.state in (TaskState.STOPPED, TaskState.FAILED) for s in tasks.values())
