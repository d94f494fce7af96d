"""`make demo-elastic`: three real VMs; the size of a web job follows the rate of its requests.

A whole machine becomes empty and is lent to best-effort work. When the requests increase again, it
is returned within the promised time. Autoscaler, Optimus, Prometheus and HAProxy are processes on
the host.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from control_plane.api.elastic import LoanView
from control_plane.api.jobs import JobStatus
from control_plane.client import ControlPlaneClient
from vm_lab.demo import PROXY, Demo, short_path
from vm_lab.errors import reporting
from vm_lab.image.app import LIMITED_VERSION

FILES = Path(__file__).parent / "elastic"
"""The files of the demo, which docs/elastic.md explains."""
LOW, HIGH, STEPS, STEP_S = 0.5, 9.0, 7, 40.0
"""Requests per second at night and at the peak, the number of steps between them, and the seconds
of one step."""
NEEDED = 9
"""Tasks for the peak at the target of one request a second: more than two machines have."""
LATENCY_LIMIT_S = 5.0
"""Limit for 95 % of the requests of any ten seconds; high, because emulated guests share CPUs."""
PHASE_S = 1500.0


@dataclass(frozen=True)
class DemoState:
    """The web job, the best-effort work (None: not begun), and the loans, at one time."""

    web: JobStatus
    work: JobStatus | None
    loans: list[LoanView]

    def __str__(self) -> str:
        places = ", ".join(f"{m} {n}" for m, n in sorted(machines_of(self.web).items()))
        lent = ", ".join(loan.machine for loan in self.loans) or "none"
        tasks, healthy = self.web.record.spec.tasks, self.web.healthy
        return f"web: {tasks} tasks, {healthy} healthy ({places}); lent: {lent}"

    @property
    def grown(self) -> bool:
        """The tasks of the peak are healthy."""
        return self.web.healthy >= NEEDED

    @property
    def work_runs(self) -> bool:
        """Best-effort work runs, and only on machines that are lent."""
        lent = {loan.machine for loan in self.loans}
        work = self.work
        return work is not None and work.running > 0 and set(machines_of(work)) <= lent


def machines_of(job: JobStatus) -> Counter[str]:
    """Return how many tasks of a job are on each machine."""
    return Counter(task.placement.machine for task in job.record.tasks if task.placement)


class ElasticDemo(Demo):
    """The demo on one lab, with the measurements for the long lab test."""

    def __init__(self, lab: str, step_s: float) -> None:
        super().__init__(lab)
        self._step_s = step_s
        self._folder = self._paths.state / "elastic"
        self._autoscaler = self._paths.autoscaler
        self._optimus = self._paths.run / "optimus.sock"
        self._load_client: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Run all steps; the lab stays up, the other programs end."""
        self._lab_command("up")
        try:
            self.begin()
            outcome = self.run_day()
        finally:
            self.end()
        self._progress.say("the demo is done; the lab is still running: twine-lab down")
        if broken := self.broken_promises(outcome):
            click.secho("\n".join(broken), fg="red", err=True)
            sys.exit(1)

    def begin(self) -> None:
        """Start the control plane with loans, the jobs, and the other programs."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, mode=0o700)
        shutil.copy(FILES / "control-plane.toml", self._paths.control_plane_config)
        self._lab_command("control-plane", "stop")
        self._lab_command("control-plane", "start")
        for name in ("web", "batch"):
            file = short_path(FILES / f"{name}-machines.toml")
            self._twinectl("entitlement", "create", name, "--file", file)
        self._image = self._push(LIMITED_VERSION)
        web = short_path(FILES / "web.toml")
        self._twinectl("job", "apply", web, "--set", f"image={self._image}", "--wait")
        self._lab_command("proxy", "start", "web:http")
        self._start_prometheus()
        more = 'prometheus = "http://127.0.0.1:9090"\nevery_s = 10\n'
        self._start_service("autoscaler", self._autoscaler, more=more)
        more = 'entitlement = "batch"\nevery_s = 5\n'
        self._start_service("optimus", self._optimus, more=more)

    def end(self) -> None:
        """End the programs; the requests first."""
        if self._load_client is not None:
            self._load_client.kill()
            self._load_client.wait()
            self._load_client = None
        super().end()

    def run_day(self) -> dict[str, Any]:
        """Raise, lower and raise the rate of requests; return what was observed."""
        words = ["-m", "vm_lab.load_client", "--url", PROXY, "--rate", str(LOW)]
        self._load_client = load_client = self._start_in_lab(sys.executable, *words, pipes=True)
        measured: dict[str, Any] = {"began": time.time()}
        click.secho("\nRequests rise: the job grows", bold=True)
        self._raise_rate(load_client.stdin)
        self._wait_for_state("the peak's tasks are healthy", lambda state: state.grown)
        measured["grown"] = time.time()
        click.secho("\nRequests fall: the job shrinks, a machine is lent", bold=True)
        self._set_rate(load_client.stdin, LOW)
        file = self._folder / "index.toml"
        file.write_text(f'image = "{self._image}"\n{(FILES / "index.toml").read_text()}')
        self._twinectl("work", "submit", str(file), "--socket", str(self._optimus))
        state = self._wait_for_state(
            "best-effort work runs on a lent machine", lambda state: state.work_runs
        )
        loan = state.loans[0]
        measured |= {"lent": time.time(), "machine": loan.machine, "promise_s": loan.promise_s}
        self._twinectl("capacity", "elastic", "--loans")
        measured["tasks_when_lent"] = state.web.record.spec.tasks
        click.secho("\nRequests return: the machine comes back", bold=True)
        self._raise_rate(load_client.stdin)
        self._wait_for_state("the machine is back", lambda state: not state.loans)
        state = self._wait_for_state("the peak's tasks are healthy", lambda state: state.grown)
        measured["grown_again"] = time.time()
        measured["web_on"] = sorted(machines_of(state.web))
        out, _ = load_client.communicate(timeout=PHASE_S)
        self._load_client = None
        measured["requests"] = json.loads(out.splitlines()[-1])
        measured["report"] = self._twinectl_json("capacity", "elastic")
        self._twinectl("capacity", "elastic")
        self._twinectl("autoscale", "explain", "web", "--socket", str(self._autoscaler))
        self._show(measured)
        return measured

    @staticmethod
    def broken_promises(measured: dict[str, Any]) -> list[str]:
        """Return which promises of the demo were broken."""
        requests, broken = measured["requests"], []
        if requests["failed"]:
            broken.append(f"{requests['failed']} requests failed: {requests['failures']}")
        slow = [w for w in requests["windows"] if w["p95"] > LATENCY_LIMIT_S]
        if slow:
            broken.append(f"95 % took more than {LATENCY_LIMIT_S:g} s: {slow}")
        kept = measured["report"]["promises"]
        if not kept or any(p["broken"] for p in kept) or not any(p["revoked"] for p in kept):
            broken.append(f"the promise was not kept: {kept}")
        if measured["machine"] not in measured["web_on"]:
            broken.append("the machine that was lent has no task of the web job again")
        return broken

    # -- steps

    def _raise_rate(self, pipe: IO[bytes] | None) -> None:
        for step in range(1, STEPS + 1):
            self._set_rate(pipe, LOW + (HIGH - LOW) * step / STEPS)
            time.sleep(self._step_s)

    def _set_rate(self, pipe: IO[bytes] | None, rate: float) -> None:
        assert pipe is not None
        pipe.write(f"{rate}\n".encode())
        pipe.flush()
        self._progress.say(f"{rate:.1f} requests a second; {self._read_state()}")

    def _wait_for_state(self, what: str, holds: Callable[[DemoState], bool]) -> DemoState:
        deadline, shown = time.monotonic() + PHASE_S, ""
        while not holds(state := self._read_state()):
            if time.monotonic() > deadline:
                raise click.ClickException(f"not within {PHASE_S:g} s: {what}; {state}")
            if str(state) != shown:
                shown = str(state)
                self._progress.say(shown)
            time.sleep(1)
        self._progress.say(f"{what}; {state}")
        return state

    def _read_state(self) -> DemoState:
        """Query the front end without a process for each query: the guests need the CPUs."""

        async def read() -> DemoState:
            async with ControlPlaneClient(self.endpoint) as client:
                jobs = {job.record.spec.name: job for job in (await client.list_jobs()).jobs}
                return DemoState(jobs["web"], jobs.get("index"), (await client.get_elastic()).loans)

        return asyncio.run(read())

    def _show(self, measured: dict[str, Any]) -> None:
        requests = measured["requests"]
        slowest = max(w["p95"] for w in requests["windows"])
        back_s = max((p["return_p99_s"] for p in measured["report"]["promises"]), default=0.0)
        grown_s = measured["grown"] - measured["began"]
        lent_s = measured["lent"] - measured["grown"]
        click.secho(
            f"{requests['requests']} requests, {requests['failed']} failed; the slowest 10 s had "
            f"{slowest:g} s at 95 %. Grown after {grown_s:.0f} s, lent {lent_s:.0f} s after the "
            f"fall with {measured['tasks_when_lent']} tasks left; back {back_s:.0f} s after the "
            f"call (promised: {measured['promise_s']:g} s)",
            bold=True,
        )
        (self._folder / "seen.json").write_text(json.dumps(measured, indent=1))


@click.command()
@click.option("--name", default="lab", show_default=True, help="Name of the lab.")
@click.option(
    "--step",
    "step_s",
    type=click.FloatRange(10),
    default=STEP_S,
    show_default=True,
    help="Seconds between two of the steps in which requests rise.",
)
def main(name: str, step_s: float) -> None:
    """Show elastic capacity on three real machines."""
    with reporting("demo"):
        ElasticDemo(name, step_s).run()


if __name__ == "__main__":
    main()
