"""The event log of a simulated region: the same seed gives the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from vm_lab.region.loop import Timeline


class History:
    """The event log of one run. Its lines do not depend on the process that runs it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._lines: list[tuple[float, str]] = []

    def note(self, text: str) -> None:
        """Add one line at the current virtual time."""
        self._lines.append((self._timeline.now, text))

    def __len__(self) -> int:
        """Return how many lines there are."""
        return len(self._lines)

    def lines(self, since: float = 0.0, until: float = float("inf")) -> Iterator[str]:
        """Yield the lines of a span of time."""
        for at, text in self._lines:
            if since <= at <= until:
                yield f"{at:12.6f} {text}"

    def digest(self) -> str:
        """Return a digest of the log, of 16 hexadecimal digits."""
        hashed = hashlib.sha256()
        for line in self.lines():
            hashed.update(line.encode())
            hashed.update(b"\n")
        return hashed.hexdigest()[:16]
