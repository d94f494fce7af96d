"""A flood blocks no new caller, and authenticated callers do not wait."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web

from control_plane.identity.authority import CertificateSubject, OwnIdentity, open_authority
from wire import tls
from wire.admission import ConnectionAdmission
from wire.limits import ConnectionLimits
from wire.networks import PROVED_S, SUSPECT_S, Suspects

from .target_process import ATTACKER, SETTLES_S, USER

pytestmark = pytest.mark.behaviour("BUG-HT4")

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40)


@asynccontextmanager
async def served(
    limits: ConnectionLimits, folder: Path | None = None
) -> AsyncIterator[tuple[ConnectionAdmission, int]]:
    """Serve through connection admission; with a folder over TLS."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server((USER, 0), backlog=1024)
    port = listener.getsockname()[1]
    context = None
    if folder is not None:
        authority = open_authority(folder / "authority.pem", "twine")
        context = OwnIdentity(authority, [USER]).server_context()
    async with ConnectionAdmission(
        runner, listener, context, limits, logging.getLogger("x")
    ) as admission:
        yield admission, port
        await runner.cleanup()


def came(stack: ExitStack, port: int, address: str, sent: bytes = b"") -> socket.socket:
    """Connect from an address of the loopback and send bytes; the server does not read them yet."""
    sock = stack.enter_context(socket.socket())
    sock.bind((address, 0))
    sock.connect((USER, port))
    sock.sendall(sent)
    sock.setblocking(False)
    return sock


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(SETTLES_S):
        while not holds():
            await asyncio.sleep(0)


async def answered(sock: socket.socket) -> bool:
    """Return whether a request on a connection was answered; the server may have closed it."""
    async with asyncio.timeout(SETTLES_S):
        try:
            answer = await asyncio.get_running_loop().sock_recv(sock, 15)
        except ConnectionError:
            return False
    return answer.startswith(b"HTTP/1.1 200")


@pytest.mark.behaviour("BUG-HT4")
async def test_an_active_connection_does_not_count_as_silent() -> None:
    """Regression: a client that connected before a burst was dropped while its request was still
    unread.
    """
    async with served(ConnectionLimits(pending=4)) as (_, port):
        with ExitStack() as stack:
            user = came(stack, port, USER, REQUEST)
            for number in range(30):
                came(stack, port, f"127.0.1.{number + 1}")
            assert await answered(user)


@pytest.mark.behaviour("BUG-HT4")
async def test_wasteful_connections_are_dropped_before_a_slow_new_one() -> None:
    """Regression: under a flood from 200 addresses a new client had to send bytes within 10 ms."""
    async with served(ConnectionLimits(pending=8)) as (admission, port):
        with ExitStack() as stack:

            async def flood() -> None:
                socks = [came(stack, port, f"127.0.1.{n % 20 + 1}") for n in range(100)]
                await until(lambda: sum(map(_is_over, socks)) >= len(socks) - 8)

            await flood()
            user = came(stack, port, USER)
            await until(lambda: any(guest.address == USER for guest in admission._pending))
            await flood()
            user.sendall(REQUEST)
            assert await answered(user)


@pytest.mark.behaviour("BUG-HT4")
async def test_active_suspects_are_dropped_before_a_new_connection(tmp_path: Path) -> None:
    """Regression: under half handshakes every second new client was dropped. Between its connection
    and its first byte it was the only silent one.
    """
    async with served(ConnectionLimits(pending=8, handshake_s=SETTLES_S), tmp_path) as (
        admission,
        port,
    ):
        with ExitStack() as stack:
            now = asyncio.get_running_loop().time()
            for number in range(8):
                admission._suspects.add(f"127.0.1.{number + 1}", now)
                came(stack, port, f"127.0.1.{number + 1}", HELLO)
            await until(lambda: len(admission._pending) == 8 and not admission._pending.silent)
            user = came(stack, port, USER)
            await until(lambda: any(guest.address == USER for guest in admission._pending))
            later = [came(stack, port, f"127.0.1.{number + 1}", HELLO) for number in range(8)]
            await until(lambda: sum(map(_is_over, later)) + len(admission._pending) >= 9)
            assert not _is_over(user)


@pytest.mark.behaviour("BUG-HT4")
async def test_half_a_handshake_of_a_disconnected_client_costs_no_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: TLS took 0.25 ms for each connection that was already closed."""
    async with served(ConnectionLimits(), tmp_path) as (admission, port):
        begun: list[object] = []
        monkeypatch.setattr(admission._handshakes, "_begin_handshake", begun.append)
        with ExitStack() as stack:
            for _ in range(20):
                came(stack, port, ATTACKER, HELLO).close()
            came(stack, port, USER, HELLO)
            await until(lambda: begun)
        assert [getattr(guest, "address", "") for guest in begun] == [USER]


def _is_over(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.behaviour("BUG-HT2")
async def test_a_short_visit_displaces_no_other_caller() -> None:
    """The health checks of a load balancer do not count as unauthenticated callers."""
    async with served(ConnectionLimits(pending=1)) as (admission, port):
        with ExitStack() as stack:
            user = came(stack, port, USER)
            await until(lambda: admission.count() == (1, 1))
            for _ in range(100):
                came(stack, port, ATTACKER).close()
            last = came(stack, port, USER, REQUEST)
            assert await answered(last)
            assert admission.count()[1] <= 1
            assert _is_over(user)


@pytest.mark.behaviour("BUG-HT4")
async def test_handshakes_begin_a_few_at_a_time(tmp_path: Path) -> None:
    """Authenticated callers are served in between: one handshake costs a millisecond."""
    async with served(ConnectionLimits(), tmp_path) as (admission, port):
        with ExitStack() as stack:
            for number in range(60):
                came(stack, port, f"127.0.1.{number + 1}", HELLO)

            def begun() -> int:
                return sum(guest.task is not None for guest in admission._pending)

            seen = [0]
            while seen[-1] < 60:
                await asyncio.sleep(0)
                seen.append(begun())
            assert max(now - before for before, now in pairwise(seen)) <= 4


@pytest.mark.behaviour("BUG-HT4")
async def test_the_network_of_an_authenticated_caller_is_not_suspect(tmp_path: Path) -> None:
    """A caller that failed once is not blocked because of other callers at its address."""
    async with served(ConnectionLimits(), tmp_path) as (admission, port):
        authority = open_authority(tmp_path / "authority.pem", "twine")
        context = tls.unverified_context()
        tls.install(context, authority.credential(CertificateSubject("user", "ann"), ""))
        now = asyncio.get_running_loop().time()
        admission._suspects.add(USER, now)
        assert admission._suspects.is_suspect(USER, now)
        _, writer = await asyncio.open_connection(USER, port, ssl=context)
        await until(lambda: not admission._suspects.is_suspect(USER, now))
        writer.close()


@pytest.mark.behaviour("BUG-HT4")
def test_suspicion_ends() -> None:
    """An address is not blocked for attempts of an hour ago."""
    suspects = Suspects()
    suspects.add("a", 0.0)
    assert suspects.is_suspect("a", SUSPECT_S - 1)
    assert not suspects.is_suspect("a", SUSPECT_S)
    assert not suspects.is_suspect("b", 0.0)
    suspects.record_proof("a", 1.0)
    suspects.add("a", PROVED_S)
    assert not suspects.is_suspect("a", PROVED_S)
    assert suspects.is_suspect("a", PROVED_S + 1)


@pytest.mark.behaviour("BUG-HT2")
@pytest.mark.parametrize("count", [10_000])
def test_suspects_are_bounded(count: int) -> None:
    """The memory about unauthenticated callers is bounded, as all their costs are."""
    suspects = Suspects()
    for number in range(count):
        suspects.add(str(number), float(number))
        suspects.record_proof(str(number), float(number))
    assert len(suspects._until) == len(suspects._proved_until) == 4096
    assert suspects._until.keys() == {str(n) for n in range(count - 4096, count)}
