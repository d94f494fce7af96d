"""Assigns ports of one machine to tasks."""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.allocator.core.feasibility import FIRST_PORT, LAST_PORT


class Ports:
    """The ports of one machine that tasks use; made for the first task with ports."""

    __slots__ = ("next", "taken")

    def __init__(self, taken: Iterable[int] = (), next_: int = FIRST_PORT) -> None:
        """`next_` is where the search for free ports begins: old ones are not reused soon."""
        self.taken = set(taken)
        self.next = next_

    def pick(self, names: Iterable[str]) -> dict[str, int]:
        """Take a free port for each name; the caller has checked that there are enough."""
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
