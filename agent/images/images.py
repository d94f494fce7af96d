"""The image store: receives, verifies and unpacks images, and publishes them read-only.

    staging/<digest>.stream     the received part of the stream
    staging/<digest>/           the subvolume while it is being unpacked
    staging/<digest>.tree/      the same for an OCI image, to which layers are applied (`layers`)
    images/<digest>/            the read-only subvolume
    images/<digest>.json        written last: the image is complete

The subvolume of an OCI image shares all its data with its topmost layer, so it takes no space.
Roots of tasks are made from it as from any other image.

Leftovers of a crash are removed at the next start; an incomplete image is never visible.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

from msgspec.structs import replace

from agent.api import ImageFormat, ImageInfo, pull_event_text
from agent.images.core.oci import location_of
from agent.images.core.unpack import drop_setuid_properties, unpack_properties
from agent.images.imports import RunningImports
from agent.images.layers import Hold, Layers
from agent.images.oci import AssembledImage, OciImages, Registries
from agent.images.published import IMAGE_FILES, Published, digits_of, paths_in, remove_leftover
from agent.images.sandbox import Sandbox
from agent.machine import Btrfs, Processes
from agent.runtime.crashpoints import crash_point
from agent.runtime.disk import FREE_RESERVE_BYTES
from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from agent.runtime.units import Units
from wire.durable import sync_folder
from wire.errors import Conflict, HostError, NotFound, Unprocessable, Unreachable

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 20
IDLE_S = 60.0
"""Seconds without data after which a stream is given up; the sender can begin again."""


class HostImages:
    """The image store of this machine."""

    def __init__(
        self,
        state: Path,
        btrfs: Btrfs,
        units: Units,
        processes: Processes,
        lanes: Lanes,
        events: HostEvents,
        registries: Registries,
    ) -> None:
        """Keep images below `state`, a folder on btrfs."""
        self._published = Published(btrfs, state / "images", ImageInfo)
        self._staging = state / "staging"
        self._btrfs = btrfs
        self._lanes = lanes
        self._events = events
        self.idle_s = IDLE_S
        self.imports = RunningImports(events)
        self._quiet = asyncio.Lock()
        """Held while leftovers are removed, so that no image begins to arrive."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By digest: serializes operations on an image. A lock exists while it is in use."""
        self._staging.mkdir(parents=True, exist_ok=True)
        self._sandbox = Sandbox(self._staging, btrfs, units, processes, lanes)
        self.layers = Layers(state, btrfs, self._sandbox, lanes)
        self._oci = OciImages(state, btrfs, self._sandbox, self.layers, lanes, events, registries)

    async def tidy(self) -> bool:
        """Remove leftovers of interrupted transfers; no transfer may run.

        Returns False if the disk could not be read: then everything stays until later (F-35).
        """
        await self._sandbox.clear()
        try:
            await self._lanes.run("btrfs", self._tidy)
        except (OSError, HostError) as e:
            log.error("cannot search for leftovers of images", extra={"why": str(e)})
            return False
        return True

    async def tidy_if_idle(self) -> bool:
        """Call `tidy` unless an image is being received; return whether it succeeded."""
        async with self._quiet:
            if self.is_receiving:
                return False
            return await self.tidy()

    def _tidy(self) -> None:
        for path in paths_in(self._staging):
            remove_leftover(self._btrfs, path)
        self._published.tidy()
        self.layers.published.tidy()

    def get(self, digest: str) -> ImageInfo:
        """Return an image, or raise `NotFound`."""
        info = self._published.find(digest)
        if info is None:
            raise NotFound(f"image {digest} is not on this machine")
        return info

    async def find_and_touch(self, digest: str) -> ImageInfo | None:
        """Return a complete image, None if there is none; its time of last use begins again."""
        return await self._lanes.run(IMAGE_FILES, self._find_and_touch, digest)

    def _find_and_touch(self, digest: str) -> ImageInfo | None:
        info = self._published.find(digest)
        if info is not None:
            with suppress(OSError):  # a read-only disk: no image is removed, either
                os.utime(self._published.description(digest))
        return info

    def last_used(self, digest: str) -> float:
        """Return when an image was received or last used for a task; 0 if it is unknown."""
        try:
            return self._published.description(digest).stat().st_mtime
        except OSError:
            return 0.0

    def all(self) -> list[ImageInfo]:
        """Return all images, newest first."""
        return sorted(self._published.all(), key=lambda i: -i.created_at)

    def _lock(self, digest: str) -> asyncio.Lock:
        return self._locks.setdefault(digest, asyncio.Lock())

    @property
    def is_receiving(self) -> bool:
        """Whether an image is being received now."""
        return len(self.imports) > 0

    async def receive(
        self, digest: str, format_: ImageFormat, chunks: AsyncIterator[bytes]
    ) -> ImageInfo:
        """Unpack and publish an image; return at once if the host has it.

        Raises `Unprocessable` for a stream that has another digest, cannot be unpacked or
        leaves too little space, `Unreachable` for one that stalls. Then nothing of it stays.
        """
        async with self._import(digest) as hold, self._lock(digest):
            if info := await self.find_and_touch(digest):
                return info
            stream = self._stream(digest)
            try:
                size = await self._store(digest, stream, chunks)
                crash_point("image.stored")
                assembled = await self._unpack(digest, format_, stream, hold)
                # Removed early: data that is deleted before a flush is never written.
                await self._lanes.run("btrfs", stream.unlink)
                crash_point("image.unpacked")
                return await self._complete(_info(digest, format_, size, assembled))
            except OSError as e:
                raise HostError(f"cannot store image {digest}: {e.strerror}") from e
            finally:
                await self._lanes.run("btrfs", self._discard, digest)

    async def _store(self, digest: str, path: Path, chunks: AsyncIterator[bytes]) -> int:
        """Write the stream to `path` while hashing it; return its size in bytes."""
        sha, size, buffer = hashlib.sha256(), 0, bytearray()
        file = await self._lanes.run("files", path.open, "wb")
        try:
            async for chunk in self._with_timeout(digest, chunks):
                buffer += chunk
                if len(buffer) >= BUFFER_BYTES:
                    size += await self._lanes.run("files", self._flush, file, sha, bytes(buffer))
                    buffer.clear()
            size += await self._lanes.run("files", self._flush, file, sha, bytes(buffer))
        finally:
            await self._lanes.run("files", file.close)
        found = "sha256:" + sha.hexdigest()
        if found != digest:
            raise Unprocessable(
                f"the stream of image {digest} has digest {found} ({size} bytes)",
                hint="it was truncated or is another image; nothing was stored",
            )
        return size

    async def _with_timeout(
        self, digest: str, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Yield the chunks; give up a stalled stream, so that others can send the image (F-29)."""
        while True:
            try:
                async with asyncio.timeout(self.idle_s):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError as e:
                raise Unreachable(
                    f"the stream of image {digest} stalled: no data for {self.idle_s:g} s",
                    hint="send or pull it again; nothing was stored",
                ) from e
            yield chunk

    def _flush(self, file: BinaryIO, sha: hashlib._Hash, data: bytes) -> int:
        _, free = self._btrfs.free_bytes(self._staging)
        if free < FREE_RESERVE_BYTES + len(data):
            raise Unprocessable(
                f"the image does not fit: {free >> 20} MiB are free, and "
                f"{FREE_RESERVE_BYTES >> 20} MiB of them are reserved",
                hint="delete images that no task uses",
            )
        file.write(data)
        file.flush()
        sha.update(data)
        return len(data)

    async def _unpack(
        self, digest: str, format_: ImageFormat, stream: Path, hold: Hold
    ) -> AssembledImage | None:
        """Turn the stream into a subvolume in staging; return the parts of an OCI image."""
        target = self._staged(digest)
        make = os.mkdir if format_ is ImageFormat.BTRFS else self._btrfs.create
        await self._lanes.run("btrfs", make, target)
        if format_ is not ImageFormat.BTRFS:  # for an archive without an entry for its top
            await self._lanes.run("btrfs", os.chmod, target, 0o755)
        unit = f"twine-unpack-{target.name[:12]}.service"
        mount = str(await self._lanes.run("btrfs", self._btrfs.containing_subvolume, target.parent))
        properties = unpack_properties(str(stream), str(target), format_, mount)
        what = f"image {digest} cannot be unpacked as {format_}"
        await self._sandbox.run(unit, properties, what)
        if format_ is ImageFormat.BTRFS:
            received = await self._lanes.run("btrfs", self._open_received, digest)
            await self._sandbox.run(unit, drop_setuid_properties(received), what)
        if format_ is not ImageFormat.OCI:
            return None
        assembled = await self._oci.assemble(target, self._tree(digest), hold)
        await self._lanes.run("btrfs", self._btrfs.delete, target)
        return assembled

    def _staged(self, digest: str) -> Path:
        """Return the subvolume of an image while it is being unpacked."""
        return self._staging / digits_of(digest)

    def _stream(self, digest: str) -> Path:
        """Return the file with the received part of a stream."""
        return self._staging / f"{digits_of(digest)}.stream"

    def _tree(self, digest: str) -> Path:
        """Return the subvolume to which the layers of an OCI image are applied."""
        return self._staging / f"{digits_of(digest)}.tree"

    def _open_received(self, digest: str) -> str:
        staged = self._staged(digest)
        received = self._btrfs.children(staged)
        if len(received) != 1:
            raise Unprocessable(f"image {digest} holds {len(received)} subvolumes instead of one")
        self._btrfs.set_read_only(staged / received[0], False)
        return str(staged / received[0])

    async def pull(self, reference: str) -> ImageInfo:
        """Fetch an image from a registry; return at once if the host has it.

        Raises `Unprocessable` for an image that cannot be fetched, does not fit or must not be
        used, `Unreachable` if its stream stalls.
        """
        try:
            return await self._pull(reference)
        except OSError as e:
            raise HostError(f"cannot store image {reference}: {e.strerror}") from e

    async def _pull(self, reference: str) -> ImageInfo:
        async with self._import(reference) as hold, self._oci.lock(reference):
            if info := await self.find_and_touch(location_of(reference).digest):
                return info
            place, data = await self._oci.resolve(reference)
            self._events.add("image", place.digest, pull_event_text(reference))
            async with self._lock(place.digest):
                if info := await self.find_and_touch(place.digest):
                    return info
                try:
                    tree = self._tree(place.digest)
                    assembled = await self._oci.fetch(place, data, tree, hold)
                    size = sum(layer.blob.size for layer in assembled.layers)
                    return await self._complete(
                        _info(place.digest, ImageFormat.OCI, size, assembled, reference)
                    )
                finally:
                    await self._lanes.run("btrfs", self._discard, place.digest)

    @asynccontextmanager
    async def _import(self, name: str) -> AsyncIterator[Hold]:
        """List an image as being received until the block ends.

        Yields the function that protects layers from removal until then.
        """
        async with self._quiet:
            pass  # waits for a running `tidy`; there is no await before the image is listed
        with self.imports.listed(name), self.layers.holding() as hold:
            yield hold

    async def _complete(self, info: ImageInfo) -> ImageInfo:
        """Publish the subvolume in staging, and add an event."""
        if info.format is not ImageFormat.OCI:  # its files were flushed with its layers
            # Otherwise a power cut could leave a complete image with empty files.
            await self._lanes.run("sync", self._btrfs.sync, self._staging)
        crash_point("image.synced")
        await self._lanes.run("btrfs", self._publish, info)
        crash_point("image.declared")
        self._events.add("image", info.digest, "published")
        log.info("an image is complete", extra={"image": info.digest, "bytes": info.stream_bytes})
        return info

    def _publish(self, info: ImageInfo) -> None:
        """Move the subvolume into place, make it read-only, then declare it complete.

        Making it read-only commits its data and the descriptions of its layers to disk.
        """
        staged = self._staged(info.digest)
        if info.format is ImageFormat.OCI:
            staged = self._tree(info.digest)
        elif info.format is ImageFormat.BTRFS:
            staged = staged / self._btrfs.children(staged)[0]
        final = self._published.path(info.digest)
        self._btrfs.delete(final)  # a leftover of a removal that failed half-way
        os.rename(staged, final)
        self._btrfs.set_read_only(final, True)
        crash_point("image.moved")
        self._published.declare(info.digest, info)
        sync_folder(final.parent)

    def _discard(self, digest: str) -> None:
        for path in (self._stream(digest), self._tree(digest), self._staged(digest)):
            remove_leftover(self._btrfs, path)

    async def delete(self, digest: str, users: Callable[[str], list[str]]) -> None:
        """Remove an image. Raises `Conflict` while tasks run from it, `NotFound` without it."""
        async with self._lock(digest):
            await self._lanes.run(IMAGE_FILES, self.get, digest)
            if tasks := users(digest):
                raise Conflict(
                    f"image {digest} is used by {len(tasks)} tasks: {', '.join(tasks[:5])}",
                    hint="stop them first",
                )
            # Removed first, so that no new task can be made from it (trust F-40). No await since
            # `users`: the admission of a later task reads the image in this lane after the removal.
            try:
                await self._lanes.run(IMAGE_FILES, self._published.description(digest).unlink)
            except OSError as e:
                raise HostError(f"cannot delete image {digest}: {e.strerror}") from e
            crash_point("delete.undeclared")
            await self._lanes.run("btrfs", self._btrfs.delete, self._published.path(digest))
            crash_point("delete.removed")
        self._events.add("image", digest, "deleted")


def _info(
    digest: str,
    format_: ImageFormat,
    size: int,
    oci: AssembledImage | None = None,
    reference: str = "",
) -> ImageInfo:
    info = ImageInfo(digest=digest, format=format_, stream_bytes=size, created_at=time.time())
    if oci is None:
        return info
    return replace(
        info,
        reference=reference,
        manifest=oci.manifest.digest,
        layers=[layer.chain for layer in oci.layers],
        config=oci.config,
    )
