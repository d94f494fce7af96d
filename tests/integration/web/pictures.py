"""Makes the pictures of docs/web.md: `python -m tests.integration.web.pictures FOLDER`.

A region of 40 machines in memory, with a job that is updated while a machine is drained.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.integration.web.service_programs import JOB, PATIENCE_S, PIPELINE, ctl, services
from tests.integration.web.test_console import chromium, console, matching_output

AGENTS = 40
READINGS = 8
"""Number of samples of a task's usage, five seconds apart, before its picture is taken."""
PICTURES = {
    "region": "/ui/?colour=state",
    "job": "/ui/jobs/web?window=all",
    "task": "/ui/jobs/web/tasks/0",
    "autoscaling": f"/ui/autoscaling/{JOB}",
    "pipeline": f"/ui/pipelines/{PIPELINE}",
}


def history(endpoint: str) -> None:
    """Create events for the pictures: an update, a drained machine, a hold, a restarted task."""
    ctl(endpoint, "job", "scale", "web", "--tasks", "12", "--reason", "the night")
    settled(endpoint)
    status = json.loads(ctl(endpoint, "job", "status", "web", "-o", "json"))
    placed = status["record"]["tasks"][3]["placement"]["machine"]
    ctl(endpoint, "machine", "drain", placed, "--reason", "a fan is loud")
    settled(endpoint)
    ctl(endpoint, "job", "restart", "web")
    settled(endpoint)
    plan = ["maintenance", "apply", "switches", "--scope", "msb=msb2", "--wave-size", "3"]
    times = ["--work", "firmware", "--deadline", "20m", "--duration", "5m"]
    ctl(endpoint, *plan, *times, "--reason", "new switches", "--despite")
    settled(endpoint)
    ctl(endpoint, "job", "canary", "web", "--tasks", "2", "--for", "10m", "--env", "COLOUR=blue")
    settled(endpoint)
    ctl(endpoint, "job", "hold", "web", "--for", "1h", "--reason", "the match is on")
    ctl(endpoint, "entitlement", "request", "front", "--machines", "60", "--reason", "a launch")


def settled(endpoint: str) -> None:
    """Return once no task of the job has a running operation."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        time.sleep(1.0)
        status = json.loads(ctl(endpoint, "job", "status", "web", "-o", "json"))
        tasks = status["record"]["tasks"]
        if status["phase"] == "stable" and not any(task.get("operation") for task in tasks):
            return
    raise SystemExit("the job does not come to rest")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        dev = ["vm_lab.cli", "dev", "--agents", str(AGENTS)]
        endpoint = stack.enter_context(matching_output(dev, r"TWINE_ENDPOINT=(\S+)"))
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(services(endpoint, state, "apply"))
        history(endpoint)
        browser = stack.enter_context(chromium(stack.enter_context(console(endpoint))))
        base = browser.current_url.split("/ui/")[0]
        for name, path in PICTURES.items():
            browser.get(base + path)
            time.sleep(5.0 * READINGS if name == "task" else 1.0)  # charts need data
            browser.save_screenshot(str(folder / f"web-{name}.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
