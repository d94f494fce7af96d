"""`make demo-ha`: a region moves to etcd while it runs, then leaders are killed in turn.

Five real VMs, three etcd members, two processes of the core and two of shard 1, which owns the web
job; one process of each role leads. The members and the processes are on the host, in the lab's
network. So the demo shows the effect of dead processes on clients and tasks, not the loss of a
host. One client sends requests to the web job without a pause. Another client writes to the role
whose leader was killed, and records what was acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from agent.api import Limits
from control_plane.api.jobs import JobSpec
from control_plane.api.people import GroupSpec
from control_plane.client import ControlPlaneClient
from vm_lab.control import with_services
from vm_lab.demo import Demo
from vm_lab.errors import reporting
from vm_lab.sandbox import LabSandbox
from vm_lab.state import LabPaths
from wire.errors import TwineError

MACHINES, MEMBERS, REPLICAS = 5, 3, 2
CORE, SHARD = "core", "shard 1"
PAUSE_S = 0.05
WRITES_AFTER = 20
"""Writes after each take-over; the next one must lose none of them."""
_STANDBY_TEXT = "standing by"


@dataclass
class Replica:
    """One process of a role."""

    role: str
    name: str
    config: Path
    log: Path
    pid: int = 0

    def leads(self) -> bool:
        """Return whether it leads, by the last state in its log."""
        log = self.log.read_text()
        return log.rfind("serving at") > log.rfind(_STANDBY_TEXT)


@dataclass(frozen=True)
class TakeOver:
    """A killed leader, and its effect on clients."""

    killed: Replica
    took_s: float
    refused: int


class HaDemo(Demo):
    """The demo on one lab, with etcd and two processes of each role."""

    def __init__(self, lab: str, kills: int) -> None:
        super().__init__(lab)
        self._kills = kills
        self._sandbox = LabSandbox(LabPaths(lab))
        self._folder = self._paths.state / "ha"
        self._replicas: list[Replica] = []
        self._image = ""

    def run(self) -> None:
        """Run all steps; the lab stays up."""
        names = [f"m{number}" for number in range(1, MACHINES + 1)]
        self._lab_command("up", "--count", str(MACHINES))
        count = ("--machines", str(MACHINES))
        self._twinectl("entitlement", "create", "demo", *count, "--host-profile", "web")
        self._image = self._push("v1")
        self._apply(self._image)
        self._lab_command("proxy", "start", "web:http")
        before = self._invocations(names)
        self._lab_command("control-plane", "stop")
        self._start_members()
        self._start_roles()
        self._twinectl("job", "status", "web")
        outcome, take_overs, lost = self._under_traffic()
        restarted = len(before.items() - self._invocations(names).items())
        self._twinectl("shard", "list")
        self._show(outcome, take_overs, lost, restarted)
        if outcome["failed"] or lost or restarted or len(take_overs) < self._kills:
            sys.exit(1)
        self._progress.say("the demo is done; the lab is still running: twine-lab down")

    def _start_members(self) -> None:
        self._folder.mkdir(exist_ok=True)
        peers = ",".join(f"m{n}=http://10.77.0.1:{2480 + n}" for n in range(MEMBERS))
        for n in range(MEMBERS):
            client, peer = f"http://10.77.0.1:{2380 + n}", f"http://10.77.0.1:{2480 + n}"
            argv = (
                *("etcd", "--name", f"m{n}", "--data-dir", str(self._folder / f"etcd-{n}")),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", peers),
            )
            self._sandbox.spawn(argv, self._folder / f"etcd-{n}.log")
        health = ("curl", "--silent", "--fail", "--retry", "60", "--retry-connrefused")
        self._sandbox.run([*health, "http://10.77.0.1:2380/health"])

    def _start_roles(self) -> None:
        """Bring the store to etcd, and start the processes of both roles."""
        core = self._write_config("core", 'role = "core"', listen=7440)
        self._command("twine-control-plane", "migrate-store", "--to", "etcd", "--config", str(core))
        credential = self._folder / "shard-1.credential"
        written = ("--host", "10.77.0.1", "--out", str(credential), "--config", str(core))
        self._command("twine-control-plane", "shard-credential", "1", *written)
        key = f'role = "shard"\nshard = 1\nshard_credential = "{credential}"'
        for letter in "ab"[:REPLICAS]:
            log = self._folder / f"core-{letter}.log"
            self._start_replica(Replica(CORE, f"core {letter}", core, log))
        for letter in "ab"[:REPLICAS]:
            config = self._write_config(f"shard-{letter}", key, listen=7441)
            self._start_replica(
                Replica(SHARD, f"shard 1 {letter}", config, config.with_suffix(".log"))
            )
        self._twinectl("shard", "add", "1")

    def _write_config(self, name: str, role: str, listen: int) -> Path:
        """Write the configuration of a process; all of the core share its state and socket."""
        is_core = name == "core"
        state = self._paths.control_plane_state if is_core else self._folder / name
        socket = self._paths.control_plane_socket if is_core else self._folder / f"{name}.sock"
        state.mkdir(exist_ok=True)
        lines = [
            f'state = "{state}"',
            f'socket = "{socket}"',
            f'listen = "10.77.0.1:{listen}"',
            role,
            "[etcd]",
            f"endpoints = {json.dumps([f'http://10.77.0.1:{2380 + n}' for n in range(MEMBERS)])}",
            "[scheduler]",
            "shards = 2",
        ]
        config = self._folder / f"{name}.toml"
        config.write_text(with_services("\n".join(lines) + "\n", self._paths))
        return config

    def _command(self, program: str, *words: str, quiet: bool = False, code: int = 0) -> str:
        if program != "twine-control-plane":
            return super()._command(program, *words, quiet=quiet, code=code)
        self._print_command([program, *words])
        output = self._sandbox.run([self._bin / program, *words])
        click.echo(output, nl=False)
        return output

    def _start_replica(self, replica: Replica) -> None:
        """Start a process, and wait until it leads or stands by."""
        with replica.log.open("ab") as out:
            began = os.fstat(out.fileno()).st_size
            serve = (self._bin / "twine-control-plane", "serve", "--config", replica.config)
            started = subprocess.Popen(
                self._sandbox.command(serve),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        replica.pid = started.pid
        if replica not in self._replicas:
            self._replicas.append(replica)
        while not any(w in replica.log.read_text()[began:] for w in (_STANDBY_TEXT, "serving at")):
            if started.poll() is not None:
                raise SystemExit(f"{replica.name} ended: {replica.log.read_text()[-500:]}")
            time.sleep(0.1)

    def _leader(self, role: str) -> Replica:
        """Return the process that leads a role, once one does."""
        leaders: list[Replica] = []

        def leads() -> bool:
            leaders[:] = [r for r in self._replicas if r.role == role and r.leads()]
            return len(leaders) == 1

        self._wait_until(f"one process leads {role}", leads)
        return leaders[0]

    def _under_traffic(self) -> tuple[dict[str, Any], list[TakeOver], int]:
        """Move the job to shard 1 and kill leaders while clients read and write."""
        traffic = self._traffic()
        self._twinectl("shard", "move", "demo", "--to", "1")
        take_overs, lost = asyncio.run(self._kill_leaders())
        return self._end_traffic(traffic), take_overs, lost

    async def _kill_leaders(self) -> tuple[list[TakeOver], int]:
        """Kill the leader of each role in turn; return the take-overs and the lost writes."""
        take_overs: list[TakeOver] = []
        acknowledged = set[str]()
        async with ControlPlaneClient(self.endpoint) as client:
            for turn in range(self._kills):
                role = (CORE, SHARD)[turn % 2]
                write = partial(self._write, client, role)
                take_overs.append(await self._kill_leader(role, partial(write, f"n{turn}")))
                acknowledged.add(f"n{turn}")
                for number in range(WRITES_AFTER):
                    await write(f"n{turn}-{number}")
                    acknowledged.add(f"n{turn}-{number}")
                await asyncio.to_thread(self._start_replica, take_overs[-1].killed)
            stored = {group.name for group in (await client.list_groups()).groups}
            stored |= {job.record.name for job in (await client.list_jobs()).jobs}
        return take_overs, len(acknowledged - stored)

    async def _kill_leader(self, role: str, write: Callable[[], Awaitable[object]]) -> TakeOver:
        """Kill the leader of a role, and repeat a write until it is acknowledged."""
        leader = await asyncio.to_thread(self._leader, role)
        self._print_command(["kill", "-KILL", str(leader.pid)])
        refused, began = 0, time.monotonic()
        os.kill(leader.pid, signal.SIGKILL)
        while True:
            try:
                await write()
                return TakeOver(leader, time.monotonic() - began, refused)
            except (TwineError, OSError):
                refused += 1
                await asyncio.sleep(PAUSE_S)

    async def _write(self, client: ControlPlaneClient, role: str, name: str) -> None:
        """Write a record of a role: the core stores groups of users, a shard stores jobs."""
        if role == CORE:
            await client.put_group(name, GroupSpec(members=["ann"]))
            return
        spec = JobSpec(
            name=name,
            entitlement="demo",
            tasks=0,
            image=self._image,
            command=["/bin/true"],
            limits=Limits(memory_max_bytes=64 << 20),
        )
        await client.apply_job(spec)

    def _show(
        self, outcome: dict[str, Any], take_overs: list[TakeOver], lost: int, restarted: int
    ) -> None:
        click.secho("\nkilled       first write after   writes tried meanwhile", bold=True)
        for take_over in take_overs:
            name, refused = take_over.killed.name, take_over.refused
            click.echo(f"{name:12} {take_over.took_s:10.2f} s {refused:18}")
        failed = f"{outcome['failed']} of {outcome['requests']}"
        click.secho(
            f"\nclient requests failed: {failed}; acknowledged writes lost: {lost};"
            f" tasks restarted: {restarted}",
            bold=True,
        )


@click.command()
@click.option("--name", default="lab", show_default=True, help="Name of the lab.")
@click.option("--kills", type=click.IntRange(min=1), default=6, show_default=True)
def main(name: str, kills: int) -> None:
    """Show that a region outlives the leaders of its roles, on five real machines."""
    with reporting("demo"):
        HaDemo(name, kills).run()


if __name__ == "__main__":
    main()
