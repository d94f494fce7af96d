"""How long a task may run without contact to its control plane (docs/adr/0024).

The agent gives each answer to a poll a name that contains its time. The next request carries the
name of the newest answer that the control plane received. Only this name proves that the answer
arrived. So the host never counts from a later moment than the control plane does, even if
the network delays, repeats or loses messages, or delivers them in one direction only. All times
are seconds since boot, suspend included (CLOCK_BOOTTIME): no clock step changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from agent.api import DisconnectPolicy, TaskSpec

FENCE_GRACE_S = 2.0
"""Time that systemd has to kill the task after its stop timeout, before the fence kills it."""


@dataclass(frozen=True, slots=True)
class LeaseMoment:
    """The current time and lease, as input of a decision about a task."""

    wall: float
    """Seconds since 1970; only shown to users."""
    boot_s: float
    """Seconds since boot; used for every duration."""
    contact_s: float | None = None
    """When the newest answer was sent that reached the control plane, in s since boot; None: none
    did."""
    lapsed: bool = False
    """Whether the task's time ran out once, even if contact was restored since."""


def is_bound(spec: TaskSpec) -> bool:
    """Return whether a task may only run while there is contact to its control plane."""
    return spec.disconnect.policy is DisconnectPolicy.STOP


def ends_at(spec: TaskSpec, contact_s: float | None) -> float | None:
    """Return when to stop a task without new contact, in seconds since boot; None: never."""
    return TaskLease.of(spec).ends_at(contact_s) if is_bound(spec) else None


def is_cut_off(spec: TaskSpec, now: LeaseMoment) -> bool:
    """Return whether a task must stop because contact was lost for too long."""
    end = ends_at(spec, now.contact_s)
    return end is not None and (now.lapsed or now.boot_s >= end)


def why_cut_off(spec: TaskSpec) -> str:
    """Return the reason that an ended task shows."""
    after_s = spec.disconnect.after_s
    return f"its host had no contact with the control plane for {after_s:g} s, the limit of its job"


def name_answer(boot_id: str, boot_s: float) -> str:
    """Return the name of an answer sent at this moment."""
    return f"{boot_id}:{int(boot_s * 1000)}"


def answered_at(name: str, boot_id: str, boot_s: float) -> float | None:
    """Return when the named answer was sent, None if it was not sent in this boot.

    A moment in the future is rejected: no caller can extend a lease beyond the present.
    """
    of_boot, _, text = name.rpartition(":")
    if of_boot != boot_id or not (text.isascii() and text.isdigit()) or len(text) > 15:
        return None
    at = int(text) / 1000
    return at if at <= boot_s else None


# The text of a bound task's file, which the fence reads.


@dataclass(frozen=True, slots=True)
class TaskLease:
    """The lease of one bound task, as its file contains it."""

    after_s: float
    stop_timeout_s: float
    kill_at_s: float | None = None
    """When all its processes must be gone even after new contact; set once its time ran out."""

    @staticmethod
    def of(spec: TaskSpec) -> TaskLease:
        """Return the lease of a task whose time has not run out."""
        return TaskLease(spec.disconnect.after_s, spec.stop_timeout_s)

    def line(self) -> str:
        """Return the text of the file."""
        end = "" if self.kill_at_s is None else f" {self.kill_at_s!r}"
        return f"{self.after_s!r} {self.stop_timeout_s!r}{end}\n"

    def ends_at(self, contact_s: float | None) -> float:
        """Return when to stop the task, in seconds since boot."""
        return 0.0 if contact_s is None else contact_s + self.after_s

    def kills_at(self, contact_s: float | None) -> float:
        """Return when the fence kills the task's remaining processes, in seconds since boot."""
        if self.kill_at_s is not None or contact_s is None:
            return self.kill_at_s or 0.0
        return contact_s + self.after_s + self.stop_timeout_s + FENCE_GRACE_S

    def lapsed(self, contact_s: float | None) -> TaskLease:
        """Return the lease after its time ran out; later contact does not change it."""
        return TaskLease(self.after_s, self.stop_timeout_s, self.kills_at(contact_s))

    def is_overdue(self, contact_s: float | None, now_s: float) -> bool:
        """Return whether every process of the task must be gone by now."""
        return now_s >= self.kills_at(contact_s)


EXPIRED_LEASE = TaskLease(0.0, 0.0, 0.0)
"""Used for a file that cannot be parsed: the fence then ends the task."""


def read_lease(text: str) -> TaskLease:
    """Return the lease in a file's text, `EXPIRED_LEASE` if it cannot be parsed."""
    numbers = read_numbers(text)
    return TaskLease(*numbers) if len(numbers) in (2, 3) else EXPIRED_LEASE


def read_numbers(text: str) -> tuple[float, ...]:
    """Return the finite numbers >= 0 of a line; none if it contains anything else."""
    try:
        numbers = tuple(float(word) for word in text.split())
    except ValueError:
        return ()
    return numbers if all(isfinite(n) and n >= 0 for n in numbers) else ()
