"""Who may come in to an HTTP server, and how long: connections have limits before requests have.

A connection costs a descriptor and nothing else until its first byte came; TLS, which takes a
third of a megabyte, begins then. Whoever proved no identity yet is a stranger. When there are
too many strangers the oldest one goes, or that of the newcomer's own address if it has its share,
so that a newcomer always has its chance and one address cannot keep out another; those who proved
who they are are not touched by that. Each step has a deadline, and one sweep a second ends what is
past it.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import resource
import socket
import ssl
import struct
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from aiohttp import web

from agent.wire.visitor import Visitor, begins_at, ends_at

log = logging.getLogger(__name__)

_AT_ONCE = 32
"""Connections that are accepted before the loop's other work has its turn."""
_SWEEP_S = 1.0
_UCRED = struct.Struct("3i")
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SHARE = 4
"""Of the process' descriptors a door takes at most one in four."""


IsVoid = Callable[[str, float], bool]


@dataclass(frozen=True, slots=True)
class Limits:
    """How many may be in, and how long each step of theirs may take."""

    connections: int = 4096
    strangers: int = 1024
    """Who proved no identity; with TLS each takes 0.3 MB."""
    strangers_per_address: int = 128
    """Of one IPv4 address or one IPv6 /64; on a unix socket: of one user."""
    per_peer: int = 64
    """Connections of one certificate's name."""
    handshakes_per_address: int = 4
    """At once; the others of that address wait their turn."""
    first_byte_s: float = 10.0
    handshake_s: float = 10.0
    header_s: float = 10.0
    """From the first byte of a request to the end of its header; also how long a stranger may
    ask nothing."""
    idle_s: float = 75.0
    """Between two requests of one whose identity is known."""
    write_s: float = 30.0
    """How long an answer may wait for a reader who takes nothing of it."""

    def within(self, descriptors: int) -> Limits:
        """Return these limits as far as a process with that many descriptors can keep them."""
        most = max(16, descriptors // _SHARE)
        return replace(
            self,
            connections=min(self.connections, most),
            strangers=min(self.strangers, max(8, most // 2)),
            strangers_per_address=min(self.strangers_per_address, max(4, most // 4)),
        )


LOCAL = Limits(connections=256, strangers=256, strangers_per_address=192, idle_s=300.0)
"""Of a unix socket: nobody there shows a certificate, and the kernel says who it is."""


def raise_descriptor_limit() -> int:
    """Take as many descriptors as the unit allows (`LimitNOFILE`), and return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


class _Guest:
    """A connection of which nothing is known but where it comes from."""

    __slots__ = ("address", "is_transports", "network", "since", "sock", "task")

    def __init__(self, sock: socket.socket, address: str, network: str, since: float) -> None:
        self.sock, self.address, self.network, self.since = sock, address, network, since
        self.is_transports = False
        """Whether a transport closes the socket."""
        self.task: asyncio.Task[None] | None = None
        """Its handshake, once that has begun."""


class _Greeter(asyncio.Protocol):
    """Stands in for the visitor until TLS is established: it makes none of the HTTP server's
    objects, which refer to each other and would wait for the garbage collector.
    """

    def __init__(self, door: Door, guest: _Guest) -> None:
        self._door, self._guest = door, guest

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._door.let_in(self._guest, transport)


class Door:
    """One listening socket of an HTTP server."""

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        limits: Limits,
        logger: logging.Logger,
        is_void: IsVoid = lambda _name, _valid_from: False,
    ) -> None:
        """Let nobody in yet; the socket listens already and becomes the door's."""
        self.limits = limits
        self._runner, self._listener, self._tls = runner, listener, tls
        self._logger, self._is_void = logger, is_void
        self._loop = asyncio.get_running_loop()
        self._guests: dict[_Guest, None] = {}
        self._silent: dict[_Guest, None] = {}
        """Guests of whom no byte came yet; both the oldest first."""
        self._visitors: dict[Visitor, None] = {}
        self._strangers: dict[str, dict[_Guest | Visitor, None]] = {}
        """By network, the oldest first."""
        self._stranger_count = 0
        self._of_peer: Counter[str] = Counter()
        self._shaking: Counter[str] = Counter()
        self._turns: dict[str, deque[_Guest]] = {}
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Given up for a moment where no descriptor is left, so as to close who knocks."""
        self._ended: Counter[str] = Counter()
        self._sweeping: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Let people in from now on."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._sweeping = self._loop.create_task(self._sweep_forever())

    async def close(self) -> None:
        """Let nobody in any more; visitors are the runner's to send away."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        os.close(self._spare)
        tasks = [guest.task for guest in self._guests if guest.task is not None]
        if self._sweeping is not None:
            tasks.append(self._sweeping)
        for guest in list(self._guests):
            self._end(guest, "")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def count(self) -> tuple[int, int]:
        """Return how many are in or at the door, and how many of them are strangers."""
        return len(self._guests) + len(self._visitors), self._stranger_count

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
        self._ended["no descriptor is left"] += 1
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
        address, network = _whence(sock, name)
        of_network = len(self._strangers.get(network, ()))
        crowd = self._stranger_count >= self.limits.strangers
        if of_network >= self.limits.strangers_per_address:
            room = self._make_room(network)
        elif crowd or self.count()[0] >= self.limits.connections:
            room = self._make_room("")
        else:
            room = True
        if not room:
            self._ended["there are too many"] += 1
            sock.close()
            return
        guest = _Guest(sock, address, network, self._loop.time())
        self._guests[guest] = self._silent[guest] = None
        self._note(guest, network)
        self._loop.add_reader(sock.fileno(), self._first_byte, guest)

    def _make_room(self, network: str) -> bool:
        """Send the oldest idle stranger of a network away; empty: of all.

        Those who said nothing yet go first: whoever means it speaks at once.
        """
        if not network:
            oldest = next(iter(self._silent), None) or next(iter(self._guests), None)
            if oldest is not None:
                self._end(oldest, "there are too many")
                return True
            network = max(self._strangers, key=lambda n: len(self._strangers[n]), default="")
        for stranger in self._strangers.get(network, ()):
            if isinstance(stranger, _Guest) or not stranger.is_served:
                self._end(stranger, "there are too many")
                return True
        return False

    def _first_byte(self, guest: _Guest) -> None:
        try:
            byte = guest.sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            byte = b""
        if not byte:
            self._end(guest, "")
            return
        self._loop.remove_reader(guest.sock.fileno())
        self._silent.pop(guest, None)
        if self._shaking[guest.network] < self.limits.handshakes_per_address:
            self._begin(guest)
        else:
            self._turns.setdefault(guest.network, deque()).append(guest)

    def _begin(self, guest: _Guest) -> None:
        self._shaking[guest.network] += 1
        guest.since = self._loop.time()
        guest.task = self._loop.create_task(self._shake_hands(guest))
        guest.task.add_done_callback(lambda _: self._shook(guest))

    async def _shake_hands(self, guest: _Guest) -> None:
        timeouts = {}
        guest.is_transports = True
        if self._tls is not None:
            timeouts = {"ssl_handshake_timeout": self.limits.handshake_s, "ssl_shutdown_timeout": 5}
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Greeter(self, guest), guest.sock, ssl=self._tls, **timeouts
            )
        except (OSError, ssl.CertificateError) as e:
            self._ended["the handshake failed"] += 1
            e.__traceback__ = None  # its frames hold the future that holds the error: a circle

    def _shook(self, guest: _Guest) -> None:
        """Go on after a handshake, however it ended, even before it began."""
        network, guest.task = guest.network, None
        self._end(guest, "")
        self._shaking[network] -= 1
        if self._shaking[network] <= 0:
            del self._shaking[network]
        turns = self._turns.get(network)
        while turns:
            guest = turns.popleft()
            if guest in self._guests:
                self._begin(guest)
                break
        if not turns:
            self._turns.pop(network, None)

    def let_in(self, guest: _Guest, transport: asyncio.Transport) -> None:
        """Make a visitor of a guest: TLS is established, or is not used here."""
        self._guests.pop(guest, None)
        self._forget(guest, guest.network)
        certificate = transport.get_extra_info("peercert") or {}
        name = next((v for k, v in certificate.get("subjectAltName", ()) if k == "URI"), "")
        visitor = Visitor(
            self._runner, self._logger, self._left, guest.address, guest.network, name
        )
        visitor.valid_from, visitor.not_after = begins_at(certificate), ends_at(certificate)
        if name and self._of_peer[name] >= self.limits.per_peer:
            self._ended["one identity has too many"] += 1
            transport.abort()
            return
        self._visitors[visitor] = None
        if name:
            self._of_peer[name] += 1
        else:
            self._note(visitor, guest.network)
        transport.set_protocol(visitor)
        visitor.connection_made(transport)

    # -- going

    def _left(self, visitor: Visitor) -> None:
        if self._visitors.pop(visitor, self) is self:
            return
        if visitor.name:
            self._of_peer[visitor.name] -= 1
            if not self._of_peer[visitor.name]:
                del self._of_peer[visitor.name]
        else:
            self._forget(visitor, visitor.network)

    def _end(self, one: _Guest | Visitor, why: str) -> None:
        """Close a connection at once; `why` is counted for the log."""
        if why:
            self._ended[why] += 1
        if isinstance(one, Visitor):
            one.abort()
            self._left(one)
        elif self._guests.pop(one, self) is not self:
            self._silent.pop(one, None)
            self._forget(one, one.network)
            if one.task is not None:
                one.task.cancel()
            if not one.is_transports and one.sock.fileno() >= 0:
                self._loop.remove_reader(one.sock.fileno())
                one.sock.close()

    def _note(self, one: _Guest | Visitor, network: str) -> None:
        self._strangers.setdefault(network, {})[one] = None
        self._stranger_count += 1

    def _forget(self, one: _Guest | Visitor, network: str) -> None:
        known = self._strangers.get(network)
        if known is not None and known.pop(one, self) is not self:
            self._stranger_count -= 1
            if not known:
                del self._strangers[network]

    # -- deadlines

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """End all connections that are past a deadline, and say once what was ended and why."""
        now, wall, limits = self._loop.time(), time.time(), self.limits
        for guest in list(self._guests):
            if guest.task is None and now - guest.since > limits.first_byte_s:
                self._end(guest, "nothing was said")
        for visitor in list(self._visitors):
            if visitor.name and self._is_void(visitor.name, visitor.valid_from):
                self._end(visitor, "the identity was revoked")
            elif why := visitor.overdue(now, wall, limits.header_s, limits.idle_s, limits.write_s):
                self._end(visitor, why)
        if self._ended:
            fields = {"connections": self.count()[0], "strangers": self._stranger_count}
            log.warning("connections were closed", extra={**fields, "why": dict(self._ended)})
            self._ended.clear()


@asynccontextmanager
async def open_door(
    runner: web.AppRunner,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    limits: Limits,
    logger: logging.Logger,
    is_void: IsVoid = lambda _name, _valid_from: False,
) -> AsyncIterator[Door]:
    """Serve the runner's application on a listening socket until left.

    `is_void` says of a certificate's name and beginning whether it was revoked.
    """
    door = Door(runner, listener, tls, limits, logger, is_void)
    door.open()
    try:
        yield door
    finally:
        await door.close()


def _whence(sock: socket.socket, name: object) -> tuple[str, str]:
    """Return the address of who connects, and the network that is to blame for it."""
    if sock.family == socket.AF_UNIX:
        _, uid, _ = _UCRED.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        )
        return "", f"user {uid}"
    address = str(name[0]) if isinstance(name, tuple) else ""
    return address, network_of(address)


def network_of(address: str) -> str:
    """Return whom to blame: an IPv4 address, or the /64 that one IPv6 host owns."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        mapped = ip.ipv4_mapped
        return str(mapped or ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)
