"""A job's request for machines, what its pool may take from the free pool, and the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from control_plane.allocator.core.claims import Change, Claims
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.machine_pools import Bucket, Machine, Pool
from control_plane.allocator.core.preferences import DEFAULT
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import Fit, Neighbour, Preference
from control_plane.api.requirements import Term
from control_plane.broker.core.capacity import micro
from control_plane.portal.core.grants import MachineClass


@dataclass(frozen=True, slots=True)
class Group:
    """Equal tasks of a job."""

    demand: Demand
    tasks: tuple[int, ...]
    leave: frozenset[str] = frozenset()
    """Machines that the tasks must leave; they keep their claims if no other machine has room."""
    avoid: str = ""
    """The machine that the tasks should not run on if there is another."""
    running: bool = True
    """Whether the tasks run on the machines that they claim. Otherwise they leave a machine that
    takes no tasks now, if another has room."""
    among: tuple[Term, ...] = ()
    """Further terms that a machine must meet now; they are not part of the claims."""
    elsewhere: str = ""
    """Another pool that the job is leaving; tasks may stay on its machines."""


@dataclass(frozen=True, slots=True)
class NeighbourJobs:
    """The jobs of its entitlement from which a job stays apart, and those with which it runs."""

    apart_from: tuple[Neighbour, ...] = ()
    together_with: tuple[Neighbour, ...] = ()

    @staticmethod
    def of(spec: JobSpec) -> NeighbourJobs:
        """Return the neighbours that a job names."""
        if not (spec.apart_from or spec.together_with):
            return NO_NEIGHBOURS
        return NeighbourJobs(tuple(spec.apart_from), tuple(spec.together_with))


NO_NEIGHBOURS = NeighbourJobs()


@dataclass(frozen=True, slots=True)
class UnmovedTask:
    """A task that is still on its old machine: its move was allocated but did not happen."""

    task: int
    machine: str
    ports: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Request:
    """All tasks of a job with their demands; a task that is not named loses its machine."""

    job: str
    pool: str
    groups: tuple[Group, ...] = ()
    preferences: tuple[Preference, ...] = DEFAULT
    fit: Fit = Fit.EVEN
    gang: bool = False
    """Whether all tasks without a machine must get one, or none of them."""
    unmoved: tuple[UnmovedTask, ...] = ()
    """Tasks that are not on the machines they claim; their claims are moved back first."""
    neighbours: NeighbourJobs = NO_NEIGHBOURS
    """The neighbours that the job names, if no job record has them; stored with its allocation."""


@dataclass(slots=True)
class Allowance:
    """Which machines of the free pool an entitlement may still take."""

    machines: int | None = None
    """How many machines; None for any number."""
    none_left: str = "the quota of machines is used up"
    """Why it may take no machine once `machines` is 0."""
    micro_rru: int | None = None
    per_type: Mapping[str, int] | None = None
    """Type → how many more may be taken; other types may not be taken."""
    types: frozenset[str] = frozenset()
    """Allowed types; empty for any."""
    datacenter: str | None = None
    """Required data center; None for any."""
    region: str | None = None
    """Required region; None for any."""
    refuses: Callable[[Machine], str] | None = None
    """Returns why a machine may not be taken; empty if it may."""
    refuses_all: Callable[[Bucket], str] | None = None
    """Returns why no empty machine of a bucket may be taken; empty if each must be checked."""
    unpromised: Mapping[MachineClass, int] | None = None
    """Class → how many machines are not promised to others (CP7)."""
    _taken: dict[object, int] = field(default_factory=dict)

    def may_take_from(self, free: Pool) -> bool:
        """Return whether number and types allow to take any machine."""
        if self.machines is not None and self.machines <= 0:
            return False
        return not self.types or any(free.per_type.get(kind) for kind in self.types)

    def lacks(self, machine: Machine) -> str:
        """Return which limit excludes one more machine like this; empty if none does."""
        capacity = machine.capacity
        kind = capacity.machine_type
        if self.datacenter is not None and machine.place.datacenter != self.datacenter:
            return f"not in {self.datacenter}, the data center of the entitlement"
        if self.region is not None and machine.place.region != self.region:
            return f"not in {self.region}, the region of the entitlement"
        if self.types and kind not in self.types:
            return f"type {kind} is not among the entitlement's types"
        if self.machines is not None and self.machines <= 0:
            return self.none_left
        if self.per_type is not None and self.per_type.get(kind, 0) <= self._taken.get(kind, 0):
            return f"the quota of {kind} machines is used up"
        if self.micro_rru is not None and micro(capacity.rru) > self.micro_rru:
            return "the quota of RRU is used up"
        if self.unpromised:
            key = MachineClass.of(machine.capacity, machine.place)
            if self.unpromised.get(key, 1) <= self._taken.get(key, 0):
                return "reserved for others"
        return ""

    def take(self, machine: Machine) -> None:
        """Count a machine as taken."""
        capacity = machine.capacity
        if self.machines is not None:
            self.machines -= 1
        if self.micro_rru is not None:
            self.micro_rru -= micro(capacity.rru)
        kind = capacity.machine_type
        self._taken[kind] = self._taken.get(kind, 0) + 1
        if self.unpromised:
            key = MachineClass.of(machine.capacity, machine.place)
            self._taken[key] = self._taken.get(key, 0) + 1


@dataclass(slots=True)
class Plan:
    """The changes of an allocation, and the tasks that it could not place."""

    change: Change
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    gain: int = 0
    """`RegionIndex.gains` of its pool when it was planned: until they rise, no room is found."""


def same_claim(first: Demand, second: Demand) -> bool:
    """Return whether two demands claim the same room; requirements do not matter."""
    if first is second:
        return True
    return first.size[:6] == second.size[:6] and set(first.ports) == set(second.ports)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to a request: the machines of the job's tasks, and why some tasks have none."""

    claims: Claims | None
    """The claims of all tasks that have a machine; None if no task has. The index owns it."""
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    gain: int = 0
    """`RegionIndex.gains` of its pool when it was planned: until they rise, no room is found."""
