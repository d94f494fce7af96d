"""Which identity a task has, where it finds it, and when the next one is due (docs/adr/0105)."""

from __future__ import annotations

import msgspec

from agent.api import TaskSpec

INSIDE = "/run/twine-identity"
"""Where a task finds its identity; on a file system that is in memory alone."""
IDENTITY, BUNDLE = "identity.pem", "bundle.pem"
"""Private key with its certificates, in one file so that they always match; and the authorities
that peers are verified against."""
RENEW_FROM, RENEW_TO = 0.10, 0.15
"""Share of a certificate's life after which the next one is fetched: most of it is left for a
control plane that is away."""
USABLE_S = 600.0
"""Seconds for which an overdue identity must still be valid for a task to start with it."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent remembers of the identity of a task; no key."""

    entitlement: str
    job: str
    identity: str
    not_after: float
    renew_at: float
    """In seconds since 1970, like `not_after`."""


def belongs(held: Held | None, spec: TaskSpec) -> bool:
    """Return whether an identity is that of the task as it is specified."""
    return held is not None and (held.entitlement, held.job) == (spec.entitlement, spec.job)


def is_due(held: Held | None, spec: TaskSpec, now: float) -> bool:
    """Return whether a task needs its next identity."""
    return held is None or not belongs(held, spec) or now >= held.renew_at


def is_usable(held: Held | None, spec: TaskSpec, now: float) -> bool:
    """Return whether a task may be started with the identity that is there."""
    return held is not None and belongs(held, spec) and now + USABLE_S < held.not_after


def identity_properties(task_id: str, spec: TaskSpec, folder: str) -> dict[str, object]:
    """Return what a unit of a task needs to see the identity in `folder`/TASK.

    The folder is mounted, not the files: what is renamed into it later is seen at once.
    """
    if not spec.identity:
        return {}
    return {"BindReadOnlyPaths": [f"{folder}/{task_id}:{INSIDE}"]}
