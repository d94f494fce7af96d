"""On a disk that fills up at any write, or with torn reports, rollback remains possible."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_host import FakeDisk, FakeHost, a_target
from test_sidekick_crash_points import bad, cache, web

from sidekick import status as standing
from sidekick.disk import Disk
from sidekick.record import Target
from sidekick.report import ProfileState
from sidekick.state import StateFolder
from wire.errors import HostError

RESERVE = 1 << 20


@dataclass
class FullDisk(FakeDisk):
    """A disk that is full from a given write on; removing the reserve frees its space."""

    full_at: int | None = None
    """The number of the first write on the full disk."""
    is_taken: bool = False
    """Whether another program uses the freed space."""
    writes: int = 0
    free: int = 0

    def write(self, path: Path, text: str) -> None:
        self._take(path, len(text))
        super().write(path, text)

    def append(self, path: Path, line: str) -> None:
        self._take(path, len(line))
        super().append(path, line)

    def reserve(self, path: Path, size: int) -> None:
        if not path.exists():
            self._take(path, size)
        super().reserve(path, size)

    def remove(self, path: Path) -> None:
        if path.name == "reserve" and path.exists() and not self.is_taken:
            self.free += RESERVE
        super().remove(path)

    def _take(self, path: Path, size: int) -> None:
        self.writes += 1
        if self.full_at is None or self.writes < self.full_at:
            return
        if size > self.free:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise HostError(f"cannot write {path}: {full.strerror}") from full
        self.free -= size


def on(folder: Path) -> tuple[FakeHost, FullDisk]:
    fake = FakeHost(folder)
    disk = FullDisk(fake.points)
    fake.state = StateFolder(fake.state.folder, disk)
    return fake, disk


def switch(fake: FakeHost, target: Target) -> None:
    """Switch, and ignore an error that a user would get."""
    with contextlib.suppress(HostError):
        fake.apply(target)


def writes_of(folder: Path, target: Callable[[FakeHost], Target]) -> int:
    fake, disk = on(folder)
    fake.apply(web(fake))
    before = disk.writes
    fake.apply(target(fake))
    return disk.writes - before


@pytest.mark.behaviour("BUG-SK39")
@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("target", [cache, bad])
def test_a_disk_that_is_full_at_any_write_leaves_a_way_back(
    tmp_path: Path, target: Callable[[FakeHost], Target], is_taken: bool
) -> None:
    """11 settings stayed changed, and rollback was blocked."""
    writes = writes_of(tmp_path / "count", target)
    assert writes > 8
    for at in range(1, writes + 1):
        fake, disk = on(tmp_path / str(at))
        untouched = fake.everything()
        fake.apply(web(fake))
        as_web = fake.live()
        disk.full_at, disk.is_taken = disk.writes + at, is_taken
        switch(fake, target(fake))
        if fake.state.load().applied == web(fake) and fake.state.unfinished() is None:
            assert fake.live() == as_web, f"at write {at}"
        switch(fake, Target())
        assert fake.everything() == untouched, f"at write {at}"
        disk.full_at = None
        fake.apply(Target())
        assert fake.everything() == untouched
        assert standing.status(fake.host(), fake.state).state is ProfileState.NONE


@pytest.mark.behaviour("BUG-SK39")
@pytest.mark.parametrize("target", [cache])
def test_a_full_disk_after_the_first_write_does_not_stop_a_run(
    tmp_path: Path, target: Callable[[FakeHost], Target]
) -> None:
    """The reserve holds the record and the journal of the whole run."""
    fake, disk = on(tmp_path)
    fake.apply(web(fake))
    wanted = target(fake)
    wanted = Target(name="c", wanted=tuple(w for w in wanted.wanted if "kernel" not in w.setting))
    disk.full_at = disk.writes + 1
    report = fake.apply(wanted)
    assert report.state is ProfileState.VERIFIED
    assert fake.state.load().applied == wanted
    disk.is_taken, disk.free = True, 0
    with pytest.raises(HostError, match=r"cannot write .*reserve"):
        fake.apply(web(fake))
    assert fake.state.load().applied == wanted


@pytest.mark.behaviour("BUG-SK40")
def test_a_torn_report_blocks_nothing_and_is_made_again(fake: FakeHost) -> None:
    """A torn status.json blocked status, apply and rollback."""
    untouched = fake.everything()
    status = fake.state.folder / "status.json"
    fake.apply(web(fake))
    whole = status.read_bytes()
    for torn in (b"", whole[: len(whole) // 2], bytes(len(whole)), b"\xff\xfe", None):
        status.unlink() if torn is None else status.write_bytes(torn)
        report = standing.status(fake.host(), fake.state)
        assert report.state is ProfileState.VERIFIED
        assert len(report.settings) == len(web(fake).wanted)
        assert standing.verify(fake.host(), fake.state).state is ProfileState.VERIFIED
        status.write_bytes(torn or b"")
        assert fake.apply(cache(fake)).state is ProfileState.PENDING_REBOOT
        status.write_bytes(torn or b"")
        fake.apply(web(fake))
    status.write_bytes(b"{")
    fake.apply(Target())
    assert fake.everything() == untouched


@pytest.mark.behaviour("BUG-SK40")
def test_a_lost_report_is_made_again_from_the_host(fake: FakeHost) -> None:
    """sidekick reads the host and does not assume the earlier state."""
    fake.apply(a_target(fake, sysctl={"vm.swappiness": 10}))
    (fake.state.folder / "status.json").write_text("")
    fake.fs.write("/proc/sys/vm/swappiness", "20")
    assert standing.status(fake.host(), fake.state).state is ProfileState.DRIFTED


@pytest.mark.behaviour("BUG-SK39")
def test_a_failed_write_leaves_no_partial_data_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a copy or half of a line would keep the disk full."""
    disk, path = Disk(), tmp_path / "file"
    disk.append(path, "one")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    for attempt in (disk.write, disk.append):
        with pytest.raises(HostError, match="full"):
            attempt(path, "two")
    assert path.read_text() == "one\n"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
