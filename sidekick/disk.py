"""Files that survive a power failure: replaced as a whole, or appended line by line."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from wire.durable import sync_folder
from wire.errors import Forbidden, HostError


class Disk:
    """Writes files that survive a power failure."""

    def write(self, path: Path, text: str) -> None:
        """Replace the content of a file, or leave the file unchanged on an error.

        A symbolic link stays; its target is replaced and keeps its owner and mode.
        """
        with translated(f"cannot write {path}"):
            path = path.resolve()
            temporary = path.with_name(path.name + ".new")
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    _copy_owner(file.fileno(), path)
                    file.write(text.encode(errors="surrogateescape"))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()  # it may use the last free space
                raise
            sync_folder(path.parent)

    def append(self, path: Path, line: str) -> None:
        """Append one line to a file, or leave the file unchanged on an error."""
        with translated(f"cannot write {path}"):
            is_new = not path.exists()
            with path.open("ab", buffering=0) as file:
                length = os.fstat(file.fileno()).st_size
                data = f"{line}\n".encode()
                try:
                    if file.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(length)
                    raise
            if is_new:
                sync_folder(path.parent)

    def reserve(self, path: Path, size: int) -> None:
        """Create a file that reserves `size` bytes of the disk, unless it exists."""
        with translated(f"cannot reserve {size} bytes in {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                if os.fstat(fd).st_blocks * 512 < size:
                    os.posix_fallocate(fd, 0, size)
                    os.fsync(fd)
            except OSError:
                path.unlink()
                raise
            finally:
                os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        with translated(f"cannot remove {path}"):
            path.unlink(missing_ok=True)
            if path.parent.exists():
                sync_folder(path.parent)


def _copy_owner(fd: int, path: Path) -> None:
    """Give a file that replaces another one its mode and owner."""
    with contextlib.suppress(FileNotFoundError):
        old, new = path.stat(), os.fstat(fd)
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, old.st_mode & 0o7777)


def is_full(error: HostError) -> bool:
    """Return whether a file was not written for lack of space, or of quota."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise `Forbidden` or `HostError` for an error of the file system inside."""
    try:
        yield
    except PermissionError as e:
        raise Forbidden(f"{what}: {e.strerror}", hint="run as root") from e
    except OSError as e:
        raise HostError(f"{what}: {e.strerror}") from e
