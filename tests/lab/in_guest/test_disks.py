"""Scratch file systems and mount options on the real kernel."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_host import GuestHost, profile

from sidekick.report import ProfileState

FILE = Path("/var/lib/scratch.img")
PLACE = Path("/scratch")
SWAPPINESS = Path("/proc/sys/vm/swappiness")


@pytest.fixture
def file() -> Iterator[Path]:
    """Yield a sparse file of 400 MiB."""
    with FILE.open("wb") as made:
        made.truncate(400 << 20)
    yield FILE
    FILE.unlink()
    PLACE.rmdir()


def digest(file: Path) -> str:
    """Return a digest of a file: two such files together exceed the guest's memory."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def mounted(place: str) -> str:
    found = [x for x in Path("/proc/self/mounts").read_text().splitlines() if f" {place} " in x]
    return found[-1] if found else ""


@pytest.mark.behaviour("HP2")
@pytest.mark.long
def test_scratch_is_made_mounted_kept_over_a_switch_and_taken_back(
    host: GuestHost, file: Path
) -> None:
    swappiness = SWAPPINESS.read_text()
    for kind in ("xfs", "btrfs"):
        table = (
            f"[scratch]\ndevice='{file}'\nfilesystem='{kind}'\noptions=['noatime']\nrequired=true\n"
        )
        profile(f"{kind}-share", f"{table}share=0.8\n")
        assert host.apply(f"{kind}-share").state is ProfileState.VERIFIED
        assert os.statvfs(PLACE).f_blocks * os.statvfs(PLACE).f_frsize <= 320 << 20
        profile(kind, table)
        profile(f"{kind}-2", f"{table}[sysctl]\n'vm.swappiness'=7\n")
        report = host.apply(kind)
        assert report.state is ProfileState.VERIFIED, report
        assert f" {PLACE} {kind} " in mounted(str(PLACE))
        assert "noatime" in mounted(str(PLACE))
        (PLACE / "data").write_text("x")
        assert host.apply(f"{kind}-2").state is ProfileState.VERIFIED
        assert (PLACE / "data").read_text() == "x", "both want the same: nothing was touched"
        # as at a boot, and the remount resets sysctls
        subprocess.run(["umount", str(PLACE)], check=True)
        SWAPPINESS.write_text(swappiness)
        host.as_after_a_boot()
        assert host.resume().state is ProfileState.VERIFIED
        assert (PLACE / "data").read_text() == "x"
    host.release()
    assert mounted(str(PLACE)) == ""
    with file.open("rb") as device:
        assert not any(device.read(1 << 20))


@pytest.mark.behaviour("HP2")
@pytest.mark.long
def test_scratch_never_uses_a_disk_with_data(host: GuestHost, file: Path) -> None:
    subprocess.run(["mkfs.xfs", "-q", "-L", "somebodys", str(file)], check=True)
    PLACE.mkdir(exist_ok=True)
    before = digest(file)
    table = f"[scratch]\ndevice='{file}'\nrequired=true\n"
    assert host.apply(profile("greedy", table)).state is ProfileState.DEGRADED
    assert digest(file) == before


@pytest.mark.behaviour("HP2")
def test_mount_options_change_separately_and_are_restored(host: GuestHost) -> None:
    """`lazytime` and `commit` belong to the file system, whose first mount is the root."""
    point = "/var/lib/twine"
    before = mounted("/"), mounted(point)
    table = (
        f"[mounts]\n'{point}' = {{ atime='relatime', required=true }}\n"
        "'/' = { lazytime='on', commit=45, required=true }\n"
    )
    report = host.apply(profile("m", table))
    assert report.state is ProfileState.VERIFIED, report
    now = mounted(point)
    assert all(option in now for option in ("relatime", "lazytime", "commit=45", "subvol=/@twine"))
    host.release()
    assert (mounted("/"), mounted(point)) == before
