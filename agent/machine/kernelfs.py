"""Reads and writes text files of the kernel: /proc/sys, /sys, cgroup attributes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from agent.machine.descriptors import closing
from wire.errors import KernelFileError

_MOST = 16_384
"""Bytes of one read: nearly every file of the kernel is smaller."""


class KernelFs(msgspec.Struct, frozen=True):
    """A view of the kernel's files below `root`: "/" on a host, tmp_path in tests."""

    root: Path = Path("/")

    def path(self, path: str) -> Path:
        """Return the path in this view for an absolute path of the host."""
        return self.root / path.lstrip("/")

    def _place(self, path: str) -> str:
        # `path` as text: a run reads a thousand of these files, and making a Path takes longer
        # than reading one.
        return os.path.join(self.root, path.lstrip("/"))

    def exists(self, path: str) -> bool:
        """Return whether the kernel has this attribute."""
        return os.path.exists(self._place(path))

    def read(self, path: str) -> str:
        """Return the attribute without surrounding white space."""
        try:
            fd = os.open(self._place(path), os.O_RDONLY)
            try:
                data = bytearray()
                while piece := os.read(fd, _MOST):
                    data += piece
            finally:
                os.close(fd)
            return data.decode(errors="replace").strip()
        except OSError as e:
            raise KernelFileError(f"cannot read {path}: {e.strerror}") from e

    def find(self, path: str) -> str | None:
        """Return the attribute, None if this kernel does not have it."""
        try:
            return self.read(path)
        except KernelFileError as e:
            if isinstance(e.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise

    def write(self, path: str, value: str) -> None:
        """Set the attribute with one write(2): some attributes accept nothing else.

        If the kernel rejects the value (EINVAL), this raises and the old value stays in force.
        O_CREAT is not used: a missing attribute must fail in tests as it does in the kernel.
        """
        try:
            with closing(os.open(self._place(path), os.O_WRONLY | os.O_TRUNC)) as fd:
                os.write(fd, value.encode())
        except OSError as e:
            raise KernelFileError(
                f"cannot set {path} to {value!r}: {e.strerror}",
                hint="`sidekick verify` lists the attributes this kernel lacks",
            ) from e

    def find_bytes(self, path: str) -> bytes | None:
        """Return a file unchanged, with its white space; None if there is none."""
        try:
            return self.path(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise KernelFileError(f"cannot read {path}: {e.strerror}") from e

    def find_at(self, path: str, offset: int, size: int) -> bytes | None:
        """Return `size` bytes at an offset of a binary file, None if they cannot be read."""
        try:
            with closing(os.open(self._place(path), os.O_RDONLY)) as fd:
                found = os.pread(fd, size, offset)
        except OSError:
            return None
        return found if len(found) == size else None

    def noticed(self, interface: str, command: int, answer: bytes) -> None:
        """Called with an answer of the kernel that is in no file; subclasses record it."""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; empty if it does not exist."""
        try:
            return sorted(os.listdir(self._place(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            raise KernelFileError(f"cannot list {path}: {e.strerror}") from e
