"""DNS over UDP and TCP, for the names of one zone."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

import dns.exception
import dns.message

from control_plane.api.endpoints import Endpoints
from resolver import dns_message
from resolver.dns_message import DnsQuestion, Zone
from resolver.zone import NO_SUCH_NAME, answer
from wire.errors import Busy, ConfigError

log = logging.getLogger(__name__)

Find = Callable[[str, float], Awaitable[Endpoints | None]]
"""`EndpointFollower.get`."""

FIRST_ANSWER_S = 2.0
"""Longest wait for the first addresses of a job; stub resolvers wait 5 s (resolv.conf(5))."""
MAX_PENDING = 1000
"""Most questions over UDP that wait for a first answer; more are dropped, and clients retry."""
MAX_CONNECTIONS = 200
IDLE_S = 10.0
"""RFC 7766, 6.2.3 recommends an idle timeout of some seconds."""


class DnsServer:
    """Answers DNS queries with the addresses that `find` returns."""

    def __init__(self, zone: Zone, find: Find, randomness: random.Random | None = None) -> None:
        self._zone = zone
        self._find = find
        self._random = randomness or random.Random()
        self._pending: set[asyncio.Task[None]] = set()
        self._clients: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        """The open TCP connections, and the tasks that answer them."""

    async def reply_to(self, wire: bytes, *, tcp: bool) -> bytes | None:
        """Return the answer to a message; None if none must be sent."""
        question = dns_message.decode_query(wire)
        if question is None:
            return None
        reply = await self._reply(question) if isinstance(question, DnsQuestion) else question
        return dns_message.encode_reply(reply, wire, tcp=tcp)

    async def _reply(self, question: DnsQuestion) -> dns.message.Message:
        zone = self._zone
        if not question.name.is_subdomain(zone.name):
            return dns_message.refused_reply(question)
        if question.name == zone.name:
            return dns_message.apex_reply(question, zone)
        subject_in = question.subject_in(zone)
        if subject_in is None:
            return dns_message.answer_reply(question, zone, NO_SUCH_NAME, self._random)
        try:
            endpoints = await self._find(subject_in.job, FIRST_ANSWER_S)
        except Busy:
            return dns_message.servfail_reply(question)
        found = answer(subject_in, question.kind, endpoints)
        try:
            return dns_message.answer_reply(question, zone, found, self._random)
        except dns.exception.DNSException as e:
            why = f"a task of job {subject_in.job} has an address that DNS cannot hold: {e}"
            log.warning("a question cannot be answered", extra={"why": why})
            return dns_message.servfail_reply(question)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Listen on UDP and TCP until left; yields the port, a free one if `port` is 0.

        At the end open connections are closed. `wait_closed` is not used: since Python 3.12 it
        waits for the clients.
        """
        server, transport = await self._open(host, port)
        try:
            yield transport.get_extra_info("sockname")[1]
        finally:
            server.close()
            transport.close()
            for task in list(self._pending):
                task.cancel()
            await self._close_clients()

    async def _close_clients(self) -> None:
        """Close all connections; wait for their tasks at most as long as for a first answer."""
        for client in self._clients:
            client.transport.abort()
        if self._clients:
            await asyncio.wait(self._clients.values(), timeout=FIRST_ANSWER_S)

    async def _open(self, host: str, port: int) -> tuple[asyncio.Server, asyncio.DatagramTransport]:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = await asyncio.start_server(self._connected, host, port, family=family)
            chosen = server.sockets[0].getsockname()[1]
            transport, _ = await loop.create_datagram_endpoint(
                lambda: _Datagrams(self), local_addr=(host, chosen)
            )
        except (OSError, UnicodeError) as e:
            why = e.strerror if isinstance(e, OSError) and e.strerror else e
            raise ConfigError(
                f"cannot listen at {host}:{port}: {why}",
                hint="another server may be there (port 53 also needs root): --listen HOST:PORT",
            ) from e
        return server, transport

    def on_datagram(self, wire: bytes, send: Callable[[bytes], None]) -> None:
        """Answer a datagram, unless too many wait."""
        if len(self._pending) >= MAX_PENDING:
            return
        task = asyncio.ensure_future(self._answer(wire, send))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _answer(self, wire: bytes, send: Callable[[bytes], None]) -> None:
        reply = await self.reply_to(wire, tcp=False)
        if reply is not None:
            send(reply)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer messages with two bytes of length before each (RFC 1035, 4.2.2)."""
        self._clients[writer] = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            if len(self._clients) > MAX_CONNECTIONS:
                return
            while True:
                async with asyncio.timeout(IDLE_S):
                    length = int.from_bytes(await reader.readexactly(2), "big")
                    wire = await reader.readexactly(length)
                    reply = await self.reply_to(wire, tcp=True)
                    if reply is None:
                        return
                    writer.write(len(reply).to_bytes(2, "big") + reply)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            await self._close(writer)

    async def _close(self, client: asyncio.StreamWriter) -> None:
        """Close a connection once its answers are sent, at once if it does not read them."""
        client.close()
        try:
            with suppress(OSError):
                async with asyncio.timeout(IDLE_S):
                    await client.wait_closed()
        finally:
            client.transport.abort()
            del self._clients[client]


class _Datagrams(asyncio.DatagramProtocol):
    """Passes datagrams to the server."""

    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[object, ...]) -> None:
        def send(reply: bytes) -> None:
            if not self._transport.is_closing():
                self._transport.sendto(reply, addr)

        self._server.on_datagram(data, send)

    def error_received(self, exc: Exception) -> None:
        """Ignore the error: the client left before its answer."""
