"""A store that fails as a remote or a faulty store does, for simulations and tests.

The worst fault is a write without an answer. The store may or may not have made it, or makes it
after its sender has continued.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from control_plane.store.protocol import Entry, KeyChange, Listing, Operation, Store
from control_plane.store.write_times import WriteTimes
from wire.errors import Busy, Conflict, UnknownOutcome


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one transaction."""

    made: bool = True
    answered: bool = True
    """Whether the answer arrives. Without it the outcome is unknown."""
    late: int = 0
    """The write arrives only after this number of further calls of the store (`made`, not
    `answered`)."""


MADE = Outcome()
REFUSED = Outcome(made=False)
"""The disk is full: the store changes nothing and reports this to the writer."""
LOST = Outcome(made=False, answered=False)
UNANSWERED = Outcome(answered=False)


class FaultyStore:
    """Implements `control_plane.store.Store` on top of another store, for one process at a time."""

    def __init__(
        self, inner: Store, outcome: Callable[[Sequence[Operation]], Outcome] = lambda _: MADE
    ) -> None:
        """`outcome(operations)` decides the outcome of each transaction."""
        self.inner = inner
        self.outcome = outcome
        self.broken = ""
        """While this is not empty, the store refuses every call with this text."""
        self._late: list[tuple[int, Mapping[str, int], Sequence[Operation]]] = []
        self._calls = 0

    async def __aenter__(self) -> Self:
        """Open the inner store."""
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the inner store. Late writes are never made: the store fences their sender."""
        self._late.clear()
        await self.inner.__aexit__(kind, error, trace)

    @property
    def times(self) -> WriteTimes:
        """Return the times of the inner store."""
        return self.inner.times

    def epoch(self) -> int:
        """Return the epoch of the inner store."""
        return self.inner.epoch()

    def revision(self) -> int:
        """Return the newest revision of the inner store."""
        return self.inner.revision()

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key, if there is one."""
        await self._called()
        return await self.inner.get(key)

    async def list_prefix(self, prefix: str, after: str = "", limit: int | None = None) -> Listing:
        """Return the keys below a prefix and after a key."""
        await self._called()
        return await self.inner.list_prefix(prefix, after, limit)

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Make, refuse, delay or lose a transaction, as `outcome` decides."""
        await self._called()
        outcome = self.outcome(operations)
        if outcome.late:
            self._late.append((self._calls + outcome.late, dict(compare), list(operations)))
        elif outcome.made:
            revision = await self.inner.txn(compare, operations)
            if outcome.answered:
                return revision
        elif outcome.answered:
            raise Busy("the store cannot be used: it is made to fail; nothing was changed")
        raise UnknownOutcome("unknown whether the store made a write: its answer is lost")

    def failure(self) -> str:
        """Return why the inner store will never write again."""
        return self.inner.failure()

    async def wait_failed(self) -> None:
        """Wait until the inner store can never write again, and raise the reason."""
        await self.inner.wait_failed()

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[KeyChange]:
        """Yield the changes of the inner store."""
        return self.inner.watch(prefix, from_revision)

    async def compact(self, revision: int) -> None:
        """Drop the history up to a revision."""
        await self.inner.compact(revision)

    async def _called(self) -> None:
        """Make the late writes that are due, or refuse the call."""
        self._calls += 1
        due = [late for late in self._late if late[0] <= self._calls]
        self._late = [late for late in self._late if late[0] > self._calls]
        for _, compare, operations in due:
            try:
                await self.inner.txn(compare, operations)
            except Conflict:  # it is too late, and its sender no longer waits
                continue
        if self.broken:
            raise Busy(f"the store cannot be used: {self.broken}")
