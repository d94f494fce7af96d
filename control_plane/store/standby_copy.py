"""A standby's copy of the store in memory, so that a take-over need not read it from etcd."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, insort

from control_plane.store import etcd_pb2 as pb
from control_plane.store.etcd_client import EtcdClient, read_range
from control_plane.store.progress import FollowedRevision
from wire.errors import TwineError

log = logging.getLogger(__name__)
_RETRY_S = 1.0
_LOAD_S, _BEHIND_S = 30.0, 1.0
"""After the election: how long lists are answered from the copy, and how long a list waits until
the copy has all earlier writes."""


class StandbyCopy(FollowedRevision):
    """All keys of a range of etcd, by one list and a watch; revisions are etcd's own.

    It always equals etcd's state at one revision. A process that has just become the leader loads
    its tables from it, and then drops it.
    """

    def __init__(self, client: EtcdClient, begin: bytes, end: bytes) -> None:
        super().__init__()  # `at` is 0 while there is no copy
        self._client, self._begin, self._end = client, begin, end
        self._values: dict[bytes, pb.KeyValue] = {}
        self._order: list[bytes] | None = None
        """All keys, sorted at the first list."""
        self.serves_lists = False
        """Whether lists are answered from it: while this process loads as the new leader."""
        self._running: asyncio.Task[None] | None = None
        self._dropping: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin to copy while another process leads; a repeated call changes nothing."""
        if self._running is None:
            self._running = asyncio.create_task(self.run())

    def serve_lists(self) -> None:
        """Answer lists from the copy, if there is one, for `_LOAD_S` seconds."""
        if self._running is not None:
            self.serves_lists = True
            self._dropping = asyncio.get_running_loop().call_later(_LOAD_S, self._drop)

    async def is_up_to(self, revision: int) -> bool:
        """Return whether the copy has everything up to a revision; drop it if not."""
        if not await self.wait_reached(revision, _BEHIND_S):
            log.warning("the copy is too old; the store is read", extra={"revision": self.at})
            self._drop()
        return self.serves_lists

    async def end(self) -> None:
        """End copying."""
        if self._dropping is not None:
            self._dropping.cancel()
        running = self._running
        self._drop()
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)

    def _drop(self) -> None:
        self.serves_lists = False
        if self._running is not None:
            self._running.cancel()
            self._running = None
        self._values.clear()
        self._order = None

    async def run(self) -> None:
        """Follow until cancelled; after a compaction everything is listed again."""
        while True:
            try:
                self.advance(await self._list())
                async for response in self._client.watch(self._begin, self._end, self.at):
                    for event in response.events:
                        self._apply(event)
                    self.advance(int(response.events[-1].kv.mod_revision))
            except TwineError as e:
                log.info("the copy is read again", extra={"reason": str(e)})
                self.at = 0
                await asyncio.sleep(_RETRY_S)

    def between(self, begin: bytes, end: bytes, limit: int | None) -> list[pb.KeyValue]:
        """Return the entries of a range in order, at most `limit`."""
        if self._order is None:
            self._order = sorted(self._values)
        first = bisect_left(self._order, begin)
        last = bisect_left(self._order, end)
        if limit is not None:
            last = min(last, first + limit)
        return [self._values[key] for key in self._order[first:last]]

    async def _list(self) -> int:
        """Read all keys at one revision, and return it."""
        self._values.clear()
        self._order = None
        revision, found = await read_range(self._client, self._begin, self._end)
        self._values = {kv.key: kv for kv in found}
        return revision

    def _apply(self, event: pb.Event) -> None:
        key, order = event.kv.key, self._order
        if event.type == pb.Event.DELETE:
            if self._values.pop(key, None) is not None and order is not None:
                del order[bisect_left(order, key)]
            return
        if order is not None and key not in self._values:
            insort(order, key)
        self._values[key] = event.kv
