"""How long does a task take to start, compared with a bare unit, systemd-nspawn and podman?

Boots a guest (or uses the lab named by --lab), measures inside it, in one run and in turns, so that
a slow moment of the machine affects all four equally:

    agent    PUT on the agent's socket → `running` in its event stream
    floor    snapshot by ioctl + a bare transient unit (Type=exec) with that RootDirectory
             → the unit is seen active
    nspawn   snapshot by ioctl + systemd-nspawn → first line of the payload
    podman   podman run of the same root file system → first line of the payload

Prints medians in milliseconds and `ratio` = agent / floor; --json for programs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

HERE = Path(__file__).resolve()
NEEDS_GUEST = True
STATE = Path("/var/lib/twine")
KINDS = ("agent", "floor", "nspawn", "podman")
APPLETS = ("sh", "sleep", "echo")


def root_tar() -> bytes:
    """Return a root file system of busybox as a tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for folder in ("", "bin", "usr", "etc", "proc", "sys", "dev", "tmp", "run", "var", "root"):
            entry = tarfile.TarInfo(f"./{folder}")
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        busybox = Path("/bin/busybox").read_bytes()
        entry = tarfile.TarInfo("./bin/busybox")
        entry.size, entry.mode = len(busybox), 0o755
        tar.addfile(entry, io.BytesIO(busybox))
        for name in APPLETS:
            entry = tarfile.TarInfo(f"./bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        for name, text in (("passwd", "root:x:0:0:root:/:/bin/sh\n"), ("os-release", "ID=bench\n")):
            entry = tarfile.TarInfo(f"./etc/{name}")
            entry.size, entry.mode = len(text), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


# ── inside the guest ────────────────────────────────────────────────────────────────────


class Inside:
    """The four ways to start the same payload, each timed."""

    def __init__(self, tar: Path) -> None:
        from agent.client import AgentClient
        from agent.machine.btrfs import HostBtrfs
        from agent.machine.systemd import HostSystemd

        self.tar = tar
        self.digest = "sha256:" + hashlib.sha256(tar.read_bytes()).hexdigest()
        self.image = STATE / "images" / self.digest.removeprefix("sha256:")
        self.client = AgentClient("unix:/run/twine/agent.sock")
        self.btrfs = HostBtrfs()
        self.systemd = HostSystemd()
        self.changed = threading.Event()
        self.systemd.listen(lambda _unit: self.changed.set())

    async def prepare(self) -> None:
        from agent.api import ImageFormat

        async def chunks():
            yield self.tar.read_bytes()

        await self.client.put_image(self.digest, ImageFormat.TAR, chunks())
        subprocess.run(
            ["podman", "import", "-q", str(self.tar), "twine-bench"],
            check=True,
            capture_output=True,
        )

    async def agent(self, turn: int) -> float:
        from agent import api
        from wire.errors import NotFound

        name = f"bench-{turn}"
        spec = api.TaskSpec(
            generation=int(time.time() * 1000),
            image=self.digest,
            command=["/bin/sleep", "1000"],
            stop_timeout_s=0.1,
        )
        after = (await self.client.get_events(0)).latest
        began = time.perf_counter()
        await self.client.put_task(name, spec)
        running = False
        while not running:
            events = await self.client.get_events(after, wait_s=30)
            after = events.latest
            running = any(
                e.object == name and e.task is not None and e.task.state is api.TaskState.RUNNING
                for e in events.events
            )
        took = time.perf_counter() - began
        await self.client.delete_task(name)
        while True:
            try:
                await self.client.get_task(name)
            except NotFound:
                return took * 1000
            after = (await self.client.get_events(after, wait_s=5)).latest

    async def floor(self, turn: int) -> float:
        root, unit = STATE / "tasks" / f"floor-{turn}", f"bench-floor-{turn}.service"
        properties = {
            "Type": "exec",
            "ExecStart": [["/bin/sleep", "1000"]],
            "RootDirectory": str(root),
            "TimeoutStopUSec": 100_000,
        }
        began = time.perf_counter()
        self.btrfs.snapshot(self.image, root)
        self.systemd.start_transient(unit, properties)
        while True:
            self.changed.wait(5)
            self.changed.clear()
            state = self.systemd.find(unit)
            if state is not None and state.active == "active":
                break
        took = time.perf_counter() - began
        self.systemd.stop(unit)
        while (state := self.systemd.find(unit)) is not None:
            # a slow host had to kill it: the unit stays until it is reset
            if state.active == "failed":
                self.systemd.reset_failed(unit)
            await asyncio.sleep(0.05)
        self.btrfs.delete(root)
        return took * 1000

    def _first_line(self, command: list[str], began: float) -> float:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            took = time.perf_counter() - began
        if b"started" not in line:
            raise RuntimeError(f"{command[0]} answered {line!r}")
        return took * 1000

    async def nspawn(self, turn: int) -> float:
        root = STATE / "tasks" / f"nspawn-{turn}"
        began = time.perf_counter()
        self.btrfs.snapshot(self.image, root)
        command = ["systemd-nspawn", "-q", "-D", str(root), "--register=no", "--as-pid2"]
        took = self._first_line([*command, "/bin/echo", "started"], began)
        self.btrfs.delete(root)
        return took

    async def podman(self, turn: int) -> float:
        command = ["podman", "run", "--rm", "--network=host", "--pull=never", "twine-bench"]
        return self._first_line([*command, "/bin/echo", "started"], time.perf_counter())


def idle_share(before: list[int], after: list[int]) -> float:
    """Return the idle share of a machine between two readings of /proc/stat."""
    passed = [b - a for a, b in zip(before, after, strict=True)]
    return (passed[3] + passed[4]) / (sum(passed[:8]) or 1)


async def settled() -> None:
    """Wait until the machine has finished the work of the previous way, for half a minute at most.

    podman cleans up after its container by another podman, which would count for the next way.
    """

    def cpu_times() -> list[int]:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]

    for _ in range(60):
        before = cpu_times()
        await asyncio.sleep(0.5)
        if idle_share(before, cpu_times()) >= 0.9:
            return


