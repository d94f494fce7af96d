"""What the front end answers in a second over TLS, and how late while it is attacked.

`python tests/bench/front_end.py [--json] [--seconds 5]`. A control plane as a process with 1,024
descriptors, four users on kept connections from one address of the loopback, an attacker in a
process of its own on another. `p99_ms` is of GETs at a fixed pace of 100 a second, without and
under each attack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "tests/integration")]

from attack.face import Face, running  # noqa: E402

from agent.api import ImageFormat  # noqa: E402
from control_plane.api.capacity import EntitlementSpec  # noqa: E402
from control_plane.api.jobs import JobSpec  # noqa: E402
from control_plane.client import ControlPlaneClient  # noqa: E402

IMAGE = b"no image at all"
DIGEST = "sha256:" + hashlib.sha256(IMAGE).hexdigest()
JOB = JobSpec(name="web", entitlement="front", tasks=3, image=DIGEST, command=["/bin/true"])
USERS, PACE_PER_S = 4, 100.0
Attack = Callable[[Face], None]


def connect_and_close(face: Face) -> None:
    """Come and go."""
    face.connect().close()


def half_a_handshake(face: Face) -> None:
    """Begin TLS and leave."""
    with face.connect() as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))


def handshake(face: Face) -> None:
    """Make the server compute."""
    with contextlib.suppress(OSError):
        face.secured("anyone").close()


_HELD: list[socket.socket] = []


def idle(face: Face) -> None:
    """Stay, and say nothing."""
    _HELD.append(face.connect(f"127.0.1.{len(_HELD) % 200 + 1}"))
    if len(_HELD) > 2000:
        _HELD.pop(0).close()


ATTACKS: dict[str, Attack] = {
    f.__name__: f for f in (connect_and_close, half_a_handshake, handshake, idle)
}


def _attacking(face: Face, attack: Attack) -> None:
    while True:
        with contextlib.suppress(OSError):
            attack(face)


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


async def _late_ms(face: Face, seconds: float) -> float:
    """Return the 99th percentile of the time to an answer, asked for at a fixed pace."""
    took: list[float] = []

    async def user() -> None:
        async with ControlPlaneClient(_url(face), face.context("user", "root")) as client:
            due = time.monotonic()
            until = due + seconds
            while due < until:
                await asyncio.sleep(due - time.monotonic())
                await _once(client, dry_run=False)
                took.append(time.monotonic() - due)
                due += USERS / PACE_PER_S

    await asyncio.gather(*(user() for _ in range(USERS)))
    return statistics.quantiles(took, n=100)[98] * 1000


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
        figures["p99_ms"] = asyncio.run(_late_ms(face, given.seconds))
        for name, attack in ATTACKS.items():
            attacker = multiprocessing.get_context("fork").Process(
                target=_attacking, args=(face, attack), daemon=True
            )
            attacker.start()
            figures[f"{name}_p99_ms"] = asyncio.run(_late_ms(face, given.seconds))
            attacker.terminate()
            attacker.join()
        figures["under_attack_p99_ms"] = max(figures[f"{name}_p99_ms"] for name in ATTACKS)
        figures["memory_mib"] = face.memory() / 2**20
    figures = {name: round(value, 1) for name, value in figures.items()}
    if given.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value:10.1f}")


if __name__ == "__main__":
    main()
