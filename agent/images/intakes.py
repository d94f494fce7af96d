"""Images that are being taken in: which they are, since when, and how one is cancelled.

An intake goes on when its client leaves: others may wait for the same image, and layers that are
here need not be fetched again. So it is listed, and an operator can end it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent.api.oci import Arrival
from agent.runtime.events import HostEvents
from wire.errors import Conflict, NotFound


@dataclass(slots=True, eq=False)
class _Intake:
    name: str
    task: asyncio.Task[object]
    began_at: float = field(default_factory=time.time)
    cancelled: bool = False


class Intakes:
    """The intakes of this agent, the oldest first."""

    def __init__(self, events: HostEvents) -> None:
        self._events = events
        self._intakes: list[_Intake] = []

    def __len__(self) -> int:
        """Return how many images are being taken in."""
        return len(self._intakes)

    @contextmanager
    def listed(self, name: str) -> Iterator[None]:
        """List the running task as the intake of an image, by its reference or digest.

        Raises `Conflict` in it once the intake was cancelled.
        """
        task = asyncio.current_task()
        assert task is not None
        intake = _Intake(name, task)
        self._intakes.append(intake)
        try:
            yield
        except asyncio.CancelledError:
            if not intake.cancelled or task.uncancel() > 0:
                raise
            raise Conflict(f"the fetch of image {name} was cancelled by an operator") from None
        finally:
            self._intakes.remove(intake)

    def all(self) -> list[Arrival]:
        """Return what is being taken in."""
        return [Arrival(name=i.name, began_at=i.began_at) for i in self._intakes]

    def cancel(self, name: str) -> int:
        """End the intakes of an image, by the name that `all` shows; return how many they were.

        What is complete of it stays. Raises `NotFound` where there are none.
        """
        found = [i for i in self._intakes if i.name == name]
        if not found:
            raise NotFound(
                f"image {name} is not being fetched", hint="twine-agent image pull --list"
            )
        for intake in found:
            intake.cancelled = True
            intake.task.cancel()
        self._events.add("image", name, "cancelled by an operator")
        return len(found)
