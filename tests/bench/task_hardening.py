"""What does each property of a task's sandbox cost at its start?

Run as root on a host with systemd as PID 1 and btrfs at --folder; with --lab in that lab's guest:

    python -m tests.bench.task_hardening --lab bench [--json] [--starts 20]
    python tests/bench/task_hardening.py [--starts 20] [--without] [--only PrivateTmp …]

Starts `/bin/sleep` from a snapshot: bare, with the whole sandbox, and with each property alone (or,
with --without, with all but each one). They take turns, so that drift affects all equally.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from agent.machine.btrfs import HostBtrfs
from agent.machine.systemd import HostSystemd
from agent.tasks.core.unit_properties import TASK_HARDENING

NEEDS_GUEST = True


def make_root(btrfs: HostBtrfs, path: Path) -> None:
    """Make a root file system that holds /bin/sleep and the mount points of a sandbox."""
    btrfs.delete(path)
    btrfs.create(path)
    listed = subprocess.run(["ldd", "/bin/sleep"], check=True, capture_output=True, text=True)
    for name in ["/bin/sleep", *re.findall(r"(/\S+) \(0x", listed.stdout)]:
        target = path / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target)
    for folder in ("dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "var/tmp"):
        (path / folder).mkdir(parents=True, exist_ok=True)


def start_ms(
    systemd: HostSystemd, events: queue.Queue[str], properties: Mapping[str, object]
) -> float:
    """Return milliseconds from the request until the unit runs."""
    unit = f"twine-bench-{time.monotonic_ns()}.service"
    began = time.perf_counter()
    systemd.start_transient(unit, properties)
    while True:
        events.get(timeout=30)
        state = systemd.find(unit)
        if state and state.sub in ("running", "failed"):
            break
    took = (time.perf_counter() - began) * 1000
    if state.sub == "failed":
        raise SystemExit(f"{unit} failed: {state}; see journalctl -u {unit}")
    systemd.kill(unit, signal.SIGKILL)  # with a PID namespace SIGTERM would not end it
    while systemd.find(unit):
        events.get(timeout=30)
    return took


def main() -> None:
    """Print one table, or one object."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--starts", type=int, default=20)
    options.add_argument("--without", action="store_true")
    options.add_argument("--only", nargs="*", default=sorted(TASK_HARDENING))
    options.add_argument("--folder", type=Path, default=Path("/var/lib/twine"))
    options.add_argument("--lab", default="", help="a running lab, in whose guest it is measured")
    options.add_argument("--json", action="store_true", help="one JSON object")
    args = options.parse_args()
    if args.lab:
        from tests.bench.guest import PYTHON, lab, put

        source = put(args.lab, "task_hardening.py", Path(__file__).read_bytes())
        print(
            lab(args.lab, "ssh", "m1", "--", shlex.join([PYTHON, source, *_inside(args)])), end=""
        )
        return
    took = measure(args)
    if args.json:
        medians = {name: round(statistics.median(values), 1) for name, values in took.items()}
        ratio = round(medians["whole sandbox"] / medians["bare"], 2)
        found = {"n": args.starts, "ratio_whole_sandbox": ratio, "median_ms": medians}
        print(json.dumps(found))
    else:
        print_table(args.starts, took)


def _inside(args: argparse.Namespace) -> list[str]:
    """Return the arguments for the guest."""
    flags = [flag for flag in ("--json", "--without") if getattr(args, flag[2:])]
    return [
        *flags,
        "--starts",
        str(args.starts),
        "--folder",
        str(args.folder),
        "--only",
        *args.only,
    ]


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return milliseconds of each start by variant."""
    btrfs, systemd = HostBtrfs(), HostSystemd()
    root = args.folder / "bench-root"
    make_root(btrfs, root)
    bare = {
        "ExecStart": [["/bin/sleep", "1000"]],
        "Type": "exec",
        "CollectMode": "inactive-or-failed",
        "RootDirectory": str(root),
    }
    variants = {"bare": bare, "whole sandbox": {**bare, **TASK_HARDENING}}
    for name in args.only:
        if args.without:
            variants[f"without {name}"] = {
                key: value for key, value in variants["whole sandbox"].items() if key != name
            }
        else:
            variants[f"with {name}"] = {**bare, name: TASK_HARDENING[name]}
    took: dict[str, list[float]] = {name: [] for name in variants}
    events: queue.Queue[str] = queue.Queue()
    systemd.listen(events.put)
    for i in range(args.starts + 1):
        for name, properties in variants.items():
            ms = start_ms(systemd, events, properties)
            if i:  # the first round warms the caches
                took[name].append(ms)
    systemd.close()
    btrfs.delete(root)
    return took


def print_table(starts: int, took: Mapping[str, list[float]]) -> None:
    """Print medians and least times, and their difference from a bare unit's."""
    least, middle = min(took["bare"]), statistics.median(took["bare"])
    print(f"n = {starts}; milliseconds; differences to bare")
    for name, values in sorted(took.items(), key=lambda pair: statistics.median(pair[1])):
        low, median = min(values), statistics.median(values)
        print(
            f"{name:32s} median {median:7.1f} {median - middle:+7.1f}"
            f"   min {low:7.1f} {low - least:+7.1f}   ratio {median / middle:.2f}"
        )


if __name__ == "__main__":
    main()
