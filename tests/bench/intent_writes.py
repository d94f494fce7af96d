"""How many durable writes of sizes does a control plane accept through its front end?

    python -m tests.bench.intent_writes [--json] [--seconds 20]

Sizes of 500 jobs are written over TLS to a control plane in a separate process. A write is answered
once it is on disk with its entry in the audit log (goal: 1,000 a second). Each write has another
size, so each gives the scheduler work, except for `confirming_…`.

- `single_…`: one size a request, by 48 writers that wait for their answers.
- `confirming_…`: the same with the size that is in force, as most writes of an autoscaler are.
- `together_…`: 100 sizes a request by 4 writers, as the autoscaler writes them.
- `bare_…`: the floor: a server with only aiohttp and SQLite, which stores the same bytes with the
  same certificates, with one sync for all waiting writes, for the 48 writers of `single_…`.
- `…_cpu_ms` is what the server computes for one write, `client_cpu_ms` this process. With less than
  1 ms a core is enough for 1,000 a second, whatever else the host does.
- `single_ratio` and `confirming_ratio` are `bare_cpu_ms` over theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import queue
import re
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import msgspec
from aiohttp import web

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "tests/integration")]

from attack.target_process import USER, Target, running  # noqa: E402

from agent.api import ImageFormat  # noqa: E402
from control_plane.api.capacity import EntitlementSpec  # noqa: E402
from control_plane.api.intent_changes import SizeChange, SizeChanges  # noqa: E402
from control_plane.api.jobs import JobSpec  # noqa: E402
from control_plane.client import ControlPlaneClient  # noqa: E402
from control_plane.identity.authority import CertificateSubject  # noqa: E402
from tests.bench.front_end import DIGEST, IMAGE  # noqa: E402
from wire import tls  # noqa: E402

WRITERS, TOGETHER, AT_ONCE, WRITTEN = 48, 4, 100, 500
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_STORED = {"jobs": 1500, "audit": 300}
"""Bytes that a write of a size stores: the job's intent, and the entry of the audit log."""


# -- a client that costs little: both servers share the host with it


class _Writer(asyncio.Protocol):
    """Sends each request after the answer to the previous one, until it is stopped."""

    def __init__(self, requests: Iterator[bytes], answered: Callable[[], None]) -> None:
        self._requests, self._answered, self._got = requests, answered, b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def write(self) -> None:
        self._transport.write(next(self._requests))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionResetError("the server closed"))

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, _, body = self._got.partition(b"\r\n\r\n")
        found = _LENGTH.search(head)
        if found is None or len(body) < int(found[1]):
            return
        if not head.startswith(b"HTTP/1.1 200") or b'"refused":{"' in body:
            self.ended.set_exception(AssertionError(self._got[:2000]))
            return
        self._got = b""
        self._answered()
        if self.is_stopping:
            self.ended.set_result(None)
            self._transport.close()  # the number of connections of one identity is limited
        else:
            self.write()


def _request(path: str, body: object) -> bytes:
    data = msgspec.json.encode(body)
    head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _change(writer: int, number: int) -> SizeChange:
    return SizeChange(tasks=number % 3, reason=f"write {number} of writer {writer}")


def single(writer: int) -> Iterator[bytes]:
    """Yield requests of one size."""
    for number in count():
        job = (writer + number * WRITERS) % WRITTEN
        yield _request(f"/v1/jobs/job{job}/intents/size", _change(writer, number))


def confirming(writer: int) -> Iterator[bytes]:
    """Yield requests of one size, always the same one."""
    for number in count():
        job = (writer + number * WRITERS) % WRITTEN
        yield _request(f"/v1/jobs/job{job}/intents/size", _change(writer, 0))


def together(writer: int) -> Iterator[bytes]:
    """Yield requests of 100 sizes."""
    names = [f"job{(writer * AT_ONCE + n) % WRITTEN}" for n in range(AT_ONCE)]
    for number in count():
        sizes = dict.fromkeys(names, _change(writer, number))
        yield _request("/v1/sizes", SizeChanges(sizes=sizes))


