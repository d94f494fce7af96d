"""`make demo-elastic`: three real VMs; a web job grows with its requests and shrinks after them.

A whole machine becomes empty, is lent to best-effort work, and is back within its promise when the
requests return. Autoscaler, Optimus, Prometheus and HAProxy are processes on the host.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import click

from vm_lab.demo import PROXY, Demo, short_path
from vm_lab.image.app import LIMITED_VERSION

FILES = Path(__file__).parent / "elastic"
"""The files of the demo, which docs/elastic.md explains."""
PROMETHEUS = Path(__file__).parent / "delivery" / "prometheus.yml"
LOW, HIGH, STEPS, STEP_S = 0.5, 9.0, 7, 40.0
"""Requests a second at night and at the peak; they rise in so many steps."""
NEEDED = 9
"""Tasks for the peak at the target of one request a second: more than two machines have."""
LATENCY_LIMIT_S = 5.0
"""For 95 % of the requests of any ten seconds. Generous: guests are emulated, and share CPUs."""
PHASE_S = 1500.0


class ElasticDemo(Demo):
    """The demo on one lab, and what the long lab test asks of it."""

    def __init__(self, lab: str) -> None:
        super().__init__(lab)
        self._folder = self._paths.state / "elastic"
        self._autoscaler = self._paths.run / "autoscaler.sock"
        self._optimus = self._paths.run / "optimus.sock"
        self._tide: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Run all steps; the lab stays up, the programs beside it end."""
        self._lab_command("up")
        try:
            self.begin()
            outcome = self.day()
        finally:
            self.end()
        self._progress.say("the demo is done; the lab goes on running: twine-lab down")
        if wrong := self.wrong(outcome):
            click.secho("\n".join(wrong), fg="red", err=True)
            sys.exit(1)

    def begin(self) -> None:
        """Start the control plane with loans, the jobs, and the programs beside them."""
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
        self._start(
            "prometheus",
            f"--config.file={PROMETHEUS}",
            f"--storage.tsdb.path={self._folder / 'prometheus'}",
            "--web.listen-address=127.0.0.1:9090",
            "--log.level=warn",
        )
        extra = 'prometheus = "http://127.0.0.1:9090"\nevery_s = 10\n'
        self._client("autoscaler", self._autoscaler, extra)
        self._client("optimus", self._optimus, 'entitlement = "batch"\nevery_s = 5\n')

    def end(self) -> None:
        """End the programs; the requests first."""
        if self._tide is not None:
            self._tide.kill()
            self._tide.wait()
            self._tide = None
        super().end()

    def day(self) -> dict[str, Any]:
        """Let requests rise, fall and rise again; return what was seen."""
        words = ["-m", "vm_lab.tide", "--url", PROXY, "--rate", str(LOW)]
        self._tide = tide = self._inside(sys.executable, *words, pipes=True)
        seen: dict[str, Any] = {"began": time.time()}
        click.secho("\nRequests rise: the job grows", bold=True)
        self._rise(tide.stdin)
        self._until("the peak's tasks are healthy", lambda: self._healthy() >= NEEDED)
        seen["grown"] = time.time()
        click.secho("\nRequests fall: the job shrinks, a machine is lent", bold=True)
        self._set(tide.stdin, LOW)
        file = self._folder / "index.toml"
        file.write_text(f'image = "{self._image}"\n{(FILES / "index.toml").read_text()}')
        self._twinectl("work", "submit", str(file), "--socket", str(self._optimus))
        self._until("best-effort work runs on a lent machine", self._work_runs)
        seen["lent"], seen["loan"] = time.time(), self._loans()[0]
        self._twinectl("capacity", "elastic", "--loans")
        seen["tasks_when_lent"] = self._ask("job", "status", "web")["record"]["spec"]["tasks"]
        click.secho("\nRequests return: the machine comes back", bold=True)
        self._rise(tide.stdin)
        self._until("the machine was called back", self._called_back)
        seen["called"] = time.time()
        self._until("the loan ended", lambda: not self._loans())
        seen["back"] = time.time()
        self._until("the peak's tasks are healthy", lambda: self._healthy() >= NEEDED)
        seen["grown_again"] = time.time()
        seen["web_on"] = sorted(self._machines_of("web"))
        out, _ = tide.communicate(timeout=PHASE_S)
        self._tide = None
        seen["requests"] = json.loads(out.splitlines()[-1])
        seen["report"] = self._ask("capacity", "elastic")
        self._twinectl("capacity", "elastic")
        self._twinectl("autoscale", "explain", "web", "--socket", str(self._autoscaler))
        self._show(seen)
        return seen

    @staticmethod
    def wrong(seen: dict[str, Any]) -> list[str]:
        """Return which promises of the demo were broken."""
        requests, found = seen["requests"], []
        if requests["failed"]:
            found.append(f"{requests['failed']} requests failed: {requests['failures']}")
        slow = [w for w in requests["windows"] if w["p95"] > LATENCY_LIMIT_S]
        if slow:
            found.append(f"95 % took more than {LATENCY_LIMIT_S:g} s: {slow}")
        kept = seen["report"]["promises"]
        if not kept or any(p["broken"] for p in kept) or not any(p["revoked"] for p in kept):
            found.append(f"the promise was not kept: {kept}")
        if seen["loan"]["machine"] not in seen["web_on"]:
            found.append("the machine that was lent has no task of the web job again")
        return found

    # -- steps

    def _rise(self, pipe: IO[bytes] | None) -> None:
        for step in range(1, STEPS + 1):
            self._set(pipe, LOW + (HIGH - LOW) * step / STEPS)
            time.sleep(STEP_S)

    def _set(self, pipe: IO[bytes] | None, rate: float) -> None:
        assert pipe is not None
        self._progress.say(f"{rate:.0f} requests a second; {self._sizes()}")
        pipe.write(f"{rate}\n".encode())
        pipe.flush()

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline, shown = time.monotonic() + PHASE_S, ""
        while not holds():
            if time.monotonic() > deadline:
                raise click.ClickException(f"not within {PHASE_S:g} s: {what}; {self._sizes()}")
            if (now := self._sizes()) != shown:
                shown = now
                self._progress.say(now)
            time.sleep(2)
        self._progress.say(f"{what}; {self._sizes()}")

    def _client(self, name: str, socket: Path, extra: str) -> None:
        config = self._folder / f"{name}.toml"
        config.write_text(
            f'endpoint = "{self.endpoint}"\nstate = "{self._folder / name}"\n'
            f'socket = "{socket}"\n{extra}'
        )
        self._start(str(self._bin / f"twine-{name}"), "--config", str(config))
        self._wait(f"{name} serves", socket.exists)

    # -- what is there

    def _healthy(self) -> int:
        return int(self._ask("job", "status", "web")["healthy"])

    def _sizes(self) -> str:
        job = self._ask("job", "status", "web")
        places = ", ".join(f"{m} {n}" for m, n in sorted(self._machines_of("web").items()))
        lent = ", ".join(view["machine"] for view in self._loans()) or "none"
        return (
            f"web: {job['record']['spec']['tasks']} tasks, {job['healthy']} healthy ({places}); "
            f"lent: {lent}"
        )

    def _machines_of(self, job: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for task in self._ask("job", "status", job)["record"]["tasks"]:
            if place := task.get("placement"):
                found[place["machine"]] = found.get(place["machine"], 0) + 1
        return found

    def _loans(self) -> list[dict[str, Any]]:
        return list(self._ask("capacity", "elastic")["loans"])

    def _work_runs(self) -> bool:
        lent = {view["machine"] for view in self._loans()}
        if not lent:
            return False
        job = self._ask("job", "status", "index")
        return bool(job["running"]) and set(self._machines_of("index")) <= lent

    def _called_back(self) -> bool:
        return all(view.get("revoked_at") is not None for view in self._loans())

    def _show(self, seen: dict[str, Any]) -> None:
        requests = seen["requests"]
        slowest = max(w["p95"] for w in requests["windows"])
        click.secho(
            f"{requests['requests']} requests, {requests['failed']} failed; the slowest 10 s had "
            f"{slowest:g} s at 95 %. Grown after {seen['grown'] - seen['began']:.0f} s, lent "
            f"{seen['lent'] - seen['grown']:.0f} s after the fall with {seen['tasks_when_lent']} "
            f"tasks left; back {seen['back'] - seen['called']:.0f} s after the call (promised: "
            f"{seen['loan']['promise_s']:g} s)",
            bold=True,
        )
        (self._folder / "seen.json").write_text(json.dumps(seen, indent=1))


@click.command()
@click.option("--name", default="lab", show_default=True, help="Which lab.")
def main(name: str) -> None:
    """Show elastic capacity on three real machines."""
    ElasticDemo(name).run()


if __name__ == "__main__":
    main()
