"""Groups of users, operators and host admins: small, stored, and all in memory.

A credential carries only a name, so a role can be taken away at any moment without a new
credential.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from control_plane.api.people import (
    Grant,
    Grants,
    Group,
    Groups,
    GroupSpec,
    Principal,
    Revocation,
    Role,
)
from control_plane.identity.core.certificates import SKEW_S
from control_plane.identity.core.permissions import Caller
from control_plane.runtime.runtime import Runtime
from control_plane.store import Delete, Operation, Put, Store
from control_plane.store.records import GROUPS, HOST_ADMINS, OPERATORS, REVOKED, decode
from wire.errors import Conflict, InvalidInput, NotFound, Unauthenticated
from wire.fairness import Peer
from wire.peers import principal
from wire.violations import violations

log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)

MAX_GROUPS = MAX_GRANTS = 1000
MAX_CALLERS = 4096
"""Users whose groups and grants are cached."""
_GRANT_PREFIXES = {Role.OPERATOR: OPERATORS, Role.HOST_ADMIN: HOST_ADMINS}
"""Role that can be granted → where its grants are."""
_PREFIXES = {"group": GROUPS, "operator": OPERATORS, "host-admin": HOST_ADMINS}
KINDS = frozenset(_PREFIXES)
"""The audit log's names of these kinds of objects."""


