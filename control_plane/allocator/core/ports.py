"""The ports of one machine that tasks have."""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.allocator.core.feasibility import FIRST_PORT, LAST_PORT


class Ports:
    """Ports of one machine; made when the first task asks for one."""

    __slots__ = ("next", "taken")

    def __init__(self, taken: Iterable[int] = (), next_: int = FIRST_PORT) -> None:
        """Begin the search for free ports at `next_`, so that old ones are not reused soon."""
        self.taken = set(taken)
        self.next = next_

    def pick(self, names: Iterable[str]) -> dict[str, int]:
        """Take a free port for each name; the caller judged that there are enough."""
        found = {}
        for name in names:
            while self.next in self.taken:
                self._advance()
            found[name] = self.next
            self.taken.add(self.next)
            self._advance()
        return found

    def _advance(self) -> None:
        self.next = FIRST_PORT if self.next >= LAST_PORT else self.next + 1