async def rate(
    port: int,
    context: ssl.SSLContext,
    pid: int,
    seconds: float,
    writers: int,
    requests: Callable[[int], Iterator[bytes]],
) -> tuple[float, float, float]:
    """Return requests answered in a second, and the milliseconds of both processes for each.

    When the clock starts, all connections have been made and have had an answer.
    """
    loop, made = asyncio.get_running_loop(), 0

    def answered() -> None:
        nonlocal made
        made += 1

    connections = []
    for number in range(writers):
        made_one = loop.create_connection(
            lambda number=number: _Writer(requests(number), answered),  # type: ignore[misc]
            *(USER, port),
            ssl=context,
        )
        connections.append((await made_one)[1])
        connections[-1].write()
    while made < 2 * writers:
        for connection in connections:
            if connection.ended.done():
                connection.ended.result()
        await asyncio.sleep(0.01)
    began, used, own, first = time.monotonic(), _cpu_s(pid), time.process_time(), made
    await asyncio.sleep(seconds)
    took, done = time.monotonic() - began, made - first
    used, own = _cpu_s(pid) - used, time.process_time() - own
    for connection in connections:
        connection.is_stopping = True
    await asyncio.gather(*(connection.ended for connection in connections))
    return done / took, 1e3 * used / done, 1e3 * own / done


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, to the nanosecond."""
    folder = Path(f"/proc/{pid}/task")
    return sum(int((one / "schedstat").read_text().split()[0]) for one in folder.iterdir()) / 1e9


# -- the control plane


async def _prepare(client: ControlPlaneClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield IMAGE

    await client.put_entitlement("front", EntitlementSpec(machines=3))
    await client.push_image(DIGEST, ImageFormat.TAR, chunks())
    for number in range(WRITTEN):
        command = ["/bin/true"]
        spec = JobSpec(
            name=f"job{number}", entitlement="front", tasks=0, image=DIGEST, command=command
        )
        await client.apply_job(spec)


def of_front_end(target: Target, seconds: float) -> dict[str, float]:
    """Measure the writes through the front end."""

    async def granted() -> None:
        async with ControlPlaneClient(f"unix:{target.socket}") as client:
            await client.grant_operator("user:root")
            await _prepare(client)

    asyncio.run(granted())
    served = target.port, target.context("user", "root"), target.process.pid, seconds
    one_per_s, one_ms, own_ms = asyncio.run(rate(*served, WRITERS, single))
    asyncio.run(rate(*served, WRITERS, confirming))  # all jobs get that size, and become quiet
    same_per_s, same_ms, _ = asyncio.run(rate(*served, WRITERS, confirming))
    many_per_s, many_ms, _ = asyncio.run(rate(*served, TOGETHER, together))
    return {
        "single_writes_per_s": round(one_per_s, 1),
        "single_cpu_ms": round(one_ms, 3),
        "client_cpu_ms": round(own_ms, 3),
        "confirming_writes_per_s": round(same_per_s, 1),
        "confirming_cpu_ms": round(same_ms, 3),
        "together_writes_per_s": round(many_per_s * AT_ONCE, 1),
        "together_cpu_ms": round(many_ms / AT_ONCE, 3),
    }


# -- the floor


class _Rows:
    """A thread that stores rows: all waiting rows share a transaction and its sync."""

    def __init__(self, path: Path) -> None:
        self._waiting: queue.SimpleQueue[tuple[str, asyncio.Future[None]]] = queue.SimpleQueue()
        self._path, self._loop = path, asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    async def store(self, job: str) -> None:
        """Return once the rows of a write are on disk."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiting.put((job, done))
        await done

    def _run(self) -> None:
        db = sqlite3.connect(self._path, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("CREATE TABLE t (key TEXT PRIMARY KEY, value BLOB)")
        for number in count(0, 1_000):
            group = [self._waiting.get()]
            while not self._waiting.empty() and len(group) < 512:
                group.append(self._waiting.get())
            rows = [(f"jobs/{job}", bytes(_STORED["jobs"])) for job, _ in group]
            rows += [
                (f"audit/{number + n:012}", bytes(_STORED["audit"])) for n in range(len(group))
            ]
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT OR REPLACE INTO t VALUES (?, ?)", rows)
            db.execute("COMMIT")
            self._loop.call_soon_threadsafe(self._answer, [done for _, done in group])

    def _answer(self, waiting: list[asyncio.Future[None]]) -> None:
        for done in waiting:
            done.set_result(None)


async def _serve_bare(folder: Path) -> None:
    rows = _Rows(folder / "rows.db")

    async def put(request: web.Request) -> web.Response:
        msgspec.json.decode(await request.read(), type=SizeChange)
        await rows.store(request.match_info["job"])
        return web.json_response({"version": 1})

    app = web.Application()
    app.router.add_put("/v1/jobs/{job}/intents/size", put)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    context = tls.server_context(tls.load(folder / "bare.json"), require_client=True)
    site = web.TCPSite(runner, USER, 0, ssl_context=context)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


@contextmanager
def bare_server(target: Target, folder: Path) -> Iterator[tuple[int, int]]:
    """Run a server of aiohttp and SQLite with the program's authority; yields port and pid."""
    subject = CertificateSubject("component", tls.CONTROL_PLANE.rpartition("/")[2], (USER,))
    tls.save(target.authority.credential(subject, ""), folder / "bare.json")
    program = [sys.executable, "-m", "tests.bench.intent_writes", "--bare", str(folder)]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.bare is not None:
        asyncio.run(_serve_bare(options.bare))
        return
    with tempfile.TemporaryDirectory() as name, running("control plane", Path(name)) as target:
        figures = of_front_end(target, options.seconds)
        context = target.context("user", "root")
        with bare_server(target, Path(name)) as (port, pid):
            served = port, context, pid, options.seconds
            per_s, ms, _ = asyncio.run(rate(*served, WRITERS, single))
    figures |= {"bare_writes_per_s": round(per_s, 1), "bare_cpu_ms": round(ms, 3)}
    for name in ("single", "confirming"):
        figures[f"{name}_ratio"] = round(ms / figures[f"{name}_cpu_ms"], 3)
    figures["load"] = round(os.getloadavg()[0], 1)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:10}")


if __name__ == "__main__":
    main()
