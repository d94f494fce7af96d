"""Admission of connections to an HTTP server: limits and deadlines before any request.

A connection costs only a descriptor until its first byte comes. TLS begins then and takes a third
of a megabyte. Until TLS is established the connection is pending. When too many are pending, the
oldest one is closed. If the address of the new connection has used up its share, the oldest one
of that address is closed. So a new caller always gets a place, and one address cannot keep out
another.

Established connections without a certificate have places of their own, because a pending
connection may still show a certificate. Connections with a certificate are not affected by
these limits. Each step has a deadline. A sweep closes connections past their deadline: at most
once a second, and only while there is a deadline (docs/adr/0114).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Self

from aiohttp import web

from wire.connection import HttpConnection
from wire.handshakes import Handshakes
from wire.limits import ConnectionLimits
from wire.networks import ConnectionsByNetwork, Suspects, origin_of
from wire.pending import PendingConnection, PendingConnections, first_byte, is_disconnected

log = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before other work of the event loop (about 20 us each)."""
_SWEEP_S = 1.0
"""Time from an event of a connection to the next sweep; the least time between two sweeps."""
_IDLE_S = 30.0
"""The longest time between two sweeps while a connection is open: setting the clock moves the end
of a certificate."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


IsVoid = Callable[[str, float], bool]
"""Returns whether a certificate was revoked, by its name and the time it begins."""


class ConnectionAdmission:
    """One listening socket of an HTTP server, which accepts connections within its context."""

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        limits: ConnectionLimits,
        logger: logging.Logger,
        is_void: IsVoid | None = None,
    ) -> None:
        """`is_void` is called once a second; None: no certificate can be revoked."""
        self.limits = limits
        self._runner, self._listener, self._tls = runner, listener, tls
        self._logger, self._is_void = logger, is_void
        self._loop = asyncio.get_running_loop()
        self._pending = PendingConnections()
        self._handshakes = Handshakes(self._pending, tls, limits, self.admit, self._close)
        self._connections: dict[HttpConnection, None] = {}
        self._anonymous: ConnectionsByNetwork[HttpConnection] = ConnectionsByNetwork()
        """Connections without a certificate. They have places of their own, because a pending
        connection may still prove an identity."""
        self._of_peer: Counter[str] = Counter()
        self._suspects = Suspects()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Closed for a moment when no descriptor is left, to accept and close a connection."""
        self._closed_by_reason: Counter[str] = Counter()
        self._sweeping: asyncio.TimerHandle | None = None
        self._is_soon = False
        """Whether the next sweep comes within a second."""

    async def __aenter__(self) -> Self:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop accepting connections; the runner closes the open ones."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        os.close(self._spare)
        tasks = [pending.task for pending in self._pending if pending.task is not None]
        for pending in list(self._pending):
            self._close(pending, "")
        self._handshakes.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._is_soon = True  # connections that end from now on start no sweep
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def count(self) -> tuple[int, int]:
        """Return the number of connections, and how many of them proved no identity."""
        pending = len(self._pending)
        return pending + len(self._connections), pending + len(self._anonymous)

    # -- accepting

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, name = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                self._refuse_without_descriptor()
                return
            self._add_pending(sock, name)

    def _refuse_without_descriptor(self) -> None:
        """Close a pending connection, or the new one, when no descriptor is free.

        Otherwise the listening socket stays readable and the event loop spins.
        """
        self._count_closed("no descriptor is left")
        if not self._close_oldest():
            os.close(self._spare)
            try:
                self._listener.accept()[0].close()
            except OSError:
                pass
            finally:
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _add_pending(self, sock: socket.socket, name: object) -> None:
        sock.setblocking(False)
        if is_disconnected(sock, tls=self._tls is not None):
            sock.close()  # it closed already, and displaces no connection
            return
        address, network = origin_of(sock, name)
        is_full = len(self._pending) >= self.limits.pending
        if len(self._pending.of(network)) >= self.limits.unproved_per_address:
            has_room = self._close_oldest_of(network)
        elif is_full or self.count()[0] >= self.limits.connections:
            has_room = self._close_oldest()
        else:
            has_room = True
        if not has_room:
            self._count_closed("there are too many")
            sock.close()
            return
        pending = PendingConnection(sock, address, network, self._loop.time())
        self._pending.add(pending)
        self._sweep_soon()
        if self._is_silent(pending):
            self._loop.add_reader(sock.fileno(), self._is_silent, pending)

    def _close_oldest(self) -> bool:
        """Close a pending connection, else an idle anonymous one; return whether there was one.

        Networks that wasted a place before go first, then silent connections: an honest client
        sends at once. Whether bytes have arrived is checked before closing.
        """
        pending, suspects, now = self._pending, self._suspects, self._loop.time()
        while (oldest := pending.next_to_close(suspects, now)) is not None:
            if oldest not in pending.silent or self._is_silent(oldest) or oldest not in pending:
                self._close(oldest, "there are too many")
                return True
        return self._close_oldest_idle(self._anonymous.largest())

    def _close_oldest_of(self, network: str) -> bool:
        """Close the oldest pending connection of a network, a silent one first, if there is one."""
        known, silent = self._pending.of(network), self._pending.silent
        still_silent = (one for one in list(known) if one in silent and self._is_silent(one))
        oldest = next(still_silent, None) or next(iter(known), None)
        if oldest is not None:
            self._close(oldest, "there are too many")
        return oldest is not None

    def _is_silent(self, pending: PendingConnection) -> bool:
        """Return whether a pending connection sent no byte.

        If it did, its handshake is queued; if it ended, it is closed.
        """
        byte = first_byte(pending.sock)
        if byte is None:
            return True
        if not byte:
            self._close(pending, "")
            return False
        self._loop.remove_reader(pending.sock.fileno())
        self._pending.record_first_byte(pending)
        self._handshakes.queue(pending)
        return False

    def admit(self, pending: PendingConnection, transport: asyncio.Transport) -> None:
        """Admit a pending connection after its TLS handshake, or at once without TLS."""
        self._pending.remove(pending)
        certificate = transport.get_extra_info("peercert") or {}
        connection = HttpConnection(
            self._runner, self._logger, self._remove, self._sweep_soon, pending, certificate
        )
        name = connection.name
        if name and self._of_peer[name] >= self.limits.per_peer:
            self._count_closed("one identity has too many")
            transport.abort()
            return
        if not name and not self._has_room(pending.network):
            self._count_closed("there are too many")
            transport.abort()
            return
        self._connections[connection] = None
        self._sweep_soon()
        if name:
            self._of_peer[name] += 1
            self._suspects.record_proof(pending.network, self._loop.time())
        else:
            self._anonymous.add(pending.network, connection)
        transport.set_protocol(connection)
        connection.connection_made(transport)

    def _has_room(self, network: str) -> bool:
        """Return whether an anonymous connection is admitted; an idle one is closed if needed."""
        known = self._anonymous.of(network)
        if len(known) < self.limits.unproved_per_address:
            if len(self._anonymous) < self.limits.anonymous:
                return True
            known = self._anonymous.largest()
        return self._close_oldest_idle(known)

    def _close_oldest_idle(self, connections: Iterable[HttpConnection]) -> bool:
        """Close the oldest of some connections without a running request, if there is one."""
        idle = next((connection for connection in connections if not connection.is_served), None)
        if idle is not None:
            self._close(idle, "there are too many")
        return idle is not None

    # -- closing

    def _remove(self, connection: HttpConnection) -> None:
        if self._connections.pop(connection, self) is self:
            return
        if connection.name:
            self._of_peer[connection.name] -= 1
            if not self._of_peer[connection.name]:
                del self._of_peer[connection.name]
        else:
            self._anonymous.remove(connection.network, connection)

    def _close(self, connection: PendingConnection | HttpConnection, why: str) -> None:
        """Close a connection at once; `why` is counted for the log."""
        if why:
            self._count_closed(why)
        if isinstance(connection, HttpConnection):
            connection.abort()
            self._remove(connection)
        elif self._pending.remove(connection):
            if why:
                self._suspects.add(connection.network, self._loop.time())
            connection.close(self._loop)

    # -- deadlines

    def _count_closed(self, why: str) -> None:
        """Count a connection that was ended, for the log."""
        self._closed_by_reason[why] += 1
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        """Schedule a sweep soon: a connection may have got a deadline, or an earlier one."""
        if not self._is_soon:
            self._is_soon = True
            self._sweep_in(_SWEEP_S)

    def _sweep_in(self, pause_s: float) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._sweeping = self._loop.call_later(pause_s, self._sweep_once)

    def _sweep_once(self) -> None:
        self._sweeping, self._is_soon = None, False
        try:
            next_s = self.sweep()
        except Exception:
            log.exception("sweeping connections failed; this is a bug")
            next_s = _SWEEP_S
        if next_s is not None and not self._is_soon:
            self._sweep_in(next_s)

    def sweep(self) -> float | None:
        """Close all connections past a deadline, and log how many were closed by reason.

        Returns the seconds until the next sweep is due; None without connections.
        """
        now, wall, limits = self._loop.time(), time.time(), self.limits
        next_s = _IDLE_S
        for pending in list(self._pending):
            left_s = pending.since + limits.first_byte_s - now
            if pending.task is None and left_s <= 0:
                self._close(pending, "no request came")
            elif pending.task is None:
                next_s = min(next_s, left_s)
        for connection in list(self._connections):
            if (
                connection.name
                and self._is_void
                and self._is_void(connection.name, connection.valid_from)
            ):
                self._close(connection, "the identity was revoked")
                continue
            at, why = connection.deadline(now, wall, limits)
            if at <= now:
                self._close(connection, why)
            else:
                next_s = min(next_s, at - now)
        if self._closed_by_reason:
            fields = {"connections": self.count()[0], "unproved": self.count()[1]}
            log.warning(
                "connections were closed", extra={**fields, "why": dict(self._closed_by_reason)}
            )
            self._closed_by_reason.clear()
        if self._connections and self._is_void is not None:
            return _SWEEP_S  # revocations are not announced here
        return max(_SWEEP_S, next_s) if self._pending or self._connections else None
