"""What the front end answers in a second over TLS, and how late while it is attacked.

`python tests/bench/front_end.py [--json] [--seconds 5]`. A control plane as a process with 1,024
descriptors, four users on kept connections from one address of the loopback, an attacker in a
process of its own on 200 others. `p99_ms` is of GETs at a fixed pace of 100 a second, without and
under each attack, of which `_per_s` says how many connections it made.

An attacker is another host: here it shares two cores with those that it attacks, so it runs at
nice 19 and takes what they leave. `computing_p99_ms` is beside a process that only computes, at
nice 19, too: what sharing alone costs. Newcomers open a connection for each request, five a
second; `newcomers_turned_away` is the largest share of them that any attack kept out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import socket
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

from attack.face import USER, Face, running  # noqa: E402

from agent.api import ImageFormat  # noqa: E402
from control_plane.api.capacity import EntitlementSpec  # noqa: E402
from control_plane.api.jobs import JobSpec  # noqa: E402
from control_plane.client import ControlPlaneClient  # noqa: E402
from wire import tls  # noqa: E402
from wire.errors import Unreachable  # noqa: E402

IMAGE = b"no image at all"
DIGEST = "sha256:" + hashlib.sha256(IMAGE).hexdigest()
JOB = JobSpec(name="web", entitlement="front", tasks=3, image=DIGEST, command=["/bin/true"])
USERS, PACE_PER_S, NEWCOMERS_PER_S = 4, 100.0, 5.0
IP_BIND_ADDRESS_NO_PORT = 24
"""ip(7): the port is chosen by connect(2), which is quick also where thousands are in use."""
Attack = Callable[[Face], None]


_NUMBERS = itertools.count()


def _connected(face: Face) -> socket.socket:
    """Connect from the next of 200 addresses, with as little work for this side as possible."""
    sock = socket.socket()
    sock.settimeout(5)
    sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        sock.bind((f"127.0.1.{next(_NUMBERS) % 200 + 1}", 0))
        sock.connect((USER, face.port))
    except BaseException:
        sock.close()
        raise
    return sock


def computing(_: Face) -> None:
    """Take computing time and do nothing to anybody."""
    for _number in range(10_000):
        pass


def connect_and_close(face: Face) -> None:
    """Come and go."""
    _connected(face).close()


def half_a_handshake(face: Face) -> None:
    """Begin TLS and leave."""
    with _connected(face) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))


def handshake(face: Face) -> None:
    """Make the server compute."""
    _ANYBODY.wrap_socket(_connected(face)).close()


_ANYBODY = tls.unverified_context()
_HELD: list[socket.socket] = []


def idle(face: Face) -> None:
    """Stay, and say nothing."""
    _HELD.append(_connected(face))
    if len(_HELD) > 2000:
        _HELD.pop(0).close()


ATTACKS: dict[str, Attack] = {
    f.__name__: f for f in (connect_and_close, half_a_handshake, handshake, idle)
}


def _attacking(face: Face, attack: Attack, done: Any) -> None:
    os.nice(19)
    while True:
        with contextlib.suppress(OSError):
            attack(face)
            done.value += 1


@contextmanager
def _beside(face: Face, attack: Attack) -> Iterator[Callable[[], int]]:
    """Attack until left; what is yielded tells how often that was done so far."""
    context = multiprocessing.get_context("fork")
    done = context.Value("q", 0)
    attacker = context.Process(target=_attacking, args=(face, attack, done), daemon=True)
    attacker.start()
    try:
        yield lambda: int(done.value)
    finally:
        attacker.terminate()
        attacker.join()


async def _once(client: ControlPlaneClient, dry_run: bool) -> None:
    if dry_run:
        await client.apply_job(JOB, dry_run=True)
    else:
        await client.get_job("web")


async def _rate(face: Face, seconds: float, *, dry_run: bool) -> float:
    """Return answers per second of users that ask as fast as they are answered."""
    until = time.monotonic() + seconds

    async def user() -> int:
        count = 0
        async with ControlPlaneClient(_url(face), face.context("user", "root")) as client:
            while time.monotonic() < until:
                await _once(client, dry_run)
                count += 1
        return count

    return sum(await asyncio.gather(*(user() for _ in range(USERS)))) / seconds


async def _late_ms(
    face: Face, seconds: float, attack: Attack | None = None
) -> tuple[float, float, float]:
    """Return the 99th percentile of the time to an answer, asked for at a fixed pace.

    The second value is the share of newcomers that were kept out, the third what the attacker
    did in a second.
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
                async with ControlPlaneClient(_url(face), newcomers) as client:
                    await _once(client, dry_run=False)
                came.append(True)
            except Unreachable:
                came.append(False)
            due += 1 / NEWCOMERS_PER_S

    newcomers = face.context("user", "root")
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(ControlPlaneClient(_url(face), newcomers))
            for _ in range(USERS)
        ]
        for client in clients:
            await _once(client, dry_run=False)
        done = stack.enter_context(_beside(face, attack)) if attack else int
        began, until = time.monotonic(), time.monotonic() + seconds
        await asyncio.gather(newcomer(until), *(user(client, until) for client in clients))
        rate = done() / (time.monotonic() - began)
    return statistics.quantiles(took, n=100)[98] * 1000, came.count(False) / len(came), rate


def _url(face: Face) -> str:
    return f"https://127.0.0.1:{face.port}"


async def _prepare(face: Face) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield IMAGE

    async with ControlPlaneClient(f"unix:{face.socket}") as client:
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
    with tempfile.TemporaryDirectory() as folder, running("control plane", Path(folder)) as face:
        asyncio.run(_prepare(face))
        figures["get_per_s"] = asyncio.run(_rate(face, given.seconds, dry_run=False))
        figures["apply_dry_run_per_s"] = asyncio.run(_rate(face, given.seconds, dry_run=True))
        figures["p99_ms"] = asyncio.run(_late_ms(face, given.seconds))[0]
        figures["computing_p99_ms"] = asyncio.run(_late_ms(face, given.seconds, computing))[0]
        kept_out = []
        for name, attack in ATTACKS.items():
            late_ms, away, rate = asyncio.run(_late_ms(face, given.seconds, attack))
            figures[f"{name}_p99_ms"], figures[f"{name}_per_s"] = late_ms, rate
            kept_out.append(away)
        figures["under_attack_p99_ms"] = max(figures[f"{name}_p99_ms"] for name in ATTACKS)
        figures["newcomers_turned_away"] = max(kept_out)
        figures["memory_mib"] = face.memory() / 2**20
    figures = {name: round(value, 2) for name, value in figures.items()}
    if given.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value:10.1f}")


if __name__ == "__main__":
    main()
