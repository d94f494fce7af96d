"""Types of the agent's API for images of the Open Container Initiative (OCI)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import END, Argument, EnvName, Id, Moment, Reported, Written

REFERENCE_PATTERN = (
    r"^[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?(:[0-9]{1,5})?"
    r"(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?" + END
)
"""REGISTRY[:PORT]/REPOSITORY[:TAG][@DIGEST]; repository and tag follow the OCI distribution
specification. The registry is required: there is no default."""
Reference = Annotated[
    str,
    Meta(
        pattern=REFERENCE_PATTERN,
        max_length=512,
        description="REGISTRY[:PORT]/REPOSITORY[:TAG][@sha256:…]",
    ),
]


def pull_event_text(reference: str) -> str:
    """Return the message of the first event of a pull, which contains the reference."""
    return f"requested as {reference}"


class OciPull(Written, frozen=True, kw_only=True):
    """A request to fetch an image from a registry."""

    reference: Reference


class ImageImport(Reported, frozen=True, kw_only=True):
    """An image that is being received."""

    name: Annotated[str, Meta(max_length=512)]
    """Its reference in a registry, or the digest of the stream that is sent."""
    began_at: Moment


class ImageImports(Reported, frozen=True, kw_only=True):
    """All images that are being received, the oldest first."""

    images: Annotated[list[ImageImport], Meta(max_length=100_000)]


class ImportName(Written, frozen=True, kw_only=True):
    """A request to cancel an image that is being received."""

    name: Annotated[str, Meta(max_length=512)]
    """`ImageImport.name` of the image."""


class ImageUser(Reported, frozen=True, kw_only=True):
    """The user that an image runs as, from the image's own lists of users and groups."""

    uid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    """The task owns the files of this user in the image; 0 only in a writable root."""
    gid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    name: Id = ""
    """Empty for a number that the image does not list."""
    home: Annotated[str, Meta(max_length=4096)] = ""
    shell: Annotated[str, Meta(max_length=4096)] = ""
    group: Id = ""
    users: Annotated[str, Meta(max_length=4096)] = ""
    """Path of the file with the user, relative to the image and without links."""
    groups: Annotated[str, Meta(max_length=4096)] = ""


class OciConfig(Reported, frozen=True, kw_only=True):
    """How an image is meant to be run; a task's specification overrides it."""

    entrypoint: Annotated[list[Argument], Meta(max_length=4096)] = []
    command: Annotated[list[Argument], Meta(max_length=4096)] = []
    environment: Annotated[dict[EnvName, Argument], Meta(max_length=4096)] = {}
    user: Id = ""
    """The user as the image names it. On the host a task's processes have their own user."""
    runs_as: ImageUser | None = None
    """The user that `user` names; None for root. Its files appear as files of the task."""
    working_dir: Annotated[str, Meta(max_length=4096)] = ""
    stop_signal: Id = ""
    """Name of the signal, such as SIGQUIT; empty: SIGTERM."""
