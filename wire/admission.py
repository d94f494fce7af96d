"""Admission of connections to an HTTP server: limits and deadlines before any request.

A connection costs a descriptor and nothing else until its first byte came; TLS, which takes a
third of a megabyte, begins then. Until TLS is established the connection is pending. When too many
are pending the oldest one is closed, or the oldest of the new one's own address if that has its
share. So a new caller always has its chance, and one address cannot keep out another. Established
connections without a certificate have places of their own: they take none of a pending one that
may show a certificate. Connections with a certificate are touched by none of this. Each step has a
deadline. A sweep ends what is past one: once a second at most, and only while there is a deadline
to come (docs/adr/0114).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import chain

from aiohttp import web

from wire.connection import HttpConnection, begins_at, ends_at, identity_in
from wire.limits import ConnectionLimits
from wire.networks import Suspects, whence

log = logging.getLogger(__name__)

_AT_ONCE = 32
"""Connections that are accepted before the loop's other work has its turn (some 20 us each)."""
_BEGUN_AT_ONCE = 4
"""Handshakes that begin before it has (0.25 to 1 ms each): known clients go before unknown ones."""
_BEGIN_S = 0.002
"""From one handshake to the next, on average: they take half of the loop's time at most."""
_SWEEP_S = 1.0
"""From an event of a connection to the next sweep, and between two of them at least."""
_CALM_S = 30.0
"""Between two sweeps at most while a connection is open: a clock that was set moves the end of a
certificate."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


IsVoid = Callable[[str, float], bool]


class _PendingConnection:
    """A connection; only its address is known."""

    __slots__ = ("address", "is_transports", "network", "since", "sock", "task")

    def __init__(self, sock: socket.socket, address: str, network: str, since: float) -> None:
        self.sock, self.address, self.network, self.since = sock, address, network, since
        self.is_transports = False
        """Whether a transport closes the socket."""
        self.task: asyncio.Task[None] | None = None
        """Its handshake, once that has begun."""


class _Acceptor(asyncio.Protocol):
    """Stands in for the connection until TLS is established: it makes none of the HTTP server's
    objects, which refer to each other and would wait for the garbage collector.
    """

    def __init__(self, admission: ConnectionAdmission, pending: _PendingConnection) -> None:
        self._admission, self._pending = admission, pending

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._admission.let_in(self._pending, transport)


class ConnectionAdmission:
    """One listening socket of an HTTP server."""

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        limits: ConnectionLimits,
        logger: logging.Logger,
        is_void: IsVoid | None = None,
    ) -> None:
        """Take over a listening socket; accept no connection yet."""
        self.limits = limits
        self._runner, self._listener, self._tls = runner, listener, tls
        self._logger, self._is_void = logger, is_void
        self._loop = asyncio.get_running_loop()
        self._pending: dict[_PendingConnection, None] = {}
        self._silent: dict[_PendingConnection, None] = {}
        """Accepted connections that sent no byte yet; both the oldest first."""
        self._connections: dict[HttpConnection, None] = {}
        self._pending_of: dict[str, dict[_PendingConnection, None]] = {}
        """Pending ones by network, the oldest first."""
        self._pending_count = 0
        self._anonymous: dict[str, dict[HttpConnection, None]] = {}
        """Connections without a certificate, by network, the oldest first. They take no place of a
        pending one, which may yet prove an identity."""
        self._anonymous_count = 0
        self._of_peer: Counter[str] = Counter()
        self._shaking: Counter[str] = Counter()
        self._suspects = Suspects()
        self._spoke: deque[_PendingConnection] = deque()
        """Pending ones whose handshake is to begin, or to wait for a turn in `_turns`."""
        self._begins_at = 0.0
        self._beginning: asyncio.TimerHandle | None = None
        self._turns: dict[str, deque[_PendingConnection]] = {}
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Closed for a moment where no descriptor is left, to accept and close a connection."""
        self._ended: Counter[str] = Counter()
        self._sweeping: asyncio.TimerHandle | None = None
        self._is_soon = False
        """Whether that is within a second anyway."""

    def open(self) -> None:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Accept no more connections; the runner closes the open ones."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        os.close(self._spare)
        tasks = [pending.task for pending in self._pending if pending.task is not None]
        for pending in list(self._pending):
            self._end(pending, "")
        for timer in (self._beginning, self._sweeping):
            if timer is not None:
                timer.cancel()
        self._is_soon = True  # connections that end from now on start no sweep
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def count(self) -> tuple[int, int]:
        """Return how many connections there are, and how many of them have proved no identity."""
        return len(self._pending) + len(
            self._connections
        ), self._pending_count + self._anonymous_count

    # -- coming in

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, name = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                self._turn_away()
                return
            self._welcome(sock, name)

    def _turn_away(self) -> None:
        """Close a new connection without a free descriptor for it; close a pending one, too.

        Otherwise the listening socket would stay readable: a loop at full speed.
        """
        self._count("no descriptor is left")
        if not self._make_room(""):
            os.close(self._spare)
            try:
                self._listener.accept()[0].close()
            except OSError:
                pass
            finally:
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _welcome(self, sock: socket.socket, name: object) -> None:
        sock.setblocking(False)
        if self._has_left(sock):
            sock.close()  # it closed already, and displaces no connection
            return
        address, network = whence(sock, name)
        of_network = len(self._pending_of.get(network, ()))
        crowd = self._pending_count >= self.limits.pending
        if of_network >= self.limits.unproved_per_address:
            room = self._make_room(network)
        elif crowd or self.count()[0] >= self.limits.connections:
            room = self._make_room("")
        else:
            room = True
        if not room:
            self._count("there are too many")
            sock.close()
            return
        pending = _PendingConnection(sock, address, network, self._loop.time())
        self._pending[pending] = self._silent[pending] = None
        self._note(pending, network)
        self._stir()
        if self._is_silent(pending):
            self._loop.add_reader(sock.fileno(), self._is_silent, pending)

    def _make_room(self, network: str) -> bool:
        """Close the oldest pending one of a network; empty: of all, else an idle anonymous one.

        Connections from a network that wasted a place before are closed first, then silent ones:
        an honest client sends at once. Whether bytes have arrived is checked before closing.
        """
        if not network:
            while (one := self._least()) is not None:
                if one not in self._silent or self._is_silent(one) or one not in self._pending:
                    self._end(one, "there are too many")
                    return True
            return self._end_idle(max(self._anonymous.values(), key=len, default={}))
        known = self._pending_of.get(network, {})
        silent = (one for one in list(known) if one in self._silent and self._is_silent(one))
        going = next(silent, None) or next(iter(known), None)
        if going is None:
            return False
        self._end(going, "there are too many")
        return True

    def _least(self) -> _PendingConnection | None:
        """Return the oldest suspect, silent ones first, or the oldest of all in the same order."""
        now, has = self._loop.time(), self._suspects.has
        for pending in chain(self._silent, self._pending):
            if has(pending.network, now):
                return pending
        return next(chain(self._silent, self._pending), None)

    def _is_silent(self, pending: _PendingConnection) -> bool:
        """Return whether a pending one sent nothing yet; one that did is taken on, or closed."""
        byte = _first_byte(pending.sock)
        if byte is None:
            return True
        if not byte:
            self._end(pending, "")
            return False
        self._loop.remove_reader(pending.sock.fileno())
        self._silent.pop(pending, None)
        self._take_on(pending)
        return False

    def _has_left(self, sock: socket.socket) -> bool:
        """Return whether no client waits: with TLS, one that ended its side gets no answer."""
        return _first_byte(sock) == b"" or (self._tls is not None and _is_ended(sock))

    def _take_on(self, pending: _PendingConnection) -> None:
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
            if self._has_left(pending.sock):
                self._end(pending, "the handshake failed")
            elif self._shaking[pending.network] < self.limits.handshakes_per_address:
                self._begin(pending)
                begun += 1
            else:
                self._turns.setdefault(pending.network, deque()).append(pending)
        self._begins_at = self._loop.time() + begun * _BEGIN_S * (self._tls is not None)
        if self._spoke:
            self._beginning = self._loop.call_at(self._begins_at, self._begin_some)

    def _begin(self, pending: _PendingConnection) -> None:
        self._shaking[pending.network] += 1
        pending.since = self._loop.time()
        pending.task = self._loop.create_task(self._shake_hands(pending))
        pending.task.add_done_callback(lambda _: self._shook(pending))

    async def _shake_hands(self, pending: _PendingConnection) -> None:
        timeouts = {}
        pending.is_transports = True
        if self._tls is not None:
            timeouts = {"ssl_handshake_timeout": self.limits.handshake_s, "ssl_shutdown_timeout": 5}
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Acceptor(self, pending), pending.sock, ssl=self._tls, **timeouts
            )
        except (OSError, ssl.CertificateError) as e:
            e.__traceback__ = None  # its frames hold the future that holds the error: a circle

    def _shook(self, pending: _PendingConnection) -> None:
        """Go on after a handshake, however it ended, even before it began."""
        network, pending.task = pending.network, None
        if pending in self._pending:
            self._end(pending, "the handshake failed")
        self._shaking[network] -= 1
        if self._shaking[network] <= 0:
            del self._shaking[network]
        turns = self._turns.get(network)
        while turns:
            pending = turns.popleft()
            if pending in self._pending:
                self._take_on(pending)
                break
        if not turns:
            self._turns.pop(network, None)

    def let_in(self, pending: _PendingConnection, transport: asyncio.Transport) -> None:
        """Admit a pending connection: TLS is established, or is not used here."""
        self._pending.pop(pending, None)
        self._forget(pending, pending.network)
        certificate = transport.get_extra_info("peercert") or {}
        name = identity_in(certificate)
        connection = HttpConnection(
            self._runner, self._logger, self._left, pending.address, pending.network, name
        )
        connection.valid_from, connection.not_after = begins_at(certificate), ends_at(certificate)
        if name and self._of_peer[name] >= self.limits.per_peer:
            self._count("one identity has too many")
            transport.abort()
            return
        if not name and not self._has_room(pending.network):
            self._count("there are too many")
            transport.abort()
            return
        self._connections[connection] = None
        connection.stir = self._stir
        self._stir()
        if name:
            self._of_peer[name] += 1
            self._suspects.proved(pending.network, self._loop.time())
        else:
            self._anonymous.setdefault(pending.network, {})[connection] = None
            self._anonymous_count += 1
        transport.set_protocol(connection)
        connection.connection_made(transport)

    def _has_room(self, network: str) -> bool:
        """Return whether an anonymous connection is admitted; an idle one is closed if needed."""
        known = self._anonymous.get(network, {})
        if len(known) < self.limits.unproved_per_address:
            if self._anonymous_count < self.limits.anonymous:
                return True
            known = max(self._anonymous.values(), key=len)
        return self._end_idle(known)

    def _end_idle(self, connections: dict[HttpConnection, None]) -> bool:
        """Close the oldest of some connections that is not being answered, if there is one."""
        idle = next((one for one in connections if not one.is_served), None)
        if idle is not None:
            self._end(idle, "there are too many")
        return idle is not None

    # -- going

    def _left(self, connection: HttpConnection) -> None:
        if self._connections.pop(connection, self) is self:
            return
        if connection.name:
            self._of_peer[connection.name] -= 1
            if not self._of_peer[connection.name]:
                del self._of_peer[connection.name]
        else:
            known = self._anonymous[connection.network]
            del known[connection]
            self._anonymous_count -= 1
            if not known:
                del self._anonymous[connection.network]

    def _end(self, one: _PendingConnection | HttpConnection, why: str) -> None:
        """Close a connection at once; `why` is counted for the log."""
        if why:
            self._count(why)
        if isinstance(one, HttpConnection):
            one.abort()
            self._left(one)
        elif self._pending.pop(one, self) is not self:
            if why:
                self._suspects.add(one.network, self._loop.time())
            self._silent.pop(one, None)
            self._forget(one, one.network)
            if one.task is not None:
                one.task.cancel()
            if not one.is_transports and one.sock.fileno() >= 0:
                self._loop.remove_reader(one.sock.fileno())
                one.sock.close()

    def _note(self, one: _PendingConnection, network: str) -> None:
        self._pending_of.setdefault(network, {})[one] = None
        self._pending_count += 1

    def _forget(self, one: _PendingConnection, network: str) -> None:
        known = self._pending_of.get(network)
        if known is not None and known.pop(one, self) is not self:
            self._pending_count -= 1
            if not known:
                del self._pending_of[network]

    # -- deadlines

    def _count(self, why: str) -> None:
        """Count a connection that was ended, for the log."""
        self._ended[why] += 1
        self._stir()

    def _stir(self) -> None:
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
        """End all connections that are past a deadline, and say once what was ended and why.

        Returns after how many seconds to look again at the latest; None without connections.
        """
        now, wall, limits = self._loop.time(), time.time(), self.limits
        next_s = _CALM_S
        for pending in list(self._pending):
            left_s = pending.since + limits.first_byte_s - now
            if pending.task is None and left_s <= 0:
                self._end(pending, "nothing was said")
            elif pending.task is None:
                next_s = min(next_s, left_s)
        for one in list(self._connections):
            if one.name and self._is_void and self._is_void(one.name, one.valid_from):
                self._end(one, "the identity was revoked")
                continue
            at, why = one.deadline(now, wall, limits)
            if at <= now:
                self._end(one, why)
            else:
                next_s = min(next_s, at - now)
        if self._ended:
            fields = {"connections": self.count()[0], "unproved": self.count()[1]}
            log.warning("connections were closed", extra={**fields, "why": dict(self._ended)})
            self._ended.clear()
        if self._connections and self._is_void is not None:
            return _SWEEP_S  # revocations are not announced here
        return max(_SWEEP_S, next_s) if self._pending or self._connections else None


@asynccontextmanager
async def open_admission(
    runner: web.AppRunner,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    limits: ConnectionLimits,
    logger: logging.Logger,
    is_void: IsVoid | None = None,
) -> AsyncIterator[ConnectionAdmission]:
    """Serve the runner's application on a listening socket until left.

    `is_void` returns whether a certificate was revoked, by its name and beginning. It is called
    once a second. None: no certificate is revoked here.
    """
    admission = ConnectionAdmission(runner, listener, tls, limits, logger, is_void)
    admission.open()
    try:
        yield admission
    finally:
        await admission.close()


def _is_ended(sock: socket.socket) -> bool:
    """Return whether the other side has ended its stream; sent data may still be unread."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _first_byte(sock: socket.socket) -> bytes | None:
    """Return the first byte of a connection; empty: it ended; None: no byte has arrived."""
    try:
        return sock.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""
