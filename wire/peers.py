"""Identifies the other side of a connection, as TLS or the kernel proved it.

Only the URI in the certificate's subject alternative name counts, in SPIFFE's form:
`spiffe://<cluster>/host/<name>`, `/component/<name>`, `/user/<name>` or, for a TaskController,
`/controller/<name>`. The common name, DNS names and addresses grant no rights.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from typing import Any

from wire.certificates import IDENTITY, begins_at, ends_at
from wire.errors import Forbidden, Unauthenticated
from wire.fairness import Peer
from wire.networks import user_of


def peer_of(certificate: Mapping[str, Any] | None, domain: str = "") -> Peer:
    """Return the holder of a verified certificate (as `getpeercert()` returns it).

    Raises `Unauthenticated` without a certificate, or if it has no identity of Twine, is of
    another trust domain than `domain` (empty: any), or has expired since the connection was made.
    """
    if not certificate:
        raise Unauthenticated(
            "the caller sent no client certificate", hint="call with a credential of this cluster"
        )
    uris = [v for kind, v in certificate.get("subjectAltName", ()) if kind == "URI"]
    match = IDENTITY.fullmatch(uris[0]) if len(uris) == 1 else None
    if match is None:
        raise Unauthenticated(f"the certificate names no identity of Twine: {uris[:2]!r}")
    if domain and match["cluster"] != domain:
        raise Unauthenticated(
            f"the certificate is of trust domain {match['cluster']!r}; this is {domain!r}"
        )
    if time.time() >= ends_at(certificate):
        raise Unauthenticated(
            f"the certificate of {match['role']} {match['name']} has expired",
            hint="call with a new one, on a new connection",
        )
    return Peer(
        name=uris[0],
        role=match["role"],
        valid_from=begins_at(certificate),
        is_trusted=match["role"] == "component",
    )


def principal(peer: Peer) -> str:
    """Return the last part of the identity: the name of the host, component or user."""
    return peer.name.rpartition("/")[2]


def expect_peer(certificate: Mapping[str, Any] | None, path: str, domain: str = "") -> Peer:
    """Return the holder of a certificate; `Forbidden` unless it is `path`, such as `/host/vm1`.

    `path` may list several identities, separated by `|`.
    """
    peer = peer_of(certificate, domain)
    identity = "/" + peer.name.removeprefix("spiffe://").partition("/")[2]
    if identity not in path.split("|"):
        raise Forbidden(f"expected to reach {path.replace('|', ' or ')}, but {identity} answered")
    return peer


def tls_peer(transport: asyncio.BaseTransport | None, domain: str = "") -> Peer | None:
    """Return the peer that proved its identity over TLS; None on a connection without TLS.

    Raises `Unauthenticated` if TLS is used and the client sent no certificate.
    """
    ssl_object = None if transport is None else transport.get_extra_info("ssl_object")
    return None if ssl_object is None else peer_of(ssl_object.getpeercert(), domain)


def local_user(transport: asyncio.BaseTransport | None) -> tuple[int, int] | None:
    """Return (uid, gid) of the process on the other end of a unix socket, else None."""
    sock = None if transport is None else transport.get_extra_info("socket")
    return None if sock is None or sock.family != socket.AF_UNIX else user_of(sock)
