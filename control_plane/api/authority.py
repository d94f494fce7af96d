"""The certificate authority as it is shown, and the steps by which operators replace its root."""

from __future__ import annotations

import enum

import msgspec

from agent.api.ranges import Id, Moment, Pins


class Step(enum.StrEnum):
    """A step of the exchange of one root for another."""

    PREPARE = "prepare"
    """A new root is made and trusted; it does not issue certificates yet."""
    ACTIVATE = "activate"
    """The new root issues certificates; the former one is still trusted."""
    RETIRE = "retire"
    """The former root is no longer trusted."""
    ABANDON = "abandon"
    """The new root is removed before it issued anything."""


class RootState(enum.StrEnum):
    """The purpose of a root."""

    ACTIVE = "active"
    COMING = "coming"
    FORMER = "former"


class RotationStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator takes a step."""

    step: Step
    force: bool = False
    """Take the step even if it locks out hosts or users."""


class HostTrust(msgspec.Struct, frozen=True, kw_only=True):
    """The roots that a host trusts, as reported at its last renewal, and its issuer."""

    schema: int = 1
    trusts: Pins = []
    issuer: Id = ""


class RootView(msgspec.Struct, frozen=True, kw_only=True):
    """One root."""

    ca_hash: str
    state: RootState
    ends_at: Moment
    trusted_by: int
    """Hosts that reported it."""
    used_by: int
    """Hosts whose certificate it issued."""


class AuthorityView(msgspec.Struct, frozen=True, kw_only=True):
    """The authority of a region."""

    roots: list[RootView]
    hosts: int
    """Hosts that have joined."""
    behind: list[str]
    """Some of the hosts that must renew first; the control plane has requested that."""
    next: Step
    hinders: list[str]
    """The hosts and users that the next step would lock out, as text."""
