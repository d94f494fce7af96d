"""Handshakes of pending connections: a few begin at a time, a few of one address run at once."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter, deque
from collections.abc import Callable

from wire.limits import ConnectionLimits
from wire.pending import PendingConnection, PendingConnections, has_left

_BEGUN_AT_ONCE = 4
"""Handshakes that begin before the loop's other work has its turn (0.25 to 1 ms each): known
clients go before unknown ones."""
_BEGIN_S = 0.002
"""From one handshake to the next, on average: they take half of the loop's time at most."""

Admit = Callable[[PendingConnection, asyncio.Transport], None]


class _Acceptor(asyncio.Protocol):
    """Stands in for the connection until TLS is established: it makes none of the HTTP server's
    objects, which refer to each other and would wait for the garbage collector.
    """

    def __init__(self, admit: Admit, pending: PendingConnection) -> None:
        self._admit, self._pending = admit, pending

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._admit(self._pending, transport)


class Handshakes:
    """The handshakes of one listening socket; without TLS they are over as soon as they begin."""

    def __init__(
        self,
        pending: PendingConnections,
        tls: ssl.SSLContext | None,
        limits: ConnectionLimits,
        admit: Admit,
        end: Callable[[PendingConnection, str], None],
    ) -> None:
        """`admit` is called when TLS is established; `end` to close one, with the reason."""
        self._pending, self._tls, self._limits = pending, tls, limits
        self._admit, self._end = admit, end
        self._loop = asyncio.get_running_loop()
        self._running: Counter[str] = Counter()
        """Handshakes by network."""
        self._spoke: deque[PendingConnection] = deque()
        """Pending ones whose handshake is to begin, or to wait for a turn in `_turns`."""
        self._turns: dict[str, deque[PendingConnection]] = {}
        self._begins_at = 0.0
        self._beginning: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Begin no further handshake."""
        if self._beginning is not None:
            self._beginning.cancel()

    def take_on(self, pending: PendingConnection) -> None:
        """Begin the handshake of a connection that sent a byte, as soon as it has its turn."""
        self._spoke.append(pending)
        if self._beginning is None:
            self._beginning = self._loop.call_at(self._begins_at, self._begin_some)

    def _begin_some(self) -> None:
        """Begin a few handshakes; the others begin after known clients had their turn."""
        begun, self._beginning = 0, None
        while self._spoke and begun < _BEGUN_AT_ONCE:
            pending = self._spoke.popleft()
            if pending not in self._pending:
                continue
            if has_left(pending.sock, tls=self._tls is not None):
                self._end(pending, "the handshake failed")
            elif self._running[pending.network] < self._limits.handshakes_per_address:
                self._begin(pending)
                begun += 1
            else:
                self._turns.setdefault(pending.network, deque()).append(pending)
        self._begins_at = self._loop.time() + begun * _BEGIN_S * (self._tls is not None)
        if self._spoke:
            self._beginning = self._loop.call_at(self._begins_at, self._begin_some)

    def _begin(self, pending: PendingConnection) -> None:
        self._running[pending.network] += 1
        pending.since = self._loop.time()
        pending.task = self._loop.create_task(self._shake_hands(pending))
        pending.task.add_done_callback(lambda _: self._shook(pending))

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
            e.__traceback__ = None  # its frames hold the future that holds the error: a circle

    def _shook(self, pending: PendingConnection) -> None:
        """Go on after a handshake, however it ended, even before it began."""
        network, pending.task = pending.network, None
        if pending in self._pending:
            self._end(pending, "the handshake failed")
        self._running[network] -= 1
        if self._running[network] <= 0:
            del self._running[network]
        turns = self._turns.get(network)
        while turns:
            pending = turns.popleft()
            if pending in self._pending:
                self.take_on(pending)
                break
        if not turns:
            self._turns.pop(network, None)
