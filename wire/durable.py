"""Writes small files atomically: after a crash a file has its new or its old content."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace the file in one step; when this returns, it survives a power cut.

    Source of the order (data, then name, then folder): fsync(2), rename(2).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def swap(path: Path, data: bytes, mode: int) -> None:
    """Replace a file on an in-memory file system in one step; raises `OSError`.

    Readers never see half a file or another mode. Nothing is flushed.
    """
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
    new.rename(path)
