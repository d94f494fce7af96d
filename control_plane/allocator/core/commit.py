"""Checks at the commit whether a plan is still allowed; moves claims back to where tasks are.

A plan is made in steps, and other jobs of the pool take machines meanwhile. So the limits are
checked again in the step that reserves the plan (`RegionIndex.reserving`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from control_plane.allocator.core.claims import Change, Claim, Claims
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Request
from control_plane.broker.core.matching import holds


def without_terms(request: Request) -> Request:
    """Return the same request: no terms follow from other jobs."""
    return request


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request with its conditions, which are evaluated again for each plan."""

    request: Request
    allowance: Callable[[], Allowance]
    """Returns the machines that its pool may take now."""
    profile: str = ""
    with_terms: Callable[[Request], Request] = without_terms
    """Adds the present terms that follow from other jobs."""

    def refused_machines(self, change: Change) -> list[str]:
        """Return the machines that a plan for this request may no longer use."""
        request = self.with_terms(self.request)
        if not change.takes and request is self.request:
            return []
        return refused_machines(change, request, self.allowance())


def refused_machines(change: Change, request: Request, allowance: Allowance) -> list[str]:
    """Return the machines that the pool may no longer take, or the job no longer use.

    `allowance` and the terms of `request` must be the present ones; `allowance` is changed.
    """
    refused = []
    for machine in change.takes:
        if allowance.lacks(machine):
            refused.append(machine.name)
        allowance.take(machine)
    terms = {task: group.among for group in request.groups if group.among for task in group.tasks}
    if terms:
        for claim in change.claims:
            if not all(holds(term, claim.machine) for term in terms.get(claim.task, ())):
                refused.append(claim.machine.name)
    return refused


def move_back_change(
    request: Request, claims: Claims | None, machines: Mapping[str, Machine]
) -> Change:
    """Return the change that moves claims back to the machines where their tasks still are."""
    change = Change(request.job, claims.pool if claims is not None else request.pool)
    for unmoved in request.unmoved:
        claim = claims.get(unmoved.task) if claims is not None else None
        machine = machines.get(unmoved.machine)
        if claim is not None and machine is not None and claim.machine is not machine:
            change.freed.append(claim)
            change.claims.append(
                Claim(unmoved.task, machine, claim.demand, dict(unmoved.ports) or None)
            )
    return change


def move_claims_back(index: RegionIndex, change: Change) -> list[Machine]:
    """Move claims to the machines of their tasks, whether or not they fit there.

    Return the machines that have no tasks after that.
    """
    freed = Change(change.job, change.pool, freed=change.freed)
    index.reserve(freed)
    emptied = index.settle(freed)
    present = [claim for claim in change.claims if claim.machine.at >= 0]
    index.restore(change.job, change.pool, present)
    return [machine for machine in emptied if not machine.jobs]
