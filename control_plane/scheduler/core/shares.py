"""Limits what the jobs of a reservation may request together, by its own quota.

Reservations on one entitlement run on the same machines (MO16), so the machines of each cannot be
counted: one small task on every machine would use up a whole quota. Instead, the requests of its
jobs are added up by resource. A task that claims half of a machine's memory needs half a machine by
memory; of several kinds of machines, the kind with the least part counts. Tasks that fit on the
quota's machines together need at most the quota by any resource. So no job is refused that fits.

The limit is checked when a job requests more than before. So it does not depend on which machines
are chosen, and a smaller quota ends no running task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from control_plane.allocator.core.demand import Demand, demand_of
from control_plane.allocator.core.feasibility import judge, restricted_to
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.planned_room import PlannedRoom
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.api.policy import Property
from control_plane.api.requirements import NUMBERS
from control_plane.broker.core.capacity import Capacity
from control_plane.scheduler.core.rollout import wanted_tasks
from wire.errors import FieldError

_EPSILON = 1e-6
"""Tolerance as a share of a quota: sums of parts are not exact."""
Need = tuple[str, str]
"""The unit of a quota, machines or RRU, and the resource by which it is needed."""
_OF_KIND = frozenset({*Property, *NUMBERS}) - {"msb", "row", "rack", "machine"}
"""Requirements that count here; places do not: one without machines today may get some later."""


def is_shared(name: str, specs: Mapping[str, EntitlementSpec]) -> bool:
    """Return whether an entitlement shares its machines with others: then its own quota applies."""
    known = specs.get(name)
    return known is not None and (
        known.materialization is not None
        or any(spec.materialization == name for spec in specs.values())
    )


def check_share(
    spec: JobSpec,
    known: JobRecord | None,
    others: Iterable[JobRecord],
    specs: Mapping[str, EntitlementSpec],
    machines: Sequence[Machine],
) -> list[FieldError]:
    """Return why a job wants more than the other jobs of its entitlement leave.

    `machines` are the region's kinds. A job that wants at most what it wanted before is not
    refused.
    """
    if not is_shared(spec.entitlement, specs):
        return []
    shares, others = _Shares(spec.entitlement, specs, machines), list(others)
    before = shares.of(known) if known is not None else defaultdict(float)
    is_own = shares.surge_tasks is None
    wanted = shares.needed([spec], spec.tasks + (spec.update.surge if is_own else 0))
    taken = shares.buffer([spec, *(other.spec for other in others if not other.stopping)])
    for other in others:
        for need, amount in shares.of(other).items():
            taken[need] += amount
    found = []
    for (unit, resource), own in wanted.items():
        need, quota = (unit, resource), shares.quotas.get(unit)
        if quota is None or own <= before[need] + _EPSILON:
            continue
        if own + taken[need] > quota * (1 + _EPSILON):
            found.append(
                f"its tasks need {own:.4g} {unit} by {resource}, the other jobs of"
                f" {spec.entitlement!r} {taken[need]:.4g}, and its own quota is {quota:g}"
            )
    return [FieldError(field="tasks", reason=reason) for reason in found]


class _Shares:
    """The quotas of one entitlement, and what jobs need in their units."""

    def __init__(
        self, name: str, specs: Mapping[str, EntitlementSpec], machines: Sequence[Machine]
    ) -> None:
        own = specs[name]
        base = specs.get(own.materialization or name, own)
        types = own.machine_types or list(own.per_type) or base.machine_types
        self.quotas: dict[str, float] = {}
        if own.machines is not None:
            self.quotas["machines"] = own.machines + own.borrows
        if own.per_type:
            count = sum(own.per_type.values())
            self.quotas["machines"] = min(count, self.quotas.get("machines", count))
        if own.rru is not None:
            self.quotas["RRU"] = own.rru
        self.surge_tasks = own.surge_tasks
        self._datacenter = own.datacenter or base.datacenter
        self._region = own.region or base.region
        self._requires = own.requires
        self._machines = [m for m in machines if not types or m.capacity.machine_type in types]

    def of(self, record: JobRecord) -> defaultdict[Need, float]:
        """Return what a job needs: for all tasks that it has or wants, by its largest version.

        A version that is only kept for a rollback needs nothing.
        """
        is_own = self.surge_tasks is None and not record.stopping
        surge = record.spec.update.surge if is_own else 0
        present = sum(1 for task in record.tasks if is_own or not task.extra)
        tasks = max(wanted_tasks(record) + surge, present)
        runs = {task.version for task in record.tasks}
        return self.needed(
            [record.spec, *(spec for v, spec in record.specs.items() if v in runs)], tasks
        )

    def buffer(self, specs: Sequence[JobSpec]) -> defaultdict[Need, float]:
        """Return what the shared extra tasks need: the most that there may be, of the largest."""
        each = defaultdict[Need, list[float]](list)
        for spec in specs if self.surge_tasks is not None else ():
            most = min(spec.update.surge, self.surge_tasks or 0)
            for need, amount in self._of_task(spec).items() if most else ():
                each[need] += [amount] * most
        found = defaultdict[Need, float](float)
        for need, amounts in each.items():
            found[need] = sum(sorted(amounts, reverse=True)[: self.surge_tasks])
        return found

    def needed(self, versions: Sequence[JobSpec], tasks: int) -> defaultdict[Need, float]:
        """Return how much of a quota `tasks` tasks need; nothing where none of them fits."""
        found = defaultdict[Need, float](float)
        for spec in versions:
            for need, amount in self._of_task(spec).items():
                found[need] = max(found[need], amount * tasks)
        return found

    def _of_task(self, spec: JobSpec) -> dict[Need, float]:
        demand = restricted_to(
            demand_of(spec, self._datacenter, self._requires, self._region), _OF_KIND
        )
        found: dict[Need, float] = {}
        for machine in self._machines:
            capacity = machine.capacity
            if judge(demand, machine, PlannedRoom.whole(capacity)):
                continue
            for resource, part in parts(demand, capacity).items():
                for unit, amount in (("machines", part), ("RRU", part * capacity.rru)):
                    need = (unit, resource)
                    found[need] = min(found.get(need, amount), amount)
        return found


def parts(demand: Demand, capacity: Capacity) -> dict[str, float]:
    """Return the part of each resource of a machine that one task claims, 0 to 1."""
    claimed = {
        "CPU": (demand.cpu_on(capacity), capacity.cpu_room),
        "memory": (demand.memory_bytes, capacity.memory_bytes),
        "GPUs": (demand.gpus, capacity.gpus),
        "network": (demand.network_mbps, capacity.network_mbps),
        "disk": (demand.disk_bytes, capacity.disk_bytes),
    }
    return {name: need / room if room else 0.0 for name, (need, room) in claimed.items()}
