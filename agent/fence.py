"""Ends tasks whose lease has run out, even if no agent runs (docs/adr/0024).

This separate program (`twine-fence.service`) depends on as little as possible. It reads the files
that `agent.lease.contact` writes below /run/twine/fence and compares them with the clock that
counts suspend. It kills through the kernel (cgroup.kill of cgroup-v2.rst), so neither the agent nor
D-Bus nor systemd has to work. If a file is empty or cannot be parsed, the fence kills the
task.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.lease.core.lease import read_lease, read_numbers
from agent.machine import boottime_s
from agent.runtime.core.records import unit_of
from agent.tasks.core.inside import inside_unit, step_unit
from wire.notify import WATCHDOG, notify

log = logging.getLogger(__name__)

FOLDER = Path("/run/twine/fence")
SLICE = Path("/sys/fs/cgroup/workload.slice")
EVERY_S = 0.5

Kill = Callable[[str], bool]
"""Kills all processes of a unit; returns whether there were any."""


def overdue(folder: Path, now_s: float) -> Iterator[str]:
    """Yield the ids of the tasks whose processes must all be gone by now."""
    numbers = read_numbers(_find(folder / ".heard") or "")
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        text = _find(path)
        if text is None:
            continue
        if read_lease(text).is_overdue(numbers[0] if numbers else None, now_s):
            yield path.name


def _find(path: Path) -> str | None:
    """Return a file's text, None if the agent has just removed the file."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None


def kill_unit(unit: str, below: Path = SLICE) -> bool:
    """Kill every process of a unit at once; return whether there were any.

    Its cgroup is found by its name, one or two slices down (systemd.slice(5)).
    """
    had_processes = False
    for cgroup in (*below.glob(f"{unit}"), *below.glob(f"*/{unit}")):
        try:
            if "populated 1" in (cgroup / "cgroup.events").read_text():
                (cgroup / "cgroup.kill").write_text("1")
                had_processes = True
        except OSError as e:
            if cgroup.exists():
                log.error("cannot kill %s: %s", cgroup, e)
    return had_processes


def check(folder: Path, now_s: float, kill: Kill = kill_unit) -> None:
    """Kill overdue tasks, and write `.alive`, which shows the agent that the fence runs."""
    for task_id in overdue(folder, now_s):
        units = (unit_of(task_id), step_unit(task_id), inside_unit(task_id, "*"))
        if sum(map(kill, units)):
            log.warning("killed task %s: its control plane was silent for too long", task_id)
    new = folder / ".new.alive"
    new.write_text(f"{now_s!r}\n")
    os.replace(new, folder / ".alive")


def main() -> None:
    """Check the bound tasks twice a second until SIGTERM."""
    logging.basicConfig(format="%(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check(folder, boottime_s())
    notify("READY=1")
    while not stop.wait(EVERY_S):
        check(folder, boottime_s())
        notify(WATCHDOG)


if __name__ == "__main__":
    main()
