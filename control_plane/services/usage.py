"""What is placed where: the index from machines to tasks, kept from the job records."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from control_plane.api.jobs import JobRecord, TaskPhase, task_id
from control_plane.core.placement import FIRST_PORT, LAST_PORT, Demand, Load, demand_of
from control_plane.core.reconcile import spec_of


@dataclass(frozen=True, slots=True)
class Placed:
    """One task on a machine, or one that must still be removed from it."""

    job: str
    demand: Demand
    ports: tuple[int, ...]
    leaving: bool = False
    """It moved away and must be removed."""
    lost: bool = False
    """Its machine is down; it goes elsewhere as soon as there is room."""


class UsageIndex:
    """Tasks per machine. A placement counts from its reservation on, before it is durable."""

    def __init__(self) -> None:
        """Start empty; `settle` is called for each record."""
        self._on: dict[str, dict[str, Placed]] = defaultdict(dict)
        self._of: dict[str, dict[tuple[str, str], Placed]] = {}
        self._next_port: dict[str, int] = {}

    def settle(self, job: str, record: JobRecord | None) -> None:
        """Make a job's entries exactly those of its stored record."""
        entries = _entries(record) if record is not None else {}
        for machine, task in self._of.get(job, {}).keys() - entries.keys():
            del self._on[machine][task]
        self._add(job, entries)
        self._of[job] = entries
        if record is None:
            del self._of[job]

    def reserve(self, job: str, record: JobRecord) -> None:
        """Add the entries of a record that is about to be stored, removing none yet."""
        entries = _entries(record)
        self._add(job, entries)
        self._of[job] = self._of.get(job, {}) | entries

    def tasks(self, machine: str) -> dict[str, Placed]:
        """Return the tasks of a machine, by id."""
        return self._on[machine]

    def jobs(self, machine: str) -> set[str]:
        """Return the jobs that have tasks on a machine."""
        return {placed.job for placed in self._on[machine].values()}

    def load(self, machine: str, without: frozenset[str] = frozenset()) -> Load:
        """Return what the tasks of a machine may use, some tasks left out."""
        memory, cores, ports = 0, 0.0, set[int]()
        for task, placed in self._on[machine].items():
            if task not in without:
                memory += placed.demand.memory_bytes
                cores += placed.demand.cpu_cores
                ports.update(placed.ports)
        return Load(memory, cores, frozenset(ports))

    def leaving(self, machine: str) -> list[str]:
        """Return tasks that must be gone before the machine takes new ones."""
        return [task for task, placed in self._on[machine].items() if placed.leaving]

    def next_port(self, machine: str) -> int:
        """Return where to look for free ports: behind those given out last."""
        return self._next_port.get(machine, FIRST_PORT)

    def _add(self, job: str, entries: dict[tuple[str, str], Placed]) -> None:
        known = self._of.get(job, {})
        for (machine, task), placed in entries.items():
            if known.get((machine, task)) == placed:
                continue
            self._on[machine][task] = placed
            if placed.ports:
                after = max(placed.ports) + 1
                self._next_port[machine] = after if after <= LAST_PORT else FIRST_PORT


def _entries(record: JobRecord) -> dict[tuple[str, str], Placed]:
    entries: dict[tuple[str, str], Placed] = {}
    demands = {version: demand_of(spec) for version, spec in record.specs.items()}
    for task in record.tasks:
        if task.placement is not None:
            demand = demands.get(task.version) or demand_of(spec_of(record, task))
            ports = tuple(sorted(task.placement.ports.values()))
            key = (task.placement.machine, task_id(record.name, task.index))
            lost = task.phase is TaskPhase.LOST
            entries[key] = Placed(record.name, demand, ports, lost=lost)
    for machine, ids in record.leaving.items():
        for name in ids:
            entries[(machine, name)] = Placed(record.name, Demand(0), (), leaving=True)
    return entries
