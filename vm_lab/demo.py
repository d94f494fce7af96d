"""`make demo`: three real VMs, the control plane, a job that runs, and one rolling update.

Only commands that a user could type: each is printed before it runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click

from vm_lab.errors import reporting
from vm_lab.image.app import VERSIONS, build_app
from vm_lab.progress import PATIENCE_S, Progress, wait_until
from vm_lab.state import LabPaths, process_ref

JOB_FILE = Path(__file__).parent / "jobs" / "web.toml"
PROXY = "http://10.77.0.1:8080/"
"""The URL that `twine-lab proxy start` prints."""
_PR_SET_PDEATHSIG = 1
"""prctl(2)."""
NEXT = """
What next? (in this shell first:  . .venv/bin/activate; export TWINE_ENDPOINT={endpoint})

  twinectl machine list                  machines, their profile, what runs there
  twinectl job status web --watch        follow the job while you do the rest
  twinectl job logs web 0 -f             what task 0 writes
  twinectl ui jobs/web                   another browser: each link works once
  twinectl job apply {job} --set tasks=3 --set image={image}
  twine-lab power-off m3                 cut a machine's power: its tasks move
  twine-lab power-on m3                  nothing runs twice when it comes back
  twine-lab ssh m1 -- twine-agent ps     the host's own view, no control plane needed
  twine-lab ssh m1 -- sidekick status    the host's profile, with proof per setting
  twine-lab down                         take it all away
