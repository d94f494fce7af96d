"""How long a task may run without contact to its control plane (docs/adr/0024).

An agent answers a poll at some moment and names that answer. The next request carries the name
of the newest answer that arrived. Only this proves that the control plane received an answer of
that moment. So the host never counts from a later moment than the control plane does, whatever
the network delays, repeats, loses or delivers in one direction only. All times are seconds since
boot with suspend (CLOCK_BOOTTIME): no clock step changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from agent.api import DisconnectPolicy, TaskSpec

FENCE_GRACE_S = 2.0
"""What the fence leaves systemd to do it first, after the task's own time to stop."""


@dataclass(frozen=True, slots=True)
class LeaseMoment:
    """Now, as a decision about a task takes it."""

    wall: float
    """Seconds since 1970: only to be shown."""
    boot_s: float
    """Seconds since boot; used for every duration."""
    heard_s: float | None = None
    """Moment of the newest answer that reached the control plane, in s since boot; None: none."""
    lapsed: bool = False
    """The task's time ran out once, even if contact was restored since."""


def is_bound(spec: TaskSpec) -> bool:
    """Return whether a task may only run while there is contact to its control plane."""
    return spec.disconnect.policy is DisconnectPolicy.STOP


def ends_at(spec: TaskSpec, heard_s: float | None) -> float | None:
    """Return from when on a task is to be stopped, in seconds since boot; None: never."""
    if not is_bound(spec):
        return None
    return 0.0 if heard_s is None else heard_s + spec.disconnect.after_s


def is_cut_off(spec: TaskSpec, now: LeaseMoment) -> bool:
    """Return whether a task may run no longer."""
    end = ends_at(spec, now.heard_s)
    return end is not None and (now.lapsed or now.boot_s >= end)


def why_cut_off(spec: TaskSpec) -> str:
    """Return the reason that an ended task shows."""
    after_s = spec.disconnect.after_s
    return f"not heard from its control plane for {after_s:g} s, as its job asks"


def name_answer(boot_id: str, boot_s: float) -> str:
    """Return the name of an answer given at this moment."""
    return f"{boot_id}:{int(boot_s * 1000)}"


def answered_at(name: str, boot_id: str, boot_s: float) -> float | None:
    """Return when the named answer was given, None where it is none of this boot.

    A name from the future is not ours: no caller can lend a task more time than has passed.
    """
    of_boot, _, text = name.rpartition(":")
    if of_boot != boot_id or not (text.isascii() and text.isdigit()) or len(text) > 15:
        return None
    at = int(text) / 1000
    return at if at <= boot_s else None


# What the fence reads: it has no other source, and needs none.


@dataclass(frozen=True, slots=True)
class Bond:
    """What a bound task may do, as it stands in its file."""

    after_s: float
    stop_timeout_s: float
    kill_at_s: float | None = None
    """Set once its time ran out: when no process may be left, even if contact is restored."""

    @staticmethod
    def of(spec: TaskSpec) -> Bond:
        """Return the bond of a task."""
        return Bond(spec.disconnect.after_s, spec.stop_timeout_s)

    def line(self) -> str:
        """Return it as its file holds it."""
        end = "" if self.kill_at_s is None else f" {self.kill_at_s!r}"
        return f"{self.after_s!r} {self.stop_timeout_s!r}{end}\n"

    def ends_at(self, heard_s: float | None) -> float:
        """Return when the task is to be stopped, in seconds since boot."""
        return 0.0 if heard_s is None else heard_s + self.after_s

    def kills_at(self, heard_s: float | None) -> float:
        """Return when the fence kills what is left of the task."""
        if self.kill_at_s is not None or heard_s is None:
            return self.kill_at_s or 0.0
        return heard_s + self.after_s + self.stop_timeout_s + FENCE_GRACE_S

    def lapsed(self, heard_s: float | None) -> Bond:
        """Return the bond after its time ran out; later contact does not change it."""
        return Bond(self.after_s, self.stop_timeout_s, self.kills_at(heard_s))

    def overdue(self, heard_s: float | None, now_s: float) -> bool:
        """Return whether every process of the task must be gone by now."""
        return now_s >= self.kills_at(heard_s)


STRICTEST = Bond(0.0, 0.0, 0.0)
"""What a file means that cannot be read: the task is ended rather than forgotten."""


def read_bond(text: str) -> Bond:
    """Return the bond in a file's text; the strictest where it makes no sense."""
    numbers = read_numbers(text)
    return Bond(*numbers) if len(numbers) in (2, 3) else STRICTEST


def read_numbers(text: str) -> tuple[float, ...]:
    """Return the finite numbers >= 0 of a line, none where anything else is in it."""
    try:
        numbers = tuple(float(word) for word in text.split())
    except ValueError:
        return ()
    return numbers if all(isfinite(n) and n >= 0 for n in numbers) else ()
