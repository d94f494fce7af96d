"""Decodes and checks the documents of images of the Open Container Initiative.

Pure: takes bytes of a manifest or configuration, returns values. Sources: the image specification
1.1 (`manifest.md`, `config.md`, `layer.md`) and Docker's image manifest version 2, schema 2, which
registries still serve.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from agent.api import OciConfig
from agent.api.ranges import DIGEST_PATTERN
from wire.errors import Unprocessable

T = TypeVar("T")

DOCUMENT_MAX_BYTES = 4 << 20
"""Largest manifest or configuration; registries refuse larger ones (distribution spec)."""
CONFIG_MAX_BYTES = 64 << 10
"""Most bytes of an image's commands and environment: a host lists all its images in one answer."""
LAYERS_MAX = 127
"""The limit of overlay-based engines; no engine makes more."""
LAYER_MAX_BYTES = 1 << 40

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_MANIFESTS = frozenset({MANIFEST, "application/vnd.docker.distribution.manifest.v2+json"})
_INDEXES = frozenset(
    {
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    }
)
_LAYERS = {
    "application/vnd.oci.image.layer.v1.tar": "tar",
    "application/vnd.oci.image.layer.v1.tar+gzip": "gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "zstd",
    "application/vnd.docker.image.rootfs.diff.tar": "tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "zstd",
}
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
"""The kernel's names of processors → names in the image specification (GOARCH)."""
TAG = "org.opencontainers.image.ref.name"
"""Annotation of an image in a layout: its tag (`image-layout.md`)."""
_DIGEST = re.compile(DIGEST_PATTERN)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_SIGNAL_NAMES = (
    "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT STOP "
    "TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS"
)
SIGNALS: Mapping[str, int] = MappingProxyType(
    {f"SIG{name}": number for number, name in enumerate(_SIGNAL_NAMES.split(), start=1)}
    | {f"SIGRTMIN+{n}": 34 + n for n in range(16)}
)
"""Numbers of signal(7) for x86 and arm; SIGRTMIN is 34 in glibc, which reserves two."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor of this host."""

    machine: str
    """Output of `uname -m`."""
    level: int = 1
    """Level of x86-64: 1 to 4, as in the variants v1 to v4 of amd64."""

    @property
    def name(self) -> str:
        """Its name in the image specification (GOARCH)."""
        return _ARCHITECTURES.get(self.machine, self.machine)

    def runs(self, architecture: str, variant: str) -> bool:
        """Return whether it runs programs of an architecture (`config.md`, "variant")."""
        if architecture != self.name:
            return False
        known = {"amd64": [f"v{n + 1}" for n in range(self.level)], "arm64": ["v8"]}
        return not variant or variant in known.get(architecture, [variant])

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"linux/{self.name}" + (f"/v{self.level}" if self.name == "amd64" else "")


class _Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    variant: str = ""


class _Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str
    digest: str
    size: Annotated[int, Meta(ge=0)]
    urls: list[str] = []
    annotations: dict[str, str] = {}
    platform: _Platform | None = None


class _Manifest(msgspec.Struct, frozen=True, rename="camel"):
    schema_version: int
    media_type: str = ""
    config: _Descriptor | None = None
    layers: list[_Descriptor] | None = None
    manifests: list[_Descriptor] | None = None


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: list[str] = []


class _Run(msgspec.Struct, frozen=True, rename="pascal"):
    user: str | None = None
    env: list[str] | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    working_dir: str | None = None
    stop_signal: str | None = None


