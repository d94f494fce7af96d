"""The role of this process, and the leaders of all roles (docs/adr/0153).

All processes of a region write to one store. Each role has a leader, elected with an epoch of one
shared counter. The election also writes the leader's record, so a follower of the store sees
elections in the order of their epochs. A replaced leader sees its successor before it can adopt a
later epoch of another role.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec

from agent.api.term import HEADER, Term
from control_plane.api.ownership import RoleProcess
from control_plane.runtime.following import Following
from control_plane.runtime.table import Table
from control_plane.store import Put, Store
from control_plane.store.records import PROCESSES, encode
from wire.errors import Busy, Unreachable

ALL, CORE = "all", "core"
_FIRST = "control-plane"
"""Name of the record of `all` or `core`: only one of them leads."""


class OwnRole(msgspec.Struct, frozen=True, kw_only=True):
    """The role of a process."""

    name: str = ALL
    """`all`, `core`, or `shard-N`."""
    shard: int | None = None
    """Its shard; None: the first one (`core`), or all of them (`all`)."""
    url: str = ""
    shards: int = 1
    life: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))

    @property
    def is_core(self) -> bool:
        """Return whether the process has the roles that exist once in a region."""
        return self.shard is None

    @property
    def lock(self) -> str:
        """Return the name of the role's leader lock; `all` and `core` share one."""
        return "" if self.is_core else self.name

    @property
    def writer(self) -> str:
        """Return the name of this process as a writer of tables that several processes write."""
        return self.lock

    def runs(self, shard: int) -> bool:
        """Return whether the process runs a shard."""
        if self.name == ALL:
            return True
        return shard == (self.shard or 0)

    def election_records(self, epoch: int) -> Sequence[Put]:
        """Return the writes that are part of its election."""
        record = RoleProcess(
            role=self.name,
            epoch=epoch,
            life=self.life,
            url=self.url,
            shards=self.shards,
            host=socket.gethostname(),
            since=time.time(),
        )
        return [Put(PROCESSES + (self.lock or _FIRST), encode(record))]


class RoleLeaders:
    """The leader of each role, as written by the elections."""

    def __init__(self, store: Store, own: OwnRole) -> None:
        self.own, self._store = own, store
        self.table: Table[RoleProcess] = Table(store, PROCESSES, RoleProcess, "process")
        self.following: Following | None = None
        self._epoch = store.epoch()
        self._replaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.table.listen(self._leader_changed)

    async def load(self) -> None:
        """Read the leaders; `Busy` if this process is a shard and no core has led."""
        await self.table.load()
        if not self.own.is_core:
            self._check_core()

    def epoch(self) -> int:
        """Return the newest epoch of any role."""
        return self._epoch

    def url_of(self, shard: int) -> str:
        """Return the URL of a shard's process, or raise `Unreachable`."""
        record = self.leader_of(shard)
        if record is None:
            raise shard_unavailable(shard, "no process of it has ever led")
        return record.url

    def leader_of(self, shard: int) -> RoleProcess | None:
        """Return the process that led a shard last; None: it is the core's, or none has led."""
        return self.table.find(f"shard-{shard}")

    def shards(self) -> list[int]:
        """Return the shards that a process has led."""
        names = (name.removeprefix("shard-") for name in self.table if name.startswith("shard-"))
        return sorted(int(name) for name in names if name.isdecimal())

    async def has_led(self, shard: int) -> bool:
        """Return whether a process has ever led a shard, read from the store."""
        return await self._store.get(f"{PROCESSES}shard-{shard}") is not None

    def own_record(self) -> RoleProcess | None:
        """Return the record of this process, once it leads."""
        record = self.table.find(self.own.lock or _FIRST)
        return record if record is not None and record.life == self.own.life else None

    def core_life(self) -> str:
        """Return the `life` of the process that led the core last; empty: none has led."""
        core = self.table.find(_FIRST)
        return "" if core is None else core.life

    def core_url(self) -> str:
        """Return the URL of the core."""
        return self.table.get(_FIRST).url

    def headers(self) -> Mapping[str, str]:
        """Return the term header of a request to an agent: the life of the core.

        It is the same in all processes, with the revision up to which each followed the store.
        """
        core, following = self.table.find(_FIRST), self.following
        if core is None or following is None:
            return {}
        began = self.table.revision(_FIRST)
        return {HEADER: Term(core.life, began, max(began, following.at)).text()}

    async def wait_replaced(self) -> None:
        """Never return; raise `Busy` once this process no longer leads its role."""
        await asyncio.shield(self._replaced)

    def _check_core(self) -> None:
        core = self.table.find(_FIRST)
        if core is None or core.role != CORE:
            raise Busy(
                f"cannot run {self.own.name}: no control plane with --role core has led this store",
                hint="start `twine-control-plane serve --role core` first, with the same [etcd]",
            )

    def _leader_changed(self, name: str, _: RoleProcess | None, after: RoleProcess | None) -> None:
        if self._replaced.done() or after is None:
            return
        if name == (self.own.lock or _FIRST) and after.life != self.own.life:
            if after.epoch > self._store.epoch():
                self._end(f"another process leads {self.own.name} now: {after.host}")
        elif name == _FIRST and not self.own.is_core and after.role != CORE:
            self._end(f"{self.own.name} ends: a control plane with --role {after.role} leads")
        else:
            self._epoch = max(self._epoch, after.epoch)

    def _end(self, why: str) -> None:
        self._replaced.set_exception(Busy(why))
        self._replaced.exception()  # the owner of the process calls `wait_replaced`


def shard_unavailable(shard: int, why: str) -> Unreachable:
    """Return the error of a request for a shard whose process does not answer."""
    return Unreachable(
        f"shard {shard} is unavailable: {why}; its tasks continue to run",
        hint="try again in some seconds; all other shards answer",
    )
