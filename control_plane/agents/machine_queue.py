"""The pending commands of one machine, its image pulls, and the pauses after failures.

The *subject* of a command is a task, an image, or a request about the host profile.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

CALLS_MAX = 4
"""Calls in flight per machine, and images that it pulls at once."""
PAUSE_MAX_S = 60.0


class Pause(NamedTuple):
    """The time after a failure in which a command is not sent again."""

    until: float
    """Time of the loop."""
    length_s: float


@dataclass(slots=True)
class MachineQueue:
    """The pending commands of one machine; removed with the last of them."""

    machine: str
    pending: dict[str, bool] = field(default_factory=dict)
    """Subject → whether the rate limit has admitted it already."""
    in_flight: set[str] = field(default_factory=set)
    pauses: dict[str, Pause] = field(default_factory=dict)
    """Subject of a failed command → its pause."""
    pulls: dict[str, set[str]] = field(default_factory=dict)
    """Image that is being pulled → tasks that wait for it."""
    pull_calls: dict[str, tuple[str, asyncio.Timeout]] = field(default_factory=dict)
    """Image that is being pulled → boot of the machine at the call, and the timeout of the call."""
    pulling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CALLS_MAX))
    is_scheduled: bool = False
    """Whether it waits for its turn among the machines."""

    def is_idle(self) -> bool:
        """Return whether nothing about the machine has to be kept."""
        return not (self.pending or self.in_flight or self.pauses or self.pulls)

    def is_paused(self, subject: str, now: float) -> bool:
        """Return whether the last command failed a short while ago."""
        return subject in self.pauses and now < self.pauses[subject].until

    def is_busy_with(self, subject: str, now: float) -> bool:
        """Return whether a command is in flight or paused, or its task waits for an image."""
        awaits_image = any(subject in tasks for tasks in self.pulls.values())
        return awaits_image or subject in self.in_flight or self.is_paused(subject, now)

    def pause(self, subject: str, now: float, first_s: float) -> float:
        """Begin the pause after a failure; return its seconds: `first_s`, then twice the last."""
        last = self.pauses.get(subject)
        length_s = min(2 * last.length_s if last is not None else first_s, PAUSE_MAX_S)
        self.pauses[subject] = Pause(now + length_s, length_s)
        return length_s
