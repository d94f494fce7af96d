"""`make demo-delivery`: a pipeline on three real VMs, under constant requests.

Version 2 goes to a canary, to half and to all tasks while the size of the job changes and a machine
loses its power. Version 3 answers slowly and version 4 with errors: both are stopped at the canary.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vm_lab.demo import Demo, requests_text, short_path
from vm_lab.errors import reporting
from vm_lab.image.app import BAD_VERSIONS, VERSIONS

FILES = Path(__file__).parent / "delivery"
"""The files of the demo, which docs/pipelines.md explains."""
RUN_S = 1800.0
"""Timeout of a run of the pipeline, in seconds: guests in software emulation are slow."""
NEXT = """
What next? (in this shell first:  . .venv/bin/activate; export TWINE_ENDPOINT={endpoint})

  twinectl job intents web           who wants what of the job
  twine-lab down                     take it all away
"""


class DeliveryDemo(Demo):
    """The demo on one lab, with the measurements for the long lab test."""

    pipeline_name = "web"
    source_option = "--image"

    def __init__(self, lab: str) -> None:
        super().__init__(lab)
        self._folder = self._paths.state / "delivery"
        self._service = f"unix:{self._paths.conveyor}"

    def run(self) -> None:
        """Run all steps; the lab stays up, Prometheus and the conveyor end."""
        self._lab_command("up")
        images = {v: self._push(v) for v in (*VERSIONS, *BAD_VERSIONS)}
        self._twinectl("entitlement", "create", "demo", "--machines", "3", "--host-profile", "web")
        self._apply(images["v1"])
        try:
            self.begin()
            self.deliver_good_version(images["v2"])
            for version in BAD_VERSIONS:
                self.deliver_bad_version(images[version])
        finally:
            self.end()
        self._twinectl("job", "status", "web")
        click.echo(NEXT.format(endpoint=self.endpoint))
        self._progress.say("the demo is done; the lab is still running")

    def begin(self) -> None:
        """Start HAProxy, Prometheus and the conveyor, and apply the pipeline."""
        self._lab_command("proxy", "start", "web:http")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, mode=0o700)
        self._start_prometheus()
        self._start_service("conveyor", self._paths.conveyor, "serve")
        pipeline = short_path(FILES / "web.toml")
        self.pipeline("plan", pipeline, code=2)
        self.pipeline("apply", pipeline)

    def deliver_good_version(self, image: str) -> dict[str, Any]:
        """Deliver a good version; the size changes and a machine is lost meanwhile."""
        click.secho("\nVersion 2, under constant requests", bold=True)

        def meanwhile(view: Any) -> None:
            step = view["record"]["active"].get("step", 0)
            if step == 0 and "size" not in done and _is_reached(view):
                done.add("size")
                self._twinectl("job", "scale", "web", "--tasks", "8", "--reason", "more users")
            if step == 1 and "power" not in done:
                done.add("power")
                self._lab_command("power-off", "m3")

        done: set[str] = set()
        outcome = self.run_pipeline(image, meanwhile)
        self._lab_command("power-on", "m3")
        return self._check_outcome(outcome, "done", failed=0)

    def deliver_bad_version(self, image: str) -> dict[str, Any]:
        """Deliver a bad version, which must not get beyond the canary."""
        click.secho("\nA bad version", bold=True)
        return self._check_outcome(
            self.run_pipeline(image, lambda _: None), "rolled-back", failed=None
        )

    def run_pipeline(self, image: str, meanwhile: Callable[[Any], None]) -> dict[str, Any]:
        """Run the pipeline with an image under requests; return its run and their outcome."""
        traffic = self._traffic()
        self.pipeline("start", self.pipeline_name, self.source_option, image)
        deadline, shown = time.monotonic() + RUN_S, ""
        while True:
            view = self._twinectl_json(
                "pipeline", "--service", self._service, "status", self.pipeline_name
            )
            run = view["record"].get("active") or view["record"].get("waiting")
            if run is None:
                break
            if time.monotonic() > deadline:
                raise click.ClickException(f"no end within {RUN_S:g} s: {run.get('waits')}")
            if (now := str(run.get("waits", ""))) != shown:
                shown = now
                self._progress.say(f"run {run['number']}: {now}")
            if view["record"].get("active") is not None:
                meanwhile(view)
            time.sleep(1)
        outcome = self._end_traffic(traffic)
        self.pipeline("history", self.pipeline_name, "--run", str(view["last"]["number"]))
        click.secho(requests_text(outcome), bold=True)
        click.echo("\n".join(outcome["failures"]), err=True)
        return outcome | {"run": view["last"]}

    def pipeline(self, *words: str, code: int = 0) -> str:
        """Run `twinectl pipeline` with these arguments; return its output."""
        return self._command("twinectl", "pipeline", "--service", self._service, *words, code=code)

    def _check_outcome(
        self, outcome: dict[str, Any], state: str, failed: int | None
    ) -> dict[str, Any]:
        run = outcome["run"]
        click.secho(f"the run ended: {run['state']} {run.get('reason', '')}", bold=True)
        if run["state"] != state or failed not in (None, outcome["failed"]):
            sys.exit(1)
        return outcome


def _is_reached(view: Any) -> bool:
    steps = view["record"]["active"].get("steps", [])
    return bool(steps) and steps[-1].get("reached") is not None


@click.command()
@click.option("--name", default="lab", show_default=True, help="Name of the lab.")
def main(name: str) -> None:
    """Show continuous delivery on three real machines."""
    with reporting("demo"):
        DeliveryDemo(name).run()


if __name__ == "__main__":
    main()
