"""The autoscaler and the conveyor of a region in memory, with one job for each."""

from __future__ import annotations

import asyncio
import io
import json
import math
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from click.testing import CliRunner

from control_plane.autoscaler import stored_jobs
from control_plane.autoscaler.core.history import DAY_S, SLOT_S
from control_plane.autoscaler.stored_jobs import AutoscaledJob
from control_plane.cli import main as twinectl
from control_plane.store.sqlite import SqliteStore

JOB, PIPELINE = "tide", "shop"
DAYS = 120
PATIENCE_S = 120
FILE = """
name = "shop"
jobs = ["shop"]
[[stages]]
kind = "canary"
tasks = 1
gates = ["health", "release"]
[[stages]]
kind = "percent"
percent = 50
soak_s = "30s"
gates = ["health"]
[[stages]]
kind = "all"
gates = ["health"]
[gates.health]
health = {}
every_s = 2
[gates.release]
approval = { by = ["ann", "bob"] }
deadline_s = "8h"
"""


def ctl(endpoint: str, *arguments: str) -> str:
    result = CliRunner().invoke(twinectl, ["--endpoint", endpoint, *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def pushed(endpoint: str, folder: Path, words: str) -> str:
    """Store an image and return its digest."""
    file = folder / f"{words}.tar"
    with tarfile.open(file, "w") as archive:
        entry = tarfile.TarInfo(f"bin/{words}")
        archive.addfile(entry, io.BytesIO())
    return str(json.loads(ctl(endpoint, "image", "push", str(file), "-o", "json"))["digest"])


def job_of(name: str, image: str) -> dict[str, object]:
    return {
        "name": name,
        "entitlement": "front",
        "tasks": 3,
        "image": image,
        "command": ["/bin/serve"],
        "limits": {"memory_max_bytes": 64 << 20, "cpu_max_cores": 0.5},
        "update": {"max_unavailable": 2, "drain_s": 0},
    }


POLICY = {
    **{"minimum": 2, "maximum": 12, "target": 0.8, "headroom": "none"},
    "schedule": [{"days": ["fri"], "start": "19:00", "end": "23:00", "minimum": 6}],
}


async def remember(state: Path) -> None:
    """Store a load with days and weeks, as an autoscaler that has run for months."""
    job, now = AutoscaledJob(signal="cpu ", seen_at=time.time()), time.time()
    for at in range(int(now) - DAYS * DAY_S, int(now), SLOT_S):
        day, week = 2 * math.pi * at / DAY_S, 2 * math.pi * at / (7 * DAY_S)
        growth = 1 + (at - now) / (400 * DAY_S)
        job.sizing.history.add(at, growth * (1.1 - 0.5 * math.cos(day) + 0.2 * math.sin(week)))
    async with SqliteStore(state, 100) as store:
        await stored_jobs.save(store, {JOB: job})


@contextmanager
def program(*argv: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-m", *argv]) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


@contextmanager
def services(endpoint: str, folder: Path, mode: str = "recommend") -> Iterator[None]:
    """Run both at the sockets that the control plane of `vm_lab.cli dev` reads."""
    run = Path(endpoint.removeprefix("unix:")).parent
    first, second = pushed(endpoint, folder, "one"), pushed(endpoint, folder, "two")
    policy = {"autoscale": POLICY | {"mode": mode}}
    for job in (job_of(JOB, first) | policy, job_of(PIPELINE, first)):
        (folder / "job.json").write_text(json.dumps(job))
        ctl(endpoint, "job", "apply", str(folder / "job.json"))
    (folder / "pipeline.toml").write_text(FILE)
    (folder / "autoscaler.toml").write_text("every_s = 10\n")
    (folder / "conveyor.toml").write_text(
        f'state = "{folder}/conveyor"\nsocket = "{run}/conveyor.sock"\nendpoint = "{endpoint}"\n'
    )
    asyncio.run(remember(folder / "autoscaler"))
    at = ("--endpoint", endpoint, "--state", f"{folder}/autoscaler")
    config = ("--config", str(folder / "autoscaler.toml"), *at)
    with ExitStack() as stack:
        socket = ("--socket", f"{run}/autoscaler.sock")
        stack.enter_context(program("control_plane.autoscaler.daemon", *config, *socket))
        serve = ("serve", "--config", str(folder / "conveyor.toml"))
        stack.enter_context(program("conveyor.cli", *serve))
        await_sockets(run)
        pipeline = ("pipeline", "--service", f"unix:{run}/conveyor.sock")
        ctl(endpoint, *pipeline, "apply", str(folder / "pipeline.toml"))
        ctl(endpoint, *pipeline, "start", PIPELINE, "--image", second, "--reason", "new water")
        yield


def await_sockets(run: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not all((run / f"{name}.sock").is_socket() for name in ("autoscaler", "conveyor")):
        assert time.monotonic() < until, "a service did not start"
        time.sleep(0.1)
