"""Images that are being received: a list with start times, and how to cancel one.

An intake continues after its client has left: other clients may wait for the same image, and a
later fetch reuses its layers. So intakes are listed, and an operator can cancel one.
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
        """Return how many images are being received."""
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
        """Return the images that are being received."""
        return [Arrival(name=i.name, began_at=i.began_at) for i in self._intakes]

    def cancel(self, name: str) -> int:
        """End the intakes of an image, by the name that `all` shows; return their number.

        Complete layers stay. Raises `NotFound` if there are none.
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
