"""The distributed store: etcd, which only one leader may write (docs/adr/0128).

All keys of a store are below one prefix, so several stores can share a cluster. A process opens
the store by becoming its leader. `leadership` has the lease, `etcd_client` the calls. One watch of
the whole prefix feeds all watchers of this process, as the log of SQLite does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import groupby
from typing import Self

import msgspec

from control_plane.config import EtcdSettings
from control_plane.store import etcd_pb2 as pb
from control_plane.store.bounds import Bounds, check_values
from control_plane.store.copies import Numbers
from control_plane.store.etcd_client import EtcdClient, created_at, read_range, written_at
from control_plane.store.feed import HISTORY, Feed
from control_plane.store.leadership import Leadership, now_s
from control_plane.store.moved import MigrationNote, refuse_noted_store
from control_plane.store.protocol import (
    LAST,
    Compacted,
    Entry,
    KeyChange,
    Listing,
    Operation,
    Put,
    check_transaction,
    stale_error,
)
from control_plane.store.standby_copy import StandbyCopy
from control_plane.store.write_times import WriteTimes
from wire.errors import Busy, Conflict, TwineError

log = logging.getLogger(__name__)
_BELOW_ALL = Numbers(0, 0)
_NOTE, _MIGRATING, _SHIFT = b"migration", b"migrating", b"shift"
_NEVER = (1 << 63) - 1
"""A revision that no key has."""
_BYTES_MAX = 1_400_000
"""Bytes of one transaction; etcd refuses requests above 1.5 MiB by default."""
_COMPACT_EVERY_S = 300.0
_SIZE_WARN = 1_600_000_000
"""Bytes of the database from which a warning is logged; etcd's default quota is 2 GiB."""


