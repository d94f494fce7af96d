"""Asks the lab for what benches in a guest need; the lab is used by its command only."""

from __future__ import annotations

import subprocess
import sys

FOLDER = "/root/twine-bench"
PYTHON = "/opt/twine/bin/python"


def lab(name: str, *arguments: str, stdin: bytes | None = None) -> str:
    """Return what `twine-lab` says; ends the bench if it fails."""
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
