"""What jobs claim of machines: one object per job, not one per task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from control_plane.core.feasibility import Demand
from control_plane.core.machine_pools import Machine

if TYPE_CHECKING:
    from control_plane.core.region_index import Change


class Claim(NamedTuple):
    """One task on one machine."""

    task: int
    """Its index in the job."""
    machine: Machine
    demand: Demand
    ports: dict[str, int] | None = None


class Claims:
    """The machines of one job's tasks, by index: one object per job, not one per task."""

    __slots__ = (
        "_others",
        "_ports",
        "demand",
        "job",
        "machines",
        "needs_usable",
        "pool",
        "reserved",
        "valid",
    )

    def __init__(self, job: str, pool: str) -> None:
        """Claim nothing yet."""
        self.job = job
        self.pool = pool
        self.machines: list[Machine | None] = []
        self.demand: Demand | None = None
        """Of all tasks but those in `_others`."""
        self.valid = True
        """Whether the machines are as they were when they were chosen (AL13)."""
        self.needs_usable = True
        """Whether that includes that they take tasks: it does not matter to tasks that run."""
        self.reserved: Change | None = None
        """What is charged to machines already, but not settled."""
        self._others: dict[int, Demand] = {}
        self._ports: dict[int, dict[str, int]] = {}

    def set(self, claim: Claim) -> None:
        """Add a task, or give it another machine."""
        task, machine, demand, ports = claim
        missing = task + 1 - len(self.machines)
        if missing > 0:
            self.machines.extend([None] * missing)
        self.machines[task] = machine
        if self.demand is None:
            self.demand = demand
        if demand is not self.demand and demand != self.demand:
            self._others[task] = demand
        elif self._others:
            self._others.pop(task, None)
        if ports:
            self._ports[task] = ports
        elif self._ports:
            self._ports.pop(task, None)

    def extend(self, first: int, machines: Iterable[Machine | None], demand: Demand) -> None:
        """Add tasks that claim the same, and no ports, behind all others; None: no machine."""
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
        """Forget a task."""
        self.machines[index] = None
        self._others.pop(index, None)
        self._ports.pop(index, None)
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
        return Claim(index, machine, demand, self._ports.get(index) if self._ports else None)

    def __iter__(self) -> Iterator[Claim]:
        """Yield the claims of all tasks that have a machine, by index."""
        for index in range(len(self.machines)):
            claim = self.get(index)
            if claim is not None:
                yield claim

    def __len__(self) -> int:
        """Return how many tasks have a machine."""
        return len(self.machines) - self.machines.count(None)
