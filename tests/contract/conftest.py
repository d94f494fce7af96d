"""The contract tests always run on the fake machine, and on real ones selected by TWINE_REAL.

TWINE_REAL lists interfaces, for instance `TWINE_REAL=btrfs,systemd`. The real variant of a listed
interface runs, and fails if a capability is missing. An interface that is not listed has no real
variant, so no test is ever skipped. Only the standard library, pytest and `agent.machine` are
needed, so that the tests also run inside a bare guest.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.machine import Btrfs, Cgroups, Systemd, UnitState
from agent.machine.cgroups import HostCgroups
from agent.machine.fake import FakeMachine
from agent.machine.fake_systemd import Ended, FakeSystemd
from agent.machine.kernelfs import KernelFs

INTERFACES = ("btrfs", "systemd", "etcd")
REAL = frozenset(filter(None, os.environ.get("TWINE_REAL", "").split(",")))
if REAL - set(INTERFACES):
    raise pytest.UsageError(f"TWINE_REAL knows {', '.join(INTERFACES)}, not {REAL}")

MARKS = {"btrfs": pytest.mark.root, "systemd": pytest.mark.guest, "etcd": ()}


def variants(interface: str) -> list[object]:
    """Return the parameters of a fixture for an interface."""
    real = [pytest.param("real", marks=MARKS[interface])] if interface in REAL else []
    return ["fake", *real]


def pytest_report_header() -> str:
    """Report the machines on which the tests run."""
    return f"contract tests: fake, and real {', '.join(sorted(REAL)) or 'nothing'}"


@dataclass(frozen=True)
class Volume:
    """A file system for subvolumes, and a new folder on it."""

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
    """Yield a fake file system, and also a real one if TWINE_REAL lists it."""
    if request.param == "fake":
        yield Volume(FakeMachine(tmp_path).btrfs, tmp_path)
        return
    from agent.machine.btrfs import HostBtrfs  # the fake must run without btrfsutil

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
    """A subvolume, or in the fake a folder, that holds /bin/sleep."""
    real: bool
    cgroups: Cgroups

    def fake_clock(self, boot_s: int) -> None:
        """Give the fake's shell the time."""
        assert isinstance(self.systemd, FakeSystemd)

        def shell(argv: list[str], _: Mapping[str, object]) -> Ended | None:
            return Ended(code=int(boot_s >= int(argv[-1])))

        self.systemd.programs["sh"] = shell

    def until(self, unit: str, reached: Callable[[UnitState | None], bool]) -> UnitState | None:
        """Return the state of a unit when it matches the condition; fail after 30 s."""
        deadline = time.monotonic() + 30
        while not reached(state := self.systemd.find(unit)):
            if not self.real or time.monotonic() > deadline:
                pytest.fail(f"{unit} got stuck: {state}")
            time.sleep(0.02)
        return state

    def whole(self, unit: str) -> UnitState:
        """Return all properties of a running unit."""
        self.running(unit)
        (found,) = self.systemd.units(unit)
        return found

    def ended(self, unit: str) -> UnitState:
        """Return the state of a unit whose processes have ended."""
        state = self.until(unit, lambda s: s is not None and s.sub in ("exited", "failed"))
        assert state
        return state

    def running(self, unit: str) -> UnitState:
        """Return the state of a running unit."""
        state = self.until(unit, lambda s: s is not None and s.sub == "running")
        assert state
        return state


def _shell(argv: list[str], properties: Mapping[str, object]) -> Ended | None:
    """Emulate the few scripts of the tests in the fake."""
    del properties
    script = argv[-1]
    if script.startswith("exit "):
        return Ended(code=int(script.split()[1]))
    if script.startswith("kill -KILL $$"):
        return Ended(code=None, signal="SIGKILL")
    if script.startswith("tail /dev/zero"):
        return Ended(code=None, signal="SIGKILL", result="oom-kill")
    return None


@pytest.fixture(scope="session")
def real_root(real_btrfs_folder: Path) -> Iterator[Path]:
    """Yield a snapshot of an image that contains only /bin/sleep."""
    from agent.machine.btrfs import HostBtrfs

    btrfs = HostBtrfs()
    image, root = real_btrfs_folder / "contract-image", real_btrfs_folder / "contract-root"
    for path in (root, image):
        btrfs.delete(path)
    btrfs.create(image)
    listed = subprocess.run(["ldd", "/bin/sleep"], check=True, capture_output=True, text=True)
    for name in ["/bin/sleep", *re.findall(r"(/\S+) \(0x", listed.stdout)]:
        target = image / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target)
    btrfs.set_read_only(image, True)
    btrfs.snapshot(image, root)
    yield root
    for path in (root, image):
        btrfs.delete(path)


@pytest.fixture(params=variants("systemd"))
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    """Yield a fake service manager, and also the host's own if TWINE_REAL lists it."""
    if request.param == "fake":
        fake = FakeMachine(tmp_path)
        fake.systemd.programs["sh"] = _shell
        yield Host(fake.systemd, tmp_path, real=False, cgroups=fake.cgroups)
        return
    from agent.machine.bus import open_bus
    from agent.machine.systemd import HostSystemd

    systemd = HostSystemd(open_bus)
    root = request.getfixturevalue("real_root")
    yield Host(systemd, root, real=True, cgroups=HostCgroups(KernelFs()))
    for state in systemd.units("twine-contract-*"):
        systemd.kill(state.unit, signal.SIGKILL)
        systemd.stop(state.unit)
        systemd.reset_failed(state.unit)
    systemd.stop("twinecontract.slice")
    systemd.close()
