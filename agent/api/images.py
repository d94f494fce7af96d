"""Images on a host, and requests to fetch one from the control plane's image store."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from agent.api.oci import OciConfig
from agent.api.ranges import Bytes, DigestStr, Id, Moment, Reported
from agent.api.signing import ImageTrust, Signatures


class ImageFormat(StrEnum):
    """Format in which an image is transferred."""

    TAR = "tar"
    BTRFS = "btrfs"
    """A stream of `btrfs send`, full or relative to an image of the host."""
    OCI = "oci"
    """An OCI layout as a tar (skopeo's `oci-archive:`)."""


class ImageInfo(Reported, frozen=True, kw_only=True):
    """One complete image, from which tasks can start."""

    digest: Id
    """SHA-256 of the stream that it was made from."""
    format: ImageFormat
    stream_bytes: Bytes
    created_at: Moment
    tasks: Annotated[list[Id], Meta(max_length=100_000)] = []
    """Ids of the tasks that run from it; an image with tasks cannot be deleted."""
    reference: Annotated[str, Meta(max_length=512)] = ""
    """Reference of an image that was pulled from a registry."""
    manifest: Id = ""
    """Digest of the manifest of an OCI image."""
    layers: Annotated[list[Id], Meta(max_length=1024)] = []
    """Chain ids of an OCI image's layers, lowest first; images share them."""
    signatures: Signatures = []
    """Signatures of the image, in the image store only. On a host each task carries its own."""
    owner: Id = ""
    """User that pushed the image, in the image store only. It counts against this user's share."""
    names: Annotated[list[Id], Meta(max_length=1000)] = []
    """Names that refer to the image now, such as `redis:7.2`; in the image store only."""
    config: OciConfig | None = None
    """How an OCI image is meant to be run; a task's specification overrides it."""


class Images(Reported, frozen=True, kw_only=True):
    """All images of a machine."""

    images: Annotated[list[ImageInfo], Meta(max_length=100_000)]


class ImagePull(Reported, frozen=True, kw_only=True):
    """A request to fetch an image from the control plane's image store."""

    digest: DigestStr
    format: ImageFormat = ImageFormat.TAR
    path: Id
    """Path on the agent's own control plane, for instance `/v1/images/sha256:…`. Never a URL, so
    that no caller can make the agent call another server."""
    trust: ImageTrust = ImageTrust()
    """Checked before the download."""
