"""Fetches, checks and assembles images of the Open Container Initiative from shared layers.

    staging/oci-<key>/      a layout (`image-layout.md`): documents and compressed layers
    staging/oci-<key>.json  the manifest from the registry

skopeo fetches, in a sandbox that has only a network. skopeo is not trusted: every digest is
checked here or when a layer is applied.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from msgspec.structs import replace

from agent.api import OciConfig
from agent.images.core.image_user import (
    LIST_MAX_BYTES,
    LISTS,
    ListedUsers,
    is_plain,
    names_user,
    resolve,
)
from agent.images.core.oci import (
    DOCUMENT_MAX_BYTES,
    Blob,
    ImageLocation,
    Layer,
    Manifest,
    Processor,
    choose,
    digest_of,
    is_index,
    location_of,
    read_config,
    read_manifest,
)
from agent.images.core.unpack import fetch_properties
from agent.images.layers import Hold, Layers
from agent.images.sandbox import Sandbox
from agent.machine import Btrfs
from agent.machine.beneath import ensure_folder, read_file, resolve_path
from agent.machine.hardware import read_x86_level
from agent.machine.kernelfs import KernelFs
from agent.runtime.crashpoints import crash_point
from agent.runtime.disk import FREE_RESERVE_BYTES
from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from wire.errors import Unprocessable
from wire.units import about_size


@dataclass(frozen=True, slots=True)
class Registries:
    """How images are fetched; configured by the operator, never by the caller."""

    tls_verify: bool = True
    credentials_file: str = ""


@dataclass(frozen=True, slots=True)
class AssembledImage:
    """An image whose layers are all on the host."""

    manifest: Manifest
    layers: tuple[Layer, ...]
    config: OciConfig


class OciImages:
    """Brings the layers of images to this machine."""

    def __init__(
        self,
        state: Path,
        btrfs: Btrfs,
        sandbox: Sandbox,
        layers: Layers,
        lanes: Lanes,
        events: HostEvents,
        registries: Registries,
    ) -> None:
        """Use `state`, a folder on btrfs."""
        self._state = state
        self._staging = state / "staging"
        self._btrfs = btrfs
        self._sandbox = sandbox
        self._layers = layers
        self._lanes = lanes
        self._events = events
        self._registries = registries
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._processor = Processor(platform.machine(), read_x86_level(KernelFs()))

    def lock(self, reference: str) -> asyncio.Lock:
        """Return the lock that serializes fetches of this reference."""
        return self._locks.setdefault(reference, asyncio.Lock())

    async def resolve(self, reference: str) -> tuple[ImageLocation, bytes]:
        """Return the location of an image, with its digest, and its manifest for this processor."""
        location = location_of(reference)
        data = await self._manifest(location.name, location.digest)
        if is_index(data):
            chosen = choose(data, self._processor)
            location = location_of(f"{location.repository}@{chosen}")
            data = await self._manifest(location.name, chosen)
        crash_point("pull.resolved")
        return ImageLocation(location.repository, location.tag, digest_of(data)), data

    async def _manifest(self, name: str, digest: str) -> bytes:
        key = _key(name)
        stage, output = self._staging / f"oci-{key}", self._staging / f"oci-{key}.json"
        await self._lanes.run("files", _make_empty, stage)
        try:
            arguments = ["inspect", "--raw", *self._options(""), name]
            await self._skopeo(key, arguments, stage, f"cannot read {name}", str(output))
            data = await self._lanes.run(
                "files", read_file, str(self._staging), output.name, DOCUMENT_MAX_BYTES
            )
        except OSError as e:
            raise Unprocessable(f"the manifest of {name} cannot be read: {e.strerror}") from e
        finally:
            await self._lanes.run("files", _remove_folder, stage)
            await self._lanes.run("files", output.unlink, missing_ok=True)
        if digest and digest_of(data) != digest:
            raise Unprocessable(f"the manifest of {name} has digest {digest_of(data)}")
        return data

    async def fetch(
        self, location: ImageLocation, data: bytes, tree: Path, hold: Hold
    ) -> AssembledImage:
        """Fetch the missing layers of an image, and make `tree` equal to its topmost layer.

        Present layers are held before the fetch begins, and are not fetched.
        """
        manifest = read_manifest(data, location.digest)

        def report_wait(number: int) -> None:
            of = f"layer {number} of {len(manifest.layers)}"
            self._events.add(
                "image", manifest.digest, f"waiting for {of}: another image fetches it"
            )

        blobs = [blob.digest for blob in manifest.layers]
        async with self._layers.fetch_turn(blobs, report_wait, hold) as present:
            return await self._fetch(
                location.at(manifest.digest), manifest, len(present), tree, hold
            )

    async def _fetch(
        self, name: str, manifest: Manifest, present: int, tree: Path, hold: Hold
    ) -> AssembledImage:
        """Fetch an image whose lowest layers, `present` in number, are on the host."""
        stage = self._staging / f"oci-{_key(name)}"
        missing = manifest.layers[present:]
        try:
            await self._lanes.run("files", self._admit, manifest, missing)
            await self._lanes.run("files", _make_empty, stage)
            await self._lanes.run("files", _make_placeholders, stage, manifest.layers[:present])
            size = about_size(sum(blob.size for blob in missing))
            event = f"fetching {len(missing)} of {len(manifest.layers)} layers, {size}"
            self._events.add("image", manifest.digest, event)
            arguments = ["copy", "--preserve-digests", *self._options("src-"), name, f"oci:{stage}"]
            await self._skopeo(_key(name), arguments, stage, f"cannot fetch {name}")
            crash_point("pull.fetched")
            return await self._assemble(manifest, stage, tree, hold)
        finally:
            await self._lanes.run("files", _remove_folder, stage)

    async def assemble(self, layout: Path, tree: Path, hold: Hold) -> AssembledImage:
        """Make `tree` equal to the only image of a complete layout."""
        data = await self._lanes.run("files", _read_document, layout, "index.json")
        seen = 0
        while is_index(data):
            digest = choose(data, self._processor)
            data = await self._lanes.run("files", _read_document, layout, Blob(digest, 0).path)
            if digest_of(data) != digest:
                raise Unprocessable(f"the manifest {digest} has digest {digest_of(data)}")
            if (seen := seen + 1) > 3:
                raise Unprocessable("the archive nests more than one index in its index")
        return await self._assemble(read_manifest(data), layout, tree, hold)

    async def _assemble(
        self, manifest: Manifest, layout: Path, tree: Path, hold: Hold
    ) -> AssembledImage:
        data = await self._lanes.run("files", _read_document, layout, manifest.config.path)
        layers, config = read_config(data, manifest, self._processor)

        def report(number: int) -> None:
            event = f"layer {number} of {len(layers)} is present"
            self._events.add("image", manifest.digest, event)

        hold(layer.chain for layer in layers)
        await self._layers.apply_missing(layers, layout, tree, report)
        config = await self._lanes.run("files", _with_user, config, tree)
        await self._lanes.run("files", _ensure_working_dir, config, tree)
        crash_point("pull.assembled")
        return AssembledImage(manifest, tuple(layers), config)

    def _admit(self, manifest: Manifest, missing: Sequence[Blob]) -> None:
        """Refuse an image that cannot fit even compressed; free space is checked again later."""
        _, free = self._btrfs.free_bytes(self._staging)
        needed = sum(blob.size for blob in missing)
        if needed + FREE_RESERVE_BYTES > free:
            raise Unprocessable(
                f"image {manifest.digest} does not fit: {about_size(needed)} have to be "
                f"fetched, {about_size(free)} are free, and "
                f"{about_size(FREE_RESERVE_BYTES)} of that are reserved",
                hint="delete images that no task uses",
            )

    async def _skopeo(
        self, key: str, arguments: Sequence[str], stage: Path, what: str, output: str = ""
    ) -> None:
        secrets = [str(self._state / "identity"), str(self._state / "journal")]
        properties = fetch_properties(arguments, str(stage), secrets, output)

        def received() -> int:
            return _bytes_in(stage) + (_size(output) if output else 0)

        await self._sandbox.run(f"twine-fetch-{key}.service", properties, what, received)

    def _options(self, side: str) -> list[str]:
        found = [] if self._registries.tls_verify else [f"--{side}tls-verify=false"]
        if self._registries.credentials_file:
            found.append(f"--{side}authfile={self._registries.credentials_file}")
        return found


def _make_empty(stage: Path) -> None:
    """Make an empty folder. A subvolume would cost more disk writes than the documents in it."""
    _remove_folder(stage)
    stage.mkdir(mode=0o700)


def _remove_folder(stage: Path) -> None:
    if os.path.lexists(stage):
        shutil.rmtree(stage)


def _bytes_in(stage: Path) -> int:
    """Return how many bytes skopeo has written to a folder, including placeholders."""
    return sum(_size(os.path.join(top, name)) for top, _, names in os.walk(stage) for name in names)


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:  # it was renamed meanwhile, or does not exist yet
        return 0


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _make_placeholders(stage: Path, blobs: Sequence[Blob]) -> None:
    """Make empty files of the right size in place of layers that the host has.

    skopeo checks only the name of a blob, and then does not fetch it. The files consist of holes
    and are never read.
    """
    (stage / "blobs" / "sha256").mkdir(parents=True)
    for blob in blobs:
        with (stage / blob.path).open("wb") as file:
            file.truncate(blob.size)


def _with_user(config: OciConfig, tree: Path) -> OciConfig:
    """Return the configuration with its user resolved by the lists in the image's tree."""
    if not names_user(config.user):
        return config
    users, groups = (_read_list(tree, path) for path in LISTS)
    return replace(config, runs_as=resolve(config.user, users, groups))


