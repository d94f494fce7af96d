"""How many requests per second does the front end answer over TLS, and how fast under attack?

`python tests/bench/front_end.py [--json] [--seconds 5]`. A control plane runs as a process with
1,024 descriptors. Four users keep connections from one address of the loopback; an attacker in a
separate process uses 200 others. `p99_ms` is of GETs at a fixed pace of 100 a second, without and
under each attack. `_per_s` is the number of connections that the attack made per second.

A real attacker is another host. Here it shares two cores with the attacked processes, so it runs at
nice 19 and uses idle time only. `computing_p99_ms` is the latency next to a process that only
computes at nice 19: the cost of sharing alone. Newcomers open a connection for each request, five a
second; `newcomers_turned_away` is the largest share of them that any attack kept out.

The attacks by requests are those of BUG-HT20, HT22, HT23 and HT27: bodies of the largest permitted
size, costly previews, and long polls whose client leaves. `all_at_once` has one attacker each.
`times_late` is the worst 99th percentile as a multiple of the one without an attack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import socket
import ssl
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "tests/integration")]

import msgspec  # noqa: E402
from attack.target_process import USER, Target, running  # noqa: E402

from agent.api import ImageFormat  # noqa: E402
from control_plane.api.capacity import EntitlementSpec  # noqa: E402
from control_plane.api.jobs import JobSpec  # noqa: E402
from control_plane.client import ControlPlaneClient  # noqa: E402
from control_plane.identity.authority import CertificateSubject  # noqa: E402
from wire import tls  # noqa: E402
from wire.errors import Unreachable  # noqa: E402

IMAGE = b"no image at all"
DIGEST = "sha256:" + hashlib.sha256(IMAGE).hexdigest()
JOB = JobSpec(name="web", entitlement="front", tasks=3, image=DIGEST, command=["/bin/true"])
USERS, PACE_PER_S, NEWCOMERS_PER_S = 4, 100.0, 5.0
IP_BIND_ADDRESS_NO_PORT = 24
"""ip(7): the port is chosen by connect(2), which is quick also where thousands are in use."""
Attack = Callable[[Target], None]


_NUMBERS = itertools.count()


def _connected(target: Target) -> socket.socket:
    """Connect from the next of 200 addresses, with as little work for the client as possible."""
    sock = socket.socket()
    sock.settimeout(5)
    sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        sock.bind((f"127.0.1.{next(_NUMBERS) % 200 + 1}", 0))
        sock.connect((USER, target.port))
    except BaseException:
        sock.close()
        raise
    return sock


def computing(_: Target) -> None:
    """Use CPU time without any request."""
    for _number in range(10_000):
        pass


def connect_and_close(target: Target) -> None:
    """Connect and disconnect."""
    _connected(target).close()


def half_a_handshake(target: Target) -> None:
    """Begin TLS and disconnect."""
    with _connected(target) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))


def handshake(target: Target) -> None:
    """Make the server compute."""
    _UNVERIFIED.wrap_socket(_connected(target)).close()


_UNVERIFIED = tls.unverified_context()
_HELD: list[socket.socket] = []
_KEPT: list[ssl.SSLSocket] = []


def idle(target: Target) -> None:
    """Keep a connection open without a request."""
    _HELD.append(_connected(target))
    if len(_HELD) > 2000:
        _HELD.pop(0).close()


def _send(
    target: Target, role: str, method: str, path: str, body: bytes, *, answered: bool
) -> None:
    """Send a request on a kept connection, and read the answer or leave."""
    if not _KEPT:
        _KEPT.append(_context(target, role).wrap_socket(_connected(target)))
        _KEPT[0].settimeout(60)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    try:
        _KEPT[0].sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if answered and _answer(_KEPT[0]):
            return
    except OSError:
        pass
    _KEPT.pop().close()


@functools.cache
def _context(target: Target, role: str) -> ssl.SSLContext:
    context = tls.unverified_context()
    if role != "anyone":
        tls.install(context, target.authority.credential(CertificateSubject(role, "eve"), ""))
    return context


def _answer(sock: ssl.SSLSocket) -> bytes:
    """Read one answer; return its first line, or nothing if the connection ends."""
    found = b""
    while b"\r\n\r\n" not in found:
        if not (part := sock.recv(65536)):
            return b""
        found += part
    head, _, rest = found.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    missing = int(length[1]) - len(rest) if length else 0
    while missing > 0:
        missing -= len(sock.recv(65536)) or missing
    return b"" if b"connection: close" in head.lower() else head.partition(b"\r\n")[0]


def _body(limit: int, one: str, **fields: object) -> bytes:
    """Return an object with as many unknown fields as its sender may send."""
    many = {f"{one}{number}": 0 for number in range(limit // (len(one) + 12))}
    return json.dumps(fields | many).encode()


UNKNOWN = _body(320_000, "replica", name="web")
NAMES = json.dumps({"known": {f"No_{n}": 0 for n in range(128_000 // 16)}}).encode()
WAIT = json.dumps({"known": {"none": 0}, "wait_s": 60}).encode()
PREVIEW = json.dumps(msgspec.to_builtins(msgspec.structs.replace(JOB, tasks=15_000))).encode()


def unknown_fields(target: Target) -> None:
    """Send a job of a user with tens of thousands of fields that no job has (BUG-HT20)."""
    _send(target, "user", "PUT", "/v1/jobs/eve", UNKNOWN, answered=True)


def wrong_names(target: Target) -> None:
    """Send thousands of names that no job has, without a certificate (BUG-HT20)."""
    _send(target, "anyone", "POST", "/v1/endpoints/watch", NAMES, answered=True)


def long_polls(target: Target) -> None:
    """Start a long poll and leave, without a certificate (BUG-HT22, BUG-HT23)."""
    _send(target, "anyone", "POST", "/v1/endpoints/watch", WAIT, answered=False)


def previews(target: Target) -> None:
    """Request previews of 15,000 tasks (BUG-HT27)."""
    _send(target, "user", "POST", "/v1/jobs/web/plan", PREVIEW, answered=True)


CONNECTIONS = (connect_and_close, half_a_handshake, handshake, idle)
ATTACKS: dict[str, tuple[Attack, ...]] = {
    f.__name__: (f,) for f in (*CONNECTIONS, unknown_fields, wrong_names, long_polls, previews)
} | {"all_at_once": (*CONNECTIONS, unknown_fields, wrong_names, long_polls, previews)}


def _attacking(target: Target, attack: Attack, done: Any) -> None:
    os.nice(19)
    while True:
        with contextlib.suppress(OSError):
            attack(target)
            with done.get_lock():
                done.value += 1


@contextmanager
def _under_attack(target: Target, attacks: tuple[Attack, ...]) -> Iterator[Callable[[], int]]:
    """Attack during the block, with a process for each attack; yield a counter of the attacks."""
    context = multiprocessing.get_context("fork")
    done = context.Value("q", 0)
    attackers = [
        context.Process(target=_attacking, args=(target, attack, done), daemon=True)
        for attack in attacks
    ]
    for attacker in attackers:
        attacker.start()
    try:
        yield lambda: int(done.value)
    finally:
        for attacker in attackers:
            attacker.terminate()
            attacker.join()


async def _once(client: ControlPlaneClient, dry_run: bool) -> None:
    if dry_run:
        await client.apply_job(JOB, dry_run=True)
    else:
        await client.get_job("web")


async def _rate(target: Target, seconds: float, *, dry_run: bool) -> float:
    """Return answers per second of users that send the next request after each answer."""
    until = time.monotonic() + seconds

    async def user() -> int:
        count = 0
        async with ControlPlaneClient(_url(target), target.context("user", "root")) as client:
            while time.monotonic() < until:
                await _once(client, dry_run)
                count += 1
        return count

    return sum(await asyncio.gather(*(user() for _ in range(USERS)))) / seconds


async def _late_ms(
    target: Target, seconds: float, attacks: tuple[Attack, ...] = ()
) -> tuple[float, float, float]:
    """Return the 99th percentile of the latency of requests at a fixed pace.

    The second value is the share of newcomers that were rejected, the third the attacker's actions
    per second.
    """
    took: list[float] = []
    came: list[bool] = []

    async def user(client: ControlPlaneClient, until: float) -> None:
        due = time.monotonic()
        while due < until:
            await asyncio.sleep(due - time.monotonic())
            await _once(client, dry_run=False)
            took.append(time.monotonic() - due)
            due += USERS / PACE_PER_S

    async def newcomer(until: float) -> None:
        due = time.monotonic()
        while due < until:
            await asyncio.sleep(due - time.monotonic())
            try:
                async with ControlPlaneClient(_url(target), newcomers) as client:
                    await _once(client, dry_run=False)
                came.append(True)
            except Unreachable:
                came.append(False)
            due += 1 / NEWCOMERS_PER_S

    newcomers = target.context("user", "root")
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(ControlPlaneClient(_url(target), newcomers))
            for _ in range(USERS)
        ]
        for client in clients:
            await _once(client, dry_run=False)
        done = stack.enter_context(_under_attack(target, attacks)) if attacks else int
        began, until = time.monotonic(), time.monotonic() + seconds
        await asyncio.gather(newcomer(until), *(user(client, until) for client in clients))
        rate = done() / (time.monotonic() - began)
    return statistics.quantiles(took, n=100)[98] * 1000, came.count(False) / len(came), rate


def _url(target: Target) -> str:
    return f"https://127.0.0.1:{target.port}"


async def _prepare(target: Target) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield IMAGE

    async with ControlPlaneClient(f"unix:{target.socket}") as client:
        await client.grant_operator("user:root")
        await client.put_entitlement("front", EntitlementSpec(machines=3))
        await client.push_image(DIGEST, ImageFormat.TAR, chunks())
        await client.apply_job(JOB)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, running("control plane", Path(folder)) as target:
        asyncio.run(_prepare(target))
        figures["get_per_s"] = asyncio.run(_rate(target, given.seconds, dry_run=False))
        figures["apply_dry_run_per_s"] = asyncio.run(_rate(target, given.seconds, dry_run=True))
        figures["p99_ms"] = asyncio.run(_late_ms(target, given.seconds))[0]
        figures["computing_p99_ms"] = asyncio.run(_late_ms(target, given.seconds, (computing,)))[0]
        kept_out = []
        for name, attacks in ATTACKS.items():
            late_ms, away, rate = asyncio.run(_late_ms(target, given.seconds, attacks))
            figures[f"{name}_p99_ms"], figures[f"{name}_per_s"] = late_ms, rate
            kept_out.append(away)
        figures["under_attack_p99_ms"] = max(figures[f"{name}_p99_ms"] for name in ATTACKS)
        floor_ms = max(figures["p99_ms"], figures["computing_p99_ms"])
        figures["times_late"] = figures["under_attack_p99_ms"] / floor_ms
        figures["newcomers_turned_away"] = max(kept_out)
        figures["memory_mib"] = target.memory() / 2**20
    figures = {name: round(value, 2) for name, value in figures.items()}
    if given.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value:10.1f}")


if __name__ == "__main__":
    main()
