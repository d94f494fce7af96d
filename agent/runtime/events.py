"""The event stream of this machine, for readers that follow it."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from agent.api import Event, Events, TaskStatus
from agent.api.ranges import ID_MAX, bounded
from agent.runtime.units import wait_woken

KEPT = 4096
"""Number of events in memory; a reader that falls further behind has to list all tasks again."""


class HostEvents:
    """A bounded stream with rising sequence numbers.

    Numbers start at the milliseconds since 1970, so a restarted agent continues above all earlier
    numbers. A reader of the earlier agent then sees that it missed events (`lost`).
    """

    def __init__(self, boot_id: str) -> None:
        self._latest = int(time.time() * 1000)
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._added = asyncio.Event()
        self._boot_id = boot_id
        self._closed = False

    @property
    def latest(self) -> int:
        """Return the number of the newest event."""
        return self._latest

    def close(self) -> None:
        """Wake all waiting readers, because the agent is about to end."""
        self._closed = True
        self._added.set()

    def add(self, kind: str, object_: str, message: str, task: TaskStatus | None = None) -> None:
        """Append an event and wake the readers."""
        self._latest += 1
        self._events.append(
            Event(
                sequence=self._latest,
                at=time.time(),
                kind=kind,
                object=bounded(object_, ID_MAX),
                message=bounded(message),
                task=task,
            )
        )
        self._added.set()
        self._added = asyncio.Event()

    async def after(self, sequence: int, wait_s: float) -> Events:
        """Return the events after `sequence`, waiting up to `wait_s` for the first."""
        lost = self._lost(sequence)
        if not (lost or self._closed) and sequence >= self._latest and wait_s > 0:
            await wait_woken(self._added, wait_s)
            lost = self._lost(sequence)
        events = [] if lost else [e for e in self._events if e.sequence > sequence]
        return Events(events=events, latest=self._latest, lost=lost, boot_id=self._boot_id)

    def _lost(self, sequence: int) -> bool:
        oldest = self._events[0].sequence if self._events else self._latest + 1
        return sequence < oldest - 1 or sequence > self._latest
