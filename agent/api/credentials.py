"""Credentials that an agent holds for tasks: what is told of them, never what they are."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Bytes, Id, Moment, Reported


class CredentialInfo(Reported, frozen=True, kw_only=True):
    """That there is one. Its value leaves the agent towards systemd alone."""

    entitlement: Id
    name: Id
    size_bytes: Bytes
    put_at: Moment
    """Seconds since 1970."""


class Credentials(Reported, frozen=True, kw_only=True):
    """All credentials that a host holds."""

    credentials: Annotated[list[CredentialInfo], Meta(max_length=100_000)]
