"""A modelled etcd: keys with revisions, transactions, leases, watches, and its faults.

It answers the messages of etcd's own interface, so the product's store, leases and elections run
on it unchanged. Its members are modelled as one: either a majority is available, or nothing is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from control_plane.store import etcd_pb2 as pb
from control_plane.store.protocol import Compacted
from vm_lab.region.loop import Timeline
from vm_lab.region.stores import SimulatedDisk
from wire.errors import Busy

LEADERS = b"/meta/leader"
"""Part of the key of each role's leader, after the prefix of the store."""
DATA = b"/data/"
"""Part of the keys of records."""
EXPIRY_S = 0.5
"""Seconds between etcd's checks for expired leases: a lease ends at most this much late."""

Applied = Callable[[int, list[pb.Event]], None]
"""Called with the sender of a transaction (0: etcd itself) and its changes."""


@dataclass(slots=True)
class _Lease:
    """Keys that etcd deletes if a process stops renewing the lease."""

    ttl_s: int
    expires_at: float
    keys: set[bytes] = field(default_factory=set)


class SimulatedEtcd(SimulatedDisk):
    """The cluster that every process of the control plane writes to and watches."""

    def __init__(self, timeline: Timeline, seed: str) -> None:
        """Start as an empty cluster without faults."""
        super().__init__("main", seed)
        self.timeline = timeline
        self.revision, self.compacted = 1, 0
        self.log: list[tuple[int, list[pb.Event]]] = []
        """All transactions since the compaction, oldest first."""
        self.on_commit: Applied = lambda _sender, _events: None
        self.watchers: list[Callable[[], None]] = []
        """Called after each change."""
        self._entries: dict[bytes, pb.KeyValue] = {}
        self._revisions: dict[bytes, list[tuple[int, pb.KeyValue | None]]] = {}
        """Key → its revisions since the compaction, with the entry; None: it was deleted."""
        self._sorted_keys: list[bytes] | None = None
        self._leases: dict[int, _Lease] = {}
        self._leases_granted = 0

    # -- calls

    def call(self, name: str, request: Any, sender: int) -> Any:
        """Return the answer of a call, or raise the error that the real client raises."""
        if self.fault.full and name in ("KV/Txn", "Lease/LeaseGrant"):
            raise Busy("etcd takes no writes: mvcc: database space exceeded")
        return _CALLS[name](self, request, sender)

    def range(self, request: pb.RangeRequest, _: int = 0) -> pb.RangeResponse:
        """Return the entries of a range, now or at an earlier revision."""
        at = request.revision or self.revision
        if at < self.compacted:
            raise Compacted(f"etcd has compacted what is asked for: {at}", hint="list again")
        answer = pb.RangeResponse(header=self._header())
        entries = self._entries if at == self.revision else self._entries_at(at)
        if not request.range_end:
            matches = [entries[request.key]] if request.key in entries else []
        else:
            order = self._keys_in_order() if entries is self._entries else sorted(entries)
            first, last = (bisect_left(order, key) for key in (request.key, request.range_end))
            matches = [entries[key] for key in order[first:last]]
        answer.more = bool(request.limit) and len(matches) > request.limit
        answer.kvs.extend(matches[: request.limit or None])
        return answer

    def txn(self, request: pb.TxnRequest, sender: int) -> pb.TxnResponse:
        """Carry out a transaction; if a comparison fails, its `failure` operations."""
        holds = all(map(self._comparison_holds, request.compare))
        answer = pb.TxnResponse(succeeded=holds)
        events = list[pb.Event]()
        for operation in request.success if holds else request.failure:
            done = pb.ResponseOp()
            if operation.HasField("request_range"):
                done.response_range.CopyFrom(self.range(operation.request_range))
            elif operation.HasField("request_put"):
                events.append(self._put(operation.request_put))
            elif (key := operation.request_delete_range.key) in self._entries:
                events.append(self._delete(key))
            answer.responses.append(done)
        self._commit(sender, events)
        answer.header.CopyFrom(self._header())
        return answer

    def transactions_after(self, revision: int) -> list[tuple[int, list[pb.Event]]]:
        """Return all transactions after a revision, oldest first."""
        first = bisect_left(self.log, revision + 1, key=lambda entry: entry[0])
        return self.log[first:]

    def _compact(self, request: pb.CompactionRequest, _: int) -> pb.CompactionResponse:
        if request.revision > self.compacted:
            self.compacted = min(request.revision, self.revision)
            self.log = [entry for entry in self.log if entry[0] > self.compacted]
            for versions in self._revisions.values():
                while len(versions) > 1 and versions[1][0] <= self.compacted:
                    del versions[0]
        return pb.CompactionResponse(header=self._header())

    def _status(self, _request: pb.StatusRequest, _: int) -> pb.StatusResponse:
        return pb.StatusResponse(version="3.5.0", dbSize=sum(map(_size, self._entries.values())))

    # -- leases

    def _grant(self, request: pb.LeaseGrantRequest, _: int) -> pb.LeaseGrantResponse:
        self._leases_granted += 1
        number, ttl = self._leases_granted, int(request.TTL)
        self._leases[number] = _Lease(ttl, self.timeline.now + ttl)
        self.timeline.after(ttl, self._expire, number)
        return pb.LeaseGrantResponse(ID=number, TTL=ttl)

    def _revoke(self, request: pb.LeaseRevokeRequest, sender: int) -> pb.LeaseRevokeResponse:
        lease = self._leases.pop(request.ID, None)
        if lease is not None:
            gone = [self._delete(key) for key in sorted(lease.keys) if key in self._entries]
            self._commit(sender, gone)
        return pb.LeaseRevokeResponse(header=self._header())

    def _renew(self, request: pb.LeaseKeepAliveRequest, _: int) -> pb.LeaseKeepAliveResponse:
        lease = self._leases.get(request.ID)
        if lease is None:
            return pb.LeaseKeepAliveResponse(ID=request.ID, TTL=0)
        lease.expires_at = self.timeline.now + lease.ttl_s
        return pb.LeaseKeepAliveResponse(ID=request.ID, TTL=lease.ttl_s)

    def _expire(self, number: int) -> None:
        """End a lease that was not renewed; a cluster without a majority counts no time."""
        lease = self._leases.get(number)
        if lease is None:
            return
        if self.fault.failing:
            lease.expires_at = self.timeline.now + lease.ttl_s
        if lease.expires_at > self.timeline.now:
            late = self.random.uniform(0.0, EXPIRY_S)
            self.timeline.at(lease.expires_at + late, self._expire, number)
        else:
            self._revoke(pb.LeaseRevokeRequest(ID=number), 0)

    # -- keys

    def _comparison_holds(self, compare: pb.Compare) -> bool:
        entry = self._entries.get(compare.key)
        if compare.target == pb.Compare.CREATE:
            return (entry.create_revision if entry else 0) == compare.create_revision
        return (entry.mod_revision if entry else 0) == compare.mod_revision

    def _put(self, put: pb.PutRequest) -> pb.Event:
        revision, before = self.revision + 1, self._entries.get(put.key)
        if put.lease:
            if put.lease not in self._leases:
                raise Busy("etcd refused a call: NOT_FOUND: requested lease not found")
            self._leases[put.lease].keys.add(put.key)
        if before is None:
            self._sorted_keys = None
        entry = pb.KeyValue(
            key=put.key,
            value=put.value,
            create_revision=before.create_revision if before else revision,
            mod_revision=revision,
        )
        self._entries[put.key] = entry
        self._revisions.setdefault(put.key, []).append((revision, entry))
        return pb.Event(type=pb.Event.PUT, kv=entry)

    def _delete(self, key: bytes) -> pb.Event:
        del self._entries[key]
        self._sorted_keys = None
        entry = pb.KeyValue(key=key, mod_revision=self.revision + 1)
        self._revisions[key].append((self.revision + 1, None))
        return pb.Event(type=pb.Event.DELETE, kv=entry)

    def _commit(self, sender: int, events: list[pb.Event]) -> None:
        if not events:
            return
        self.revision += 1
        self.log.append((self.revision, events))
        self.transactions += 1
        self.largest_transaction = max(self.largest_transaction, len(events))
        self.largest_value = max(self.largest_value, *(len(e.kv.value) for e in events), 0)
        self.on_commit(sender, events)
        for changed in list(self.watchers):
            changed()

    def _keys_in_order(self) -> list[bytes]:
        if self._sorted_keys is None:
            self._sorted_keys = sorted(self._entries)
        return self._sorted_keys

    def _entries_at(self, revision: int) -> dict[bytes, pb.KeyValue]:
        """Return all entries at a revision that is not compacted."""
        entries = dict[bytes, pb.KeyValue]()
        for key, versions in self._revisions.items():
            entry = next((kv for at, kv in reversed(versions) if at <= revision), None)
            if entry is not None:
                entries[key] = entry
        return entries

    def _header(self) -> pb.ResponseHeader:
        return pb.ResponseHeader(revision=self.revision)


def _size(entry: pb.KeyValue) -> int:
    return len(entry.key) + len(entry.value)


_CALLS: dict[str, Callable[[SimulatedEtcd, Any, int], Any]] = {
    "KV/Range": SimulatedEtcd.range,
    "KV/Txn": SimulatedEtcd.txn,
    "KV/Compact": SimulatedEtcd._compact,
    "Maintenance/Status": SimulatedEtcd._status,
    "Lease/LeaseGrant": SimulatedEtcd._grant,
    "Lease/LeaseRevoke": SimulatedEtcd._revoke,
    "Lease/LeaseKeepAlive": SimulatedEtcd._renew,
}
