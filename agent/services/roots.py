"""The root file system of each task: a copy-on-write snapshot of its image."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from agent.api import ImageInfo, OciConfig
from agent.core.own_init import INITS
from agent.machine import Btrfs
from wire.errors import NotFound

_USED_EVERY_S = 60.0
"""How often the use of an image is written down: images go by days (core/retention.py)."""


class Roots:
    """Snapshots below one folder, named by task id. Blocking: call it through a lane."""

    def __init__(self, btrfs: Btrfs, folder: Path, images: Path) -> None:
        """Keep roots in `folder`, made from the subvolumes in `images`."""
        self._btrfs = btrfs
        self._folder = folder
        self._images = images
        self.state = folder.parent
        self._configs: dict[str, OciConfig | None] = {}
        self._used: dict[str, float] = {}
        """Image → when that was last written down; the snapshot that follows writes it to disk."""
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, task_id: str) -> Path:
        """Return where the root of a task is or would be."""
        return self._folder / task_id

    def _image(self, digest: str) -> Path:
        return self._images / digest.removeprefix("sha256:")

    def has_image(self, digest: str) -> bool:
        """Return whether an image is complete on this machine."""
        return self._image(digest).with_suffix(".json").exists()

    def has_init(self, digest: str) -> bool:
        """Return whether an image has an init that can be started as a machine's.

        No link is followed: an absolute one would lead out of the image.
        """
        image = self._image(digest)
        return any(
            (image / path).is_file()
            and not any((image / part).is_symlink() for part in (path, *_above(path)))
            for path in INITS
        )

    def config(self, digest: str) -> OciConfig | None:
        """Return how an image wants to be run, None for one that says nothing about it.

        Read once: what is under a digest never changes.
        """
        if digest not in self._configs:
            try:
                data = self._image(digest).with_suffix(".json").read_bytes()
                found = msgspec.json.decode(data, type=ImageInfo).config
            except (OSError, msgspec.DecodeError, UnicodeError):
                return None
            self._configs[digest] = found
        return self._configs[digest]

    def look(self, task_id: str, digest: str) -> tuple[bool, bool]:
        """Return whether there is a root made from this image, and whether there is any."""
        path = self.path(task_id)
        if not path.exists():
            return False, False
        root = self._btrfs.find(path)
        image = self._btrfs.find(self._image(digest))
        fits = root is not None and image is not None and root.parent_uuid == image.uuid
        return fits, True

    def prepare(self, task_id: str, digest: str) -> None:
        """Make the root of a task, in place of one from another image."""
        image = self._image(digest)
        path = self.path(task_id)
        if path.exists():
            self._btrfs.delete(path)
        if not image.exists():
            raise NotFound(
                f"cannot prepare task {task_id}: image {digest} is not on this machine",
                hint="pull or put the image, then put the task again",
            )
        self._btrfs.snapshot(image, path)
        now_s = time.monotonic()
        if now_s - self._used.get(digest, -_USED_EVERY_S) >= _USED_EVERY_S:
            with suppress(OSError):  # when it was last used; what goes first goes by that
                os.utime(image.with_suffix(".json"))
                self._used[digest] = now_s

    def remove(self, task_id: str) -> None:
        """Remove the root of a task; one that is not there is no error."""
        self._btrfs.delete(self.path(task_id))

    def all(self) -> list[str]:
        """Return the ids of all tasks that have a root."""
        return self._btrfs.children(self._folder)


def _above(path: str) -> list[str]:
    return [str(folder) for folder in Path(path).parents if folder.name]
