"""Quota groups of btrfs: changed by ioctl, read from /sys, without walking files.

With simple quotas a limited subvolume has a group of level 1 with its own number (`1/ID`).
Subvolumes that are made inside it join that group automatically, so the limit applies to all of
them together. Regular quotas lack this; there the limit is on the subvolume's own group (`0/ID`).
Numbers and layouts are those of include/uapi/linux/btrfs.h.
"""

from __future__ import annotations

import errno
import fcntl
import struct
import uuid
from contextlib import suppress
from pathlib import Path

from agent.machine import QuotaMode, Space
from agent.machine.descriptors import opened_folder

FS_INFO = 0x8400941F
"""BTRFS_IOC_FS_INFO; the file system's UUID is at byte 16."""
_QUOTA_CTL = 0xC0109428
_ENABLE, _ENABLE_SIMPLE = 1, 4
_ASSIGN = 0x40189429
_CREATE = 0x4010942A
_LIMIT = 0x8030942B
_MAX_REFERENCED = 1
_NO_LIMIT = 2**64 - 1
_LEVEL = 1 << 48


def mode(path: Path) -> QuotaMode:
    """Return how the file system of a path counts."""
    folder = _folder(path)
    mode_name = _read_word(folder / "mode")
    if mode_name == "squota":
        return QuotaMode.SIMPLE
    if mode_name == "qgroup" or (not mode_name and _read_word(folder / "enabled") == "1"):
        return QuotaMode.REGULAR  # kernels before 6.7 have no file `mode`
    return QuotaMode.OFF


def enable(path: Path) -> QuotaMode:
    """Turn quotas on, simple ones if the kernel has them; return their mode. Raises `OSError`.

    If quotas are on, their mode does not change.
    """
    if (present := mode(path)) is not QuotaMode.OFF:
        return present
    with opened_folder(path) as fd:
        try:
            fcntl.ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("QQ", _ENABLE_SIMPLE, 0)))
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            fcntl.ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("QQ", _ENABLE, 0)))
    return mode(path)


def limit(path: Path, subvolume: int, max_bytes: int | None) -> None:
    """Limit the bytes in a subvolume, including nested ones; raises `OSError`.

    The call uses the parent folder: the kernel refuses a change through a full subvolume.
    """
    simple = mode(path) is QuotaMode.SIMPLE
    group = _LEVEL | subvolume if simple else subvolume
    with opened_folder(path.parent) as fd:
        if simple:
            with suppress(FileExistsError):
                fcntl.ioctl(fd, _CREATE, struct.pack("QQ", 1, group))
            with suppress(FileExistsError):
                fcntl.ioctl(fd, _ASSIGN, struct.pack("QQQ", 1, subvolume, group))
        most = _NO_LIMIT if max_bytes is None else max_bytes
        asked = struct.pack("QQQQQQ", group, _MAX_REFERENCED, most, 0, 0, 0)
        fcntl.ioctl(fd, _LIMIT, asked)


def usage(path: Path, subvolume: int) -> Space | None:
    """Return used space and limit of a subvolume, None if quotas are off."""
    for name in (f"1_{subvolume}", f"0_{subvolume}"):
        group = _folder(path) / name
        used = _read_word(group / "referenced")
        if not used:
            continue
        flags = int(_read_word(group / "limit_flags") or 0)
        most = _read_word(group / "max_referenced")
        limited = flags & _MAX_REFERENCED and most and int(most) != _NO_LIMIT
        return Space(int(used), int(most) if limited else None)
    return None


def exclusive_bytes(path: Path, subvolume: int) -> int | None:
    """Return the exclusive bytes of a subvolume, None if quotas are off."""
    text = _read_word(_folder(path) / f"0_{subvolume}" / "exclusive")
    return int(text) if text else None


def remove_limit(path: Path, subvolume: int) -> None:
    """Remove the limit, because nested subvolumes of a full subvolume cannot be deleted."""
    if (space := usage(path, subvolume)) is not None and space.max_bytes is not None:
        limit(path, subvolume, None)


def remove_group(path: Path, subvolume: int) -> None:
    """Remove the group of a deleted subvolume; `path` is any folder of its file system.

    The kernel removes `0/ID` once the space is free. Errors are ignored: a group takes few bytes.
    """
    if not (_folder(path) / f"1_{subvolume}").exists():
        return
    with opened_folder(path) as fd:
        for number, asked in (
            (_ASSIGN, struct.pack("QQQ", 0, subvolume, _LEVEL | subvolume)),
            (_CREATE, struct.pack("QQ", 0, _LEVEL | subvolume)),
        ):
            with suppress(OSError):
                fcntl.ioctl(fd, number, asked)


def _folder(path: Path) -> Path:
    with opened_folder(path) as fd:
        answer = fcntl.ioctl(fd, FS_INFO, bytes(1024))
    return Path(f"/sys/fs/btrfs/{uuid.UUID(bytes=answer[16:32])}/qgroups")


def _read_word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
