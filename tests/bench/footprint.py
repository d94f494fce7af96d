"""What does an idle agent with 100 running tasks use, compared with an event loop with 100 timers?

The agent and the floor run at the same time in one guest, in separate units; the kernel counts the
CPU time of both over the same window. The floor is a Python process whose loop has one timer of ten
seconds for each task, and one long poll over a unix socket. The agent has its usual long poll to a
control plane. `rss_mb` is the sum over all processes of the agent's unit, shared pages counted in
each; `pss_mb` divides them among the processes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

NEEDS_GUEST = True
HERE = Path(__file__)
CGROUPS = Path("/sys/fs/cgroup")
AGENT = CGROUPS / "hostcritical.slice/twine-agent.service"
FLOOR = CGROUPS / "system.slice/twine-bench-floor.service"
TIMER_S = 10.0
"""Rare, so that the floor is nearly idle, too."""
POLL_S = 30.0
MEMORY_MIB = 4096
"""Memory of a guest booted for this bench: enough to admit 100 tasks of 16 MiB each."""
FEW = 4
"""Starts in progress at a time: `start_many` measures how tasks start."""


# ── inside the guest ────────────────────────────────────────────────────────────────────


async def floor(timers: int) -> None:
    """Run timers, and a long poll that is answered every `POLL_S`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            await asyncio.sleep(POLL_S)
            writer.write(b"nothing new\n")
            await writer.drain()

    async def tick() -> None:
        while True:
            await asyncio.sleep(TIMER_S)

    path = "/run/twine-bench-floor.sock"
    Path(path).unlink(missing_ok=True)
    async with await asyncio.start_unix_server(answer, path), asyncio.TaskGroup() as group:
        for _ in range(timers):
            group.create_task(tick())
        reader, writer = await asyncio.open_unix_connection(path)
        while True:
            writer.write(b"what is new\n")
            await reader.readline()


def cpu_s(group: Path) -> float:
    """Return the CPU time of a cgroup in seconds."""
    stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(stat["usage_usec"]) / 1e6


def memory_mb(group: Path) -> tuple[float, float]:
    """Return RSS and PSS of all processes of a cgroup."""
    rss = pss = 0
    for pid in (group / "cgroup.procs").read_text().split():
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split(":")[0]: line.split()[1] for line in rollup[1:]}
        rss, pss = rss + int(sizes["Rss"]), pss + int(sizes["Pss"])
    return round(rss / 1024, 1), round(pss / 1024, 1)


async def measure(tar: Path, tasks: int, seconds: float, called: str) -> dict[str, float]:
    from agent import api
    from agent.client import AgentClient

    client = AgentClient("unix:/run/twine/agent.sock", timeout_s=300.0)
    digest = "sha256:" + hashlib.sha256(tar.read_bytes()).hexdigest()

    async def chunks():
        yield tar.read_bytes()

    await client.put_image(digest, api.ImageFormat.TAR, chunks())
    names = [f"{called}-{n}" for n in range(tasks)]
    spec = api.TaskSpec(
        generation=int(time.time() * 1000),
        image=digest,
        command=["/bin/sleep", "100000"],
        limits=api.Limits(memory_max_bytes=16 << 20),
        stop_timeout_s=0.1,
    )
    running = 0
    for started, name in enumerate(names, start=1):
        await client.put_task(name, spec)
        while (running <= started - FEW and started < tasks) or (
            started == tasks and running < tasks
        ):
            await asyncio.sleep(1)
            found = (await client.list_tasks()).tasks
            running = sum(t.state is api.TaskState.RUNNING and t.task_id in names for t in found)
        print(f"{running} of {tasks} run", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE), "--floor", str(tasks)]
    unit = ["systemd-run", "-q", "--unit=twine-bench-floor", "-p", "CPUAccounting=yes"]
    subprocess.run([*unit, "--slice=system.slice", *command], check=True)
    polling = asyncio.create_task(_poll(client))
    await asyncio.sleep(POLL_S)  # both have loaded what they need, and are idle
    before, began = (cpu_s(AGENT), cpu_s(FLOOR)), time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    agent, bare = cpu_s(AGENT) - before[0], cpu_s(FLOOR) - before[1]
    (rss, pss), (floor_rss, _) = memory_mb(AGENT), memory_mb(FLOOR)
    polling.cancel()
    subprocess.run(["systemctl", "stop", "twine-bench-floor.service"], check=True)
    figures = {
        "tasks": running,
        "rss_mb": rss,
        "pss_mb": pss,
        "floor_rss_mb": floor_rss,
        "cpu_percent": round(100 * agent / took, 2),
        "floor_cpu_percent": round(100 * bare / took, 2),
        "cpu_ratio": round(agent / bare, 2),
        "seconds": round(took, 1),
    }
    print(json.dumps(figures), file=sys.stderr, flush=True)  # removing them takes time
    for name in names:
        await client.delete_task(name)
    await client.close()
    return figures


async def _poll(client) -> None:
    after = 0
    while True:
        after = (await client.get_events(after, wait_s=POLL_S)).latest


# ── outside ─────────────────────────────────────────────────────────────────────────────


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("-n", type=int, default=100, help="tasks")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the window")
    parser.add_argument("--called", default="idle", help="tasks; `many`: those of start_many")
    parser.add_argument("--lab", default="", help="a running lab, else one is booted")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--floor", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.floor is not None:
        asyncio.run(floor(options.floor))
    elif options.inside:
        print(
            json.dumps(
                asyncio.run(measure(options.inside, options.n, options.seconds, options.called))
            )
        )
    else:
        _outside(options)


def _outside(options: argparse.Namespace) -> None:
    from tests.bench import guest

    words = (
        "-n",
        str(options.n),
        "--seconds",
        f"{options.seconds:g}",
        "--called",
        options.called,
    )
    guest.shown(
        lambda name: guest.inside(name, HERE, *words),
        options.lab,
        "--memory-mib",
        str(MEMORY_MIB),
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
