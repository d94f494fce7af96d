"""Places jobs apart from other jobs of their entitlement, or together with them.

The machines for a job depend on where related jobs are when it is placed. So related jobs are
placed one at a time. The planner gets the places of the others as terms that machines must meet
(`Group.among`). Tasks that have a machine stay there when other jobs change.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

from control_plane.allocator.core.feasibility import bin_of
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import NO_NEIGHBOURS, NeighbourJobs, Request
from control_plane.api.policy import Neighbour, Property
from control_plane.api.requirements import Because, In, Not, Term


class JobAffinity:
    """The relations between jobs, and the terms for their placement that follow."""

    def __init__(self, index: RegionIndex) -> None:
        self._index = index
        self._neighbours: dict[str, NeighbourJobs] = {}
        """Job → the neighbours that it names; without jobs that name none."""
        self._named_by: dict[str, dict[str, None]] = defaultdict(dict)
        """Job → the jobs that name it."""
        self._placed_alone: dict[str, int] = {}
        """Jobs that are being placed, and were related to no other job when that began."""
        self._placement_ended = asyncio.Event()
        """Set when one of these jobs is placed, and replaced by a new event."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def note(self, job: str, neighbours: NeighbourJobs | None) -> None:
        """Record which other jobs a job names; None if the job is gone."""
        for neighbour in _all_neighbours(self._neighbours.pop(job, NO_NEIGHBOURS)):
            named = self._named_by[neighbour.job]
            named.pop(job, None)
            if not named:
                del self._named_by[neighbour.job]
        if neighbours is not None and neighbours != NO_NEIGHBOURS:
            self._neighbours[job] = neighbours
            for neighbour in _all_neighbours(neighbours):
                self._named_by[neighbour.job][job] = None

    def begin_alone(self, job: str) -> bool:
        """Return whether no other job is related to a job; then record it until `ended`."""
        if job in self._neighbours or job in self._named_by:
            return False
        self._placed_alone[job] = self._placed_alone.get(job, 0) + 1
        return True

    def end_alone(self, job: str) -> None:
        """Record that the placement of a job that began alone has ended."""
        left = self._placed_alone[job] = self._placed_alone[job] - 1
        if not left:
            del self._placed_alone[job]
            if self._turns:  # a related job may wait for this
                self._placement_ended.set()
                self._placement_ended = asyncio.Event()

    @asynccontextmanager
    async def turn(self, request: Request) -> AsyncIterator[None]:
        """Wait until no related job is being placed; none begins within this context."""
        async with self._turns[request.pool]:
            while any(other in self._placed_alone for other in self._others(request.job)):
                await self._placement_ended.wait()
            yield

    def with_terms(self, request: Request, neighbours: NeighbourJobs | None = None) -> Request:
        """Return a request with the terms that follow from the present places of related jobs.

        `near` replaces the neighbours that the job names; None for the recorded ones.
        """
        job = request.job
        if neighbours is None:
            neighbours = self._neighbours.get(job, NO_NEIGHBOURS)
        if neighbours == NO_NEIGHBOURS and job not in self._named_by:
            return request
        terms = tuple(self._terms(job, neighbours))
        groups = tuple(replace(group, among=(*group.among, *terms)) for group in request.groups)
        return replace(request, groups=groups)

    def placed(self, job: str) -> frozenset[Machine] | None:
        """Return the machines of a job if another job depends on them; else None."""
        awaited = any(
            neighbour.job == job
            for other in self._named_by.get(job, ())
            for neighbour in self._neighbours[other].together_with
        )
        return frozenset(self._machines(job)) if awaited else None

    def _others(self, job: str) -> Iterator[str]:
        yield from self._named_by.get(job, ())
        for neighbour in _all_neighbours(self._neighbours.get(job, NO_NEIGHBOURS)):
            yield neighbour.job

    def _terms(self, job: str, neighbours: NeighbourJobs) -> Iterator[Term]:
        for neighbour in neighbours.apart_from:
            yield from self._terms_apart(neighbour.job, neighbour.property)
        for other in self._named_by.get(job, ()):
            for neighbour in self._neighbours[other].apart_from:
                if neighbour.job == job:
                    yield from self._terms_apart(other, neighbour.property)
        for neighbour in neighbours.together_with:
            bins = self._bins(neighbour.job, neighbour.property)
            why = f"not in the {neighbour.property} of a task of {neighbour.job}"
            yield Because(In(neighbour.property, bins), why)

    def _terms_apart(self, other: str, property_: Property) -> Iterator[Term]:
        if taken := self._bins(other, property_):
            yield Because(Not(In(property_, taken)), f"in the {property_} of a task of {other}")

    def _bins(self, job: str, property_: Property) -> frozenset[str]:
        return frozenset(bin_of(property_, machine) for machine in set(self._machines(job)))

    def _machines(self, job: str) -> Iterator[Machine]:
        """Yield the machines where tasks of a job are, or will be soon."""
        claims = self._index.claims.get(job)
        if claims is None:
            return
        yield from (machine for machine in claims.machines if machine is not None)
        if claims.reserved is not None:
            yield from (claim.machine for claim in claims.reserved.claims)


def _all_neighbours(neighbours: NeighbourJobs) -> tuple[Neighbour, ...]:
    return (*neighbours.apart_from, *neighbours.together_with)