async def measure(tar: Path, n: int) -> dict[str, list[float]]:
    inside = Inside(tar)
    await inside.prepare()
    ways: dict[str, Callable[[int], Awaitable[float]]] = {k: getattr(inside, k) for k in KINDS}
    figures: dict[str, list[float]] = {k: [] for k in KINDS}
    for turn in range(n + 1):
        for kind, way in ways.items():
            await settled()
            took = await way(turn)
            if turn:
                figures[kind].append(round(took, 1))
        print(f"turn {turn}/{n}", file=sys.stderr, flush=True)
    await inside.client.close()
    return figures


# ── outside ─────────────────────────────────────────────────────────────────────────────


def in_guest(name: str, n: int) -> dict[str, list[float]]:
    from tests.bench.guest import PYTHON, lab, put

    tar, source = put(name, "root.tar", root_tar()), put(name, HERE.name, HERE.read_bytes())
    inside = f"systemctl start twine-agent && {PYTHON} {source} --inside {tar} -n {n}"
    return json.loads(lab(name, "ssh", "m1", "--", inside).splitlines()[-1])


def summary(figures: dict[str, list[float]]) -> dict[str, float | int]:
    medians = {f"{k}_ms": round(statistics.median(figures[k]), 1) for k in KINDS}
    ratio = round(medians["agent_ms"] / medians["floor_ms"], 2)
    return {**medians, "ratio": ratio, "n": len(figures["agent"])}


def table(figures: dict[str, list[float]]) -> str:
    lines = ["| way | n | median ms | min | max |", "|---|---|---|---|---|"]
    for kind in KINDS:
        values = figures[kind]
        median = statistics.median(values)
        lines.append(
            f"| {kind} | {len(values)} | {median:.1f} | {min(values):.1f} | {max(values):.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("-n", type=int, default=20, help="starts of each kind")
    parser.add_argument(
        "--lab", default="", help="a running lab of variant bench, else one is booted"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(asyncio.run(measure(options.inside, options.n))))
        return
    from tests.bench.guest import lab

    name = options.lab or "bench"
    if not options.lab:
        lab(name, "up", "--bare", "--count", "1", "--variant", "bench")
    try:
        figures = in_guest(name, options.n)
    finally:
        if not options.lab:
            lab(name, "down")
    print(json.dumps(summary(figures)) if options.json else table(figures))


if __name__ == "__main__":
    main()
