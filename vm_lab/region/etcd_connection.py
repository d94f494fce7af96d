"""The connection of one process to etcd: calls take time, and calls or answers may be lost.

`EtcdStore` uses it as its client. A request that was sent arrives even if its process is stopped
or killed, so writes of a former leader can reach etcd after those of its successor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Self

from control_plane.store import etcd_pb2 as pb
from control_plane.store.etcd_client import CALL_S
from control_plane.store.protocol import Compacted
from vm_lab.region.etcd import SimulatedEtcd
from vm_lab.region.stores import LATE_S, WRITE_S
from wire.errors import Busy, TwineError, UnknownOutcome

if TYPE_CHECKING:
    from vm_lab.region.process_life import ProcessLife

TRIES = 6
"""Attempts of a read: two for each of three members, as in the client."""
LATENCY_S = (0.0002, 0.001)
"""Seconds from a process to etcd, or back."""
RESUME_S = 2.0
"""Seconds within which a broken watch is resumed."""


class EtcdConnection:
    """Implements the methods of `EtcdClient` that the store uses, for one life of a process."""

    def __init__(self, etcd: SimulatedEtcd, life: ProcessLife) -> None:
        self._etcd, self._life = etcd, life
        self._watches: list[_EtcdWatch] = []

    async def __aenter__(self) -> Self:
        """Connect."""
        self._life.etcd_connections.append(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close; requests that were sent still arrive."""
        self._life.etcd_connections.remove(self)

    async def read(self, call: str, request: Any) -> Any:
        """Return the answer of a call that may be repeated, or raise `Busy`."""
        for _ in range(TRIES):
            if (answer := await self._exchange(call, request, CALL_S)) is not None:
                return answer
        raise Busy("no member of etcd answers")

    async def write(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """Return the answer of a transaction; `UnknownOutcome` if it may have been made."""
        answer: pb.TxnResponse | None = await self._exchange("KV/Txn", request, CALL_S)
        if answer is None:
            raise UnknownOutcome("etcd did not answer a write")
        return answer

    async def keep_alive(self, lease: int, timeout_s: float) -> int:
        """Renew a lease once; return its seconds to live, 0 if etcd has ended it."""
        request = pb.LeaseKeepAliveRequest(ID=lease)
        answer = await self._exchange("Lease/LeaseKeepAlive", request, timeout_s)
        if answer is None:
            raise Busy("etcd did not renew a lease")
        return int(answer.TTL)

    async def watch(
        self, key: bytes, range_end: bytes, after: int
    ) -> AsyncGenerator[pb.WatchResponse]:
        """Yield responses with all changes of a range after a revision, without end."""
        watch = _EtcdWatch(self._etcd, self._life, (key, range_end), after)
        self._watches.append(watch)
        self._etcd.watchers.append(watch.changed)
        try:
            watch.changed()
            while True:
                yield await watch.next()
        finally:
            self._etcd.watchers.remove(watch.changed)
            self._watches.remove(watch)

    def paths_changed(self) -> None:
        """Resume watches where they ended, if the connection works again."""
        for watch in self._watches:
            watch.resume()

    async def _exchange(self, call: str, request: Any, timeout_s: float) -> Any:
        """Return the answer, or None if none came in time."""
        life, etcd = self._life, self._etcd
        if not life.alive:
            raise asyncio.CancelledError
        done: asyncio.Future[Any] = life.loop.create_future()
        etcd.timeline.after(timeout_s, life.complete, done, None)
        if not life.sends:
            return await done
        etcd.timeline.after(self._draw_latency(), self._receive, call, request, done)
        return await done

    def _draw_latency(self) -> float:
        late = self._life.host.etcd_delay_s
        return self._etcd.random.uniform(*LATENCY_S) + self._etcd.random.uniform(0.0, late)

    def _receive(self, call: str, request: Any, done: asyncio.Future[Any]) -> None:
        etcd, now = self._etcd, self._etcd.timeline.now
        if etcd.fault.failing:
            return
        takes = etcd.random.uniform(0.0, etcd.fault.slow_s)
        if call == "KV/Txn":
            etcd.free_at = max(etcd.free_at, now) + etcd.random.uniform(*WRITE_S) / 4
            takes += etcd.free_at - now
        etcd.timeline.after(takes, self._execute, call, request, done)

    def _execute(self, call: str, request: Any, done: asyncio.Future[Any]) -> None:
        etcd, life = self._etcd, self._life
        if etcd.fault.failing:
            return
        point = life.due_write_point(request) if call == "KV/Txn" else None
        if point is not None and point.inject_before():
            return
        if call == "KV/Txn" and etcd.random.random() < etcd.fault.unknown:
            self._apply_without_answer(request)
            return
        outcome = self._apply(call, request)
        if point is not None:
            point.inject_after()
        etcd.timeline.after(self._draw_latency(), self._deliver_answer, done, outcome)

    def _apply_without_answer(self, request: Any) -> None:
        """Carry out a write whose answer is lost: now, later, or never."""
        etcd = self._etcd
        fate = etcd.random.random()
        if fate < 0.6:
            late = 0.0 if fate < 0.4 else etcd.random.uniform(0.0, LATE_S)
            etcd.timeline.after(late, self._apply, "KV/Txn", request)

    def _apply(self, call: str, request: Any) -> Any:
        try:
            return self._etcd.call(call, request, self._life.number)
        except TwineError as e:
            return e

    def _deliver_answer(self, done: asyncio.Future[Any], outcome: Any) -> None:
        if self._life.receives:
            self._life.complete(done, outcome)


class _EtcdWatch:
    """One watch: the responses that have arrived."""

    def __init__(
        self, etcd: SimulatedEtcd, life: ProcessLife, wanted: tuple[bytes, bytes], after: int
    ) -> None:
        self._etcd, self._life = etcd, life
        self._key, self._end = wanted
        self._revision = after
        """Everything up to this revision has arrived."""
        self._is_delivering = False
        self._waiter: asyncio.Future[None] | None = None
        self._arrived: deque[pb.WatchResponse | Compacted] = deque()

    async def next(self) -> pb.WatchResponse:
        """Return the next response, or raise `Compacted`."""
        while not self._arrived:
            self._waiter = self._life.loop.create_future()
            await self._waiter
        response = self._arrived.popleft()
        if isinstance(response, Compacted):
            raise response
        return response

    def changed(self) -> None:
        """Send new events, unless an earlier response has not arrived."""
        if self._etcd.fault.failing:
            self._etcd.timeline.after(RESUME_S, self.changed)
        elif (
            self._is_connected()
            and not self._is_delivering
            and self._etcd.revision > self._revision
        ):
            self._is_delivering = True
            late = self._etcd.random.uniform(0.0, self._life.host.etcd_delay_s)
            takes = self._etcd.random.uniform(*LATENCY_S)
            self._etcd.timeline.after(takes + late, self._deliver)

    def resume(self) -> None:
        """Continue after the connection broke."""
        self._etcd.timeline.after(self._etcd.random.uniform(0.1, RESUME_S), self.changed)

    def _is_connected(self) -> bool:
        life = self._life
        return life.alive and life.sends and life.receives and not self._etcd.fault.failing

    def _deliver(self) -> None:
        self._is_delivering = False
        if not self._is_connected():
            return
        etcd = self._etcd
        if self._revision < etcd.compacted:
            self._arrived.append(Compacted(f"etcd has compacted revision {self._revision}"))
            self._revision = etcd.revision
        else:
            transactions = etcd.transactions_after(self._revision)
            for _, events in transactions:
                wanted = [event for event in events if self._is_wanted(event.kv.key)]
                if wanted:
                    self._arrived.append(pb.WatchResponse(events=wanted))
            self._revision = etcd.revision
        if self._arrived and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_wanted(self, key: bytes) -> bool:
        return key == self._key if not self._end else self._key <= key < self._end
