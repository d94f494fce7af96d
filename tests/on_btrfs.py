"""A separate btrfs for an agent in memory, with programs that really run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from builders import FakeHost
from msgspec.structs import replace

from agent.machine import HostAccess, Property
from agent.machine.btrfs import HostBtrfs
from agent.machine.fake_programs import python
from agent.machine.fake_systemd import Ended


def run(*argv: str) -> None:
    """Run a program that must succeed."""
    subprocess.run(argv, check=True, capture_output=True, timeout=120)


@contextmanager
def mounted(folder: Path, size: int = 1 << 30, *options: str) -> Iterator[FakeHost]:
    """Yield a machine in memory whose state folder is on its own btrfs, made with the given
    options."""
    host = FakeHost(folder)
    host.state.mkdir()
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(size)
    run("mkfs.btrfs", "-q", *options, str(image))
    run("mount", "-o", "loop,commit=1", str(image), str(host.state))
    try:
        yield host
    finally:
        run("umount", str(host.state))


def machine(host: FakeHost) -> HostAccess:
    """Return the machine with the real file system."""
    return replace(host.fake.machine, btrfs=HostBtrfs())


def use_real_programs(host: FakeHost, *programs: str) -> None:
    """Run these programs for real when a unit starts them. This process applies the layers."""
    for name in programs:
        host.fake.systemd.programs[name] = _program
    for name in ("python", "python3", Path(sys.executable).name):
        host.fake.systemd.programs[name] = python


def _program(argv: list[str], properties: Mapping[str, Property]) -> Ended:
    output = properties.get("StandardOutputFile")
    done = subprocess.run(argv, capture_output=True, timeout=120, check=False)
    if output:
        Path(str(output)).write_bytes(done.stdout)
    sys.stderr.write(done.stderr.decode(errors="replace"))
    return Ended(code=done.returncode)