class EtcdStore:
    """Implements `control_plane.store.Store` below `settings.prefix` of an etcd cluster."""

    def __init__(
        self,
        settings: EtcdSettings,
        history: int = HISTORY,
        standing_by: Callable[[str], None] = lambda _leader: None,
        role: str = "",
        announce: Callable[[int], Sequence[Put]] = lambda _epoch: (),
        *,
        migrating: bool = False,
        client: Callable[[EtcdSettings], EtcdClient] = EtcdClient,
        clock: Callable[[], float] = now_s,
    ) -> None:
        """Open nothing yet; `migrating` also opens a store that has a note of a migration.

        Each `role` has a leader of its own; all of them write to one store, and share one counter
        of epochs. The election writes what `announce(epoch)` returns. `clock` measures leases, in
        seconds.
        """
        self._make_client, self._clock = client, clock
        self.bounds = Bounds(strict=True)
        self.times = WriteTimes()
        self._settings, self._history, self._standing_by = settings, history, standing_by
        root = settings.prefix.rstrip("/").encode() + b"/"
        self._meta, self._data = root + b"meta/", root + b"data/"
        self._role, self._announce = role, announce
        self._feed: Feed | None = None
        self._newest = self._shift = 0
        """`_shift` is added to etcd's revisions, to continue those of a store of another engine."""
        self._migrating = migrating
        self.note: MigrationNote | None = None
        self._leadership: Leadership | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Win the election; `Busy` if another process leads and `standby` is off."""
        async with AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(self._make_client(self._settings))
            name = f"{socket.gethostname()}:{os.getpid()}"
            ttl_s = self._settings.ttl_s
            leadership = Leadership(self._client, self._meta, ttl_s, name, self._clock)
            leadership.lead_role(self._role, lambda epoch: map(self._put, self._announce(epoch)))
            self._copy = StandbyCopy(self._client, self._data, self._key_bytes(LAST))
            stack.push_async_callback(self._copy.end)
            revision = await leadership.campaign(self._stand_by if self._settings.standby else None)
            stack.push_async_callback(leadership.resign)
            self._copy.serve_lists()
            revision += await self._read_meta(leadership)
            self._feed, self._newest = Feed(revision, revision, self._history), revision
            self._advanced = asyncio.Event()
            for loop in (self._follow(self._feed), self._compact_forever(self._feed)):
                task = asyncio.create_task(loop)
                task.add_done_callback(partial(_report_failure, leadership))
                stack.push_async_callback(_end, task)
            self._leadership, self._stack = leadership, stack.pop_all()
        return self

    def _stand_by(self, leader: str) -> None:
        self._copy.begin()
        self._standing_by(leader)

    async def __aexit__(self, *_: object) -> None:
        """Release leadership; the next leader need not wait for the lease."""
        self._feed, self._leadership = None, None
        await self._stack.aclose()

    def epoch(self) -> int:
        """Return the leadership term: it rises by one with each leader."""
        return self._require_leadership().epoch

    def revision(self) -> int:
        """Return the newest revision that this leader has written or seen."""
        return self._newest

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        self._require_leadership()
        answer = await self._client.read("KV/Range", pb.RangeRequest(key=self._key_bytes(key)))
        return self._entry(answer.kvs[0]) if answer.kvs else None

    async def list_prefix(self, prefix: str, after: str = "", limit: int | None = None) -> Listing:
        """Return the keys below a prefix and after a key, all at one revision."""
        self._require_leadership()
        begin = self._key_bytes(max(prefix, after and after + "\0"))
        end = self._key_bytes(prefix + LAST)
        copy = self._copy
        if copy.serves_lists and await copy.is_up_to(self._newest - self._shift):
            found = tuple(map(self._entry, copy.between(begin, end, limit)))
            return Listing(copy.at + self._shift, found)
        if begin >= end:  # an empty range: list one key that does not exist
            begin, end = self._data, b""
        revision, kvs = await read_range(self._client, begin, end, limit)
        return Listing(revision + self._shift, tuple(map(self._entry, kvs)))

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Return the new revision once a majority has it on disk, or raise `Conflict`."""
        leadership = self._require_leadership()
        check_transaction(compare, operations)
        check_values(operations)
        self.bounds.check(operations)
        if why := leadership.failure():
            raise Busy(f"cannot write: {why}")
        request = self._request(leadership, compare, operations)
        with self.times.measured():
            answer = await self._client.write(request)
        if not answer.succeeded:
            raise self._refusal(leadership, compare, answer)
        revision = int(answer.header.revision) + self._shift
        self._newest = max(self._newest, revision)
        return revision

    async def leaders(self) -> dict[str, str]:
        """Return role → the process that leads it now; the first role has an empty name."""
        begin = self._meta + b"leader"
        request = pb.RangeRequest(key=begin, range_end=begin + b"\xff")
        answer = await self._client.read("KV/Range", request)
        found = {kv.key[len(begin) :].decode().removeprefix("-"): kv for kv in answer.kvs}
        return {role: kv.value.decode() for role, kv in found.items()}

    def failure(self) -> str:
        """Return why this process can never write again; empty: it can."""
        return "" if self._leadership is None else self._leadership.failure()

    async def wait_failed(self) -> None:
        """Never return; raise the reason once this process can never write again."""
        why = await asyncio.shield(self._require_leadership().lost)
        raise Busy(f"this control plane no longer leads: {why}")

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[KeyChange]:
        """Yield changes after a revision."""
        return self._require_feed().follow(prefix, from_revision)

    async def compact(self, revision: int) -> None:
        """Drop the history up to a revision, here and in etcd."""
        feed = self._require_feed()
        while feed.revision < min(revision, self._newest):
            await self._advanced.wait()
        feed.compact(revision)
        with contextlib.suppress(Compacted):
            await self._client.read("KV/Compact", self._compaction(revision))

    # -- migration

    async def set_note(self, note: MigrationNote | None, above: Numbers = _BELOW_ALL) -> None:
        """Write the note of a migration, and continue all numbers above those of another store.

        Atomic, and only while this process leads. Without a note the store can be opened.
        """
        leadership = self._require_leadership()
        answer = await self._client.read("KV/Range", pb.RangeRequest(key=self._meta + _NOTE))
        missing = above.revision - int(answer.header.revision)
        epoch, shift = max(above.epoch, leadership.epoch), max(self._shift, missing)
        puts = {b"epoch": b"%d" % epoch, _SHIFT: b"%d" % shift}
        operations = [
            pb.RequestOp(request_put=pb.PutRequest(key=self._meta + name, value=value))
            for name, value in puts.items()
        ]
        key = self._meta + _NOTE
        if note is None:
            gone = pb.DeleteRangeRequest(key=key)
            operations.append(pb.RequestOp(request_delete_range=gone))
        else:
            put = pb.PutRequest(key=key, value=msgspec.json.encode(note))
            operations.append(pb.RequestOp(request_put=put))
        request = self._request(leadership, {}, [])
        request.success.extend(operations)
        answer = await self._client.write(request)
        if not answer.succeeded:
            raise self._refusal(leadership, {}, answer)
        self.note, self._shift = note, shift

    async def _read_meta(self, leadership: Leadership) -> int:
        """Return the shift of revisions; refuse a store that was moved or is being moved.

        A migration first writes its key, then reads the leaders. Leaders first write theirs, then
        read the migration's. So at least one of the two is refused.
        """
        migrating_key = self._meta + _MIGRATING
        if self._migrating:
            request = self._request(leadership, {}, [])
            put = leadership.leased_put(migrating_key)
            request.success.append(pb.RequestOp(request_put=put))
            answer = await self._client.write(request)
            if not answer.succeeded:
                raise self._refusal(leadership, {}, answer)
        end = self._meta[:-1] + b"0"  # the byte after the slash
        answer = await self._client.read("KV/Range", pb.RangeRequest(key=self._meta, range_end=end))
        found = {kv.key.removeprefix(self._meta): kv.value for kv in answer.kvs}
        own = leadership.key.removeprefix(self._meta)
        others = [key for key in found if key.startswith(b"leader") and key != own]
        if others if self._migrating else _MIGRATING in found:
            name = found[others[0] if self._migrating else _MIGRATING].decode()
            raise Busy(
                f"cannot open the store: another process has it ({name})",
                hint="a migration needs exclusive access: stop all control planes, or wait "
                "until it ends",
            )
        self._shift = int(found.get(_SHIFT, b"0"))
        self.note = None
        if _NOTE in found:
            self.note = msgspec.json.decode(found[_NOTE], type=MigrationNote)
            if not self._migrating:
                refuse_noted_store(f"etcd below {self._settings.prefix}", self.note)
        return self._shift

    # -- requests

    def _request(
        self, leadership: Leadership, compare: Mapping[str, int], operations: Sequence[Operation]
    ) -> pb.TxnRequest:
        """Return a transaction that also compares the leader; on failure it reads the keys."""
        keys = {key: self._key_bytes(key) for key in compare}
        request = pb.TxnRequest(
            compare=[
                created_at(leadership.key, leadership.term),
                *(written_at(keys[key], self._etcd_revision(at)) for key, at in compare.items()),
            ],
            success=map(self._operation, operations),
            failure=[
                pb.RequestOp(request_range=pb.RangeRequest(key=key, limit=1))
                for key in (leadership.key, *keys.values())
            ],
        )
        if (size := request.ByteSize()) > _BYTES_MAX:
            raise ValueError(f"a transaction has at most {_BYTES_MAX} bytes: {size}")
        return request

    def _operation(self, operation: Operation) -> pb.RequestOp:
        if isinstance(operation, Put):
            return pb.RequestOp(request_put=self._put(operation))
        key = self._key_bytes(operation.key)
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))

    def _put(self, put: Put) -> pb.PutRequest:
        return pb.PutRequest(key=self._key_bytes(put.key), value=put.value)

    def _refusal(
        self, leadership: Leadership, compare: Mapping[str, int], answer: pb.TxnResponse
    ) -> TwineError:
        """Return why a transaction was refused: another leader, or a key at another revision."""
        found = [response.response_range.kvs for response in answer.responses]
        leader = found[0][0].create_revision if found[0] else 0
        if leader != leadership.term:
            leadership.deposed()
            return Busy(f"cannot write: {leadership.failure()}")
        for (key, expected), kvs in zip(compare.items(), found[1:], strict=True):
            at = kvs[0].mod_revision + self._shift if kvs else 0
            if at != expected:
                return stale_error(key, expected, at)
        return Conflict("cannot write: a compared key has changed")

    # -- the history

    async def _follow(self, feed: Feed) -> None:
        """Feed all watchers from one watch of all keys; after a gap they have to list again."""
        end = self._key_bytes(LAST)
        while True:
            try:
                async for response in self._client.watch(
                    self._data, end, feed.revision - self._shift
                ):
                    changes = map(self._change, response.events)
                    by_revision = groupby(changes, lambda change: change.revision)
                    feed.extend([list(group) for _, group in by_revision])
                    self._advance_newest(feed.revision)
            except Compacted:
                with contextlib.suppress(TwineError):  # the next watch finds the gap again
                    revision = (await self.list_prefix("", limit=1)).revision
                    log.warning("etcd has compacted the history", extra={"revision": revision})
                    feed.skip_to(revision)
                    self._advance_newest(revision)

    def _advance_newest(self, revision: int) -> None:
        self._newest = max(self._newest, revision)
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def _compact_forever(self, feed: Feed) -> None:
        """Compact history that watchers no longer need, and warn before etcd's quota is full."""
        while True:
            begun = feed.revision
            await asyncio.sleep(_COMPACT_EVERY_S)
            try:
                await self._client.read("KV/Compact", self._compaction(begun))
                status = await self._client.read("Maintenance/Status", pb.StatusRequest())
            except TwineError as e:
                log.warning("cannot compact etcd", extra={"why": e})
                continue
            if status.dbSize > _SIZE_WARN:
                log.warning("etcd's database is large", extra={"bytes": status.dbSize})

    # -- keys, values and revisions

    def _etcd_revision(self, revision: int) -> int:
        """Return etcd's own number of a revision; `_NEVER` for one from before a migration."""
        raw = revision - self._shift
        return raw if raw > 0 else _NEVER if revision else 0

    def _compaction(self, revision: int) -> pb.CompactionRequest:
        return pb.CompactionRequest(revision=revision - self._shift)

    def _key_bytes(self, key: str) -> bytes:
        return self._data + key.encode()

    def _key_text(self, key: bytes) -> str:
        return key[len(self._data) :].decode()

    def _entry(self, kv: pb.KeyValue) -> Entry:
        return Entry(self._key_text(kv.key), kv.value, kv.mod_revision + self._shift)

    def _change(self, event: pb.Event) -> KeyChange:
        gone = event.type == pb.Event.DELETE
        kv = event.kv
        return KeyChange(
            self._key_text(kv.key), None if gone else kv.value, kv.mod_revision + self._shift
        )

    def _require_leadership(self) -> Leadership:
        if self._leadership is None:
            raise Busy("cannot use the store: it is not open")
        return self._leadership

    def _require_feed(self) -> Feed:
        if self._feed is None:
            raise Busy("cannot use the store: it is not open")
        return self._feed


def _report_failure(leadership: Leadership, task: asyncio.Task[None]) -> None:
    """Give up the lead if a loop failed: without it, this process reads nothing new."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a loop of the store has failed", exc_info=error)
        leadership.lose(f"a loop of its store failed: {error!r}")


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
