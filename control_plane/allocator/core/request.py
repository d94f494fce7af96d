"""What a job asks of the allocator, what its pool may take for it, and the plan it gets."""

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


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks of a job that are alike."""

    demand: Demand
    tasks: tuple[int, ...]
    leave: frozenset[str] = frozenset()
    """Machines that they must leave; they keep their claim there if there is no other machine."""
    avoid: str = ""
    """The machine that they should not run on, if there is another."""
    running: bool = True
    """They run where their claims are. Otherwise a claim on a machine that takes no tasks now is
    only kept if there is no other."""
    among: tuple[Term, ...] = ()
    """What else a machine must meet for these tasks now; it is no part of what they claim."""
    elsewhere: str = ""
    """Another pool, on whose machines they stay where their claims are: the job is leaving it."""


@dataclass(frozen=True, slots=True)
class Near:
    """Which jobs of its entitlement a job keeps apart from, and to which it goes."""

    apart_from: tuple[Neighbour, ...] = ()
    together_with: tuple[Neighbour, ...] = ()

    @staticmethod
    def of(spec: JobSpec) -> Near:
        """Return what a job says of others."""
        if not (spec.apart_from or spec.together_with):
            return ALONE
        return Near(tuple(spec.apart_from), tuple(spec.together_with))


ALONE = Near()


@dataclass(frozen=True, slots=True)
class Back:
    """A task that is still on its old machine: its move was allocated and not carried out."""

    task: int
    machine: str
    ports: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Request:
    """What a job needs, whole: tasks that are not named give their machines back."""

    job: str
    pool: str
    groups: tuple[Group, ...] = ()
    preferences: tuple[Preference, ...] = DEFAULT
    fit: Fit = Fit.EVEN
    gang: bool = False
    """All tasks without a machine get one, or none of them does."""
    back: tuple[Back, ...] = ()
    """Tasks that are not where their claims are: the claims follow before all else."""
    near: Near = ALONE
    """What the job says of others, if no job record has it: stored with its allocation."""


@dataclass(slots=True)
class Allowance:
    """Which machines of the free pool an entitlement may still take."""

    machines: int | None = None
    """None: as many as there are."""
    micro_rru: int | None = None
    per_type: Mapping[str, int] | None = None
    """Type → how many more; other types may not be taken."""
    types: frozenset[str] = frozenset()
    """Empty: any."""
    datacenter: str | None = None
    """None: any."""
    region: str | None = None
    """None: any."""
    refuses: Callable[[Machine], str] | None = None
    """Why this one may not be taken, empty if it may."""
    refuses_all: Callable[[Bucket], str] | None = None
    """Why none of these without tasks may be taken; empty: each is checked separately."""
    unpromised: Mapping[tuple[str, str, int, str], int] | None = None
    """Type, data center, millionths of RRU and region → how many are not promised to others
    (CP7)."""
    _taken: dict[object, int] = field(default_factory=dict)

    def may_take_from(self, free: Pool) -> bool:
        """Return whether any machine may be taken, as far as number and types go."""
        if self.machines is not None and self.machines <= 0:
            return False
        return not self.types or any(free.per_type.get(kind) for kind in self.types)

    def lacks(self, machine: Machine) -> str:
        """Return which quota keeps another such machine out; empty: none."""
        capacity = machine.capacity
        kind = capacity.machine_type
        if self.datacenter is not None and machine.place.datacenter != self.datacenter:
            return f"not in {self.datacenter}, the data center of the entitlement"
        if self.region is not None and machine.place.region != self.region:
            return f"not in {self.region}, the region of the entitlement"
        if self.types and kind not in self.types:
            return f"type {kind} is not among the entitlement's types"
        if self.machines is not None and self.machines <= 0:
            return "the quota of machines is used up"
        if self.per_type is not None and self.per_type.get(kind, 0) <= self._taken.get(kind, 0):
            return f"the quota of {kind} machines is used up"
        if self.micro_rru is not None and micro(capacity.rru) > self.micro_rru:
            return "the quota of RRU is used up"
        if self.unpromised:
            key = _class_key(machine)
            if self.unpromised.get(key, 1) <= self._taken.get(key, 0):
                return "reserved for others"
        return ""

    def take(self, machine: Machine) -> None:
        """Count a machine that is taken."""
        capacity = machine.capacity
        if self.machines is not None:
            self.machines -= 1
        if self.micro_rru is not None:
            self.micro_rru -= micro(capacity.rru)
        kind = capacity.machine_type
        self._taken[kind] = self._taken.get(kind, 0) + 1
        if self.unpromised:
            key = _class_key(machine)
            self._taken[key] = self._taken.get(key, 0) + 1


def _class_key(machine: Machine) -> tuple[str, str, int, str]:
    capacity, place = machine.capacity, machine.place
    return (capacity.machine_type, place.datacenter, micro(capacity.rru), place.region)


@dataclass(slots=True)
class Plan:
    """The changes of an allocation, and the tasks that it could not place."""

    change: Change
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    gain: int = 0
    """`RegionIndex.gains` of its pool when it was made: until they rise, nothing has room."""


def same_claim(one: Demand, other: Demand) -> bool:
    """Return whether two demands claim the same room, whatever machines they are for."""
    return one is other or (one.size[:6] == other.size[:6] and set(one.ports) == set(other.ports))


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to a request: where the job's tasks are, and why some are nowhere."""

    claims: Claims | None
    """The claims of all tasks that have a machine; None: no task has. Belongs to the index."""
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    gain: int = 0
    """`RegionIndex.gains` of its pool when it was planned: until they rise, nothing has room."""
