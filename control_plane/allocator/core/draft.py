"""A plan while it is made, with the room that it takes and frees. The index does not change."""

from __future__ import annotations

import zlib

from control_plane.allocator.core.claims import Change, Claim
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import Room
from control_plane.allocator.core.machine_pools import Binned, Bucket, Cell, Machine, Pool
from control_plane.allocator.core.partition import Bins
from control_plane.allocator.core.planned_room import PlannedRoom
from control_plane.allocator.core.power import Budget
from control_plane.allocator.core.preferences import Ranking
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Request
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import Place


class Draft:
    """A plan while it is made, with the room that it takes and frees."""

    def __init__(self, index: RegionIndex, request: Request, allowance: Allowance) -> None:
        self.request = request
        self.allowance = allowance
        self.index = index
        self.totals = index.totals()
        self.free = index.pool(FREE)
        self.ranking = Ranking(request.preferences)
        self.change = Change(request.job, request.pool)
        self.planned_rooms: dict[Machine, PlannedRoom] = {}
        """The room on machines on which the plan takes or frees room."""
        self.single_tasks: dict[Machine, Demand] = {}
        """Machine with one task so far → its demand; its `PlannedRoom` is made when it is read."""
        self.tasks_on: dict[Machine, int] = {}
        """Machine → tasks of the job there, present and planned."""
        self.taken: set[Machine] = set()
        self.freeing_buckets: set[Bucket] = set()
        """Buckets in which the request itself frees room."""
        self.taken_by_bucket: dict[Bucket, list[Machine]] = {}
        """The machines that were taken for other tasks of the request."""
        self.power = index.power
        self.powered_on: set[Machine] = set()
        """Machines that get their first task by this plan."""
        self._watts: dict[Budget, int] = {}
        """Power budget → watts that the machines of `powered_on` draw."""
        self.uses_up_power = False
        """Whether machines were skipped because the plan itself uses up their power."""
        self.with_own_bins: set[Machine] = set()
        """Machines with their own bins, because a preference concerns single machines."""
        self.skipped_avoided = False
        """Whether a machine was skipped only because the group should avoid it."""
        self.was_refused = False
        """Whether the entitlement refused machines; such a refusal may end at any moment."""
        self._refused: dict[Bucket, str] = {}
        self.reasons: list[str] = []
        self.claims = index.claims.get(request.job)
        self.moving: dict[int, Claim] = {}
        """Task that should leave its machine → its present claim."""
        self.first_bin = zlib.crc32(request.job.encode())
        """Selects the first of equal bins, so that not all jobs begin at the same bin."""

    @property
    def pool(self) -> Pool:
        """The pool, read again each time: a pool without machines may be dropped meanwhile."""
        return self.index.pool(self.request.pool)

    def give_own_bins(self, machine: Machine, binned: Binned) -> Bins:
        """Give a machine its own bins; return them."""
        self.with_own_bins.add(machine)
        bins = self.ranking.bins(machine)
        assert isinstance(binned, dict)
        binned.setdefault(bins, []).append(Cell(machine.bucket, [machine], has_own_bins=True))
        return bins

    def free_claim(self, claim: Claim) -> None:
        """Remove a task from its machine; other tasks of the request may use its room."""
        self.change.freed.append(claim)
        if not self.request.groups:
            return
        self.freeing_buckets.add(claim.machine.bucket)
        self.planned_room(claim.machine).take(claim.demand, claim.machine.capacity, -1)

    def keep_tasks_in_place(self, begun: int) -> None:
        """Swap machines among equal tasks (claims from `begun` on), so that most tasks stay."""
        claims = self.change.claims[begun:]
        if not claims or not self.change.freed:
            return
        before = {claim.task: claim.machine for claim in self.change.freed}
        places: dict[Machine, list[Claim]] = {}
        for claim in claims:
            places.setdefault(claim.machine, []).append(claim)
        found: dict[int, Claim] = {}
        for task in [claim.task for claim in claims if claim.task in before]:
            if claims_there := places.get(before[task]):
                found[task] = claims_there.pop()
        if not found:
            return
        rest = (claim for those in places.values() for claim in those)
        self.change.claims[begun:] = [
            (found.get(claim.task) or next(rest))._replace(task=claim.task) for claim in claims
        ]

    def planned_room(self, machine: Machine) -> PlannedRoom:
        """Return the plan's copy of a machine's room."""
        planned_room = self.planned_rooms.get(machine)
        if planned_room is None:
            planned_room = self.planned_rooms[machine] = PlannedRoom(machine)
            demand = self.single_tasks.pop(machine, None)
            if demand is not None:
                planned_room.take(demand, machine.capacity)
        return planned_room

    def room(self, machine: Machine) -> Room:
        """Return the room on a machine, including the plan's changes."""
        if machine in self.planned_rooms or machine in self.single_tasks:
            return self.planned_room(machine)
        return machine

    def reserve_power(self, machine: Machine) -> None:
        """Count the power of a machine that gets a task."""
        if self.power is None or machine.jobs or machine in self.powered_on:
            return
        self.powered_on.add(machine)
        for budget in self.power.budgets_of(machine.place):
            self._watts[budget] = self._watts.get(budget, 0) + machine.capacity.power_w

    def has_power(self, place: Place, watts: int) -> bool:
        """Return whether a place has power for the first task of another machine."""
        power = self.power
        if power is None or power.has(place, watts, self._watts):
            return True
        self.uses_up_power = self.uses_up_power or power.has(place, watts)
        return False

    def is_short(self, machine: Machine) -> bool:
        """Return whether a machine lacks the power for a first task."""
        if self.power is None or machine in self.powered_on:
            return False
        return self.power.short(machine, self._watts) is not None

    def why_short(self, machine: Machine) -> str:
        """Describe the lack of power; empty if there is none."""
        if self.power is None or machine in self.powered_on:
            return ""
        return self.power.describe_lack(machine, self._watts)

    def take(self, machine: Machine) -> None:
        """Take a machine from the free pool."""
        self.taken.add(machine)
        self.change.takes.append(machine)
        self.allowance.take(machine)

    def refuses_all(self, bucket: Bucket) -> str:
        """Return why the entitlement refuses all these free machines; empty if it does not."""
        why = self._refused.get(bucket)
        if why is None:
            refuses_all = self.allowance.refuses_all
            why = self._refused[bucket] = refuses_all(bucket) if refuses_all is not None else ""
        self.was_refused = self.was_refused or bool(why)
        return why

    def refuses(self, machine: Machine) -> str:
        """Return why the entitlement refuses this free machine; empty if it does not."""
        refuses = self.allowance.refuses
        why = refuses(machine) if refuses is not None else ""
        self.was_refused = self.was_refused or bool(why)
        return why
