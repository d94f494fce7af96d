"""Mounts of the host: the mount table, and changes of a single mount.

A mount is identified by its id. mount_setattr(2) changes flags of one mount, and fsconfig(2) one
option of one file system. Other flags do not change. A plain remount would copy `ro` from a
read-only bind mount to the whole file system. Python does not have these calls; their numbers are
the same on all processors. Source of the table: proc(5), /proc/pid/mountinfo.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import Protocol

import msgspec

from agent.machine.descriptors import closing
from agent.machine.kernelfs import KernelFs
from wire.errors import KernelFileError

_MOUNT_SETATTR, _FSPICK, _FSCONFIG = 442, 433, 431
_EMPTY_PATH = 0x1000
_FSPICK_CLOEXEC, _FSPICK_EMPTY_PATH = 0x1, 0x8
_SET_FLAG, _SET_STRING, _RECONFIGURE = 0, 1, 7
_ATIME_BITS = 0x70
_ATIMES = {"relatime": 0x00, "noatime": 0x10, "strictatime": 0x20}
"""From include/uapi/linux/mount.h, MOUNT_ATTR_*."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    id: int
    device: str
    """Device of the file system as `major:minor`, the same for all its mounts."""
    point: str
    options: tuple[str, ...]
    """Options of this mount only."""
    kind: str
    """Type of the file system."""
    of_file_system: tuple[str, ...]
    """Options of the file system, shared by all its mounts."""


class Mounts(Protocol):
    """Changes of a mount. Raises `KernelFileError` if the kernel refuses one."""

    def set_atime(self, mount: Mount, mode: str) -> None:
        """Set whether reads update no (`noatime`), some or all (`strictatime`) access times."""

    def set_option(self, mount: Mount, key: str, value: str | None) -> None:
        """Set one option of the file system of a mount; None: the option has no value."""


def read_mounts(fs: KernelFs) -> list[Mount]:
    """Return the mounts of this process's namespace, in the order of the kernel's table."""
    return [_parsed(line) for line in (fs.find("/proc/self/mountinfo") or "").splitlines()]


def _parsed(line: str) -> Mount:
    of_mount, _, of_file_system = line.partition(" - ")
    number, _, device, _, point, options, *_ = of_mount.split()
    kind, _, shared, *_ = [*of_file_system.split(), "", ""]
    return Mount(
        id=int(number),
        device=device,
        point=re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), point),
        options=tuple(options.split(",")),
        kind=kind,
        of_file_system=tuple(shared.split(",")),
    )


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class HostMounts:
    """Mounts of this process's namespace. Needs root."""

    def set_atime(self, mount: Mount, mode: str) -> None:
        """Change the access time flags of this mount only."""
        attr = _MountAttr(attr_set=_ATIMES[mode], attr_clr=_ATIME_BITS)
        with closing(_opened(mount)) as fd:
            size = ctypes.c_size_t(ctypes.sizeof(attr))
            arguments = fd, b"", _EMPTY_PATH, ctypes.byref(attr), size
            _call(f"set {mode} at {mount.point}", _MOUNT_SETATTR, *arguments)

    def set_option(self, mount: Mount, key: str, value: str | None) -> None:
        """Change one option of the file system; all others do not change."""
        shown = key if value is None else f"{key}={value}"
        what = f"set {shown} at {mount.point}"
        with closing(_opened(mount)) as fd:
            context = _call(what, _FSPICK, fd, b"", _FSPICK_CLOEXEC | _FSPICK_EMPTY_PATH)
        with closing(context):
            command = _SET_FLAG if value is None else _SET_STRING
            text = None if value is None else value.encode()
            _call(what, _FSCONFIG, context, command, key.encode(), text, 0)
            _call(what, _FSCONFIG, context, _RECONFIGURE, None, None, 0)


def _opened(mount: Mount) -> int:
    """Open the root of a mount; raise if its mount point now leads to another mount."""
    try:
        fd = os.open(mount.point, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise KernelFileError(f"cannot open the mount at {mount.point}: {e.strerror}") from e
    with open(f"/proc/self/fdinfo/{fd}") as file:
        found = re.search(r"^mnt_id:\s*(\d+)", file.read(), re.MULTILINE)
    if found is None or int(found[1]) != mount.id:
        os.close(fd)
        raise KernelFileError(f"the mount at {mount.point} is covered by another one")
    return fd


def _call(what: str, number: int, *arguments: object) -> int:
    done: int = _LIBC.syscall(number, *arguments)
    if done < 0:
        reason = os.strerror(ctypes.get_errno())
        raise KernelFileError(f"cannot {what}: {reason}")
    return done
