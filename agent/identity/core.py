"""Rules for identities of tasks: which fits, where to mount it, when to renew (docs/adr/0105)."""

from __future__ import annotations

import msgspec

from agent.api import TaskSpec

INSIDE = "/run/twine-identity"
"""Folder with the identity inside a task; on a file system in memory."""
IDENTITY, BUNDLE = "identity.pem", "bundle.pem"
"""File with the private key and its certificates, which therefore always match; and file with the
trusted authorities."""
RENEW_FROM, RENEW_TO = 0.10, 0.15
"""Share of a certificate's life after which the next one is fetched. The rest covers an outage of
the control plane."""
USABLE_S = 600.0
"""Seconds for which an overdue identity must still be valid for a task to start with it."""


class StoredIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the identity of a task that the agent stores; no key."""

    entitlement: str
    job: str
    identity: str
    not_after: float
    renew_at: float
    """Seconds since 1970, like `not_after`."""


def fits_task(held: StoredIdentity | None, spec: TaskSpec) -> bool:
    """Return whether an identity fits the specification of a task."""
    return held is not None and (held.entitlement, held.job) == (spec.entitlement, spec.job)


def is_due(held: StoredIdentity | None, spec: TaskSpec, now: float) -> bool:
    """Return whether a task needs its next identity."""
    return held is None or not fits_task(held, spec) or now >= held.renew_at


def is_usable(held: StoredIdentity | None, spec: TaskSpec, now: float) -> bool:
    """Return whether a task may be started with this identity."""
    return held is not None and fits_task(held, spec) and now + USABLE_S < held.not_after


def identity_properties(task_id: str, spec: TaskSpec, folder: str) -> dict[str, object]:
    """Return the unit properties that mount the identity in `folder`/TASK.

    The folder is mounted, not the files, so that the unit sees files that are replaced later.
    """
    if not spec.identity:
        return {}
    return {"BindReadOnlyPaths": [f"{folder}/{task_id}:{INSIDE}"]}
