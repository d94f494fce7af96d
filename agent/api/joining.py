"""Requests of a host to the control plane: joining a region, and renewing its identity."""

from __future__ import annotations

from agent.api import Location, MachineFacts
from agent.api.ranges import Address, Id, Moment, Name, Pem, Pins, Reported


class JoinRequest(Reported, frozen=True, kw_only=True):
    """A host asks to become a machine of the region."""

    token: Id
    """`twn1.<id>.<secret>`, made for this host and for one use."""
    machine: Name
    csr_pem: Pem
    """Certificate request; the key never leaves the host."""
    address: Address
    """`host:port` at which the control plane reaches the agent."""
    location: Location = Location()
    machine_type: Name = "small"
    facts: MachineFacts


class Certificate(Reported, frozen=True, kw_only=True):
    """The identity that a host was given."""

    machine: Id
    certificate_pem: Pem
    """Leaf first, then the issuing authority."""
    ca_pem: Pem
    """All authorities to trust from now on, the issuing one first."""
    not_after: Moment
    cluster: Id = ""
    """Trust domain; empty from a control plane of an earlier release."""
    location: Location | None = None
    """Location of the machine in the inventory; only after a join, None from an earlier release."""
    machine_type: Name | None = None
    """Type of the machine in the inventory, like `location`."""


class RenewRequest(Reported, frozen=True, kw_only=True):
    """A joined host asks for its next certificate."""

    csr_pem: Pem
    trusts: Pins = []
    """Pins of the authorities that the host trusts now; empty from an earlier release."""
    boot_id: Id = ""
    """Boot id of the host; empty from an earlier release."""


class Authority(Reported, frozen=True, kw_only=True):
    """The certificate authority, to be compared with a pin before it is trusted."""

    ca_pem: Pem
