"""Stores that can be slow, full or broken, or leave the outcome of a write unknown.

`SimulatedDisk` holds the data, which outlive the process. Each life of the control plane opens a
`StoreFacade` on it. Writes of a killed process are not carried out.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from control_plane.store.memory import MemoryStore
from control_plane.store.outcomes import OUTCOMES
from control_plane.store.protocol import Entry, KeyChange, Listing, Operation, Put
from control_plane.store.write_times import WriteTimes
from wire.errors import Busy, TwineError, UnknownOutcome

if TYPE_CHECKING:
    from vm_lab.region.plane import PlaneLife

T = TypeVar("T")
WRITE_S = (0.0005, 0.004)
"""Shortest and longest transaction on a healthy disk, in seconds."""

LATE_S = 8.0
"""Seconds by which a write with an unknown outcome may be late."""


@dataclass(slots=True)
class StoreFault:
    """The current faults of a store."""

    slow_s: float = 0.0
    """Most seconds added to each operation."""
    full: bool = False
    """Whether writes fail while reads work (SQLite on a full disk)."""
    failing: bool = False
    """Whether every call fails."""
    unknown: float = 0.0
    """Share of the writes that get no answer, carried out or not."""


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """The process is killed at its n-th transaction from now on: before it, or after."""

    left: int
    after: bool


class SimulatedDisk:
    """One store's data and its faults."""

    def __init__(self, name: str, seed: str) -> None:
        """Start as an empty store without faults."""
        self.name = name
        self.engine = MemoryStore()
        self.random = random.Random(f"{seed} store {name}")
        self.fault = StoreFault()
        self.fault_ended_at = float("-inf")
        """When its last fault ended."""
        self.crash: CrashPoint | None = None
        self.free_at = 0.0
        self.transactions = self.largest_value = self.largest_transaction = 0

    def is_faultless(self, now: float, for_s: float) -> bool:
        """Return whether it has had no fault for `for_s` seconds."""
        return self.fault == StoreFault() and now - self.fault_ended_at >= for_s


class StoreFacade:
    """Implements `control_plane.store.Store` for one life of the control plane."""

    def __init__(self, disk: SimulatedDisk, life: PlaneLife) -> None:
        self._disk, self._life = disk, life

    async def __aenter__(self) -> Self:
        """Open the store; raise `Busy` if the disk fails."""
        self._check_readable()
        await self._disk.engine.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self._disk.engine.__aexit__(None, None, None)

    @property
    def times(self) -> WriteTimes:
        """Return how long the engine's transactions took, in real time."""
        return self._disk.engine.times

    def epoch(self) -> int:
        """Return the leadership term."""
        return self._disk.engine.epoch()

    def revision(self) -> int:
        """Return the newest revision."""
        return self._disk.engine.revision()

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        await self._read()
        return await self._disk.engine.get(key)

    async def list_prefix(self, prefix: str, after: str = "", limit: int | None = None) -> Listing:
        """Return the keys below a prefix."""
        await self._read()
        return await self._disk.engine.list_prefix(prefix, after, limit)

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Carry out a transaction, unless a fault prevents it."""
        life, disk = self._life, self._disk
        if not life.alive:
            raise asyncio.CancelledError
        done: asyncio.Future[int] = life.loop.create_future()
        disk.free_at = max(disk.free_at, life.loop.time() + self._draw_duration())
        life.timeline.at(disk.free_at, self._commit, compare, operations, done)
        return await done

    def failure(self) -> str:
        """Return why the store failed for good: always empty, a modelled disk can recover."""
        return self._disk.engine.failure()

    async def wait_failed(self) -> None:
        """Wait forever: a modelled disk can always recover."""
        await self._disk.engine.wait_failed()

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[KeyChange]:
        """Yield changes after a revision."""
        return self._disk.engine.watch(prefix, from_revision)

    async def compact(self, revision: int) -> None:
        """Forget the history up to a revision."""
        await self._disk.engine.compact(revision)

    def _draw_duration(self) -> float:
        disk = self._disk
        takes = disk.random.uniform(*WRITE_S)
        if disk.fault.slow_s:
            takes += disk.random.uniform(0.0, disk.fault.slow_s)
        return takes

    def _commit(
        self,
        compare: Mapping[str, int],
        operations: Sequence[Operation],
        done: asyncio.Future[int],
    ) -> None:
        life, disk = self._life, self._disk
        if not life.alive:
            return
        crash = self._due_crash()
        if crash is not None and not crash.after:
            life.kill(f"before a transaction of store {disk.name}")
            return
        outcome: int | TwineError
        fault = disk.fault
        if fault.failing or fault.full:
            outcome = _unusable(
                disk.name, "database or disk is full" if fault.full else "I/O error"
            )
        elif fault.unknown and disk.random.random() < fault.unknown:
            self._apply_without_answer(compare, operations)
            outcome = UnknownOutcome(f"store {disk.name} did not report the outcome of the write")
        else:
            outcome = self._apply(compare, operations)
        if crash is not None:
            life.kill(f"after a transaction of store {disk.name}")
        else:
            life.complete(done, outcome)

    def _apply_without_answer(
        self, compare: Mapping[str, int], operations: Sequence[Operation]
    ) -> None:
        """Carry out a write without an answer: now, later, or never."""
        life, disk = self._life, self._disk
        fate = disk.random.random()
        if fate < 0.4:
            self._apply(compare, operations)
        elif fate < 0.6:
            late = disk.random.uniform(0.0, LATE_S)
            life.timeline.after(late, self._apply_late, compare, operations)

    def _apply_late(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> None:
        if self._life.alive:
            self._apply(compare, operations)

    def _apply(
        self, compare: Mapping[str, int], operations: Sequence[Operation]
    ) -> int | TwineError:
        life, disk = self._life, self._disk
        try:
            revision = run_immediately(disk.engine.txn(compare, operations))
        except TwineError as e:
            return e
        if operations:
            disk.transactions += 1
            disk.largest_transaction = max(disk.largest_transaction, len(operations))
            life.history.note(
                f"store {disk.name} {revision} {' '.join(map(history_text, operations))}"
            )
            for operation in operations:
                if isinstance(operation, Put):
                    disk.largest_value = max(disk.largest_value, len(operation.value))
            life.observer.stored(disk.name, operations)
        return revision

    def _due_crash(self) -> CrashPoint | None:
        crash = self._disk.crash
        if crash is None:
            return None
        if crash.left > 1:
            self._disk.crash = CrashPoint(crash.left - 1, crash.after)
            return None
        self._disk.crash = None
        return crash

    async def _read(self) -> None:
        life = self._life
        if not life.alive:
            raise asyncio.CancelledError
        if self._disk.fault.slow_s:
            await asyncio.sleep(self._disk.random.uniform(0.0, self._disk.fault.slow_s))
        self._check_readable()

    def _check_readable(self) -> None:
        if self._disk.fault.failing:
            raise _unusable(self._disk.name, "I/O error")


def run_immediately(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as e:
        return e.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("the engine in memory waited for something")


def _unusable(name: str, why: str) -> Busy:
    return Busy(
        f"the store {name} cannot be used: {why}",
        hint="is the disk full? nothing was changed; the request may be sent again",
    )


def history_text(operation: Operation) -> str:
    """Return a write as the history shows it."""
    if isinstance(operation, Put):
        if operation.key.startswith(OUTCOMES):
            return operation.key  # its value has the random name of the process
        return f"{operation.key}={zlib.crc32(operation.value):08x}"
    return f"{operation.key}-"
