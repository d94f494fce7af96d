"""`make demo-ha`: a region moves to etcd while it runs, then its leader is killed again and again.

Three real VMs, three etcd members and three control planes; one leads. The members and
the control planes are processes on the host, in the lab's network: what is shown is what clients
and tasks notice when processes die, not what the loss of a host costs. A client asks the web job
without a pause, another one writes to the control plane and notes what was acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import click

from control_plane.api.people import GroupSpec
from control_plane.client import ControlPlaneClient
from vm_lab.demo import Demo
from vm_lab.progress import PATIENCE_S
from vm_lab.sandbox import LabSandbox
from vm_lab.state import LabPaths
from wire.errors import TwineError

MEMBERS = 3
PAUSE_S = 0.05


class HaDemo(Demo):
    """The demo on one lab, with etcd and three control planes."""

    def __init__(self, lab: str, kills: int) -> None:
        super().__init__(lab)
        self._kills = kills
        self._sandbox = LabSandbox(LabPaths(lab))
        self._folder = self._paths.state / "ha"
        self._config = self._folder / "control-plane.toml"
        self._replicas: dict[str, int] = {}

    def run(self) -> None:
        """Run all steps; the lab stays up."""
        self._lab_command("up", "--count", "3")
        self._twinectl("entitlement", "create", "demo", "--machines", "3", "--host-profile", "web")
        self._apply(self._push("v1"))
        self._lab_command("proxy", "start", "web:http")
        before = self._units()
        self._lab_command("control-plane", "stop")
        self._start_members()
        self._command("twine-control-plane", "migrate-store", "--to", "etcd", *self._where())
        for number in range(MEMBERS):
            self._start_replica(f"replica {number + 1}")
        self._twinectl("job", "status", "web")
        outcome, rows, lost = self._under_traffic()
        restarted = len(before.items() - self._units().items())
        self._show(outcome, rows, lost, restarted)
        if outcome["failed"] or lost or restarted or not rows:
            sys.exit(1)
        self._progress.say("the demo is done; the lab goes on running: twine-lab down")

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
        urls = json.dumps([f"http://10.77.0.1:{2380 + n}" for n in range(MEMBERS)])
        self._config.write_text(f"[etcd]\nendpoints = {urls}\n")
        health = ("curl", "--silent", "--fail", "--retry", "60", "--retry-connrefused")
        self._sandbox.run([*health, "http://10.77.0.1:2380/health"])

    def _where(self) -> tuple[str, ...]:
        return "--config", str(self._config), "--state", str(self._paths.control_plane_state)

    def _command(self, program: str, *words: str, quiet: bool = False, code: int = 0) -> str:
        if program != "twine-control-plane":
            return super()._command(program, *words, quiet=quiet, code=code)
        self._say_command([program, *words])
        said = self._sandbox.run([self._bin / program, *words])
        click.echo(said, nl=False)
        return said

    def _start_replica(self, name: str) -> None:
        """Start a control plane; all share the folder of authority and images, and the address."""
        listen = ("--listen", "10.77.0.1:7440", "--socket", str(self._paths.control_plane_socket))
        log = self._folder / f"{name.replace(' ', '-')}.log"
        with log.open("ab") as out:
            command = self._sandbox.command(
                [self._bin / "twine-control-plane", "serve", *self._where(), *listen]
            )
            started = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._replicas[name] = started.pid
        while not any(w in log.read_text() for w in ("standing by", "serving at")):
            if started.poll() is not None:
                raise SystemExit(f"{name} ended: {log.read_text()[-500:]}")
            time.sleep(0.1)

    def _leader(self) -> str:
        """Return the replica that etcd names as the leader."""
        key = "L3R3aW5lL21ldGEvbGVhZGVy"  # /twine/meta/leader
        url = "http://10.77.0.1:2380/v3/kv/range"
        found = json.loads(self._sandbox.run(["curl", "-s", url, "-d", json.dumps({"key": key})]))
        value = subprocess.run(
            ["base64", "-d"],
            input=found["kvs"][0]["value"].encode(),
            capture_output=True,
            check=True,
        ).stdout.decode()
        return next(name for name, pid in self._replicas.items() if value.endswith(f":{pid}"))

    def _units(self) -> dict[str, str]:
        """Return the task units of all machines, and the invocation of each."""
        found = {}
        line = "systemctl show -p Id -p InvocationID 'twine-task-*.service'"
        for machine in ("m1", "m2", "m3"):
            said = self._command("twine-lab", "ssh", machine, "--", line, quiet=True)
            for unit in said.split("\n\n"):
                told = dict(row.split("=", 1) for row in unit.splitlines() if "=" in row)
                found[f"{machine} {told.get('Id')}"] = told.get("InvocationID", "")
        return found

    def _under_traffic(self) -> tuple[dict[str, Any], list[tuple[str, float, int]], int]:
        """Kill each leader while clients ask and write; return what they noticed."""
        traffic = self._traffic()
        rows, lost = asyncio.run(self._kill_in_turn())
        out, _ = traffic.communicate(timeout=PATIENCE_S)
        return json.loads(out.splitlines()[-1]), rows, lost

    async def _kill_in_turn(self) -> tuple[list[tuple[str, float, int]], int]:
        rows: list[tuple[str, float, int]] = []
        acknowledged: list[str] = []
        async with ControlPlaneClient(self.endpoint) as client:
            for turn in range(self._kills):
                name = await asyncio.to_thread(self._leader)
                refused, began = 0, time.monotonic()
                self._say_command(["kill", "-KILL", str(self._replicas[name])])
                os.kill(self._replicas[name], signal.SIGKILL)
                while True:
                    try:
                        await client.put_group(f"g{turn}", GroupSpec(members=["ann"]))
                        break
                    except (TwineError, OSError):
                        refused += 1
                        await asyncio.sleep(PAUSE_S)
                rows.append((name, time.monotonic() - began, refused))
                acknowledged.append(f"g{turn}")
                for n in range(20):  # more; the next take-over must lose none
                    await client.put_group(f"g{turn}-{n}", GroupSpec(members=["ann"]))
                    acknowledged.append(f"g{turn}-{n}")
                await asyncio.to_thread(self._start_replica, name)
            there = {group.name for group in (await client.list_groups()).groups}
        return rows, len(set(acknowledged) - there)

    def _show(
        self, outcome: dict[str, Any], rows: list[tuple[str, float, int]], lost: int, restarted: int
    ) -> None:
        click.secho("\nkilled       first write after   writes tried meanwhile", bold=True)
        for name, took, refused in rows:
            click.echo(f"{name:12} {took:10.2f} s {refused:18}")
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
    """Show that a region outlives its leaders, on three real machines."""
    HaDemo(name, kills).run()


if __name__ == "__main__":
    main()