"""


class Demo:
    """The demo on one lab; every step is a command."""

    def __init__(self, lab: str) -> None:
        self._lab = lab
        self._paths = LabPaths(lab)
        self._bin = Path(sys.executable).parent
        self.endpoint = f"unix:{self._paths.control_plane_socket}"
        self._progress = Progress()
        self._folder = self._paths.state / "demo"
        self._programs: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        """Run all steps; the lab stays up."""
        self._lab_command("up")
        images = [self._push(version) for version in VERSIONS]
        self._twinectl("entitlement", "create", "demo", "--machines", "3", "--host-profile", "web")
        self._apply(images[0])
        self._show_machines()
        self._update(images[1])
        self._twinectl("machine", "list")
        click.echo(NEXT.format(endpoint=self.endpoint, job=short_path(JOB_FILE), image=images[1]))
        self._progress.say("the demo is done; the lab is still running")
        click.secho(f"the web console, for ten minutes: {self._console_link()}", bold=True)

    def _console_link(self) -> str:
        """Return a one-time link to a console that outlives the demo; it ends with the lab."""
        words = [str(self._bin / "twinectl"), "--endpoint", self.endpoint, "ui", "jobs/web"]
        console = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._paths.save(self._paths.web_console, process_ref(console.pid))
        assert console.stdout is not None
        return console.stdout.readline().decode().removeprefix("open ").strip()

    def _print_command(self, words: list[str]) -> None:
        click.secho("\n$ " + shlex.join(words), bold=True)

    def _command(self, program: str, *words: str, quiet: bool = False, code: int = 0) -> str:
        if not quiet:
            self._print_command([program, *words])
        environment = {
            **os.environ,
            "TWINE_ENDPOINT": self.endpoint,
            "TWINE_LAB_NAME": self._lab,
        }
        output = subprocess.PIPE if quiet else None
        done = subprocess.run(
            [str(self._bin / program), *words], env=environment, stdout=output, check=False
        )
        if done.returncode != code:
            click.echo(f"demo: {program} {words[0]} failed with {done.returncode}", err=True)
            sys.exit(1)
        return done.stdout.decode() if quiet else ""

    def _lab_command(self, *words: str) -> None:
        self._command("twine-lab", *words)

    def _twinectl(self, *words: str) -> None:
        self._command("twinectl", *words)

    def _twinectl_json(self, *words: str) -> Any:
        return json.loads(self._command("twinectl", *words, "-o", "json", quiet=True))

    def _push(self, version: str) -> str:
        tar = build_app(version, self._progress.say)
        self._print_command(["twinectl", "image", "push", short_path(tar)])
        pushed = self._twinectl_json("image", "push", str(tar))
        click.echo(pushed["digest"])
        return str(pushed["digest"])

    def _apply(self, image: str) -> None:
        self._twinectl("job", "apply", short_path(JOB_FILE), "--set", f"image={image}", "--wait")

    def _show_machines(self) -> None:
        self._twinectl("job", "status", "web")
        seen = set()
        for endpoint in self._twinectl_json("job", "endpoints", "web")["endpoints"]:
            if endpoint["machine"] not in seen:
                seen.add(endpoint["machine"])
                url = f"http://{endpoint['host']}:{endpoint['ports']['http']}/"
                self._lab_command("exec", "--", "curl", "--silent", "--show-error", url)
        click.echo(f"\nHTTP answered on {len(seen)} machines.")

    def _update(self, image: str) -> None:
        """Roll the job to another image under constant requests; count the failed ones.

        The requests go through HAProxy; the resolver configures it with the tasks' addresses.
        """
        click.echo("\nA rolling update, under constant requests through a proxy:")
        self._lab_command("proxy", "start", "web:http")
        traffic = self._traffic()
        began = time.monotonic()
        self._apply(image)
        took = time.monotonic() - began
        outcome = self._end_traffic(traffic)
        self._twinectl("job", "status", "web")
        click.secho(f"updated in {took:.0f} s: {requests_text(outcome)}", bold=True)
        if outcome["failed"]:
            click.echo("\n".join(outcome["failures"]), err=True)
            sys.exit(1)

    # -- programs in the lab's network

    def end(self) -> None:
        """End what `_start_program` has started."""
        for program in reversed(self._programs):
            program.terminate()
            program.wait(PATIENCE_S)
        self._programs.clear()

    def _start_program(self, *words: str) -> None:
        self._print_command(["twine-lab", "exec", "--", *words])
        self._programs.append(self._start_in_lab(*words))

    def _start_prometheus(self) -> None:
        self._start_program(
            "prometheus",
            f"--config.file={Path(__file__).parent / 'delivery/prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'prometheus'}",
            "--web.listen-address=127.0.0.1:9090",
            "--log.level=warn",
        )

    def _start_service(self, name: str, socket: Path, *words: str, more: str = "") -> None:
        """Start a client of the front end with a configuration, and wait for its socket."""
        config = self._folder / f"{name}.toml"
        config.write_text(
            f'endpoint = "{self.endpoint}"\nstate = "{self._folder / name}"\n'
            f'socket = "{socket}"\n{more}'
        )
        self._start_program(str(self._bin / f"twine-{name}"), *words, "--config", str(config))
        self._wait_until(f"{name} serves", socket.exists)

    def _invocations(self, machines: Iterable[str]) -> dict[str, str]:
        """Return task unit → its invocation, from systemd on the machines."""
        line = "systemctl show -p Id -p InvocationID 'twine-task-*.service'"
        invocations = {}
        for machine in machines:
            shown = self._command("twine-lab", "ssh", machine, "--", line, quiet=True)
            for unit in shown.split("\n\n"):
                properties = dict(row.split("=", 1) for row in unit.splitlines() if "=" in row)
                if properties:
                    invocations[properties["Id"]] = properties["InvocationID"]
        return invocations

    def _traffic(self) -> subprocess.Popen[bytes]:
        """Start requests to the web job; they continue until the end of their standard input."""
        target = ("--endpoint", self.endpoint, "--job", "web", "--url", PROXY)
        return self._start_in_lab(sys.executable, "-m", "vm_lab.traffic", *target, pipes=True)

    def _end_traffic(self, traffic: subprocess.Popen[bytes]) -> dict[str, Any]:
        """End requests, and return their outcome."""
        out, _ = traffic.communicate(timeout=PATIENCE_S)
        outcome: dict[str, Any] = json.loads(out.splitlines()[-1])
        return outcome

    def _start_in_lab(self, *words: str, pipes: bool = False) -> subprocess.Popen[bytes]:
        """Start a program in the lab's network.

        The kernel ends it with the demo, even if the demo is killed: `twine-lab exec` becomes the
        program by exec, which keeps the signal at the parent's death.
        """
        argv = [str(self._bin / "twine-lab"), "exec", "--name", self._lab, "--", *words]
        bind = partial(_end_with_parent, os.getpid())
        if pipes:
            ends = subprocess.PIPE
            return subprocess.Popen(argv, stdin=ends, stdout=ends, preexec_fn=bind)
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=bind
            )

    def _wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        wait_until(holds, lambda: click.ClickException(f"not within {PATIENCE_S:g} s: {what}"))


def _end_with_parent(parent: int) -> None:
    """Make the kernel end this process when its parent ends; for `preexec_fn`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def requests_text(outcome: dict[str, Any]) -> str:
    """Return the outcome of requests as text: how many, how many failed, and the answers."""
    answers = ", ".join(f"{n} x {page}" for page, n in sorted(outcome["answers"].items()))
    return f"{outcome['requests']} requests, {outcome['failed']} failed ({answers})"


def short_path(path: Path) -> str:
    """Return a path relative to the working folder, if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@click.command()
@click.option("--name", default="lab", show_default=True, help="Name of the lab.")
def main(name: str) -> None:
    """Show Twine on three real machines."""
    with reporting("demo"):
        Demo(name).run()


if __name__ == "__main__":
    main()
