"""Admission of connections to an HTTP server: limits and deadlines before any request.

A connection costs a descriptor and nothing else until its first byte came; TLS, which takes a
third of a megabyte, begins then. Until TLS is established it is a guest. When there are too many
guests the oldest one goes, or that of the newcomer's own address if it has its share, so that a
newcomer always has its chance and one address cannot keep out another. Visitors without a
certificate have places of their own: they take none of a guest that will show one. Visitors with
a certificate are touched by none of this. Each step has a deadline. A sweep ends what is past
one: once a second at most, and only while there is a deadline to come (docs/adr/0114).
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

from wire.connection import Visitor, begins_at, ends_at, identity_in
from wire.limits import ConnectionLimits
from wire.networks import Suspects, whence

log = logging.getLogger(__name__)

_AT_ONCE = 32
"""Connections that are accepted before the loop's other work has its turn (some 20 us each)."""
_BEGUN_AT_ONCE = 4
"""Handshakes that begin before it has (0.25 to 1 ms each): who is known goes before who is not."""
_BEGIN_S = 0.002
"""From one handshake to the next, on average: they take half of the loop's time at most."""
_SWEEP_S = 1.0
"""From what happens at the door to the next sweep, and between two of them at least."""
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
    """Stands in for the visitor until TLS is established: it makes none of the HTTP server's
    objects, which refer to each other and would wait for the garbage collector.
    """

    def __init__(self, door: ConnectionAdmission, guest: _PendingConnection) -> None:
        self._door, self._guest = door, guest

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._door.let_in(self._guest, transport)


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
        self._guests: dict[_PendingConnection, None] = {}
        self._silent: dict[_PendingConnection, None] = {}
        """Accepted connections that sent no byte yet; both the oldest first."""
        self._visitors: dict[Visitor, None] = {}
        self._strangers: dict[str, dict[_PendingConnection, None]] = {}
        """Guests by network, the oldest first."""
        self._stranger_count = 0
        self._anonymous: dict[str, dict[Visitor, None]] = {}
        """Visitors without a certificate, by network, the oldest first. They take no place of a
        guest: among these may be one that will prove an identity."""
        self._anonymous_count = 0
        self._of_peer: Counter[str] = Counter()
        self._shaking: Counter[str] = Counter()
        self._suspects = Suspects()
        self._spoke: deque[_PendingConnection] = deque()
        """Guests whose handshake is to begin, or to wait for its address' turn in `_turns`."""
        self._begins_at = 0.0
        self._beginning: asyncio.TimerHandle | None = None
        self._turns: dict[str, deque[_PendingConnection]] = {}
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Given up for a moment where no descriptor is left, so as to close who knocks."""
        self._ended: Counter[str] = Counter()
        self._sweeping: asyncio.TimerHandle | None = None
        self._is_soon = False
        """Whether that is within a second anyway."""

    def open(self) -> None:
        """Let people in from now on."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Accept no more connections; the runner closes the open ones."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        os.close(self._spare)
        tasks = [guest.task for guest in self._guests if guest.task is not None]
        for guest in list(self._guests):
            self._end(guest, "")
        for timer in (self._beginning, self._sweeping):
            if timer is not None:
                timer.cancel()
        self._is_soon = True  # connections that end from now on start no sweep
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def count(self) -> tuple[int, int]:
        """Return how many are in or at the door, and how many of them are strangers."""
        return len(self._guests) + len(self._visitors), self._stranger_count + self._anonymous_count

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
        """Close one who knocks although there is no descriptor for it, and one of the strangers.

        Left alone, the listening socket would be readable for ever: a loop at full speed.
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
        of_network = len(self._strangers.get(network, ()))
        crowd = self._stranger_count >= self.limits.strangers
        if of_network >= self.limits.strangers_per_address:
            room = self._make_room(network)
        elif crowd or self.count()[0] >= self.limits.connections:
            room = self._make_room("")
        else:
            room = True
        if not room:
            self._count("there are too many")
            sock.close()
            return
        guest = _PendingConnection(sock, address, network, self._loop.time())
        self._guests[guest] = self._silent[guest] = None
        self._note(guest, network)
        self._stir()
        if self._is_silent(guest):
            self._loop.add_reader(sock.fileno(), self._is_silent, guest)

    def _make_room(self, network: str) -> bool:
        """Send the oldest guest of a network away; empty: of all, else an idle anonymous visitor.

        Those whose network wasted a place before go first, whatever they said; then those who
        said nothing yet: a client that means it speaks at once, also if what was said has not been
        looked at yet.
        """
        if not network:
            while (guest := self._least()) is not None:
                if guest not in self._silent or self._is_silent(guest) or guest not in self._guests:
                    self._end(guest, "there are too many")
                    return True
            return self._end_idle(max(self._anonymous.values(), key=len, default={}))
        known = self._strangers.get(network, {})
        silent = (one for one in list(known) if one in self._silent and self._is_silent(one))
        going = next(silent, None) or next(iter(known), None)
        if going is None:
            return False
        self._end(going, "there are too many")
        return True

    def _least(self) -> _PendingConnection | None:
        """Return the oldest suspect, silent ones first, or the oldest of all in the same order."""
        now, has = self._loop.time(), self._suspects.has
        for guest in chain(self._silent, self._guests):
            if has(guest.network, now):
                return guest
        return next(chain(self._silent, self._guests), None)

    def _is_silent(self, guest: _PendingConnection) -> bool:
        """Return whether a guest has said nothing yet; one that has is taken on, or sent away."""
        byte = _first_byte(guest.sock)
        if byte is None:
            return True
        if not byte:
            self._end(guest, "")
            return False
        self._loop.remove_reader(guest.sock.fileno())
        self._silent.pop(guest, None)
        self._take_on(guest)
        return False

    def _has_left(self, sock: socket.socket) -> bool:
        """Return whether no client waits: with TLS, one that ended its side gets no answer."""
        return _first_byte(sock) == b"" or (self._tls is not None and _is_ended(sock))

    def _take_on(self, guest: _PendingConnection) -> None:
        self._spoke.append(guest)
        if self._beginning is None:
            self._beginning = self._loop.call_at(self._begins_at, self._begin_some)

    def _begin_some(self) -> None:
        """Begin a few handshakes; the others begin when those who are known had their turn."""
        begun, self._beginning = 0, None
        while self._spoke and begun < _BEGUN_AT_ONCE:
            guest = self._spoke.popleft()
            if guest not in self._guests:
                continue
            if self._has_left(guest.sock):
                self._end(guest, "the handshake failed")
            elif self._shaking[guest.network] < self.limits.handshakes_per_address:
                self._begin(guest)
                begun += 1
            else:
                self._turns.setdefault(guest.network, deque()).append(guest)
        self._begins_at = self._loop.time() + begun * _BEGIN_S * (self._tls is not None)
        if self._spoke:
            self._beginning = self._loop.call_at(self._begins_at, self._begin_some)

    def _begin(self, guest: _PendingConnection) -> None:
        self._shaking[guest.network] += 1
        guest.since = self._loop.time()
        guest.task = self._loop.create_task(self._shake_hands(guest))
        guest.task.add_done_callback(lambda _: self._shook(guest))

    async def _shake_hands(self, guest: _PendingConnection) -> None:
        timeouts = {}
        guest.is_transports = True
        if self._tls is not None:
            timeouts = {"ssl_handshake_timeout": self.limits.handshake_s, "ssl_shutdown_timeout": 5}
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Acceptor(self, guest), guest.sock, ssl=self._tls, **timeouts
            )
        except (OSError, ssl.CertificateError) as e:
            e.__traceback__ = None  # its frames hold the future that holds the error: a circle

    def _shook(self, guest: _PendingConnection) -> None:
        """Go on after a handshake, however it ended, even before it began."""
        network, guest.task = guest.network, None
        if guest in self._guests:
            self._end(guest, "the handshake failed")
        self._shaking[network] -= 1
        if self._shaking[network] <= 0:
            del self._shaking[network]
        turns = self._turns.get(network)
        while turns:
            guest = turns.popleft()
            if guest in self._guests:
                self._take_on(guest)
                break
        if not turns:
            self._turns.pop(network, None)

    def let_in(self, guest: _PendingConnection, transport: asyncio.Transport) -> None:
        """Make a visitor of a guest: TLS is established, or is not used here."""
        self._guests.pop(guest, None)
        self._forget(guest, guest.network)
        certificate = transport.get_extra_info("peercert") or {}
        name = identity_in(certificate)
        visitor = Visitor(
            self._runner, self._logger, self._left, guest.address, guest.network, name
        )
        visitor.valid_from, visitor.not_after = begins_at(certificate), ends_at(certificate)
        if name and self._of_peer[name] >= self.limits.per_peer:
            self._count("one identity has too many")
            transport.abort()
            return
        if not name and not self._has_room(guest.network):
            self._count("there are too many")
            transport.abort()
            return
        self._visitors[visitor] = None
        visitor.stir = self._stir
        self._stir()
        if name:
            self._of_peer[name] += 1
            self._suspects.proved(guest.network, self._loop.time())
        else:
            self._anonymous.setdefault(guest.network, {})[visitor] = None
            self._anonymous_count += 1
        transport.set_protocol(visitor)
        visitor.connection_made(transport)

    def _has_room(self, network: str) -> bool:
        """Return whether an anonymous visitor may come in; an idle one goes if that is needed."""
        known = self._anonymous.get(network, {})
        if len(known) < self.limits.strangers_per_address:
            if self._anonymous_count < self.limits.anonymous:
                return True
            known = max(self._anonymous.values(), key=len)
        return self._end_idle(known)

    def _end_idle(self, visitors: dict[Visitor, None]) -> bool:
        """Send the oldest of some visitors away that is not being answered, if there is one."""
        idle = next((one for one in visitors if not one.is_served), None)
        if idle is not None:
            self._end(idle, "there are too many")
        return idle is not None

    # -- going

    def _left(self, visitor: Visitor) -> None:
        if self._visitors.pop(visitor, self) is self:
            return
        if visitor.name:
            self._of_peer[visitor.name] -= 1
            if not self._of_peer[visitor.name]:
                del self._of_peer[visitor.name]
        else:
            known = self._anonymous[visitor.network]
            del known[visitor]
            self._anonymous_count -= 1
            if not known:
                del self._anonymous[visitor.network]

    def _end(self, one: _PendingConnection | Visitor, why: str) -> None:
        """Close a connection at once; `why` is counted for the log."""
        if why:
            self._count(why)
        if isinstance(one, Visitor):
            one.abort()
            self._left(one)
        elif self._guests.pop(one, self) is not self:
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
        self._strangers.setdefault(network, {})[one] = None
        self._stranger_count += 1

    def _forget(self, one: _PendingConnection, network: str) -> None:
        known = self._strangers.get(network)
        if known is not None and known.pop(one, self) is not self:
            self._stranger_count -= 1
            if not known:
                del self._strangers[network]

    # -- deadlines

    def _count(self, why: str) -> None:
        """Take note of a connection that was ended, for the log."""
        self._ended[why] += 1
        self._stir()

    def _stir(self) -> None:
        """Have a sweep soon: a connection may have a deadline now that had none, or a later one."""
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
        for guest in list(self._guests):
            left_s = guest.since + limits.first_byte_s - now
            if guest.task is None and left_s <= 0:
                self._end(guest, "nothing was said")
            elif guest.task is None:
                next_s = min(next_s, left_s)
        for visitor in list(self._visitors):
            if visitor.name and self._is_void and self._is_void(visitor.name, visitor.valid_from):
                self._end(visitor, "the identity was revoked")
                continue
            at, why = visitor.deadline(now, wall, limits)
            if at <= now:
                self._end(visitor, why)
            else:
                next_s = min(next_s, at - now)
        if self._ended:
            fields = {"connections": self.count()[0], "strangers": self.count()[1]}
            log.warning("connections were closed", extra={**fields, "why": dict(self._ended)})
            self._ended.clear()
        if self._visitors and self._is_void is not None:
            return _SWEEP_S  # revocations are not announced here
        return max(_SWEEP_S, next_s) if self._guests or self._visitors else None


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

    `is_void` says of a certificate's name and beginning whether it was revoked; it is asked once
    a second. None: no certificate is revoked here.
    """
    door = ConnectionAdmission(runner, listener, tls, limits, logger, is_void)
    door.open()
    try:
        yield door
    finally:
        await door.close()


def _is_ended(sock: socket.socket) -> bool:
    """Return whether the other side sends no more, whatever of it is still unread."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _first_byte(sock: socket.socket) -> bytes | None:
    """Return the first byte of a connection; empty: it ended; None: nothing was said yet."""
    try:
        return sock.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""
