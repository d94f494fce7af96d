"""Connections that are accepted and not yet admitted."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterator, Mapping
from itertools import chain

from wire.networks import ConnectionsByNetwork, Suspects


class PendingConnection:
    """An accepted connection; only its address is known."""

    __slots__ = ("address", "is_transports", "network", "since", "sock", "task")

    def __init__(self, sock: socket.socket, address: str, network: str, since: float) -> None:
        self.sock, self.address, self.network, self.since = sock, address, network, since
        self.is_transports = False
        """Whether a transport closes the socket."""
        self.task: asyncio.Task[None] | None = None
        """Its handshake, once that has begun."""

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """End its handshake, and close its socket unless a transport does."""
        if self.task is not None:
            self.task.cancel()
        if not self.is_transports and self.sock.fileno() >= 0:
            loop.remove_reader(self.sock.fileno())
            self.sock.close()


class PendingConnections:
    """The pending connections of one listening socket, the oldest first."""

    def __init__(self) -> None:
        self._all: dict[PendingConnection, None] = {}
        self._silent: dict[PendingConnection, None] = {}
        self._by_network: ConnectionsByNetwork[PendingConnection] = ConnectionsByNetwork()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[PendingConnection]:
        return iter(self._all)

    def __contains__(self, connection: object) -> bool:
        return connection in self._all

    @property
    def silent(self) -> Mapping[PendingConnection, None]:
        """The connections that sent no byte yet, the oldest first."""
        return self._silent

    def of(self, network: str) -> Mapping[PendingConnection, None]:
        """Return the pending connections of a network, the oldest first."""
        return self._by_network.of(network)

    def add(self, connection: PendingConnection) -> None:
        """Add a connection that sent no byte yet."""
        self._all[connection] = self._silent[connection] = None
        self._by_network.add(connection.network, connection)

    def record_first_byte(self, connection: PendingConnection) -> None:
        """Record that a connection sent its first byte."""
        self._silent.pop(connection, None)

    def remove(self, connection: PendingConnection) -> bool:
        """Remove a connection, and return whether it was pending."""
        if self._all.pop(connection, self) is self:
            return False
        self._silent.pop(connection, None)
        self._by_network.remove(connection.network, connection)
        return True

    def next_to_close(self, suspects: Suspects, now: float) -> PendingConnection | None:
        """Return the connection to close first: the oldest suspect, else the oldest of all.

        In both cases silent connections go first.
        """
        is_suspect = suspects.is_suspect
        for pending in chain(self._silent, self._all):
            if is_suspect(pending.network, now):
                return pending
        return next(chain(self._silent, self._all), None)


def first_byte(sock: socket.socket) -> bytes | None:
    """Return the first byte of a connection; empty: it ended; None: no byte has arrived."""
    try:
        return sock.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


def is_disconnected(sock: socket.socket, *, tls: bool) -> bool:
    """Return whether the client has gone. With TLS this includes a client that ended its side."""
    return first_byte(sock) == b"" or (tls and _is_ended(sock))


def _is_ended(sock: socket.socket) -> bool:
    """Return whether the other side has ended its stream; sent data may still be unread."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
