"""Resolves paths inside an untrusted tree; its links cannot lead outside.

openat2(2) resolves a path as if the tree were the root directory (RESOLVE_IN_ROOT). Python does
not have this call; its number is the same on all processors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat

_OPENAT2 = 437
_NO_XDEV, _NO_MAGICLINKS, _IN_ROOT = 0x01, 0x02, 0x10
"""From include/uapi/linux/openat2.h."""
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _SAFE
_LINKS_MAX = 40
"""The kernel's limit (path_resolution(7))."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def _openat2(root: int, path: str, flags: int, resolve: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    name = os.fsencode(path)
    while True:
        fd: int = _LIBC.syscall(_OPENAT2, root, name, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        # A concurrent rename makes the kernel return EAGAIN (openat2(2)).
        if number not in (errno.EAGAIN, errno.EINTR):
            raise OSError(number, os.strerror(number), path)


def open_folder(root: int, path: str) -> int:
    """Open a folder of the tree at the descriptor `root`, following the tree's own links."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    return _openat2(root, path or ".", flags, _IN_ROOT | _NO_MAGICLINKS | _NO_XDEV)


def read_file(folder: str, path: str, most_bytes: int) -> bytes:
    """Return the content of a file below an untrusted folder; no link is followed.

    Raises `OSError` if it is not a plain file or larger than `most_bytes`.
    """
    fd = open_file(folder, path)
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > most_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return file.read(most_bytes)


def resolve_path(folder: str, path: str) -> str:
    """Return a path of a tree with all links resolved inside the tree.

    The tree must not change meanwhile. No link leads above its top. Raises `OSError` if the target
    is missing or there are too many links.
    """
    left, resolved, links = path.split("/")[::-1], list[str](), 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            resolved = resolved[:-1]
            continue
        try:
            link = os.readlink("/".join([folder, *resolved, part]))
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            resolved.append(part)
            continue
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if link.startswith("/"):
            resolved = []
        left.extend(link.split("/")[::-1])
    return "/".join(resolved)


def ensure_folder(folder: str, path: str) -> None:
    """Create a folder and its missing parents in a tree, resolving links inside the tree.

    The tree must not change meanwhile. Raises `OSError` if a part of the path is not a folder.
    """
    resolved = ""
    for part in path.split("/"):
        try:
            resolved = resolve_path(folder, f"{resolved}/{part}")
        except FileNotFoundError:
            made = "/".join([folder, resolved, part])
            os.mkdir(made)  # fails on a dangling link
            os.chmod(made, 0o755)
            resolved = f"{resolved}/{part}"
    if not stat.S_ISDIR(os.lstat(f"{folder}/{resolved}").st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def put_file(folder: str, path: str, data: bytes) -> bool:
    """Write a file of a tree, resolving links inside the tree; return False if it is unchanged.

    A link or file at the path itself is replaced. The tree must not change meanwhile. Raises
    `OSError` if the path is a folder, or a parent is not.
    """
    above, _, name = path.rpartition("/")
    ensure_folder(folder, above)
    place = os.path.join(folder, resolve_path(folder, above))
    at = f"{place}/{name}"
    try:
        fd = os.open(at, os.O_RDONLY | os.O_NONBLOCK | _SAFE)
        with os.fdopen(fd, "rb") as file:
            is_same = stat.S_ISREG(os.fstat(fd).st_mode) and file.read(len(data) + 1) == data
    except OSError:
        is_same = False
    if is_same:
        return False
    new = f"{at}.twine-new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o644)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o644)  # independent of our umask
        file.write(data)
    os.rename(new, at)
    return True


def open_file(folder: str, path: str) -> int:
    """Open a plain file below a folder for reading; no link is followed.

    Opens each folder in turn instead of using openat2(2): the agent's unit has RestrictSUIDSGID=,
    which forbids that call.
    """
    fd = os.open(folder, _FOLDER)
    parts = path.split("/")
    for number, part in enumerate(parts, start=1):
        if part in ("", ".", ".."):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a path below it", path)
        # O_NONBLOCK: opening a pipe must not wait for its other end.
        flags = os.O_RDONLY | os.O_NONBLOCK | _SAFE if number == len(parts) else _FOLDER
        try:
            below = os.open(part, flags, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd
