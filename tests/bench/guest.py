"""Runs benches in a guest of the lab, through the `twine-lab` command only."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.bench.task_start import root_tar

FOLDER = "/root/twine-bench"
PYTHON = "/opt/twine/bin/python"


def lab(name: str, *arguments: str, stdin: bytes | None = None) -> str:
    """Return the output of `twine-lab`; ends the bench if it fails."""
    command = [sys.executable, "-m", "vm_lab.cli", *arguments[:1], "--name", name, *arguments[1:]]
    done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"bench: {' '.join(command)} failed with {done.returncode}")
    return done.stdout.decode()


def put(name: str, file: str, data: bytes) -> str:
    """Write a file into the bench's folder of the first guest, and return its path there."""
    path = f"{FOLDER}/{file}"
    lab(name, "ssh", "m1", "--", f"mkdir -p {FOLDER}; cat > {path}", stdin=data)
    return path


def inside(name: str, source: Path, *arguments: str) -> dict[str, float]:
    """Run a bench's file in the first guest, with an image for its agent; return its figures."""
    tar, there = put(name, "root.tar", root_tar()), put(name, source.name, source.read_bytes())
    command = ["systemctl start twine-agent &&", PYTHON, there, "--inside", tar, *arguments]
    return json.loads(lab(name, "ssh", "m1", "--", " ".join(command)).splitlines()[-1])


def shown(measure: Callable[[str], dict[str, float]], name: str, *up: str, as_json: bool) -> None:
    """Measure in a running lab, or in one that is booted for it; show the figures.

    That lab ends with the bench, also on SIGTERM. The next bench removes the lab of a killed one.
    """
    used = name or "bench"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not name:
            lab(used, "down")
            lab(used, "up", "--bare", "--count", "1", *up)
        figures = measure(used)
    finally:
        if not name:
            lab(used, "down")
    rows = (f"{key:20} {value}" for key, value in figures.items())
    print(json.dumps(figures) if as_json else "\n".join(rows))
