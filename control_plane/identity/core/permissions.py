"""Whether a user may make a call, and which right is missing if not.

The rule of a call is in its row of the route table (`Needs`); its objects are entitlements with
their owners. A call without a rule admits no caller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from control_plane.api.people import Needs


@dataclass(frozen=True, slots=True)
class Caller:
    """A user or a local process, with its roles."""

    name: str
    is_operator: bool = False
    is_approver: bool = False
    is_host_admin: bool = False
    groups: frozenset[str] = frozenset()

    def is_among(self, principals: Collection[str]) -> bool:
        """Return whether `user:NAME` or `group:NAME` entries include this caller."""
        mine = {f"user:{self.name}", *(f"group:{group}" for group in self.groups)}
        return not mine.isdisjoint(principals)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The missing right, and how to get it."""

    reason: str
    hint: str


OwnersByEntitlement = Mapping[str, Sequence[str] | None]
"""Entitlement → its owners; None: there is no such entitlement."""


def refusal(
    needs: str, caller: Caller, about: OwnersByEntitlement, owns_any: bool = False
) -> Refusal | None:
    """Return why a caller may not make a call; None: the caller may.

    `about` are the entitlements that the call concerns.
    """
    if caller.is_operator or needs == Needs.VIEWER:
        return None
    if needs in (Needs.OWNER, Needs.ASKER):
        return _refusal_unless_owner(caller, about, may_be_new=needs == Needs.ASKER)
    if needs == Needs.ANY_OWNER:
        if owns_any:
            return None
        return Refusal(
            f"{caller.name} owns no entitlement",
            "request one: twinectl entitlement request NAME --machines N",
        )
    if needs == Needs.APPROVER:
        if caller.is_approver:
            return None
        return Refusal(
            f"{caller.name} may not decide requests",
            "ask an operator, or one of portal.approvers in the configuration",
        )
    return Refusal(
        f"{caller.name} is not an operator",
        f"ask an operator (twinectl role list): twinectl role grant user:{caller.name} operator",
    )


def _refusal_unless_owner(
    caller: Caller, about: OwnersByEntitlement, *, may_be_new: bool
) -> Refusal | None:
    for name, owners in sorted(about.items()):
        if owners is None and not may_be_new:
            return Refusal(f"there is no entitlement {name!r}", "twinectl entitlement list")
        if owners is not None and not caller.is_among(owners):
            listed = ", ".join(owners[:5]) or "the operators only"
            return Refusal(
                f"{caller.name} does not own entitlement {name!r}, which belongs to {listed}",
                f"ask an owner or an operator: twinectl entitlement update {name}"
                f" --add-owner user:{caller.name}",
            )
    return None


def refusal_without_sandbox(caller: Caller, job: str) -> Refusal | None:
    """Return why a caller may not run tasks without a sandbox; None: the caller may.

    No role includes this, not even an operator's: it is granted by name, and the audit log has the
    grant (docs/adr/0092).
    """
    if caller.is_host_admin:
        return None
    return Refusal(
        f"tasks of job {job} have no sandbox (`raw`), and {caller.name} is not a host admin",
        f"ask an operator: twinectl role grant user:{caller.name} host-admin",
    )