class People:
    """The only writer of groups and grants. `load` comes before everything else."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        operators: Sequence[str] = (),
        approvers: Sequence[str] = (),
    ) -> None:
        """`operators` and `approvers` have their roles by the configuration."""
        self._store = store
        self._runtime = runtime
        self._operators = tuple(operators)
        self._approvers = frozenset(approvers)
        self._groups: dict[str, Group] = {}
        self._grants: dict[Role, dict[str, Grant]] = {role: {} for role in _GRANT_PREFIXES}
        self._revisions: dict[str, int] = {}
        self._revoked: dict[str, Revocation] = {}
        """By the last two parts of the identity: `user/ann`, `host/vm1`."""
        self._callers: dict[str, Caller] = {}
        """Cached answers of `user`, until a group or a grant changes."""
        self._lock = asyncio.Lock()
        self._is_doubtful = False
        """Whether the last write failed or has an unknown outcome: all is read again first."""

    async def load(self) -> None:
        """Read everything."""
        self._revisions.clear()
        self._groups = await self._read(GROUPS, Group)
        for role, prefix in _GRANT_PREFIXES.items():
            self._grants[role] = await self._read(prefix, Grant)
        self._revoked = await self._read(REVOKED, Revocation)
        self._callers.clear()

    async def _read(self, prefix: str, kind: type[T]) -> dict[str, T]:
        found: dict[str, T] = {}
        for entry in (await self._store.list_prefix(prefix)).entries:
            found[entry.key.removeprefix(prefix)] = decode(entry.value, kind, entry.key)
            self._revisions[entry.key] = entry.revision
        return found

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Hold the lock of all changes; what is in memory is what the store has."""
        async with self._lock:
            if self._is_doubtful:
                await self.load()
                self._is_doubtful = False
            yield

    def is_void(self, name: str, valid_from: float) -> bool:
        """Return whether a certificate was revoked, by its identity and start of validity."""
        found = self._revoked.get("/".join(name.split("/")[-2:])) if self._revoked else None
        return found is not None and int(valid_from + SKEW_S) <= int(found.at)

    def check(self, peer: Peer) -> None:
        """Raise `Unauthenticated` for a caller whose identity was revoked."""
        if peer.valid_from and self.is_void(peer.name, peer.valid_from):
            raise Unauthenticated(
                f"the certificate of {principal(peer)} was revoked",
                hint="ask an operator for a new one",
            )

    def revocations(self) -> list[Revocation]:
        """Return the revocations: user or host, and time."""
        return [self._revoked[key] for key in sorted(self._revoked)]

    async def revoke_identity(self, role: str, name: str, by: str) -> Revocation:
        """Revoke all present certificates of a user; open connections end, too.

        A certificate has its time of issue to the second: certificates issued within this second
        are void, too.
        """
        key = f"{role}/{name}"
        async with self._changing():
            revocation = Revocation(role=role, name=name, at=self._runtime.wall(), by=by)
            await self._write(REVOKED + key, msgspec.json.encode(revocation))
            self._revoked[key] = revocation
        log.warning("an identity was revoked", extra={"role": role, "name_": name, "by": by})
        return revocation

    def user(self, name: str) -> Caller:
        """Return a user with its roles and groups."""
        known = self._callers.get(name)
        if known is None:
            if len(self._callers) >= MAX_CALLERS:
                self._callers.clear()
            known = self._callers[name] = self._resolve(name)
        return known

    def _resolve(self, name: str) -> Caller:
        groups = frozenset(g.name for g in self._groups.values() if name in g.members)
        caller = Caller(name, groups=groups, is_approver=name in self._approvers)
        if caller.is_among(self._grants[Role.HOST_ADMIN]):
            caller = replace(caller, is_host_admin=True)
        if caller.is_among((*self._operators, *self._grants[Role.OPERATOR])):
            return replace(caller, is_operator=True, is_approver=True)
        return caller

    def groups(self) -> Groups:
        """Return all groups, by name."""
        return Groups(groups=[self._groups[name] for name in sorted(self._groups)])

    def operators(self) -> Grants:
        """Return the operators and host admins, and since when they have the role."""
        granted = [of[who] for of in self._grants.values() for who in sorted(of)]
        return Grants(granted=granted, configured=list(self._operators))

    def revision(self, key: str) -> int:
        """Return the revision of `group/NAME`, `operator/WHO`, …; 0: there is none."""
        kind, _, name = key.partition("/")
        return self._revisions.get(_PREFIXES[kind] + name, 0)

    def unknown_groups(self, principals: Collection[str]) -> list[str]:
        """Return the groups among principals that do not exist; any user name is allowed."""
        groups = [p.removeprefix("group:") for p in principals if p.startswith("group:")]
        return [name for name in groups if name not in self._groups]

    async def put_group(self, name: str, spec: GroupSpec) -> Group:
        """Create a group, or replace its members."""
        _check_name(name, Group, {"name": name})
        group = Group(name=name, members=sorted(set(spec.members)))
        async with self._changing():
            if name not in self._groups and len(self._groups) >= MAX_GROUPS:
                raise Conflict(
                    (f"the maximum of {MAX_GROUPS} groups exists already"), hint="remove one"
                )
            if self._groups.get(name) != group:
                await self._write(GROUPS + name, msgspec.json.encode(group))
                self._groups[name] = group
                self._callers.clear()
        return group

    async def delete_group(self, name: str) -> None:
        """Remove a group; entitlements may still name it, which then has no effect."""
        async with self._changing():
            if name not in self._groups:
                raise NotFound(f"there is no group {name!r}", hint="twinectl group list")
            await self._write(GROUPS + name, None)
            del self._groups[name]
            self._callers.clear()

    async def grant(self, who: str, by: str, role: Role = Role.OPERATOR) -> Grant:
        """Make a user an operator, or a host admin."""
        _check_name(who, Principal, who)
        if missing := self.unknown_groups([who]):
            raise NotFound(f"there is no group {missing[0]!r}", hint="twinectl group set NAME …")
        async with self._changing():
            grants = self._grants[role]
            known = grants.get(who)
            if known is not None:
                return known
            if len(grants) >= MAX_GRANTS:
                raise Conflict(
                    f"the maximum of {MAX_GRANTS} {role}s exists already",
                    hint="grant the role to a group",
                )
            grant = Grant(who=who, role=role, at=self._runtime.wall(), by=by)
            await self._write(_GRANT_PREFIXES[role] + who, msgspec.json.encode(grant))
            grants[who] = grant
            self._callers.clear()
        log.warning("a role was granted", extra={"role": role, "who": who, "by": by})
        return grant

    async def revoke(self, who: str, role: Role = Role.OPERATOR) -> None:
        """Take a role from a user, from the next request on."""
        async with self._changing():
            grants = self._grants[role]
            if role is Role.OPERATOR and who in self._operators and who not in grants:
                raise Conflict(
                    f"{who} is an operator by the configuration",
                    hint="remove it from `operators` there and restart the control plane",
                )
            if who not in grants:
                raise NotFound(f"{who!r} does not have the role {role}", hint="twinectl role list")
            await self._write(_GRANT_PREFIXES[role] + who, None)
            del grants[who]
            self._callers.clear()
        log.warning("a role was revoked", extra={"role": role, "who": who})

    async def _write(self, key: str, value: bytes | None) -> None:
        """Write one key at the revision that was read; under the lock."""
        operation: Operation = Delete(key) if value is None else Put(key, value)
        self._is_doubtful = True
        revision = await self._store.txn({key: self._revisions.get(key, 0)}, [operation])
        self._is_doubtful = False
        if value is None:
            self._revisions.pop(key, None)
        else:
            self._revisions[key] = revision


def _check_name(name: str, kind: Any, value: Any) -> None:
    if found := violations(value, kind):
        raise InvalidInput(f"{name!r} cannot be used: {found[0].reason}", errors=tuple(found))
