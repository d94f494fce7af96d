"""Images of the Open Container Initiative on the agent's wire: what is fetched, what is known."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import END, Argument, EnvName, Id, Moment, Reported, Written

REFERENCE_PATTERN = (
    r"^[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?(:[0-9]{1,5})?"
    r"(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?" + END
)
"""REGISTRY[:PORT]/REPOSITORY[:TAG][@DIGEST]; repository and tag as the distribution
specification has them. The registry is always named: there is no default one."""
Reference = Annotated[
    str,
    Meta(
        pattern=REFERENCE_PATTERN,
        max_length=512,
        description="REGISTRY[:PORT]/REPOSITORY[:TAG][@sha256:…]",
    ),
]


def asked_for_as(reference: str) -> str:
    """Return the message of the first event of a pull: the name that was asked for."""
    return f"asked for as {reference}"


class OciPull(Written, frozen=True, kw_only=True):
    """A request to fetch an image from a registry."""

    reference: Reference


class Arrival(Reported, frozen=True, kw_only=True):
    """An image that is being taken in."""

    name: Annotated[str, Meta(max_length=512)]
    """Its reference in a registry, or the digest of what is sent."""
    began_at: Moment


class Arrivals(Reported, frozen=True, kw_only=True):
    """All images that are being taken in, the oldest first."""

    images: Annotated[list[Arrival], Meta(max_length=100_000)]


class ArrivalName(Written, frozen=True, kw_only=True):
    """A request to give up an image that is being taken in."""

    name: Annotated[str, Meta(max_length=512)]
    """As `Arrival.name` has it."""


class ImageUser(Reported, frozen=True, kw_only=True):
    """The user that an image is run as: what the image's own lists say of it."""

    uid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    """The task owns the files of this user in the image; 0 in a writable root alone."""
    gid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    name: Id = ""
    """Empty for a number that the image does not list."""
    home: Annotated[str, Meta(max_length=4096)] = ""
    shell: Annotated[str, Meta(max_length=4096)] = ""
    group: Id = ""
    users: Annotated[str, Meta(max_length=4096)] = ""
    """Where the list with the name is, below the image's top and without links."""
    groups: Annotated[str, Meta(max_length=4096)] = ""


class OciConfig(Reported, frozen=True, kw_only=True):
    """How an image wants to be run; a task's specification overrides it."""

    entrypoint: Annotated[list[Argument], Meta(max_length=4096)] = []
    command: Annotated[list[Argument], Meta(max_length=4096)] = []
    environment: Annotated[dict[EnvName, Argument], Meta(max_length=4096)] = {}
    user: Id = ""
    """As the image has it. A task's processes have a user of their own all the same."""
    runs_as: ImageUser | None = None
    """The user that `user` names; None for root. Its files appear as the task's own."""
    working_dir: Annotated[str, Meta(max_length=4096)] = ""
    stop_signal: Id = ""
    """Its name, such as SIGQUIT; empty: SIGTERM."""
