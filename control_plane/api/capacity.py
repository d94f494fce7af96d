"""Entitlements: who may use how many machines, of which types, under which host profile."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Name


class EntitlementSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pseudo-dedicated share of the region's machines (paper §2.2)."""

    machines: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Quota: the most machines it holds at any time; it holds as many as its jobs need."""
    machine_types: list[Name] = []
    """Hardware types it may hold; empty: any."""
    host_profile: Name = "base"
    """Every machine of the entitlement runs it (HP1, MO11)."""
    business_unit: str = ""


class EntitlementRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An entitlement as it is stored."""

    schema: int = 1
    name: str
    spec: EntitlementSpec
    generation: int = 1
    created_at: float = 0.0


class EntitlementView(msgspec.Struct, frozen=True, kw_only=True):
    """An entitlement as the front end shows it."""

    record: EntitlementRecord
    held: list[str] = []
    """Machines assigned to it now."""
    jobs: list[str] = []


class Entitlements(msgspec.Struct, frozen=True, kw_only=True):
    """All entitlements of the region."""

    entitlements: list[EntitlementView]
