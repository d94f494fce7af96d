"""Paths of an untrusted tree: whatever its links say, nothing outside is reached.

openat2(2) resolves a path as if the tree were the root directory (RESOLVE_IN_ROOT). Python has
no name for the call; its number is the same on all processors.
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
"""As many as the kernel follows (path_resolution(7))."""
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
        # Something was renamed meanwhile: the kernel could not be sure (openat2(2)).
        if number not in (errno.EAGAIN, errno.EINTR):
            raise OSError(number, os.strerror(number), path)


def open_folder(root: int, path: str) -> int:
    """Open a folder of the tree at the descriptor `root`, following the tree's own links."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    return _openat2(root, path or ".", flags, _IN_ROOT | _NO_MAGICLINKS | _NO_XDEV)


def read_file(folder: str, path: str, most_bytes: int) -> bytes:
    """Return a file below a folder that others filled: no link is followed.

    Raises `OSError` for what is no plain file there or is larger than `most_bytes`.
    """
    fd = open_file(folder, path)
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > most_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return file.read(most_bytes)


def find_place(folder: str, path: str) -> str:
    """Return where a path of a tree leads by the tree's own links, as a path without any.

    The tree must not change meanwhile. No link leads above its top. Raises `OSError` where there
    is nothing, or no end to the links.
    """
    left, found, links = path.split("/")[::-1], list[str](), 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            found = found[:-1]
            continue
        try:
            link = os.readlink("/".join([folder, *found, part]))
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            found.append(part)
            continue
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if link.startswith("/"):
            found = []
        left.extend(link.split("/")[::-1])
    return "/".join(found)


def ensure_folder(folder: str, path: str) -> None:
    """Make a path of a tree a folder where there is nothing, by the tree's own links.

    The tree must not change meanwhile. Raises `OSError` where something else is on the way.
    """
    here = ""
    for part in path.split("/"):
        try:
            here = find_place(folder, f"{here}/{part}")
        except FileNotFoundError:
            made = "/".join([folder, here, part])
            os.mkdir(made)  # not where a link leads to nothing: that is something
            os.chmod(made, 0o755)
            here = f"{here}/{part}"
    if not stat.S_ISDIR(os.lstat(f"{folder}/{here}").st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def put_file(folder: str, path: str, data: bytes) -> bool:
    """Make a file of a tree in place of what is there, by the tree's own links; False: it is so.

    A link or file at the path itself is replaced. The tree must not change meanwhile. Raises
    `OSError` where a folder is at the path, or something that is none is on the way.
    """
    above, _, name = path.rpartition("/")
    ensure_folder(folder, above)
    place = os.path.join(folder, find_place(folder, above))
    at = f"{place}/{name}"
    try:
        fd = os.open(at, os.O_RDONLY | os.O_NONBLOCK | _SAFE)
        with os.fdopen(fd, "rb") as file:
            is_so = stat.S_ISREG(os.fstat(fd).st_mode) and file.read(len(data) + 1) == data
    except OSError:
        is_so = False
    if is_so:
        return False
    new = f"{at}.twine-new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o644)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o644)  # whatever our umask is
        file.write(data)
    os.rename(new, at)
    return True


def open_file(folder: str, path: str) -> int:
    """Open a plain file below a folder for reading; no link is followed.

    Step by step and not by openat2(2), which is refused where set-uid bits may not be set (the
    agent's unit has RestrictSUIDSGID=).
    """
    fd = os.open(folder, _FOLDER)
    parts = path.split("/")
    for number, part in enumerate(parts, start=1):
        if part in ("", ".", ".."):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a path below it", path)
        # A pipe must not make us wait for its other end.
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
