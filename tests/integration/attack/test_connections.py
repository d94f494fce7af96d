"""Connections alone cannot harm a program."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from .target_process import DESCRIPTORS, Target

pytestmark = pytest.mark.behaviour("BUG-HT2", "BUG-HT4", "BUG-AG1")


def _closed(target: Target) -> None:
    target.connect().close()


def _one_byte(target: Target) -> None:
    with target.connect() as sock:
        sock.sendall(b"\x16")


def _no_tls(target: Target) -> None:
    with target.connect() as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")


def _half_a_hello(target: Target) -> None:
    with target.connect() as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))


def _handshake(target: Target) -> None:
    try:
        target.secured("anyone").close()
    except (ssl.SSLError, ConnectionError):
        assert target.kind == "agent"  # it accepts no caller without a certificate


@pytest.mark.behaviour("BUG-HT2")
@pytest.mark.parametrize(
    ("attack", "times"),
    [(_closed, 3000), (_one_byte, 1000), (_no_tls, 1000), (_half_a_hello, 1000), (_handshake, 300)],
)
def test_closed_connections_leave_no_objects(
    target: Target, attack: Callable[[Target], None], times: int
) -> None:
    """Regression: each connection that closed before a TLS byte leaked 0.3 MB; 3,000 leaked a
    gigabyte.
    """
    for _ in range(times):
        attack(target)


def _opened(target: Target, count: int, first: bytes) -> Iterator[socket.socket]:
    for number in range(count):
        sock = target.connect(f"127.0.1.{number % 200 + 1}")
        sock.sendall(first)
        yield sock


@pytest.mark.behaviour("BUG-HT4", "BUG-AG1")
@pytest.mark.parametrize("first", [b"", b"\x16"])
def test_idle_connections_do_not_keep_others_out(target: Target, first: bytes) -> None:
    """Regression: a thousand idle connections blocked users and the operators' socket. The agent
    could no longer write its journal, and the log grew to 673 MB in three minutes.
    """
    written = target.log.stat().st_size
    with ExitStack() as stack:
        for sock in _opened(target, 2 * DESCRIPTORS, first):
            stack.enter_context(sock)
        assert target.descriptors() < DESCRIPTORS * 3 // 4
        for role in ("", "local"):
            asyncio.run(target.ask(role))
    text = target.log.read_bytes()[written:]
    assert len(text) < 200_000
    assert b"Traceback" not in text


@pytest.mark.behaviour("BUG-HT4")
def test_one_address_keeps_no_other_out_and_not_even_itself(target: Target) -> None:
    """Most of 500 idle connections from one address are closed; a user at the same address is
    served.
    """
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(target.connect("127.0.0.1"))
        asyncio.run(target.ask())
        assert target.descriptors() < 400


UNFINISHED = [
    b"",
    b"GET /healthz HT",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 1000,
    b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n",
]


@pytest.mark.behaviour("BUG-HT4")
def test_an_incomplete_connection_is_closed(target: Target) -> None:
    """Regression: half a header, and silence after the handshake, kept a connection for minutes."""
    with ExitStack() as stack:
        socks = []
        for first in UNFINISHED[1:]:
            sock = stack.enter_context(target.secured())
            sock.sendall(first)
            socks.append(sock)
        if target.kind == "control plane":
            socks.append(stack.enter_context(target.secured("anyone")))
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
