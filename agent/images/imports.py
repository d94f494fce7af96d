"""Images that are being received: a list with start times, and how to cancel one.

An import continues after its client has left: other clients may wait for the same image, and a
later fetch reuses its layers. So imports are listed, and an operator can cancel one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent.api.oci import ImageImport
from agent.runtime.events import HostEvents
from wire.errors import Conflict, NotFound


@dataclass(slots=True, eq=False)
class _Import:
    name: str
    task: asyncio.Task[object]
    began_at: float = field(default_factory=time.time)
    cancelled: bool = False


class RunningImports:
    """The imports of this agent, the oldest first."""

    def __init__(self, events: HostEvents) -> None:
        self._events = events
        self._imports: list[_Import] = []

    def __len__(self) -> int:
        """Return how many images are being received."""
        return len(self._imports)

    @contextmanager
    def listed(self, name: str) -> Iterator[None]:
        """List the running task as the import of an image, by its reference or digest.

        Raises `Conflict` in it once the import was cancelled.
        """
        task = asyncio.current_task()
        assert task is not None
        image_import = _Import(name, task)
        self._imports.append(image_import)
        try:
            yield
        except asyncio.CancelledError:
            if not image_import.cancelled or task.uncancel() > 0:
                raise
            raise Conflict(f"the fetch of image {name} was cancelled by an operator") from None
        finally:
            self._imports.remove(image_import)

    def all(self) -> list[ImageImport]:
        """Return the images that are being received."""
        return [ImageImport(name=i.name, began_at=i.began_at) for i in self._imports]

    def cancel(self, name: str) -> int:
        """End the imports of an image, by the name that `all` shows; return their number.

        Complete layers stay. Raises `NotFound` if there are none.
        """
        found = [i for i in self._imports if i.name == name]
        if not found:
            raise NotFound(
                f"image {name} is not being fetched", hint="twine-agent image pull --list"
            )
        for image_import in found:
            image_import.cancelled = True
            image_import.task.cancel()
        self._events.add("image", name, "cancelled by an operator")
        return len(found)
