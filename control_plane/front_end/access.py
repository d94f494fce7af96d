"""Identifies callers of the front end, and refuses calls that the route table does not allow."""

from __future__ import annotations

import dataclasses
import grp
import os
import pwd
import re
import time
from dataclasses import dataclass

from aiohttp import web

from control_plane.api.shard_routes import CALLER_HEADER
from wire.certificates import IDENTITY
from wire.connection import HttpConnection
from wire.errors import Forbidden, Unauthenticated
from wire.fairness import Peer
from wire.peers import local_user, peer_of, principal
from wire.routes import Route
from wire.tls import FRONT_END

ANYONE = "anyone"
ROLES = (ANYONE, "host", "user", "component", "local")
"""All roles; `anyone` is a TLS client without a certificate."""
USERS = frozenset(("user", "local"))
"""Roles that a route admits by `needs` only."""
_FRONT_END = FRONT_END.rpartition("/")[2]
_TIME = re.compile(r"\d{1,12}(\.\d{1,9})?")
OUTSIDE_TABLE = ("openapi", "metrics")
"""Routes of the application that are not in the table."""


@dataclass(frozen=True, slots=True)
class Access:
    """The front end's rules; `socket_group`, root and the owner may use the unix socket."""

    owner_uid: int
    socket_group: str = ""
    domain: str = ""
    """Trust domain of allowed callers; empty: all domains of the authority."""

    def __call__(self, request: web.Request, route: Route) -> Peer:
        """Return the caller, or raise `Unauthenticated` or `Forbidden`."""
        peer = self.identify(request)
        check_role(peer, route)
        return peer

    def identify(self, request: web.Request) -> Peer:
        """Return the peer at the other end of the connection."""
        transport = request.transport
        user = local_user(transport)
        if user is not None:
            return self._local(user[0])
        connection = request.protocol
        peer: Peer
        if not isinstance(connection, HttpConnection):
            peer = self._tls_peer(request)
        elif connection.peer is None or time.time() >= connection.not_after:
            peer = connection.peer = self._tls_peer(request)
        else:
            peer = connection.peer
        return self._forwarded_caller(peer, request.headers.get(CALLER_HEADER, ""))

    def _tls_peer(self, request: web.Request) -> Peer:
        """Return the peer that proved an identity when the connection was made."""
        transport, address = request.transport, request.remote or ""
        ssl_object = None if transport is None else transport.get_extra_info("ssl_object")
        if ssl_object is None:
            raise Unauthenticated("the front end is served over TLS only")
        certificate = ssl_object.getpeercert()
        if not certificate:
            return Peer(name=ANYONE, role=ANYONE, address=address)
        return dataclasses.replace(peer_of(certificate, self.domain), address=address)

    def _forwarded_caller(self, peer: Peer, caller: str) -> Peer:
        """Return the user whose request a front end forwards; any other peer calls for itself.

        A front end may name a user, or a caller without a certificate, and nothing else. So a
        stolen credential of a front end cannot act as a host, a component or a local user.
        """
        if peer.role != "component" or principal(peer) != _FRONT_END:
            return peer
        identity, _, valid_from = caller.partition(" ")
        if identity == ANYONE:
            return Peer(name=ANYONE, role=ANYONE, address=peer.address)
        match = IDENTITY.fullmatch(identity)
        is_of_domain = match is not None and match["cluster"] in (self.domain or match["cluster"],)
        if (
            match is None
            or not is_of_domain
            or match["role"] != "user"
            or not _TIME.fullmatch(valid_from)
        ):
            raise Forbidden(f"{peer.name} may call for users only, not for {caller[:200]!r}")
        return Peer(name=identity, role="user", address=peer.address, valid_from=float(valid_from))

    def _local(self, uid: int) -> Peer:
        if uid not in (0, self.owner_uid) and not _is_member(uid, self.socket_group):
            raise Forbidden(
                f"user id {uid} may not use this socket",
                hint="call as root, or be added to the socket's group",
            )
        return Peer(name=f"local:{uid}", role="local", is_trusted=True)


def caller_header(peer: Peer) -> str:
    """Return the header by which a front end names its caller to the core; see `Access`."""
    return peer.name if peer.role == ANYONE else f"{peer.name} {peer.valid_from!r}"


def check_role(peer: Peer, route: Route) -> None:
    """Raise unless the route admits this role; a route without `roles` and `needs` admits none."""
    allowed = set(route.roles) - USERS
    if route.needs or route.name in OUTSIDE_TABLE:
        allowed |= USERS
    if peer.role in allowed or ANYONE in allowed:
        return
    if peer.role == ANYONE:
        raise Unauthenticated(
            f"{route.method} {route.path} needs a certificate",
            hint="pass --credential FILE (made by `twine-control-plane user add`)",
        )
    raise Forbidden(
        f"{peer.name} may not call {route.method} {route.path}: it is for"
        f" {', '.join(sorted(allowed)) or 'no role'}"
    )


def _is_member(uid: int, group: str) -> bool:
    """Return whether a user belongs to a group now, by the system's databases."""
    if not group:
        return False
    try:
        user = pwd.getpwuid(uid)
        return grp.getgrnam(group).gr_gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except KeyError:
        return False
