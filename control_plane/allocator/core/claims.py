"""The claims of jobs on machines: one object per job, not one per task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import FIRST_PORT, LAST_PORT, take_room
from control_plane.allocator.core.freed_room import FreedRoom
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.ports import Ports


class Claim(NamedTuple):
    """One task on one machine."""

    task: int
    """Its index in the job."""
    machine: Machine
    demand: Demand
    ports: dict[str, int] | None = None


@dataclass(slots=True)
class Change:
    """The claims and machines that one allocation adds, frees and takes; a plan makes it."""

    job: str
    pool: str
    claims: list[Claim] = field(default_factory=list)
    freed: list[Claim] = field(default_factory=list)
    takes: list[Machine] = field(default_factory=list)
    """Free machines that the pool gets."""
    freed_rooms: dict[Machine, FreedRoom] = field(default_factory=dict)
    """Freed room on machines that only the change itself may use."""
    charged: int = 0
    """How many of the claims, in order, are charged to their machines."""
    granted: int = 0
    """How many of the freed claims, in order, are in `freed_rooms`."""
    took: bool = False
    """Whether the machines of `takes` are in the pool because of this change."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not (self.claims or self.freed or self.takes)


class Claims:
    """The machines of one job's tasks, by task index."""

    __slots__ = (
        "_others",
        "demand",
        "job",
        "machines",
        "needs_usable",
        "pool",
        "ports",
        "reserved",
        "valid",
    )

    def __init__(self, job: str, pool: str) -> None:
        self.job = job
        self.pool = pool
        self.machines: list[Machine | None] = []
        self.demand: Demand | None = None
        """The demand of all tasks except those in `_others`."""
        self.valid = True
        """Whether the machines are unchanged since they were chosen (AL13)."""
        self.needs_usable = True
        """Whether the claims become invalid when a machine takes no tasks; False if tasks run."""
        self.reserved: Change | None = None
        """A change that is charged to machines but not settled."""
        self._others: dict[int, Demand] = {}
        self.ports: dict[int, dict[str, int]] = {}
        """The ports of tasks that have any, by task index."""

    def set(self, claims: Iterable[Claim]) -> None:
        """Add tasks, or change their machines."""
        machines, others, named = self.machines, self._others, self.ports
        for task, machine, demand, ports in claims:
            missing = task - len(machines)
            if missing > 0:
                machines.extend([None] * missing)
            if missing >= 0:
                machines.append(machine)
            else:
                machines[task] = machine
            if self.demand is None:
                self.demand = demand
            if demand is not self.demand and demand != self.demand:
                others[task] = demand
            elif others:
                others.pop(task, None)
            if ports:
                named[task] = ports
            elif named:
                named.pop(task, None)

    def extend(self, first: int, machines: Iterable[Machine | None], demand: Demand) -> None:
        """Add tasks with equal demands and without ports after all others; None for no machine."""
        self.machines.extend([None] * (first - len(self.machines)))
        self.machines.extend(machines)
        while self.machines and self.machines[-1] is None:
            self.machines.pop()
        if self.demand is None:
            self.demand = demand
        if demand != self.demand:
            for task in range(first, len(self.machines)):
                if self.machines[task] is not None:
                    self._others[task] = demand

    def unset(self, index: int) -> None:
        """Remove the claim of a task, if it has one."""
        if index < len(self.machines):
            self.machines[index] = None
        self._others.pop(index, None)
        self.ports.pop(index, None)
        while self.machines and self.machines[-1] is None:
            self.machines.pop()
        if not self.machines:
            self.demand = None

    def get(self, index: int) -> Claim | None:
        """Return the claim of a task."""
        machine = self.machines[index] if index < len(self.machines) else None
        if machine is None or self.demand is None:
            return None
        demand = self._others.get(index, self.demand) if self._others else self.demand
        return Claim(index, machine, demand, self.ports.get(index) if self.ports else None)

    def __iter__(self) -> Iterator[Claim]:
        """Yield the claims of all tasks that have a machine, by index."""
        for index in range(len(self.machines)):
            claim = self.get(index)
            if claim is not None:
                yield claim

    def between(self, first: int, last: int) -> tuple[list[int], list[Machine], list[Demand]]:
        """Return the tasks of a range that have a machine, their machines and demands.

        It makes no object per task, because a job may have a million tasks.
        """
        machines = [machine for machine in self.machines[first:last] if machine is not None]
        tasks = list(range(first, first + len(machines)))
        if len(machines) < min(last, len(self.machines)) - first:
            pairs = enumerate(self.machines[first:last], first)
            tasks = [task for task, machine in pairs if machine is not None]
        if self.demand is None:
            return [], [], []
        demands = [self.demand] * len(tasks)
        if self._others:
            demands = [self._others.get(task, self.demand) for task in tasks]
        return tasks, machines, demands

    def copy(self) -> Claims:
        """Return a copy for use in a thread, while the loop changes these claims."""
        made = Claims(self.job, self.pool)
        made.machines, made.demand = self.machines.copy(), self.demand
        made._others, made.ports = self._others.copy(), self.ports.copy()
        return made

    def after(self, change: Change) -> Claims:
        """Return the claims as they will be after a change is settled."""
        made = self.copy()
        made.pool = change.pool
        for claim in change.freed:
            made.unset(claim.task)
        made.set(change.claims)
        return made

    def demands(self) -> tuple[list[Demand], list[int]]:
        """Return the different demands, and for each task which of them it has.

        The second list is empty if all tasks have the first demand.
        """
        if self.demand is None:
            return [], []
        if not self._others:
            return [self.demand], []
        found: dict[Demand, int] = {}
        seen: dict[int, int] = {}
        """The same by `id`: there are few demands, and comparing them is slow."""
        which = []
        for task, machine in enumerate(self.machines):
            demand = self._others.get(task, self.demand)
            number = 0 if machine is None else seen.get(id(demand))
            if number is None:
                number = seen[id(demand)] = found.setdefault(demand, len(found))
            which.append(number)
        return list(found), which if len(found) > 1 else []

    def __len__(self) -> int:
        """Return how many tasks have a machine."""
        return len(self.machines) - self.machines.count(None)


