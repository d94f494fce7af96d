"""Published subvolumes: each is read-only and has a description file, which is written last.

<folder>/<digest>/        the subvolume
<folder>/<digest>.json    its description; a subvolume without one is a leftover
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from agent.machine import Btrfs
from wire.errors import HostError, TwineError

log = logging.getLogger(__name__)

IMAGE_FILES = "image files"
"""Lane that reads the files of images for requests. A disk that hangs delays only these."""
T = TypeVar("T", bound=msgspec.Struct)


class Published(Generic[T]):
    """The published subvolumes of one folder, with descriptions of one type."""

    def __init__(self, btrfs: Btrfs, folder: Path, kind: type[T]) -> None:
        self._btrfs, self._folder, self._kind = btrfs, folder, kind
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Return the path of a subvolume, which need not exist."""
        return self._folder / digits_of(digest)

    def description(self, digest: str) -> Path:
        """Return the path of a description, which need not exist."""
        return self._folder / f"{digits_of(digest)}.json"

    def find(self, digest: str) -> T | None:
        """Return the description of a complete subvolume, None if there is none."""
        try:
            return self._decoded(self.description(digest).read_bytes())
        except OSError:
            return None

    def all(self) -> list[T]:
        """Return all descriptions. Raises `HostError` if the folder cannot be read."""
        found = [self.find(path.stem) for path in _descriptions(paths_in(self._folder))]
        return [description for description in found if description is not None]

    def _decoded(self, data: bytes) -> T | None:
        try:
            return msgspec.json.decode(data, type=self._kind)
        except (msgspec.DecodeError, UnicodeError):
            return None

    def declare(self, digest: str, description: T) -> None:
        """Write the description of a subvolume, which makes it complete; atomic.

        It survives a power cut once its folder or the file system is synced.
        """
        temporary = self._folder / f".{digits_of(digest)}.new"
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(description))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.description(digest))

    def tidy(self) -> None:
        """Keep subvolumes with a description, and descriptions with a subvolume; remove the rest.

        A file that cannot be read is not considered damaged: the error is raised, and all stays.
        """
        files, there = paths_in(self._folder), set(self._btrfs.children(self._folder))
        for path in files:
            if path.name.startswith(".") and path.suffix == ".new":
                remove_leftover(self._btrfs, path)
        complete = [path for path in _descriptions(files) if path.stem in there]
        kept = {path.stem for path in complete if self._decoded(path.read_bytes()) is not None}
        for path in _descriptions(files):
            if path.stem not in kept:
                log.error("a damaged image was removed", extra={"image": path.stem})
                remove_leftover(self._btrfs, path)
        for name in there - kept:
            remove_leftover(self._btrfs, self._folder / name)


def _descriptions(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix == ".json" and path.name[0] != "."]


def digits_of(digest: str) -> str:
    """Return the hexadecimal digits of a digest, which name its files."""
    return digest.removeprefix("sha256:")


def paths_in(folder: Path) -> list[Path]:
    """Return the paths in a folder. Unlike a glob this raises `HostError` on a disk error."""
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError as e:
        raise HostError(f"cannot list {folder}: {e.strerror}") from e


def remove_leftover(btrfs: Btrfs, path: Path) -> None:
    """Remove a leftover of any kind; after an error it stays until later."""
    try:
        if btrfs.find(path) is not None:
            btrfs.delete(path)
        elif path.is_dir():
            for name in btrfs.children(path):
                btrfs.delete(path / name)
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except (OSError, TwineError) as e:
        log.warning("a leftover cannot be removed", extra={"path": str(path), "why": str(e)})
