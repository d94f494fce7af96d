"""`make demo-release`: a release of Twine itself goes through a pipeline, under constant requests.

Release 0.2.0 is installed for the agents of three VMs, the canary host first, then for the control
plane. Release 0.3.0 has an agent that does not start: the pipeline stops it at the canary host and
rolls it back. Neither release restarts a task, and no request fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import Any

import click

from vm_lab.delivery_demo import DeliveryDemo
from vm_lab.demo import short_path
from vm_lab.errors import reporting
from vm_lab.package import build_package
from vm_lab.wheel import PACKAGES, REPOSITORY, build_wheel, copy_tree

FILES = Path(__file__).parent / "release"
NEW, BROKEN = "0.2.0", "0.3.0"
DOES_NOT_START = """

async def serve(config: AgentConfig) -> None:  # noqa: F811
    raise RuntimeError("this release does not start")
"""
MACHINES = ("m1", "m2", "m3")


class ReleaseDemo(DeliveryDemo):
    """The demo on one lab, with the measurements for the long lab test."""

    pipeline_name = "twine"
    source_option = "--release"

    def __init__(self, lab: str) -> None:
        super().__init__(lab)
        self._releases = self._folder / "releases"
        self.old = ""
        self.before: dict[str, str] = {}
        """Task → invocation of its unit, before the first release."""

    def run(self) -> None:
        """Run all steps; the lab stays up, the conveyor ends."""
        self._lab_command("up")
        image = self._push("v1")
        self._twinectl("entitlement", "create", "demo", "--machines", "3", "--host-profile", "web")
        self._apply(image)
        try:
            self.begin()
            self.release_good_version()
            self.release_broken_version()
        finally:
            self.end()
        self._twinectl("job", "status", "web")
        self._progress.say("the demo is done; the lab is still running")

    def begin(self) -> None:
        """Build the releases, bring the hosts to packages, and start the conveyor."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._releases.mkdir(parents=True, mode=0o700)
        self._lab_command("proxy", "start", "web:http")
        for version, appended_code in (("", ""), (NEW, ""), (BROKEN, DOES_NOT_START)):
            self._build_release(version, appended_code)
        os.environ |= {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "TWINE_LAB_NAME": self._lab,
            "TWINE_RELEASES": str(self._releases),
            "TWINE_SOCKET": str(self._paths.control_plane_socket),
        }
        for machine in MACHINES:  # the image of the guests has no package
            self._progress.say(f"{machine}: the agent as a package, {self.old}")
            subprocess.run([FILES / "install-agent", machine, self.old], check=True)
            self._lab_command("ssh", machine, "--", "systemctl restart twine-agent.service")
        self._wait_until(
            "every agent reports again", lambda: self._ready_machines() == set(MACHINES)
        )
        self.before = self._invocations(MACHINES)
        config = self._folder / "conveyor.toml"
        socket = self._service.removeprefix("unix:")
        text = Template((FILES / "conveyor.toml").read_text())
        values = {"state": self._folder / "conveyor", "socket": socket, "endpoint": self.endpoint}
        config.write_text(text.substitute(values, here=FILES))
        words = [str(self._bin / "twine-conveyor"), "serve", "--config", str(config)]
        self._print_command(words)
        with (self._folder / "log").open("ab") as log:
            self._programs.append(subprocess.Popen(words, stdout=log, stderr=log))
        self._wait_until("the conveyor serves", Path(socket).exists)
        pipeline = short_path(FILES / "twine.toml")
        self.pipeline("plan", pipeline, code=2)
        self.pipeline("apply", pipeline)

    def release_good_version(self) -> dict[str, Any]:
        """Release a good version; return its run and the outcome of the requests."""
        click.secho(f"\nRelease {NEW}, under constant requests", bold=True)
        outcome = self._check_outcome(self.run_pipeline(NEW, lambda _: None), "done", failed=0)
        return self._check_undisturbed(outcome, NEW)

    def release_broken_version(self) -> dict[str, Any]:
        """Release a version whose agent does not start: it must stop at the canary host."""
        click.secho(f"\nRelease {BROKEN}, whose agent does not start", bold=True)
        outcome = self._check_outcome(
            self.run_pipeline(BROKEN, lambda _: None), "rolled-back", failed=0
        )
        return self._check_undisturbed(outcome, NEW)

    def _check_undisturbed(self, outcome: dict[str, Any], release: str) -> dict[str, Any]:
        """Show which release each machine runs, and check that no task was restarted."""
        views = self._twinectl_json("machine", "list")["machines"]
        agents = {v["record"]["machine"]: v["record"]["facts"]["agent_version"] for v in views}
        plane = subprocess.run([FILES / "probe-control-plane"], check=True, capture_output=True)
        releases = {**agents, "cp": plane.stdout.decode().strip()}
        click.secho(f"releases: {releases}", bold=True)
        after = self._invocations(MACHINES)
        restarted = [task for task, unit in self.before.items() if after.get(task) != unit]
        text = f"{len(after)} tasks, {len(restarted)} of them started again: {restarted}"
        click.secho(text, bold=True)
        if restarted or set(releases.values()) != {release}:
            sys.exit(1)
        return outcome | {"releases": releases, "again": restarted}

    def _ready_machines(self) -> set[str]:
        views = self._twinectl_json("machine", "list")["machines"]
        return {view["record"]["machine"] for view in views if view.get("ready")}

    def _build_release(self, version: str, appended_code: str) -> None:
        """Build the agent's package and the control plane's code of a release."""
        tree = self._releases / f"tree-{version or 'of-now'}"
        copy_tree(REPOSITORY, PACKAGES, tree)
        project = (tree / "pyproject.toml").read_text()
        is_now = project.split('version = "', 1)[1].split('"', 1)[0]
        if version:
            changed = project.replace(f'version = "{is_now}"', f'version = "{version}"', 1)
            (tree / "pyproject.toml").write_text(changed)
            with (tree / "agent/daemon.py").open("a") as file:
                file.write(appended_code)
        else:
            self.old = is_now
        self._progress.say(f"release {version or is_now}: package and wheel")
        build_package(self._releases, self._progress.say, tree)
        wheel = build_wheel(tree / "dist", tree)
        into = self._releases / f"control-plane-{version or is_now}"
        words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        target = ["--no-compile", "--target", str(into), str(wheel)]
        subprocess.run([sys.executable, *words, *target], check=True)
        shutil.rmtree(tree)


@click.command()
@click.option("--name", default="lab", show_default=True, help="Name of the lab.")
def main(name: str) -> None:
    """Release Twine itself by a pipeline on three real machines."""
    with reporting("demo"):
        ReleaseDemo(name).run()


if __name__ == "__main__":
    main()
