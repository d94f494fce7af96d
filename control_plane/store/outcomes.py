"""Writes whose outcome can be found out when their answer was lost.

A missing change does not prove that a write failed: it may still be under way, and succeed after a
process has concluded the opposite. So a process that asks for the outcome first makes the write
impossible. Each attempt compares a key that it also writes, and the asking process writes that key
too. Then either the attempt was first, or it will be refused whenever it arrives.
That needs only `get` and `txn`, on any engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from control_plane.store.protocol import Operation, Put, Store
from wire.errors import Busy, Conflict, UnknownOutcome

OUTCOMES = "outcomes/"
_VOID = b"0"


class Slots:
    """Keys that record which attempts of one writer were made.

    A slot is reused once the outcome of its attempt is known, so there are at most as
    many slots as there were attempts at one time. Two processes that write to one store have
    slots of their own, by the name of the writer. The value of a slot also names the attempt:
    another writer's value is never mistaken for ours.
    """

    def __init__(self, store: Store, name: str, writer: str = "") -> None:
        """`name` is the purpose; `writer` names the process, and is the same after a restart."""
        self.store = store
        self._prefix = f"{OUTCOMES}{name}/{writer}/" if writer else f"{OUTCOMES}{name}/"
        self._life = f"{writer} {secrets.token_hex(8)}"
        self._free: list[tuple[str, int | None]] = []
        self._made = self._attempts = 0

    async def take(self) -> tuple[str, int]:
        """Return an unused slot's key and its revision."""
        if not self._free:
            self.release(f"{self._prefix}{self._made}", None)
            self._made += 1
        key, revision = self._free.pop()
        if revision is None:
            entry = await self.store.get(key)
            revision = entry.revision if entry is not None else 0
        return key, revision

    def mark(self) -> bytes:
        """Return a slot value that identifies the next attempt among all writers."""
        self._attempts += 1
        return f"{self._life} {self._attempts}".encode()

    def release(self, key: str, revision: int | None) -> None:
        """Free a slot for the next attempt; `revision` None: unknown, it must be read."""
        self._free.append((key, revision))


class WriteAttempt:
    """One transaction, made at most once, and its outcome.

    A transaction that only replaces the value of one key needs no slot: the value itself shows
    the outcome.
    """

    def __init__(
        self, slots: Slots, compare: Mapping[str, int], operations: Sequence[Operation]
    ) -> None:
        self._slots = slots
        self._compare = compare
        self._operations = operations
        self._slot = ""
        self._known: int | None = None
        """The outcome; None while it is unknown. Afterwards another attempt may use the slot."""
        self._revision_after = 0
        """The revision of `_key` when the outcome became known."""
        self._key, self._before, self._value = "", 0, slots.mark()
        single = operations[0] if len(operations) == 1 else None
        if isinstance(single, Put) and compare.get(single.key, 0):
            self._key, self._before, self._value = single.key, compare[single.key], single.value

    async def make(self) -> int:
        """Return the new revision, or raise what `Store.txn` raises.

        After `UnknownOutcome` or cancellation, call `outcome`.
        """
        compare, operations = self._compare, self._operations
        if not self._key:
            self._slot, self._before = await self._slots.take()
            self._key = self._slot
            compare = {**compare, self._key: self._before}
            operations = [*operations, Put(self._key, self._value)]
        try:
            revision = await self._slots.store.txn(compare, operations)
        except Conflict:  # nothing was changed; the conflict may be about the slot
            self._conclude(0, self._before, at=None)
            raise
        except Busy:  # nothing was changed
            self._conclude(0, self._before, at=self._before)
            raise
        return self._conclude(revision, revision, at=revision)

    async def make_and_confirm(self) -> int:
        """Return the new revision, even if the answer was lost; see `make`.

        Raises `Busy` if nothing was changed, and the store's error while the outcome is unknown.
        """
        try:
            return await self.make()
        except UnknownOutcome:
            revision = await self.outcome()
        if not revision:
            raise Busy("the store failed; nothing was changed")
        return revision

    async def outcome(self) -> int:
        """Return the revision of the attempt; 0: it was not made and never will be.

        Raises the store's error while the outcome is unknown: then call it again.
        """
        if not self._key:
            return 0  # it was never sent
        store = self._slots.store
        while (known := self._known) is None:
            entry = await store.get(self._key)
            if self._is_known():
                continue
            revision = entry.revision if entry is not None else 0
            if revision != self._before:
                made = entry is not None and entry.value == self._value
                return self._conclude(revision if made else 0, revision, at=revision)
            void = _VOID if self._slot or entry is None else entry.value
            try:
                revision = await store.txn({self._key: self._before}, [Put(self._key, void)])
            except Conflict:
                continue  # the attempt succeeded just now
            self._conclude(0, revision, at=revision)
        return known

    def revision_after(self, key: str) -> int:
        """Return the revision of a compared key after an attempt that was not made.

        It differs from the compared one where `outcome` had to write the key itself.
        """
        return self._revision_after if key == self._key else self._compare.get(key, 0)

    def _is_known(self) -> bool:
        """Return whether another caller found the outcome, so that the slot may be reused."""
        return self._known is not None

    def _conclude(self, outcome: int, revision: int, *, at: int | None) -> int:
        """Record the outcome, and free the slot for the next attempt."""
        if self._known is None:
            self._known, self._revision_after = outcome, revision
            if self._slot:
                self._slots.release(self._slot, at)
        return self._known
