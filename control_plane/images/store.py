"""Images by digest: streamed in, verified, published in one step, streamed out.

Below the folder, `<hex>.image` is the stream and `<hex>.json` its metadata. The stream appears
last, by rename, so an existing image is complete. It is deleted first when an image is removed.
Leftovers of a crash, in `incoming/` or metadata without a stream, are removed at the next start.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec
from msgspec.structs import replace

from agent import api
from agent.api import DIGEST_PATTERN, ImageFormat, ImageInfo, Images, ImageSignature
from agent.api.signing import MAX_SIGNATURES
from control_plane.images.names import ImageNames
from wire import durable
from wire.errors import (
    Conflict,
    HostError,
    InvalidInput,
    NotFound,
    TooLarge,
    Unprocessable,
    some_of,
)
from wire.signatures import is_signed

log = logging.getLogger(__name__)

MAX_IMAGE_BYTES = 16 << 30
CHUNK_BYTES = 1 << 20
"""Bytes that are read or written at once."""
_DIGEST = re.compile(DIGEST_PATTERN)


class ImageStore:
    """The images that agents fetch from the control plane."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float],
        max_bytes: int = MAX_IMAGE_BYTES,
        owner_max_bytes: int | None = None,
    ) -> None:
        """Open the folder; remove what an earlier process left unfinished.

        `owner_max_bytes` bounds all images of one owner together; None: nothing does.
        """
        self._names = ImageNames(folder)
        self._owner_max_bytes = owner_max_bytes
        self._arriving: dict[Path, tuple[str, int]] = {}
        """File of an incoming stream → its owner, and how many bytes have arrived."""
        self._used: Counter[str] | None = None
        """Owner → bytes of its images; counted at the first request."""
        self._folder = folder
        self._incoming = folder / "incoming"
        self._clock = clock
        self._max_bytes = max_bytes
        self._changing = asyncio.Lock()
        """Held by each change of the folder, so that two changes of one image at once are both
        kept and counted once. Streams are received without it."""
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir(parents=True)
        for known in folder.glob("*.json"):
            if not known.with_suffix(".image").exists():
                known.unlink()

    async def put(
        self, digest: str, format_: ImageFormat, stream: AsyncIterator[bytes], owner: str = ""
    ) -> ImageInfo:
        """Receive a stream and publish it if it has this digest; an existing image stays as it is.

        The image counts in the share of `owner`; an empty owner has none.
        """
        known = await self._find_as(digest, format_)
        if known is not None:
            await _drain(stream, self._max_bytes)
            return known
        temporary = self._incoming / secrets.token_hex(8)
        try:
            size = await self._receive(
                digest, temporary, self._within_share(stream, owner, temporary)
            )
            info = ImageInfo(
                digest=digest,
                format=format_,
                stream_bytes=size,
                created_at=self._clock(),
                owner=owner,
            )
            async with self._changing:
                known = await self._find_as(digest, format_)
                if known is not None:  # another sender was faster
                    return known
                await asyncio.to_thread(self._publish, info, temporary)
                if self._used is not None:
                    self._used[owner] += size
        except OSError as e:
            raise HostError(
                f"cannot store image {digest}: {e.strerror}",
                hint=f"check the free space of {self._folder} on the control plane",
            ) from e
        finally:
            self._arriving.pop(temporary, None)
            temporary.unlink(missing_ok=True)
        log.info("image stored", extra={"image": digest, "bytes": size})
        return info

    async def _find_as(self, digest: str, format_: ImageFormat) -> ImageInfo | None:
        """Return the metadata of an image; `Conflict` if it is here in another format."""
        info = await self.find(digest)
        if info is not None and info.format is not format_:
            raise Conflict(f"image {digest} already exists, as {info.format.value}")
        return info

    async def find(self, digest: str) -> ImageInfo | None:
        """Return the metadata of an image; None: it is not stored here."""
        if not _DIGEST.fullmatch(digest):
            raise InvalidInput(f"{digest!r} is not a digest", hint="sha256: and 64 hex digits")
        return await asyncio.to_thread(self._read, digest)

    async def _require(self, digest: str, hint: str = "twinectl image push FILE") -> ImageInfo:
        """Return the metadata of an image, or raise `NotFound`."""
        info = await self.find(digest)
        if info is None:
            raise NotFound(f"there is no image {digest}", hint=hint)
        return info

    async def list_images(self) -> Images:
        """Return all images, newest first."""
        return Images(images=await asyncio.to_thread(self._read_all))

    async def stream(self, digest: str) -> AsyncIterator[bytes]:
        """Return the stream of an image, or raise `NotFound` before the first byte."""
        await self._require(digest)
        return self._chunks(self._path(digest))

    async def remove(self, digest: str, users: Callable[[str], Sequence[str]]) -> None:
        """Delete an image, unless `users(digest)` names jobs whose versions run it.

        Raises `NotFound`, or `Conflict` with the names.
        """
        async with self._changing:
            known = await self._require(digest, "twinectl image list")
            if jobs := users(digest):
                raise Conflict(
                    f"cannot remove image {digest}: job {some_of(jobs)} uses it",
                    hint="stop these jobs, or apply them with another image and wait for the "
                    "update",
                )
            try:
                await asyncio.to_thread(self._delete, digest)
            except OSError as e:
                raise HostError(f"cannot remove image {digest}: {e.strerror}") from e
            if self._used is not None:
                self._used[known.owner] -= known.stream_bytes
        log.info("image removed", extra={"image": digest})

    async def sign(self, digest: str, signature: ImageSignature) -> ImageInfo:
        """Store a signature with an image; it replaces an earlier one of the same key.

        Raises `NotFound`, `Unprocessable` for a wrong signature, and `Conflict` if the image has
        the most that it may have.
        """
        if not is_signed(signature.key, signature.signature, signature.name, digest):
            raise Unprocessable(
                f"this signature does not match image {digest} as {signature.name} with "
                f"{signature.key}",
                hint="twinectl image sign DIGEST --name NAME --key FILE makes one",
            )
        async with self._changing:
            known = await self._require(digest)
            others = [s for s in known.signatures if s.key != signature.key]
            if len(others) >= MAX_SIGNATURES:
                raise Conflict(f"image {digest} has {len(others)} signatures, which is the maximum")
            info = replace(known, signatures=[*others, signature], names=[])
            try:
                path = self._path(digest).with_suffix(".json")
                await asyncio.to_thread(durable.write, path, msgspec.json.encode(info))
            except OSError as e:
                raise HostError(f"cannot keep the signature of {digest}: {e.strerror}") from e
        named = {"image": digest, "as": signature.name, "key": signature.key}
        log.info("image signed", extra=named)
        return info

    def _delete(self, digest: str) -> None:
        path = self._path(digest)
        self._names.remove_all(digest)
        path.unlink(missing_ok=True)
        durable.sync_folder(self._folder)
        path.with_suffix(".json").unlink(missing_ok=True)

    async def _chunks(self, path: Path) -> AsyncIterator[bytes]:
        with path.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk

    async def name(self, digest: str, name: str, by: str = "") -> ImageInfo:
        """Assign a name to an image; applied jobs keep their image (BUG-UX3).

        `by` is the user; the first user of a name owns it. Empty: an operator, who may move any
        name. Raises `NotFound`, and `Forbidden` for a name of another user.
        """
        async with self._changing:
            await self._require(digest)
            try:
                await asyncio.to_thread(self._names.assign, name, digest, by)
            except OSError as e:
                raise HostError(f"cannot name the image {digest}: {e.strerror}") from e
        info = await self._require(digest)
        log.info("image named", extra={"image": digest, "as": name, "by": by})
        return info

    async def _within_share(
        self, stream: AsyncIterator[bytes], owner: str, path: Path
    ) -> AsyncIterator[bytes]:
        """Yield a stream; `TooLarge` once the images of its owner exceed one share (BUG-HT27).

        Bytes count when they arrive, so one of two concurrent pushes is refused.
        """
        most = self._owner_max_bytes
        if most is None or not owner:
            async for chunk in stream:
                yield chunk
            return
        used, size = await self._usage(), 0
        async for chunk in stream:
            size += len(chunk)
            self._arriving[path] = owner, size
            arriving = sum(count for who, count in self._arriving.values() if who == owner)
            if used[owner] + arriving > most:
                raise TooLarge(
                    f"the images of {owner} would exceed their share of {most} bytes: "
                    f"{used[owner]} are stored, {arriving} are being received",
                    hint="twinectl image list; an operator removes those that no job runs",
                )
            yield chunk

    async def _usage(self) -> Counter[str]:
        async with self._changing:
            if self._used is None:
                used = Counter[str]()
                for info in await asyncio.to_thread(self._read_all):
                    used[info.owner] += info.stream_bytes
                self._used = used
            return self._used

    async def _receive(self, digest: str, path: Path, stream: AsyncIterator[bytes]) -> int:
        """Write the stream to a file and return its size; raise unless it has the digest."""
        hasher = hashlib.sha256()
        size = 0
        buffer = bytearray()
        with path.open("xb") as file:
            async for chunk in stream:
                size += len(chunk)
                if size > self._max_bytes:
                    raise TooLarge(f"image {digest} has more than {self._max_bytes} bytes")
                buffer += chunk
                if len(buffer) >= CHUNK_BYTES:
                    await asyncio.to_thread(_append, file, hasher.update, bytes(buffer))
                    buffer.clear()
            await asyncio.to_thread(_append, file, hasher.update, bytes(buffer))
            actual = f"sha256:{hasher.hexdigest()}"
            if actual != digest:
                raise Unprocessable(
                    f"the stream of {size} bytes has digest {actual}, not {digest}: not stored",
                    hint="was it truncated or changed in transfer?",
                )
            await asyncio.to_thread(_sync, file)
        return size

    def _publish(self, info: ImageInfo, temporary: Path) -> None:
        path = self._path(info.digest)
        durable.write(path.with_suffix(".json"), msgspec.json.encode(info))
        temporary.rename(path)
        durable.sync_folder(self._folder)

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest.removeprefix('sha256:')}.image"

    def _read(self, digest: str) -> ImageInfo | None:
        path = self._path(digest)
        try:
            info = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=ImageInfo)
            if path.stat().st_size != info.stream_bytes:
                return None
            names = self._names.names_of(digest)
            return replace(info, names=names) if names else info
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as e:
            extra = {"image": digest, "reason": str(e)}
            log.error("an image cannot be read and counts as missing", extra=extra)
            return None

    def _read_all(self) -> list[ImageInfo]:
        images = [self._read(f"sha256:{p.stem}") for p in self._folder.glob("*.image")]
        return sorted((i for i in images if i is not None), key=lambda i: -i.created_at)


def _append(file: IO[bytes], update: Callable[[bytes], object], data: bytes) -> None:
    update(data)
    file.write(data)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


async def _drain(stream: AsyncIterator[bytes], max_bytes: int) -> None:
    """Read the rest of a stream, so that its sender gets an answer, not a closed connection."""
    left = max_bytes
    async for chunk in stream:
        left -= len(chunk)
        if left < 0:
            return


FindImage = Callable[[str], Awaitable[api.ImageInfo | None]]
"""Returns the image store's metadata of a digest, None if it has no such image."""