def _ensure_working_dir(config: OciConfig, tree: Path) -> None:
    """Make the image's working directory if no layer has it, as container engines do."""
    try:
        ensure_folder(str(tree), config.working_dir)
    except OSError as e:
        raise Unprocessable(
            f"cannot open the image's working directory {config.working_dir!r}: {e.strerror}",
            hint="it must be a folder",
        ) from e


def _read_list(tree: Path, path: str) -> ListedUsers:
    try:
        really = resolve_path(str(tree), path)
        if not is_plain(really):
            raise OSError(errno.EINVAL, "a link has a target that is not plain text")
        return ListedUsers(really, read_file(str(tree), really, LIST_MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return ListedUsers()
    except OSError as e:
        raise Unprocessable(
            f"the image names a user, and its /{path} cannot be read: {e.strerror}",
            hint=f"it must be a file of at most {LIST_MAX_BYTES >> 20} MiB",
        ) from e


def _read_document(layout: Path, path: str) -> bytes:
    try:
        return read_file(str(layout), path, DOCUMENT_MAX_BYTES)
    except OSError as e:
        hint = "make one with skopeo copy … oci-archive:FILE"
        if (layout / "manifest.json").exists():
            hint = "this is a Docker archive: skopeo copy docker-archive:… oci-archive:FILE"
        raise Unprocessable(f"this is not an OCI image: {path}: {e.strerror}", hint=hint) from e
