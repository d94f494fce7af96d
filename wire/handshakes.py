"""TLS handshakes of pending connections, limited in rate, and in number per address."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter, deque
from collections.abc import Callable

from wire.limits import ConnectionLimits
from wire.pending import PendingConnection, PendingConnections, is_disconnected

_BEGUN_AT_ONCE = 4
"""Handshakes that begin before other work of the event loop (0.25 to 1 ms each). Requests of
known clients go first."""
_BEGIN_S = 0.002
"""Average time between two handshakes, so that they take at most half of the event loop's time."""

Admit = Callable[[PendingConnection, asyncio.Transport], None]


class _Acceptor(asyncio.Protocol):
    """Protocol of a connection until TLS is established.

    The HTTP server's objects are created only then: they refer to each other, so only the garbage
    collector would free those of a failed handshake.
    """

    def __init__(self, admit: Admit, pending: PendingConnection) -> None:
        self._admit, self._pending = admit, pending

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._admit(self._pending, transport)


class Handshakes:
    """The handshakes of one listening socket. Without TLS a connection is admitted at once."""

    def __init__(
        self,
        pending: PendingConnections,
        tls: ssl.SSLContext | None,
        limits: ConnectionLimits,
        admit: Admit,
        end: Callable[[PendingConnection, str], None],
    ) -> None:
        """`admit` is called when TLS is established, `end` to close a connection with a reason."""
        self._pending, self._tls, self._limits = pending, tls, limits
        self._admit, self._end = admit, end
        self._loop = asyncio.get_running_loop()
        self._running: Counter[str] = Counter()
        """Handshakes by network."""
        self._queued: deque[PendingConnection] = deque()
        """Connections that sent a byte and whose handshake has not begun."""
        self._waiting: dict[str, deque[PendingConnection]] = {}
        """By network: connections that wait until a handshake of their network ends."""
        self._begins_at = 0.0
        self._beginning: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Begin no further handshake."""
        if self._beginning is not None:
            self._beginning.cancel()

    def queue(self, pending: PendingConnection) -> None:
        """Queue the handshake of a connection that sent a byte."""
        self._queued.append(pending)
        if self._beginning is None:
            self._beginning = self._loop.call_at(self._begins_at, self._begin_queued)

    def _begin_queued(self) -> None:
        """Begin a few handshakes; requests of known clients run before the others."""
        begun, self._beginning = 0, None
        while self._queued and begun < _BEGUN_AT_ONCE:
            pending = self._queued.popleft()
            if pending not in self._pending:
                continue
            if is_disconnected(pending.sock, tls=self._tls is not None):
                self._end(pending, "the handshake failed")
            elif self._running[pending.network] < self._limits.handshakes_per_address:
                self._begin_handshake(pending)
                begun += 1
            else:
                self._waiting.setdefault(pending.network, deque()).append(pending)
        self._begins_at = self._loop.time() + begun * _BEGIN_S * (self._tls is not None)
        if self._queued:
            self._beginning = self._loop.call_at(self._begins_at, self._begin_queued)

    def _begin_handshake(self, pending: PendingConnection) -> None:
        self._running[pending.network] += 1
        pending.since = self._loop.time()
        pending.task = self._loop.create_task(self._shake_hands(pending))
        pending.task.add_done_callback(lambda _: self._end_handshake(pending))

    async def _shake_hands(self, pending: PendingConnection) -> None:
        timeouts = {}
        pending.is_transports = True
        if self._tls is not None:
            handshake_s = self._limits.handshake_s
            timeouts = {"ssl_handshake_timeout": handshake_s, "ssl_shutdown_timeout": 5}
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Acceptor(self._admit, pending), pending.sock, ssl=self._tls, **timeouts
            )
        except (OSError, ssl.CertificateError) as e:
            e.__traceback__ = None  # breaks a cycle: its frames hold the future with the error

    def _end_handshake(self, pending: PendingConnection) -> None:
        """Clean up after a handshake, and begin the next one of its network."""
        network, pending.task = pending.network, None
        if pending in self._pending:
            self._end(pending, "the handshake failed")
        self._running[network] -= 1
        if self._running[network] <= 0:
            del self._running[network]
        waiting = self._waiting.get(network)
        while waiting:
            pending = waiting.popleft()
            if pending in self._pending:
                self.queue(pending)
                break
        if not waiting:
            self._waiting.pop(network, None)
