"""What is told of the certificate authority, and what operators do to it."""

from __future__ import annotations

import enum

import msgspec

from agent.api.ranges import Id, Moment, Pins


class Step(enum.StrEnum):
    """A step of the exchange of one root for another."""

    PREPARE = "prepare"
    """A new root is made and trusted; it issues nothing yet."""
    ACTIVATE = "activate"
    """It issues; the one before is still trusted."""
    RETIRE = "retire"
    """The one before is trusted no more."""
    ABANDON = "abandon"
    """The new root is dropped before it issued anything."""


class RootState(enum.StrEnum):
    """What a root is there for."""

    ACTIVE = "active"
    COMING = "coming"
    FORMER = "former"


class RotationStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator takes a step."""

    step: Step
    force: bool = False
    """Also if it locks hosts or users out."""


class HostTrust(msgspec.Struct, frozen=True, kw_only=True):
    """What a host trusts, as it said when it renewed last, and who issued its certificate."""

    schema: int = 1
    trusts: Pins = []
    issuer: Id = ""


class RootView(msgspec.Struct, frozen=True, kw_only=True):
    """One root."""

    ca_hash: str
    state: RootState
    ends_at: Moment
    trusted_by: int
    """Hosts that said so."""
    used_by: int
    """Hosts whose certificate it issued."""


class AuthorityView(msgspec.Struct, frozen=True, kw_only=True):
    """The authority of a region."""

    roots: list[RootView]
    hosts: int
    """Hosts that have joined."""
    behind: list[str]
    """Some of those that have to renew first; they are asked to."""
    next: Step
    hinders: list[str]
    """Who would be locked out by the next step, in words."""
