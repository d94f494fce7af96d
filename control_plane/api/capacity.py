"""Entitlements: how many machines an owner may use, their types, and their host profile."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Name, Relaxations
from agent.api.signing import PublicKeys
from control_plane.api.elastic import Elastic
from control_plane.api.people import Principal
from control_plane.api.policy import Expression, Overcommit, Preference


class EntitlementSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pseudo-dedicated share of the region's machines (paper §2.2)."""

    machines: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """Quota: the most machines it holds at any time; it holds as many as its jobs need. 0: only
    machines that are lent to it (`elastic.borrow`)."""
    per_type: Annotated[
        dict[Name, Annotated[int, Meta(ge=1, le=1_000_000)]], Meta(max_length=1000)
    ] = {}
    """Quota by machine type, such as 2,000 Skylake machines (MO6); other types are not held."""
    rru: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Quota in relative resource units; all given quotas apply together."""
    machine_types: Annotated[list[Name], Meta(max_length=1000)] = []
    """Hardware types it may hold; empty: any."""
    datacenter: Name | None = None
    """Pins its machines and jobs to one data center (CP10)."""
    region: Name | None = None
    """Pins its machines and jobs to one region, so that a regional shard may own it; None: it is
    global. `datacenter` holds in addition."""
    requires: Annotated[list[Expression], Meta(max_length=16)] = []
    """Hard requirements of all its jobs, in addition to their own (docs/requirements-grammar.md).
    They do not change how the quota is counted: by type, region and data center."""
    preferences: Annotated[list[Preference], Meta(max_length=16)] | None = None
    """Spread policy of its jobs, unless they have their own; None: the region's default."""
    overcommit: Overcommit = Overcommit()
    """The most that its jobs may opt in to."""
    materialization: Name | None = None
    """Another entitlement on whose machines this one is a stackable reservation (MO16);
    None: it is a pseudo cluster of its own."""
    surge_tasks: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Limit of extra tasks (`update.surge`) that run at once in all jobs of the entitlement
    together (docs/updates.md); None: each job has its own room for them."""
    host_profile: Name = "base"
    """Every machine of the entitlement has this host profile (HP1, MO11)."""
    image_keys: PublicKeys = []
    """One of these keys must have signed each image of its jobs (docs/security.md); empty: no
    signature is required."""
    relaxations: Relaxations = []
    """Relaxations of the sandbox that its jobs may have though not every job may: `own-init`,
    `nested`. Only a user who may decide requests can allow more of these (docs/security.md)."""
    business_unit: Annotated[str, Meta(max_length=256)] = ""
    """A path in the accounting hierarchy: `ads/ranking`."""
    owners: Annotated[list[Principal], Meta(max_length=100)] = []
    """Users and groups that may deploy into it and change it: `user:ann`, `group:web`."""
    priority: Annotated[int, Meta(ge=0, le=1000)] = 500
    """Order in which entitlements get free machines when there are too few; higher first (CP6)."""
    elastic: Elastic | None = None
    """What it lends and borrows; None: its machines are not lent, and it borrows none."""

    @property
    def borrows(self) -> int:
        """Return the maximum number of machines that it may borrow."""
        return self.elastic.borrow if self.elastic is not None else 0


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
    """Machines assigned to it now; to its materialization, where it is a reservation."""
    jobs: list[str] = []
    pending: list[str] = []
    """Requests for it that wait for a decision."""


class Entitlements(msgspec.Struct, frozen=True, kw_only=True):
    """All entitlements of the region."""

    entitlements: list[EntitlementView]


class RequestState(StrEnum):
    """How far a request is."""

    PENDING = "pending"
    """It waits for a user who may decide."""
    APPROVED = "approved"
    """It is in force."""
    DENIED = "denied"
    WITHDRAWN = "withdrawn"
    """The requester withdrew it."""


Note = Annotated[str, Meta(max_length=1000)]


class EntitlementChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to create or change an entitlement, or to remove it."""

    spec: EntitlementSpec | None = None
    """What is wanted; None: remove it."""
    reason: Note = ""
    """Shown to the users who decide."""
    queue: bool = False
    """Let another user decide, even if it would be granted at once or does not fit yet."""
    dry_run: bool = False
    """Only report the outcome: nothing is stored."""


class DecisionNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's note on a decision."""

    note: Note = ""


class EntitlementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is stored (CP1, CP12)."""

    schema: int = 1
    request_id: str
    entitlement: str
    spec: EntitlementSpec | None
    """None: remove it."""
    based_on: int = 0
    """Generation of the entitlement that the requester saw; 0: there was none."""
    requester: str
    reason: str = ""
    created_at: float
    state: RequestState = RequestState.PENDING
    why_pending: str = ""
    """Why it was not granted at once."""
    decided_by: str = ""
    """Empty if the rules granted it, or while it is undecided."""
    decided_at: float | None = None
    note: str = ""
    warnings: list[str] = []
    """Limits that the requester should expect; reported once, in the answer."""


class EntitlementRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, the oldest first."""

    requests: list[EntitlementRequest]
