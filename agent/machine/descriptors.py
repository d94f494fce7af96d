"""File descriptors that a block closes when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Yield a descriptor, and close it at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def opened_folder(path: str | Path) -> AbstractContextManager[int]:
    """Return a block with a descriptor of a folder. Raises `OSError`."""
    return closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
