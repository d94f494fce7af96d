"""Images: streamed in, verified, unpacked in a sandbox, then published read-only.

    staging/<digest>.stream     what has arrived so far
    staging/<digest>/           the subvolume while it is being unpacked
    images/<digest>/            the read-only subvolume
    images/<digest>.json        written last: the image is complete

What a crash leaves behind is removed at the next start; an image is never half visible.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

import msgspec

from agent.api import ImageFormat, ImageInfo
from agent.core.unpack import UNPACK_TIMEOUT_S, unpack_properties
from agent.errors import (
    Conflict,
    HostError,
    NotFound,
    SystemdError,
    TwineError,
    Unprocessable,
    Unreachable,
)
from agent.machine import Btrfs, Processes, UnitState
from agent.services.disk import FREE_RESERVE_BYTES
from agent.services.events import EventLog
from agent.services.offload import Lanes
from agent.services.units import Units

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 20
FREE_LOOK_S = 0.1
"""How often the room is looked at while an image is unpacked: at 1 GB/s it shrinks by less than
the reserve between two looks."""
IDLE_S = 60.0
"""A stream of which nothing came for so long has ended; whoever sends can begin anew."""
CLEAR_TIMEOUT_S = 30.0
"""How long an unpack unit from before may take to end once it was stopped."""


class Images:
    """The image store of this machine."""

    def __init__(
        self,
        state: Path,
        btrfs: Btrfs,
        units: Units,
        processes: Processes,
        lanes: Lanes,
        events: EventLog,
    ) -> None:
        """Keep images below `state`, a folder on btrfs."""
        self.folder = state / "images"
        self._staging = state / "staging"
        self._btrfs = btrfs
        self._units = units
        self._processes = processes
        self._lanes = lanes
        self._events = events
        self.idle_s = IDLE_S
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One at a time does something to an image; a lock lives while somebody has use for it."""
        for folder in (self.folder, self._staging):
            folder.mkdir(parents=True, exist_ok=True)

    async def tidy(self) -> None:
        """Remove what interrupted transfers left behind, before anything else runs."""
        for unit in await self._units.all("twine-unpack-*.service"):
            await self._units.clear(unit.unit, timeout_s=CLEAR_TIMEOUT_S)
        await self._lanes.run("btrfs", self._tidy)

    def _tidy(self) -> None:
        for path in list(self._staging.iterdir()):
            self._remove(path)
        for path in self.folder.glob(".*.new"):
            self._remove(path)
        there = set(self._btrfs.children(self.folder))
        for path in self.folder.glob("*.json"):
            if path.stem not in there or self.find(f"sha256:{path.stem}") is None:
                log.error("an image is damaged and removed", extra={"image": path.stem})
                self._remove(path)
        complete = {p.stem for p in self.folder.glob("*.json")}
        for name in there - complete:
            self._remove(self.folder / name)

    def _remove(self, path: Path) -> None:
        """Remove what was left behind, of whatever kind; what cannot go stays until later."""
        try:
            if self._btrfs.find(path) is not None:
                self._btrfs.delete(path)
            elif path.is_dir():
                for name in self._btrfs.children(path):
                    self._btrfs.delete(path / name)
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        except (OSError, TwineError) as e:
            log.warning("a leftover cannot be removed", extra={"path": str(path), "why": str(e)})

    def find(self, digest: str) -> ImageInfo | None:
        """Return an image that is complete, None where there is none."""
        try:
            data = (self.folder / f"{_hex(digest)}.json").read_bytes()
            return msgspec.json.decode(data, type=ImageInfo)
        except (OSError, msgspec.DecodeError, UnicodeError):
            return None

    def get(self, digest: str) -> ImageInfo:
        """Return an image, or raise `NotFound`."""
        info = self.find(digest)
        if info is None:
            raise NotFound(f"image {digest} is not on this machine")
        return info

    def all(self) -> list[ImageInfo]:
        """Return all images, newest first."""
        infos = [self.find("sha256:" + p.stem) for p in self.folder.glob("*.json")]
        return sorted((i for i in infos if i), key=lambda i: -i.created_at)

    def _lock(self, digest: str) -> asyncio.Lock:
        return self._locks.setdefault(digest, asyncio.Lock())

    async def receive(
        self, digest: str, format_: ImageFormat, chunks: AsyncIterator[bytes]
    ) -> ImageInfo:
        """Take an image in; return at once where it is here already.

        Raises `Unprocessable` for a stream that has another digest, cannot be unpacked or
        leaves too little space, `Unreachable` for one that stalls; then nothing of it stays.
        """
        async with self._lock(digest):
            if info := self.find(digest):
                return info
            stream = self._staging / f"{_hex(digest)}.stream"
            try:
                size = await self._store(digest, stream, chunks)
                await self._unpack(digest, format_, stream)
                # Else a power cut could leave a complete image whose files are empty.
                await self._lanes.run("sync", self._btrfs.sync, self._staging)
                info = ImageInfo(
                    digest=digest, format=format_, stream_bytes=size, created_at=time.time()
                )
                await self._lanes.run("btrfs", self._publish, info)
                await self._lanes.run("sync", self._btrfs.sync, self.folder)
            except OSError as e:
                raise HostError(f"cannot store image {digest}: {e.strerror}") from e
            finally:
                await self._lanes.run("btrfs", self._discard, digest)
        self._events.add("image", digest, "published")
        log.info("an image is complete", extra={"image": digest, "bytes": size})
        return info

    async def _store(self, digest: str, path: Path, chunks: AsyncIterator[bytes]) -> int:
        """Write the stream to `path` while hashing it; return its size in bytes."""
        sha, size, buffer = hashlib.sha256(), 0, bytearray()
        file = await self._lanes.run("files", _new_file, path)
        try:
            async for chunk in self._timely(digest, chunks):
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
                hint="it was cut short or is another image; nothing of it was kept",
            )
        return size

    async def _timely(self, digest: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks; a stream that stalls must not keep others from the image (F-29)."""
        while True:
            try:
                async with asyncio.timeout(self.idle_s):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError as e:
                raise Unreachable(
                    f"the stream of image {digest} stalled: nothing came for {self.idle_s:g} s",
                    hint="send or pull it again; nothing of it was kept",
                ) from e
            yield chunk

    def _flush(self, file: BinaryIO, sha: hashlib._Hash, data: bytes) -> int:
        _, free = self._btrfs.free_bytes(self._staging)
        if free < FREE_RESERVE_BYTES + len(data):
            raise Unprocessable(
                f"the image does not fit: {free >> 20} MiB are free and "
                f"{FREE_RESERVE_BYTES >> 20} MiB must stay so",
                hint="delete images that no task uses",
            )
        file.write(data)
        file.flush()
        sha.update(data)
        return len(data)

    async def _unpack(self, digest: str, format_: ImageFormat, stream: Path) -> None:
        target = self._staging / _hex(digest)
        make = self._btrfs.create if format_ is ImageFormat.TAR else os.mkdir
        await self._lanes.run("btrfs", make, target)
        unit = f"twine-unpack-{_hex(digest)[:12]}.service"
        properties = unpack_properties(str(stream), str(target), format_)
        # One from before would have unpacked into a folder that is gone by now.
        await self._units.clear(unit, timeout_s=CLEAR_TIMEOUT_S)
        short: list[int] = []
        watch = asyncio.create_task(self._watch_room(unit, short.append))
        try:
            end = await self._units.run(unit, properties, timeout_s=UNPACK_TIMEOUT_S + 60)
        except asyncio.CancelledError:
            await self._units.stop(unit)
            raise
        except SystemdError:
            if not short:
                raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if short:
            raise Unprocessable(
                f"image {digest} does not fit: unpacking it left {short[0] >> 20} MiB, and "
                f"{FREE_RESERVE_BYTES >> 20} MiB must stay free",
                hint="delete images that no task uses",
            )
        if end.active == "failed" or end.exit_code:
            why = await asyncio.to_thread(self._said, end)
            raise Unprocessable(f"image {digest} cannot be unpacked as {format_}: {why}")

    async def _watch_room(self, unit: str, tell: Callable[[int], None]) -> None:
        """Stop an unpacking that fills the disk, and tell how many bytes it left.

        A few bytes of a stream may become many; with no room left, not even a task could be
        stopped.
        """
        while True:
            _, free = await self._lanes.run("files", self._btrfs.free_bytes, self._staging)
            if free < FREE_RESERVE_BYTES:
                tell(free)
                await self._units.stop(unit)
                return
            await asyncio.sleep(FREE_LOOK_S)

    def _said(self, end: UnitState) -> str:
        """Return the last words of a failed unpack unit."""
        invocation = f"_SYSTEMD_INVOCATION_ID={end.invocation_id}"
        command = ["journalctl", "--no-pager", "--quiet", "--output=cat", "--lines=3", invocation]
        try:
            words = self._processes.run(command, timeout_s=10.0).stdout
        except TwineError:
            words = ""
        return "; ".join(words.strip().splitlines()) or end.result

    def _publish(self, info: ImageInfo) -> None:
        """Close the subvolume, move it into place, then declare it complete."""
        staged = self._staging / _hex(info.digest)
        if info.format is ImageFormat.BTRFS:
            received = self._btrfs.children(staged)
            if len(received) != 1:
                raise Unprocessable(
                    f"image {info.digest} holds {len(received)} subvolumes, it must be one"
                )
            staged = staged / received[0]
            self._btrfs.set_read_only(staged, False)
        final = self.folder / _hex(info.digest)
        self._btrfs.delete(final)  # one whose removal once failed half-way
        os.rename(staged, final)
        self._btrfs.set_read_only(final, True)
        temporary = self.folder / f".{_hex(info.digest)}.new"
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(info))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, final.with_suffix(".json"))

    def _discard(self, digest: str) -> None:
        self._remove(self._staging / f"{_hex(digest)}.stream")
        self._remove(self._staging / _hex(digest))

    async def delete(self, digest: str, users: Callable[[str], list[str]]) -> None:
        """Remove an image. Raises `Conflict` while tasks run from it, `NotFound` without it."""
        async with self._lock(digest):
            self.get(digest)
            if tasks := users(digest):
                raise Conflict(
                    f"image {digest} is used by {len(tasks)} tasks: {', '.join(tasks[:5])}",
                    hint="stop them first",
                )
            # At once: from here on no new task can be made from it (trust F-40).
            (self.folder / f"{_hex(digest)}.json").unlink()
            await self._lanes.run("btrfs", self._btrfs.delete, self.folder / _hex(digest))
        self._events.add("image", digest, "deleted")


def _new_file(path: Path) -> BinaryIO:
    return path.open("wb")


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
