"""The identity of a task: the request of its host, and the certificate (docs/adr/0105)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Moment, Pem, Reported


class TaskIdentityRequest(Reported, frozen=True, kw_only=True):
    """A host requests the next certificate of one of its tasks."""

    csr_pem: Pem
    """Certificate request; only its public key is used. The private key stays on the host."""


class TaskCertificate(Reported, frozen=True, kw_only=True):
    """A certificate that identifies its holder as one task."""

    identity: Annotated[str, Meta(max_length=1024)]
    """`spiffe://CLUSTER/entitlement/ENTITLEMENT/job/JOB/task/TASK`, the certificate's only name."""
    certificate_pem: Pem
    """Leaf first, then the issuing authority."""
    not_after: Moment
