"""The kernel's text files: /proc/sys, /sys, cgroup attributes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from wire.errors import KernelFileError

_MOST = 16_384
"""Bytes of one read: nearly every file of the kernel's is whole with the first."""


class KernelFs(msgspec.Struct, frozen=True):
    """A view of the kernel's files below `root`: "/" on a host, tmp_path in tests."""

    root: Path = Path("/")

    def path(self, path: str) -> Path:
        """Return where an absolute path of the host lies in this view."""
        return self.root / path.lstrip("/")

    def _place(self, path: str) -> str:
        # `path` as text: a thousand of these files are read in a run, and a Path takes longer
        # to make than a file of the kernel's to read.
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
        """Return the attribute, None where this kernel lacks it."""
        try:
            return self.read(path)
        except KernelFileError as e:
            if isinstance(e.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise

    def write(self, path: str, value: str) -> None:
        """Set the attribute, in one write(2) since some accept nothing else.

        A value the kernel rejects (EINVAL) raises and leaves the old one in force. There is
        no O_CREAT: a missing attribute must fail below `tmp_path` as it does on a kernel.
        """
        try:
            fd = os.open(self._place(path), os.O_WRONLY | os.O_TRUNC)
            try:
                os.write(fd, value.encode())
            finally:
                os.close(fd)
        except OSError as e:
            raise KernelFileError(
                f"cannot set {path} to {value!r}: {e.strerror}",
                hint="`sidekick verify` lists the attributes this kernel lacks",
            ) from e

    def find_bytes(self, path: str) -> bytes | None:
        """Return a file as it is, with its white space; None where there is none."""
        try:
            return self.path(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise KernelFileError(f"cannot read {path}: {e.strerror}") from e

    def find_at(self, path: str, offset: int, size: int) -> bytes | None:
        """Return so many bytes at a place of a file that has no text, None where they are not."""
        try:
            fd = os.open(self._place(path), os.O_RDONLY)
            try:
                found = os.pread(fd, size, offset)
            finally:
                os.close(fd)
        except OSError:
            return None
        return found if len(found) == size else None

    def noticed(self, interface: str, command: int, answer: bytes) -> None:
        """Called with what a network interface answered (no file has it); subclasses keep it."""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder, none where it does not exist."""
        try:
            return sorted(os.listdir(self._place(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            raise KernelFileError(f"cannot list {path}: {e.strerror}") from e