class _Config(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    variant: str = ""
    rootfs: _RootFs = _RootFs()
    config: _Run | None = None


@dataclass(frozen=True, slots=True)
class Blob:
    """A piece of content, identified by its digest."""

    digest: str
    size: int
    compression: str = ""
    """`tar`, `gzip` or `zstd` for a layer."""

    @property
    def path(self) -> str:
        """Its path in a layout (`image-layout.md`)."""
        return f"blobs/sha256/{self.digest.removeprefix('sha256:')}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image: its configuration and its layers, lowest first."""

    digest: str
    config: Blob
    layers: tuple[Blob, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and the chain of layers below it."""

    chain: str
    """Identifies this layer with all layers below it (`config.md`, "Layer ChainID")."""
    below: str
    """Chain id of the layer below, empty for the lowest."""
    diff_id: str
    """Digest of the uncompressed layer."""
    blob: Blob


def digest_of(data: bytes) -> str:
    """Return the digest of a document."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def chain_of(below: str, diff_id: str) -> str:
    """Return the chain id of a layer on another (`config.md`)."""
    return diff_id if not below else digest_of(f"{below} {diff_id}".encode())


def is_index(data: bytes) -> bool:
    """Return whether a document lists images instead of being one."""
    document = _decoded(data, _Manifest, "the manifest")
    return document.media_type in _INDEXES or (
        not document.media_type and document.manifests is not None
    )


def choose(data: bytes, processor: Processor) -> str:
    """Return the digest of the image for this processor from an index.

    Prefers an image without a variant, then the highest variant that runs here. Raises
    `Unprocessable` if there is none, or more than one without a platform.
    """
    listed = _decoded(data, _Manifest, "the index").manifests or []
    images = [m for m in listed if m.media_type in _MANIFESTS | _INDEXES]
    plain = [m for m in images if m.platform is None]
    if len({m.digest for m in plain}) > 1:
        named = [name for m in plain if (name := m.annotations.get(TAG))]
        raise Unprocessable(
            f"one archive or index has {len(plain)} images without a platform",
            hint="name one of them, oci-layout:FOLDER:TAG or oci-archive:FILE:TAG"
            + (f": {', '.join(sorted(named)[:10])}" if named else ""),
        )
    fits = [m for m in images if m.platform is None or _runs(processor, m.platform)]
    if not fits:
        others = sorted({_platform_text(m.platform) for m in images if m.platform})
        raise Unprocessable(
            f"the image is not for {processor}, only for {', '.join(others) or 'nothing'}"
        )
    best = min(fits, key=_rank)
    return _checked(best, "the index").digest


def _runs(processor: Processor, platform: _Platform) -> bool:
    return platform.os == "linux" and processor.runs(platform.architecture, platform.variant)


def _rank(descriptor: _Descriptor) -> tuple[bool, bool, int]:
    variant = descriptor.platform.variant if descriptor.platform else ""
    number = int(variant[1:]) if re.fullmatch(r"v[0-9]{1,3}", variant) else 0
    return descriptor.platform is None, bool(variant), -number


def _platform_text(platform: _Platform) -> str:
    parts = (platform.os or "?", platform.architecture or "?", platform.variant)
    return "/".join(part for part in parts if part)


def read_manifest(data: bytes, expected: str = "") -> Manifest:
    """Return a decoded manifest. Raises `Unprocessable` if it cannot or must not be used."""
    digest = digest_of(data)
    if expected and digest != expected:
        raise Unprocessable(f"the manifest {expected} has digest {digest}: it was changed")
    document = _decoded(data, _Manifest, "the manifest")
    if document.schema_version != 2:
        raise Unprocessable(f"manifest {digest} has schema {document.schema_version}, not 2")
    if document.media_type and document.media_type not in _MANIFESTS:
        raise Unprocessable(f"manifest {digest} is of type {document.media_type}: not an image")
    if document.config is None or not document.layers:
        raise Unprocessable(f"manifest {digest} has no configuration or no layers: not an image")
    if len(document.layers) > LAYERS_MAX:
        raise Unprocessable(
            f"manifest {digest} has {len(document.layers)} layers; the maximum is {LAYERS_MAX}"
        )
    config = _checked(document.config, "the configuration")
    if config.size > DOCUMENT_MAX_BYTES:
        raise Unprocessable(f"the configuration of {digest} declares a size of {config.size} bytes")
    layers = tuple(_layer_blob(d) for d in document.layers)
    return Manifest(digest, Blob(config.digest, config.size), layers)


def _layer_blob(descriptor: _Descriptor) -> Blob:
    digest = _checked(descriptor, "a layer").digest
    if (
        ".nondistributable." in descriptor.media_type
        or ".foreign." in descriptor.media_type
        or descriptor.urls
    ):
        raise Unprocessable(
            (
                f"layer {digest} is a foreign layer ({descriptor.media_type}): the registry does "
                "not have it"
            ),
            hint="build the image without layers that may not be distributed",
        )
    kind = _LAYERS.get(descriptor.media_type)
    if kind is None:
        raise Unprocessable(
            f"layer {digest} is of the unsupported type {descriptor.media_type}",
            hint="plain, gzip and zstd layers are supported; encrypted ones are not",
        )
    return Blob(digest, descriptor.size, kind)


def read_config(
    data: bytes, manifest: Manifest, processor: Processor
) -> tuple[list[Layer], OciConfig]:
    """Return the layers, lowest first, and how the image is meant to be run."""
    if digest_of(data) != manifest.config.digest:
        raise Unprocessable(f"the configuration of {manifest.digest} has another digest")
    document = _decoded(data, _Config, "the configuration")
    platform = _Platform(document.architecture, document.os, document.variant)
    if not _runs(processor, platform):
        is_for = _platform_text(platform)
        raise Unprocessable(f"image {manifest.digest} is for {is_for}, not for {processor}")
    ids = document.rootfs.diff_ids
    if len(ids) != len(manifest.layers) or not all(_DIGEST.fullmatch(i) for i in ids):
        raise Unprocessable(
            f"image {manifest.digest} has {len(manifest.layers)} layers, and its "
            f"configuration lists {len(ids)}"
        )
    layers, below = [], ""
    for diff_id, blob in zip(ids, manifest.layers, strict=True):
        chain = chain_of(below, diff_id)
        layers.append(Layer(chain, below, diff_id, blob))
        below = chain
    return layers, _run_config(document.config or _Run(), manifest.digest)


def _run_config(run: _Run, digest: str) -> OciConfig:
    environment = {}
    for pair in run.env or []:
        name, equals, value = pair.partition("=")
        # systemd drops names that no shell accepts, too (systemd.exec(5)).
        if equals and _ENV_NAME.fullmatch(name) and "\0" not in value:
            environment[name] = value
    fields = {
        "entrypoint": run.entrypoint or [],
        "command": run.cmd or [],
        "environment": environment,
        "user": run.user or "",
        "working_dir": _folder(run.working_dir or "", digest),
        "stop_signal": _signal(run.stop_signal or "", digest),
    }
    if (size := len(msgspec.json.encode(fields))) > CONFIG_MAX_BYTES:
        raise Unprocessable(
            f"image {digest} has {size >> 10} KiB of commands and environment, more than "
            f"{CONFIG_MAX_BYTES >> 10} KiB"
        )
    try:
        return msgspec.convert(fields, OciConfig)
    except msgspec.ValidationError as e:
        raise Unprocessable(f"the configuration of image {digest} cannot be used: {e}") from e


def _folder(path: str, digest: str) -> str:
    if not path.isprintable():
        raise Unprocessable(
            f"image {digest} has the working directory {path!r}: its name is not printable"
        )
    if path and (not path.startswith("/") or ".." in path.split("/")):
        raise Unprocessable(f"image {digest} has the working directory {path!r}: not absolute")
    return path


def _signal(name: str, digest: str) -> str:
    """Return the name of a signal given as `SIGQUIT`, `QUIT` or `3` (`config.md`)."""
    if not name:
        return ""
    by_number = {str(number): word for word, number in SIGNALS.items()}
    signal = by_number.get(name, name.upper())
    signal = signal if signal.startswith("SIG") else f"SIG{signal}"
    if signal not in SIGNALS:
        raise Unprocessable(f"image {digest} has the stop signal {name!r}, which does not exist")
    return signal


def _checked(descriptor: _Descriptor, what: str) -> _Descriptor:
    if not _DIGEST.fullmatch(descriptor.digest):
        raise Unprocessable(f"{what} is named {descriptor.digest[:80]!r}: only sha256 is supported")
    if descriptor.size > LAYER_MAX_BYTES:
        raise Unprocessable(
            f"{what} ({descriptor.digest}) declares a size of {descriptor.size} bytes"
        )
    return descriptor


def _decoded(data: bytes, kind: type[T], what: str) -> T:
    if len(data) > DOCUMENT_MAX_BYTES:
        raise Unprocessable(f"{what} is larger than {DOCUMENT_MAX_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise Unprocessable(f"{what} cannot be read: {e}") from e


@dataclass(frozen=True, slots=True)
class ImageLocation:
    """Location of an image in a registry."""

    repository: str
    """Repository, including the registry."""
    tag: str
    digest: str

    @property
    def name(self) -> str:
        """Return its name for skopeo."""
        if self.digest:
            return f"docker://{self.repository}@{self.digest}"
        return f"docker://{self.repository}:{self.tag or 'latest'}"

    def at(self, digest: str) -> str:
        """Return the name for skopeo of one image of the repository."""
        return f"docker://{self.repository}@{digest}"


def location_of(reference: str) -> ImageLocation:
    """Return the parts of a reference that fits `api.Reference`."""
    rest, _, digest = reference.partition("@")
    registry, _, path = rest.partition("/")
    repository, _, tag = path.partition(":")
    return ImageLocation(f"{registry}/{repository}", tag, digest)