def holders(machine: Machine) -> tuple[Claims, ...]:
    """Return the claims of the jobs on a machine, once per task; only `region_index` adds any."""
    return cast(tuple[Claims, ...], machine.jobs)


def recounted_cpu(machine: Machine) -> int:
    """Return the free CPU of a machine, in grains of its present capacity."""

    def cpu(claims: Iterable[Claim]) -> int:
        return sum(c.demand.cpu_on(machine.capacity) for c in claims if c.machine is machine)

    free = machine.capacity.cpu_room
    for claims in dict.fromkeys(holders(machine)):
        free -= cpu(claims)
        change = claims.reserved
        if change is None:
            continue
        wanted = cpu(change.claims[: change.charged])
        free -= wanted
        freed_room = change.freed_rooms.get(machine)
        if freed_room is not None:
            freed = [c for c in change.freed[: change.granted] if claims.get(c.task) == c]
            free += freed_room.recount_cpu(cpu(freed), wanted)
    return free


def charge(claim: Claim) -> None:
    """Subtract the room and the ports of a claim from its machine."""
    machine = claim.machine
    take_room(machine, claim.demand, machine.capacity)
    if claim.ports:
        if machine.ports is None:
            machine.ports = Ports()
        machine.ports.taken.update(claim.ports.values())
        last = max(claim.ports.values())
        machine.ports.next = FIRST_PORT if last >= LAST_PORT else last + 1


def uncharge(claim: Claim) -> None:
    """Add the room and the ports of a claim to its machine again."""
    machine = claim.machine
    if claim.ports and machine.ports:
        machine.ports.taken.difference_update(claim.ports.values())
    take_room(machine, claim.demand, machine.capacity, -1)


def without_one(jobs: tuple[Claims, ...], claims: Claims | None) -> tuple[Claims, ...]:
    """Return the jobs without one occurrence of a job."""
    for position, job in enumerate(jobs):
        if job is claims:
            return jobs[:position] + jobs[position + 1 :]
    return jobs
