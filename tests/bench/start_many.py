"""How fast do 200 tasks start that are requested at once, and does the agent answer meanwhile?

The floor is a shell loop of `systemd-run` over the same root: plain units, one after the other, as
a user would start them manually. The loop's units have no snapshot, no hardening, no limits, no
record on disk and no supervisor; `ratio` is the agent's rate over the loop's. Meanwhile the program
that starts the tasks requests `/readyz` every tenth of a second over the unix socket.

On one CPU the ratio compares the computing of a start of each kind. With more CPUs the agent starts
several tasks at once, which the loop does not: real hosts have many CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

NEEDS_GUEST = True
HERE = Path(__file__)
STATE = Path("/var/lib/twine")
EVERY_S = 0.1
IDLE_CALLS = 200
POLL_S = 0.5
"""Seconds between two counts of the running tasks: the largest error of a time of a minute or more.
"""
REPORT_EACH = 20
CPUS = 2
"""CPUs of a guest booted for this bench; results for one CPU are in FINDINGS.md."""
MEMORY_MIB = 6144
"""Memory of a guest booted for this bench: enough to admit 200 tasks of 16 MiB each."""


# ── inside the guest ────────────────────────────────────────────────────────────────────


def p99(seconds: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return round(sorted(seconds)[int(0.99 * (len(seconds) - 1))] * 1000, 1)


async def query(client, calls: int | None, found: list[float]) -> None:
    """Request the agent's health `calls` times (None: until cancelled); record each duration."""
    while calls is None or len(found) < calls:
        began = time.perf_counter()
        await client.readyz()
        found.append(time.perf_counter() - began)
        await asyncio.sleep(EVERY_S)


async def until_running(client, names: set[str], after: int) -> None:
    """Wait for tasks; uses as little of the one CPU as the shell's loop does."""
    from agent import api

    running: set[str] = set()
    reported = 0
    while names - running:
        await asyncio.sleep(POLL_S)
        events = await client.get_events(after, wait_s=30)
        if events.lost:
            found = (await client.list_tasks()).tasks
            running = {t.task_id for t in found if t.state is api.TaskState.RUNNING}
        after = events.latest
        for event in events.events:
            if event.task is not None and event.task.state is api.TaskState.RUNNING:
                running.add(event.object)
        if len(running & names) >= reported + REPORT_EACH or not names - running:
            reported = len(running & names)
            print(f"{reported} of {len(names)} run", file=sys.stderr, flush=True)


_AT_ONCE = asyncio.Semaphore(16)


async def few(request) -> None:
    """Have few requests in progress: the agent ends connections of a user with very many."""
    async with _AT_ONCE:
        await request


async def by_agent(client, digest: str, names: list[str], busy: list[float]) -> float:
    from agent import api

    spec = api.TaskSpec(
        generation=int(time.time() * 1000),
        image=digest,
        command=["/bin/sleep", "100000"],
        limits=api.Limits(memory_max_bytes=16 << 20),
        stop_timeout_s=0.1,
    )
    after = (await client.get_events(0)).latest
    querying = asyncio.create_task(query(client, None, busy))
    began = time.perf_counter()
    await asyncio.gather(*(few(client.put_task(name, spec)) for name in names))
    await until_running(client, set(names), after)
    took = time.perf_counter() - began
    querying.cancel()
    await asyncio.gather(querying, return_exceptions=True)
    return took


async def removed(client, names: list[str]) -> None:
    """Remove tasks, and wait until nothing is left of them."""
    found = {task.task_id for task in (await client.list_tasks()).tasks} & set(names)
    await asyncio.gather(*(few(client.delete_task(name)) for name in found))
    while {task.task_id for task in (await client.list_tasks()).tasks} & found:
        await asyncio.sleep(1)


def by_shell(root: Path, n: int) -> float:
    loop = (
        f"for i in $(seq {n}); do systemd-run -q --unit=bench-many-$i -p Type=exec"
        f" -p RootDirectory={root} /bin/sleep 100000 || exit 1; done"
    )
    began = time.perf_counter()
    subprocess.run(["/bin/sh", "-c", loop], check=True)
    took = time.perf_counter() - began
    subprocess.run(["/bin/sh", "-c", "systemctl stop 'bench-many-*'"], check=True)
    return took


async def measure(tar: Path, n: int) -> dict[str, float]:
    from agent import api
    from agent.client import AgentClient

    client = AgentClient("unix:/run/twine/agent.sock", timeout_s=600.0)
    digest = "sha256:" + hashlib.sha256(tar.read_bytes()).hexdigest()

    async def chunks():
        yield tar.read_bytes()

    await client.put_image(digest, api.ImageFormat.TAR, chunks())
    names = [f"many-{i}" for i in range(n)]
    await removed(client, names)  # left by an earlier run
    idle: list[float] = []
    busy: list[float] = []
    await query(client, IDLE_CALLS, idle)
    shell_s = by_shell(STATE / "images" / digest.removeprefix("sha256:"), n)
    agent_s = await by_agent(client, digest, [f"many-{i}" for i in range(n)], busy)
    figures = {
        "cpus": os.cpu_count() or 1,
        "tasks": n,
        "agent_per_s": round(n / agent_s, 2),
        "shell_per_s": round(n / shell_s, 2),
        "ratio": round(shell_s / agent_s, 2),
        "api_p99_idle_ms": p99(idle),
        "api_p99_busy_ms": p99(busy),
        "api_longest_busy_ms": round(max(busy) * 1000, 1),
        "api_calls_busy": len(busy),
    }
    print(json.dumps(figures), file=sys.stderr, flush=True)  # removing them takes time
    await removed(client, names)
    await client.close()
    return figures


# ── outside ─────────────────────────────────────────────────────────────────────────────


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("-n", type=int, default=200, help="tasks")
    parser.add_argument("--lab", default="", help="a running lab with memory for them")
    parser.add_argument("--cpus", type=int, default=CPUS, help="of a guest that is booted for this")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(asyncio.run(measure(options.inside, options.n))))
    else:
        _outside(options)


def _outside(options: argparse.Namespace) -> None:
    from tests.bench import guest

    words = (
        "-n",
        str(options.n),
    )
    guest.shown(
        lambda name: guest.inside(name, HERE, *words),
        options.lab,
        "--memory-mib",
        str(MEMORY_MIB),
        "--cpus",
        str(options.cpus),
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
