"""The identity of a task: what its host asks for, and what it gets (docs/adr/0105)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Moment, Pem, Reported


class TaskIdentityRequest(Reported, frozen=True, kw_only=True):
    """A host asks for the next certificate of a task that it was given."""

    csr_pem: Pem
    """For a key that was made on the host and never leaves it; only its public half is taken."""


class TaskCertificate(Reported, frozen=True, kw_only=True):
    """A certificate that identifies its holder as one task."""

    identity: Annotated[str, Meta(max_length=1024)]
    """`spiffe://CLUSTER/entitlement/ENTITLEMENT/job/JOB/task/TASK`, the only name in it."""
    certificate_pem: Pem
    """Leaf first, then the issuing authority."""
    not_after: Moment
