"""The root file system of each task: a copy-on-write snapshot of its image."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.api import ImageInfo, ImageUser, OciConfig, TaskSpec
from agent.images.core.image_user import LISTS
from agent.images.core.writable_root import (
    WRITABLE_BELOW,
    choose_writable_folders,
    is_writable,
    owner_of_root,
)
from agent.images.published import Published
from agent.machine import Btrfs, QuotaMode
from agent.machine.beneath import resolve_path
from agent.runtime.core.records import TaskRecord
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from wire.errors import BtrfsError, HostError, NotFound

INITS = ("usr/lib/systemd/systemd", "lib/systemd/systemd")
"""Paths of systemd in an image; other inits are stopped in other ways."""
_USED_EVERY_S = 60.0
"""How often the use of an image is recorded; retention counts days (images/core/retention.py)."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """An image, as the admission of a task read it."""

    digest: str
    is_complete: bool
    """Whether the whole image is on this machine."""
    has_init: bool
    config: OciConfig | None
    """None: it is not an OCI image."""


class TaskRoots:
    """Snapshots below one folder, named by task id. Blocking: call it through a lane."""

    def __init__(self, btrfs: Btrfs, folder: Path, images: Path) -> None:
        """Keep roots in `folder`, made from the subvolumes in `images`."""
        self._btrfs = btrfs
        self._folder = folder
        self._images = Published(btrfs, images, ImageInfo)
        self.state = folder.parent
        self._configs: dict[str, OciConfig | None] = {}
        self._used: dict[str, float] = {}
        """Image → when its use was last recorded; the next snapshot flushes that to disk."""
        self._unused: set[str] = set()
        """Tasks whose root was never started from."""
        self._quotas_on: bool | None = None
        self._writable_folders: dict[str, list[str]] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        """Image → the version of its description from which the cached values were read."""
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, task_id: str) -> Path:
        """Return the path of a task's root, which need not exist."""
        return self._folder / task_id

    def facts(self, digest: str) -> ImageFacts:
        """Return what the admission of a task needs to know about its image."""
        is_complete = self._images.description(digest).exists()
        info = self._images.find(digest)
        config = None if info is None else info.config
        return ImageFacts(digest, is_complete, self._has_init(digest), config)

    def _has_init(self, digest: str) -> bool:
        """Return whether an image has an init that can run as the init of a container.

        No link is followed: an absolute link would lead out of the image.
        """
        image = self._images.path(digest)
        return any(
            (image / path).is_file()
            and not any((image / part).is_symlink() for part in (path, *_parents(path)))
            for path in INITS
        )

    def config(self, digest: str) -> OciConfig | None:
        """Return the configuration of an OCI image, None if it has none.

        Cached until the description changes: a stream can be imported again in another format.
        """
        self._forget_replaced(digest)
        if digest not in self._configs:
            info = self._images.find(digest)
            if info is None:
                return None
            self._configs[digest] = info.config
        return self._configs[digest]

    def _forget_replaced(self, digest: str) -> None:
        """Drop the cached values of an image that was removed or imported again."""
        try:
            found = self._images.description(digest).stat()
        except FileNotFoundError:
            version = None
        except OSError:
            return
        else:
            version = found.st_ino, found.st_ctime_ns
        if self._versions.get(digest) == version:
            return
        for cached in (self._configs, self._writable_folders, self._versions):
            cached.pop(digest, None)
        if version is not None:
            self._versions[digest] = version

    def is_writable(self, spec: TaskSpec) -> bool:
        """Return whether a task may write to its root here."""
        return is_writable(spec, self.config(spec.image), has_quotas=self.has_quotas())

    def has_quotas(self) -> bool:
        """Return whether this file system can limit written data; checked once."""
        if self._quotas_on is None:
            try:
                self._quotas_on = self._btrfs.enable_quota(self.state) is not QuotaMode.OFF
            except BtrfsError:
                self._quotas_on = False
        return self._quotas_on

    def writable_folders(self, digest: str) -> list[str]:
        """Return the folders of an image that are writable in a writable root."""
        self._forget_replaced(digest)
        if digest not in self._writable_folders:
            image = self._images.path(digest)
            found = {"": _folders(image)}
            found |= {name: _folders(image / name) for name in WRITABLE_BELOW if name in found[""]}
            self._writable_folders[digest] = choose_writable_folders(found)
        return self._writable_folders[digest]

    def owner(self, digest: str) -> ImageUser:
        """Return the owner of the root of a task without an image user: root."""
        return owner_of_root(*(self._path_in_image(digest, path) for path in LISTS))

    def _path_in_image(self, digest: str, path: str) -> str:
        try:
            return resolve_path(str(self._images.path(digest)), path)
        except OSError:
            return ""

    def renew(self, task_id: str, spec: TaskSpec) -> None:
        """Replace a writable root by a fresh one with a size limit; keep a read-only root.

        Raises `HostError` if the root cannot have a limit.
        """
        if not self.is_writable(spec):
            return
        if task_id not in self._unused:
            self.prepare(task_id, spec.image)
        self._unused.discard(task_id)
        path = self.path(task_id)
        if not self.has_quotas():
            raise HostError(
                f"the root of task {task_id} cannot be writable: the file system at "
                f"{self.state} has no quotas, so the written data would have no limit",
                hint='set root = "read-only", or put the state folder on btrfs with quotas',
            )
        usage = self._btrfs.usage(path)  # regular quotas also count data shared with the image
        shared = (
            0 if usage is None or self._btrfs.quota(path) is QuotaMode.SIMPLE else usage.used_bytes
        )
        self._btrfs.limit(path, shared + spec.root_max_bytes)

    def find(self, task_id: str, digest: str) -> tuple[bool, bool]:
        """Return whether the task has a root made from this image, and whether it has any root."""
        path = self.path(task_id)
        if not path.exists():
            return False, False
        root = self._btrfs.find(path)
        image = self._btrfs.find(self._images.path(digest))
        fits = root is not None and image is not None and root.parent_uuid == image.uuid
        return fits, True

    def prepare(self, task_id: str, digest: str) -> None:
        """Make the root of a task; replace a root from another image."""
        image = self._images.path(digest)
        path = self.path(task_id)
        if path.exists():
            self._btrfs.delete(path)
        if not image.exists():
            raise NotFound(
                f"cannot prepare task {task_id}: image {digest} is not on this machine",
                hint="pull or put the image, then put the task again",
            )
        self._btrfs.snapshot(image, path)
        self._unused.add(task_id)
        now_s = time.monotonic()
        if now_s - self._used.get(digest, -_USED_EVERY_S) >= _USED_EVERY_S:
            with suppress(OSError):  # the time of last use decides which image is removed first
                os.utime(self._images.description(digest))
                self._used[digest] = now_s

    def remove(self, task_id: str) -> None:
        """Remove the root of a task; does nothing if it has none."""
        self._unused.discard(task_id)
        self._btrfs.delete(self.path(task_id))

    def all(self) -> list[str]:
        """Return the ids of all tasks that have a root."""
        return self._btrfs.children(self._folder)


class FreshRoot(TaskStage):
    """Replaces a writable root by a fresh one before each start."""

    def __init__(self, roots: TaskRoots, lanes: Lanes) -> None:
        self._roots, self._lanes = roots, lanes

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Renew the root before a start; the task's loop makes and removes roots."""
        await self._lanes.run("btrfs", self._roots.renew, task.task_id, task.spec)
        return task


def _folders(path: Path) -> list[str]:
    with os.scandir(path) as found:
        return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]


def _parents(path: str) -> list[str]:
    return [str(folder) for folder in Path(path).parents if folder.name]
