"""A small client of etcd's gRPC interface: calls with deadlines, several members, watches.

No Python client is both complete and maintained (docs/adr/0128), so this one covers exactly what
the store needs. Every call has a deadline. A read is repeated at the next member. A write is not
repeated here: its answer may be lost after etcd carried it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from control_plane.config import EtcdSettings
from control_plane.store import etcd_pb2 as pb
from control_plane.store.protocol import Compacted
from wire.errors import Busy, ConfigError, TwineError, UnknownOutcome

CALL_S = 5.0
"""Deadline of one call. A three-member cluster elects a leader within 1 to 2 s (measured)."""
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_LEADER_REQUIRED = (("hasleader", "true"),)
"""Makes etcd end a watch at a member that lost its cluster, instead of leaving it silent."""
_TRIES_A_MEMBER = 2
_PAGE = 1000
"""Keys of one range call; a longer list is read in several calls, all at one revision."""
_RETRYABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
_CALLS: dict[str, Any] = {
    "KV/Range": pb.RangeResponse,
    "KV/Txn": pb.TxnResponse,
    "KV/Compact": pb.CompactionResponse,
    "Lease/LeaseGrant": pb.LeaseGrantResponse,
    "Lease/LeaseRevoke": pb.LeaseRevokeResponse,
    "Maintenance/Status": pb.StatusResponse,
}


class EtcdClient:
    """Connections to all members; calls use one of them until it fails."""

    def __init__(self, settings: EtcdSettings) -> None:
        if not settings.endpoints:
            raise ConfigError("etcd has no endpoints", hint="[etcd] endpoints = ['https://…:2379']")
        self._settings = settings
        self._members: list[aio.Channel] = []
        self._current = 0

    async def __aenter__(self) -> EtcdClient:
        secrets = _credentials(self._settings)
        for endpoint in self._settings.endpoints:
            scheme, _, address = endpoint.partition("://")
            if scheme == "https" and secrets is not None:
                member = aio.secure_channel(address, secrets, options=_OPTIONS)
            else:
                member = aio.insecure_channel(address, options=_OPTIONS)
            self._members.append(member)
        return self

    async def __aexit__(self, *_: object) -> None:
        members, self._members = self._members, []
        await asyncio.gather(*(member.close(grace=0) for member in members))

    async def read(self, call: str, request: Any) -> Any:
        """Return the answer of a call that may be repeated, or raise `Busy`."""
        error: aio.AioRpcError | None = None
        for _ in range(_TRIES_A_MEMBER * len(self._members)):
            member = self._current
            try:
                return await self._call(member, call, request)
            except aio.AioRpcError as e:
                if e.code() not in _RETRYABLE:
                    raise _refusal(e) from e
                error = e
                self._switch_from(member)
        raise Busy(
            f"no member of etcd answers: {error.details() if error else 'closed'}",
            hint=f"are the members at {', '.join(self._settings.endpoints)} up, and a majority?",
        ) from error

    async def write(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """Return the answer of a transaction; `UnknownOutcome` if etcd may have committed it."""
        member = self._current
        try:
            answer: pb.TxnResponse = await self._call(member, "KV/Txn", request)
        except aio.AioRpcError as e:
            if e.code() not in _RETRYABLE:
                raise _refusal(e) from e
            self._switch_from(member)
            raise UnknownOutcome(f"etcd did not answer a write: {e.details()}") from e
        return answer

    async def keep_alive(self, lease: int, timeout_s: float) -> int:
        """Renew a lease once; return its remaining seconds, 0 if etcd has ended it."""
        member = self._current
        call = self._members[member].stream_stream(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=pb.LeaseKeepAliveResponse.FromString,
        )(timeout=timeout_s, metadata=_LEADER_REQUIRED)
        try:
            await call.write(pb.LeaseKeepAliveRequest(ID=lease))
            answer = await call.read()
            return 0 if answer is aio.EOF else int(answer.TTL)
        except (aio.AioRpcError, asyncio.InvalidStateError) as e:
            self._switch_from(member)
            raise Busy(f"etcd did not renew a lease: {e}") from e
        finally:
            call.cancel()

    async def watch(
        self, key: bytes, range_end: bytes, after: int
    ) -> AsyncGenerator[pb.WatchResponse]:
        """Yield responses with all changes of a range after a revision, forever.

        A broken stream is resumed after the last revision that was yielded. Raises `Compacted`
        when etcd no longer has that part of its history.
        """
        pause_s = 0.1
        while True:
            member = self._current
            call = self._members[member].stream_stream(
                "/etcdserverpb.Watch/Watch",
                request_serializer=pb.WatchRequest.SerializeToString,
                response_deserializer=pb.WatchResponse.FromString,
            )(metadata=_LEADER_REQUIRED)
            wanted = pb.WatchCreateRequest(key=key, range_end=range_end, start_revision=after + 1)
            try:
                await call.write(pb.WatchRequest(create_request=wanted))
                async for response in call:
                    if response.compact_revision:
                        raise Compacted(f"etcd has compacted revision {after}", hint="list again")
                    if response.canceled:
                        break
                    if response.events:
                        after, pause_s = response.events[-1].kv.mod_revision, 0.1
                        yield response
            except (aio.AioRpcError, asyncio.InvalidStateError):
                pass
            finally:
                call.cancel()
            self._switch_from(member)
            await asyncio.sleep(pause_s)
            pause_s = min(2.0, pause_s * 2)

    async def _call(self, member: int, call: str, request: Any) -> Any:
        if not self._members:
            raise Busy("cannot use etcd: the client is closed")
        method = self._members[member].unary_unary(
            f"/etcdserverpb.{call}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=_CALLS[call].FromString,
        )
        return await method(request, timeout=CALL_S)

    def _switch_from(self, member: int) -> None:
        """Use the next member, unless a concurrent call has changed it already."""
        if member == self._current and self._members:
            self._current = (member + 1) % len(self._members)


async def read_range(
    client: EtcdClient, begin: bytes, end: bytes, limit: int | None = None
) -> tuple[int, list[pb.KeyValue]]:
    """Return the revision and the entries of a range, at most `limit`; without `end`: of a key."""
    found: list[pb.KeyValue] = []
    revision = 0
    while True:
        count = _PAGE if limit is None else max(1, min(_PAGE, limit - len(found)))
        request = pb.RangeRequest(key=begin, range_end=end, limit=count, revision=revision)
        answer = await client.read("KV/Range", request)
        revision = revision or int(answer.header.revision)
        found += answer.kvs
        if not answer.more or (limit is not None and len(found) >= limit):
            return revision, found[:limit]
        begin = answer.kvs[-1].key + b"\0"


def created_at(key: bytes, revision: int) -> pb.Compare:
    """Return the comparison that a key was created at a revision; 0: that it does not exist."""
    compare = pb.Compare
    return compare(result=compare.EQUAL, target=compare.CREATE, key=key, create_revision=revision)


def written_at(key: bytes, revision: int) -> pb.Compare:
    """Return the comparison that a key was written last at a revision."""
    compare = pb.Compare
    return compare(result=compare.EQUAL, target=compare.MOD, key=key, mod_revision=revision)


def _refusal(error: aio.AioRpcError) -> TwineError:
    """Return the error for a definite refusal: etcd changed nothing."""
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Busy(
            f"etcd accepts no writes: {details}",
            hint="compact and defragment it, then `etcdctl alarm disarm` (docs/operating.md)",
        )
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return ConfigError(f"etcd refuses this client: {details}", hint="check [etcd] certificate")
    if code is grpc.StatusCode.OUT_OF_RANGE:
        return Compacted(f"etcd has compacted the requested revision: {details}", hint="list again")
    return Busy(f"etcd refused a call: {code.name}: {details}")


def _credentials(settings: EtcdSettings) -> grpc.ChannelCredentials | None:
    if not settings.ca:
        return None

    def read(path: str) -> bytes | None:
        try:
            return Path(path).read_bytes() if path else None
        except OSError as e:
            raise ConfigError(f"cannot read {path}: {e.strerror}", hint="see [etcd]") from e

    return grpc.ssl_channel_credentials(
        root_certificates=read(settings.ca),
        private_key=read(settings.key),
        certificate_chain=read(settings.certificate),
    )
