"""Leadership of a role in etcd: one process holds it, by a lease, and stops in time.

The leader's key exists as long as its lease. Every write compares the key's creation revision, so
etcd refuses a deposed leader's write, independently of its clock. In addition the leader stops by
itself before the lease can expire: etcd cannot check commands to agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable

from control_plane.store import etcd_pb2 as pb
from control_plane.store.etcd_client import EtcdClient, created_at, written_at
from control_plane.store.protocol import Compacted
from wire.errors import Busy, TwineError, UnknownOutcome

log = logging.getLogger(__name__)
_RENEWALS = 4
"""Renewals within the time to live of the lease: two may fail."""
_RETRY_S = 0.1
_MARGIN = 0.2
"""Share of the lease that is not used at its end, for pauses and for clocks of different speed."""


def now_s() -> float:
    """Return seconds that also count while the host sleeps (clock_gettime(2), CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership:
    """Held by this process from `campaign` until `failure` returns why it is lost."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: bytes,
        ttl_s: int,
        name: str,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._clock = clock
        self._client, self._ttl_s, self._name = client, ttl_s, name
        self.key, self._epoch_key = prefix + b"leader", prefix + b"epoch"
        self.term = 0
        """Creation revision of the leader's key; every write compares it."""
        self.epoch = 0
        self._announce: Callable[[int], Iterable[pb.PutRequest]] = lambda _epoch: ()
        self._lease = 0
        self._good_until = 0.0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves to the reason once leadership is lost."""
        self._renewing: asyncio.Task[None] | None = None

    def lead_role(self, role: str, announce: Callable[[int], Iterable[pb.PutRequest]]) -> None:
        """Lead one role of several; the election also writes what `announce(epoch)` returns."""
        self.key += f"-{role}".encode() if role else b""
        self._announce = announce

    async def campaign(self, standing_by: Callable[[str], None] | None) -> int:
        """Become the leader and return the revision of the election; `Busy` if another leads.

        With `standing_by`, call it with each other leader's name and wait for its lease to end.
        """
        reported = ""
        while True:
            leader, epoch, revision = await self._read_leader()
            if leader is None:
                if revision := await self._try_election(epoch):
                    log.info("leading", extra={"epoch": self.epoch})
                    self._renewing = asyncio.create_task(self._renew())
                    return revision
                continue
            if standing_by is None:
                raise Busy(
                    f"cannot open the store: another control plane leads ({leader})",
                    hint="stop the other process, or run this one with [etcd] standby = true",
                )
            if leader != reported:
                log.info("standing by", extra={"leader": leader})
                standing_by(leader)
                reported = leader
            await self._wait_for_change(revision)

    async def resign(self) -> None:
        """End the lease, so that the next leader need not wait for it."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        if self._lease:
            lease, self._lease = self._lease, 0
            try:
                await self._client.read("Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=lease))
            except TwineError as e:  # it expires by itself
                log.warning("cannot end the lease", extra={"why": e})

    def leased_put(self, key: bytes) -> pb.PutRequest:
        """Return a write of a key that is deleted with the lease."""
        return pb.PutRequest(key=key, value=self._name.encode(), lease=self._lease)

    def failure(self) -> str:
        """Return why this process no longer leads; empty: it leads."""
        if self.lost.done():
            return self.lost.result()
        if self._clock() >= self._good_until:
            self.lose("the lease could not be renewed in time")
            return self.lost.result()
        return ""

    def deposed(self) -> None:
        """Record that etcd refused a write because another process leads."""
        self.lose("another control plane leads")

    async def _read_leader(self) -> tuple[str | None, pb.KeyValue | None, int]:
        """Return the leader's name (None: no leader), the entry of the epoch, and the revision."""
        found = [
            await self._client.read("KV/Range", pb.RangeRequest(key=key))
            for key in (self.key, self._epoch_key)
        ]
        leader, epoch = (answer.kvs[0] if answer.kvs else None for answer in found)
        name = None if leader is None else leader.value.decode()
        return name, epoch, found[0].header.revision

    async def _wait_for_change(self, revision: int) -> None:
        """Return when the leader's key has changed after a revision, after `ttl_s` at the latest.

        A watch at a hanging etcd member stays silent, so the caller reads the key again.
        """
        with contextlib.suppress(TimeoutError, Compacted):
            async with (
                asyncio.timeout(self._ttl_s),
                contextlib.aclosing(self._client.watch(self.key, b"", revision)) as changes,
            ):
                await anext(changes)

    async def _try_election(self, epoch: pb.KeyValue | None) -> int:
        """Return the revision at which this process became the leader; 0: it did not."""
        asked = self._clock()
        granted = await self._client.read("Lease/LeaseGrant", pb.LeaseGrantRequest(TTL=self._ttl_s))
        self._lease, number = granted.ID, int(epoch.value) + 1 if epoch is not None else 1
        puts = (
            pb.PutRequest(key=self.key, value=self._name.encode(), lease=self._lease),
            pb.PutRequest(key=self._epoch_key, value=b"%d" % number),
            *self._announce(number),
        )
        request = pb.TxnRequest(
            compare=[
                created_at(self.key, 0),
                written_at(self._epoch_key, epoch.mod_revision if epoch is not None else 0),
            ],
            success=[pb.RequestOp(request_put=put) for put in puts],
        )
        try:
            answer = await self._client.write(request)
        except UnknownOutcome:
            await self.resign()  # if the election succeeded, this ends it; then try again
            return 0
        good_until = asked + granted.TTL * (1 - _MARGIN)
        if not answer.succeeded or self._clock() >= good_until:  # it may have been paused
            await self.resign()
            return 0
        self.term, self.epoch = answer.header.revision, number
        self._good_until = good_until
        return int(answer.header.revision)

    async def _renew(self) -> None:
        pause_s = every_s = self._ttl_s / _RENEWALS
        while not self.failure():
            await asyncio.sleep(pause_s)
            asked, pause_s = self._clock(), every_s
            try:
                ttl_s = await self._client.keep_alive(self._lease, timeout_s=every_s)
            except Busy as e:
                log.warning("cannot renew the lease", extra={"why": e})
                pause_s = _RETRY_S  # at the next member
                continue
            if ttl_s == 0:
                self.lose("its lease has expired")
            else:
                self._good_until = asked + ttl_s * (1 - _MARGIN)

    def lose(self, why: str) -> None:
        if not self.lost.done():
            log.error("leadership is lost", extra={"why": why})
            self.lost.set_result(why)
