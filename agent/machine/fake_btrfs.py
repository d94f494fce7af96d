"""Subvolumes of the machine in memory: plain folders with a registry."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.machine import QuotaMode, Space, Subvolume
from wire.errors import BtrfsError, Conflict, NotBtrfs

GIB = 1 << 30


@dataclass(slots=True)
class _FakeSubvolume:
    uuid: str
    parent_uuid: str = ""
    received_uuid: str = ""
    read_only: bool = False
    max_bytes: int | None = None


def _copy(source: str, target: str) -> None:
    if stat.S_ISFIFO(os.lstat(source).st_mode):
        os.mkfifo(target, 0o600)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


class FakeBtrfs:
    """Subvolumes as plain folders below `root`. They are registered by inode, so renames work.

    Programs can write into a read-only subvolume: only the calls here refuse it.
    """

    def __init__(self, root: Path) -> None:
        """`root` is the top folder of the file system."""
        self.root = root
        self.size_bytes = 8 * GIB
        self.available_bytes = 6 * GIB
        self.counts = QuotaMode.OFF
        self.can_count = QuotaMode.SIMPLE
        """The mode that `enable_quota` sets; `OFF`: the kernel refuses."""
        self._records: dict[int, _FakeSubvolume] = {}
        self._numbers = itertools.count(1)

    def create(self, path: Path) -> None:
        """Make an empty, writable subvolume."""
        self._make(path, f"cannot create subvolume {path}")
        self._register(path, _FakeSubvolume(self._uuid()))

    def snapshot(self, source: Path, target: Path, *, read_only: bool = False) -> None:
        """Copy `source` to `target`; nested subvolumes become empty folders."""
        attempt = f"cannot snapshot {source} as {target}"
        origin = self._get(source, attempt)
        self._make(target, attempt)

        def nested(folder: str, names: list[str]) -> Iterable[str]:
            return names if Path(folder) != source and self._find(Path(folder)) else ()

        shutil.copytree(
            source, target, symlinks=True, dirs_exist_ok=True, ignore=nested, copy_function=_copy
        )
        self._register(target, _FakeSubvolume(self._uuid(), origin.uuid, read_only=read_only))

    def delete(self, path: Path) -> None:
        """Remove a subvolume and those nested in it."""
        if not os.path.lexists(path):
            return
        self._get(path, f"cannot delete subvolume {path}")
        for folder, _, _ in os.walk(path):
            self._records.pop(os.lstat(folder).st_ino, None)
        shutil.rmtree(path)

    def set_read_only(self, path: Path, read_only: bool) -> None:
        """Close or open a subvolume for writing."""
        word = "close" if read_only else "open"
        self._get(path, f"cannot {word} subvolume {path} for writing").read_only = read_only

    def find(self, path: Path) -> Subvolume | None:
        """Return the subvolume at `path`."""
        found = self._find(path)
        if found is None:
            return None
        return Subvolume(found.uuid, found.parent_uuid, found.received_uuid, found.read_only)

    def children(self, path: Path) -> list[str]:
        """Return the names of the subvolumes directly below a folder, sorted."""
        try:
            return sorted(name for name in os.listdir(path) if self._find(path / name))
        except OSError as e:
            raise BtrfsError(f"cannot list the subvolumes below {path}: {e.strerror}") from e

    def free_bytes(self, path: Path) -> tuple[int, int]:
        """Return the attributes `size_bytes` and `available_bytes`."""
        if not path.exists():
            raise BtrfsError(f"cannot read the free space at {path}: {os.strerror(errno.ENOENT)}")
        return self.size_bytes, self.available_bytes

    def containing_subvolume(self, path: Path) -> Path:
        """Return the subvolume that a path lies in; the top folder of the file system is one."""
        for folder in (path, *path.parents):
            if folder == self.root or self._find(folder):
                return folder
        raise NotBtrfs(f"cannot find the subvolume of {path}: it is not on a btrfs file system")

    def exclusive_bytes(self, path: Path) -> int | None:
        """Return the size of a subvolume's own files."""
        self._get(path, f"cannot measure {path}")
        return sum(p.lstat().st_size for p in path.rglob("*") if p.is_file())

    def quota(self, path: Path) -> QuotaMode:
        """Return the attribute `counts`."""
        del path
        return self.counts

    def enable_quota(self, path: Path) -> QuotaMode:
        """Turn counting on, if the kernel can."""
        if self.counts is QuotaMode.OFF:
            if self.can_count is QuotaMode.OFF:
                raise BtrfsError(f"cannot turn quotas on at {path}: {os.strerror(errno.ENOTTY)}")
            self.counts = self.can_count
        return self.counts

    def limit(self, path: Path, max_bytes: int | None) -> None:
        """Store the limit; it is not enforced."""
        attempt = f"cannot limit subvolume {path} to {max_bytes} bytes"
        record = self._get(path, attempt)
        if self.counts is QuotaMode.OFF:
            raise BtrfsError(f"{attempt}: {os.strerror(errno.ENOTCONN)}")
        record.max_bytes = max_bytes

    def usage(self, path: Path) -> Space | None:
        """Return the size of its files, and the limit."""
        record = self._get(path, f"cannot read the quota of {path}")
        if self.counts is QuotaMode.OFF:
            return None
        return Space(self.exclusive_bytes(path) or 0, record.max_bytes)

    def sync(self, path: Path) -> None:
        """Do nothing: these folders need no flush."""
        if not path.exists():
            raise BtrfsError(f"cannot sync the file system of {path}: {os.strerror(errno.ENOENT)}")

    def mark_received(self, path: Path, uuid: str) -> None:
        """Mark a subvolume as finished by `btrfs receive`."""
        record = self._get(path, f"cannot mark {path}")
        record.received_uuid, record.read_only = uuid, True

    def _uuid(self) -> str:
        return f"{next(self._numbers):032x}"

    def _find(self, path: Path) -> _FakeSubvolume | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._records.get(os.lstat(path).st_ino)
        return None

    def _get(self, path: Path, attempt: str) -> _FakeSubvolume:
        found = self._find(path)
        if found is None:
            reason = "it is not a subvolume" if path.exists() else os.strerror(errno.ENOENT)
            raise BtrfsError(f"{attempt}: {reason}")
        return found

    def _make(self, path: Path, attempt: str) -> None:
        if not path.parent.resolve().is_relative_to(self.root.resolve()):
            raise BtrfsError(f"{attempt}: it is not on a btrfs file system")
        for above in path.parents:
            record = self._find(above)
            if record and record.read_only:
                raise BtrfsError(f"{attempt}: {os.strerror(errno.EROFS)}")
        try:
            path.mkdir()
        except FileExistsError as e:
            raise Conflict(f"{attempt}: {e.strerror}") from e
        except OSError as e:
            raise BtrfsError(f"{attempt}: {e.strerror}") from e

    def _register(self, path: Path, record: _FakeSubvolume) -> None:
        self._records[os.lstat(path).st_ino] = record
