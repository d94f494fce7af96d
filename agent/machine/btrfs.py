"""The file system that holds images and task roots: subvolumes and snapshots.

Uses only functions of libbtrfsutil's Python binding that exist in every release, 6.10 to 7.3.
The `btrfs` program sends and receives: the library can do neither.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import btrfsutil

from agent.machine import QuotaMode, Space, Subvolume, qgroups
from agent.machine.descriptors import opened_folder
from wire.errors import BtrfsError, Conflict, NotBtrfs

SUBVOLUME_INODE = 256
"""Inode number of every subvolume's top folder (BTRFS_FIRST_FREE_OBJECTID)."""

_REASONS = {
    errno.ENOTTY: "it is not on a btrfs file system",
    errno.EINVAL: "it is not a subvolume",
}
"""Meaning for btrfs of an errno whose own text is unclear."""


class HostBtrfs:
    """Subvolumes of the host, through libbtrfsutil. Needs root."""

    def create(self, path: Path) -> None:
        """Make an empty, writable subvolume; its parent folder must exist."""
        with _translated(f"cannot create subvolume {path}"):
            btrfsutil.create_subvolume(path)

    def snapshot(self, source: Path, target: Path, *, read_only: bool = False) -> None:
        """Make `target` a copy-on-write child of `source`, without its nested subvolumes.

        Succeeds on a full disk too, so it does not prove that there is room to write.
        """
        with _translated(f"cannot snapshot {source} as {target}"):
            btrfsutil.create_snapshot(source, target, read_only=read_only)

    def delete(self, path: Path) -> None:
        """Remove a subvolume and those nested in it; the kernel frees their space later."""
        if not os.path.lexists(path):
            return
        with _translated(f"cannot delete subvolume {path}"):
            number = btrfsutil.subvolume_info(path).id if _is_subvolume(path) else 0
            if number:
                qgroups.remove_limit(path, number)
            try:
                btrfsutil.delete_subvolume(path, recursive=True)
            except OSError as e:
                if e.errno != errno.EROFS:
                    raise
                _open_all(path)
                btrfsutil.delete_subvolume(path, recursive=True)
            if number:
                qgroups.remove_group(path.parent, number)

    def set_read_only(self, path: Path, read_only: bool) -> None:
        """Close or open a subvolume for writing."""
        word = "close" if read_only else "open"
        with _translated(f"cannot {word} subvolume {path} for writing"):
            btrfsutil.set_subvolume_read_only(path, read_only)

    def find(self, path: Path) -> Subvolume | None:
        """Return the subvolume at `path`, None if there is none."""
        with _translated(f"cannot read subvolume {path}"):
            if not _is_subvolume(path):
                return None
            info = btrfsutil.subvolume_info(path)
            return Subvolume(
                uuid=_hex(info.uuid),
                parent_uuid=_hex(info.parent_uuid),
                received_uuid=_hex(info.received_uuid),
                read_only=btrfsutil.get_subvolume_read_only(path),
            )

    def children(self, path: Path) -> list[str]:
        """Return the names of the subvolumes directly below a folder, sorted."""
        with _translated(f"cannot list the subvolumes below {path}"):
            return sorted(name for name in os.listdir(path) if _is_subvolume(path / name))

    def free_bytes(self, path: Path) -> tuple[int, int]:
        """Return size and free space of the file system."""
        with _translated(f"cannot read the free space at {path}"):
            found = os.statvfs(path)
            return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def containing_subvolume(self, path: Path) -> Path:
        """Return the subvolume that a path lies in."""
        with _translated(f"cannot find the subvolume of {path}"):
            for folder in (path, *path.parents) if _is_on_btrfs(path) else ():
                if _is_subvolume(folder):
                    return folder
        raise NotBtrfs(f"cannot find the subvolume of {path}: it is not on a btrfs file system")

    def exclusive_bytes(self, path: Path) -> int | None:
        """Return the exclusive bytes of a subvolume, None if quotas are off.

        Read from the quota groups (/sys/fs/btrfs/UUID/qgroups), without walking the files.
        """
        try:
            return qgroups.exclusive_bytes(path, btrfsutil.subvolume_info(path).id)
        except (OSError, ValueError):
            return None

    def quota(self, path: Path) -> QuotaMode:
        """Return how the file system counts."""
        with _translated(f"cannot read the quotas at {path}"):
            return qgroups.mode(path)

    def enable_quota(self, path: Path) -> QuotaMode:
        """Turn counting on; if it is on, its mode does not change."""
        with _translated(f"cannot turn quotas on at {path}"):
            return qgroups.enable(path)

    def limit(self, path: Path, max_bytes: int | None) -> None:
        """Limit the bytes in a subvolume; None: no limit."""
        with _translated(f"cannot limit subvolume {path} to {max_bytes} bytes"):
            qgroups.limit(path, btrfsutil.subvolume_info(path).id, max_bytes)

    def usage(self, path: Path) -> Space | None:
        """Return used space and limit of a subvolume, None if quotas are off."""
        with _translated(f"cannot read the quota of {path}"):
            return qgroups.usage(path, btrfsutil.subvolume_info(path).id)

    def sync(self, path: Path) -> None:
        """Flush this file system to disk, and no other one.

        Calls syncfs(2) in the C library: Python does not have it, and libbtrfsutil names it
        differently in different releases.
        """
        with _translated(f"cannot sync the file system of {path}"), opened_folder(path) as fd:
            if _LIBC.syncfs(fd):
                raise OSError(ctypes.get_errno(), "syncfs")


_LIBC = ctypes.CDLL(None, use_errno=True)


def _is_on_btrfs(folder: Path) -> bool:
    try:
        with opened_folder(folder) as fd:
            fcntl.ioctl(fd, qgroups.FS_INFO, bytes(1024))
    except OSError as e:
        if e.errno == errno.ENOTTY:
            return False
        raise
    return True


def _is_subvolume(path: Path) -> bool:
    try:
        # lstat: a symbolic link to a subvolume does not count. Most paths fail this cheap test.
        return os.lstat(path).st_ino == SUBVOLUME_INODE and btrfsutil.is_subvolume(path)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _open_all(path: Path) -> None:
    """Make a subvolume and all nested ones writable, so that nested ones can be removed."""
    btrfsutil.set_subvolume_read_only(path, False)
    for name, _ in btrfsutil.SubvolumeIterator(path):
        btrfsutil.set_subvolume_read_only(path / name, False)


def _hex(uuid: bytes) -> str:
    return uuid.hex() if any(uuid) else ""


@contextmanager
def _translated(attempt: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        reason = _REASONS.get(e.errno or 0) or os.strerror(e.errno or 0)
        if e.errno == errno.EEXIST:
            raise Conflict(f"{attempt}: {reason}") from e
        raise BtrfsError(f"{attempt}: {reason}") from e
