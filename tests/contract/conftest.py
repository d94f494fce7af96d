"""Which machines the contract tests run on: always the fake, real ones by TWINE_REAL.

TWINE_REAL lists interfaces, for instance `TWINE_REAL=btrfs,systemd`. The real variant of a
listed interface runs, and a capability that is missing then fails; the real variant of one
that is not listed does not exist, so nothing is ever skipped. Only the standard library,
pytest and `agent.machine` are needed, so that the tests also run inside a bare guest.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.machine import Btrfs, Systemd
from agent.machine.fake import FakeMachine

INTERFACES = ("btrfs", "systemd")
REAL = frozenset(filter(None, os.environ.get("TWINE_REAL", "").split(",")))
if REAL - set(INTERFACES):
    raise pytest.UsageError(f"TWINE_REAL knows {', '.join(INTERFACES)}, not {REAL}")

MARKS = {"btrfs": pytest.mark.root, "systemd": pytest.mark.guest}


def variants(interface: str) -> list[object]:
    """Return what a fixture for an interface is parametrised with."""
    real = [pytest.param("real", marks=MARKS[interface])] if interface in REAL else []
    return ["fake", *real]


def pytest_report_header() -> str:
    """Say on what the tests run."""
    return f"contract tests: fake, and real {', '.join(sorted(REAL)) or 'nothing'}"


@dataclass(frozen=True)
class Volume:
    """A file system for subvolumes, and a fresh folder on it."""

    btrfs: Btrfs
    folder: Path
    real: bool = False


@pytest.fixture(scope="session")
def real_btrfs_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder on btrfs: TWINE_BTRFS_DIR, else on a loop-mounted file."""
    given = os.environ.get("TWINE_BTRFS_DIR")
    if given:
        yield Path(given)
        return
    base = tmp_path_factory.mktemp("btrfs")
    image, mount = base / "image", base / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(160 << 20)
    _run("mkfs.btrfs", "-q", str(image))
    _run("mount", "-o", "loop", str(image), str(mount))
    try:
        yield mount
    finally:
        _run("umount", str(mount))


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=60)


@pytest.fixture(params=variants("btrfs"))
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Volume]:
    """Yield a fake file system, and a real one where it was asked for."""
    if request.param == "fake":
        yield Volume(FakeMachine(tmp_path).btrfs, tmp_path)
        return
    from agent.machine.btrfs import HostBtrfs  # the fake one must run without btrfsutil

    top: Path = request.getfixturevalue("real_btrfs_folder") / f"contract-{tmp_path.name}"
    yield from _real_volume(HostBtrfs(), top)


def _real_volume(btrfs: Btrfs, top: Path) -> Iterator[Volume]:
    btrfs.create(top)
    try:
        yield Volume(btrfs, top, real=True)
    finally:
        btrfs.delete(top)


@dataclass(frozen=True)
class Host:
    """A service manager, a root file system for its units, and a way to wait for it."""

    systemd: Systemd
    root: Path
    """A writable subvolume that holds /bin/sleep."""
    wait: Callable[[Callable[[], bool]], None]
    real: bool = False
