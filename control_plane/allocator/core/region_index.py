"""The index for planning: every machine of a region, and every job's claims on machines.

Plans are made in steps, and the index may change between them. `reserve` judges every machine of
the plan again and takes all of it or nothing (optimistic concurrency control, paper §2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from control_plane.allocator.core.claims import (
    Change,
    Claim,
    Claims,
    charge,
    holders,
    uncharge,
    without_one,
)
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import judge
from control_plane.allocator.core.freed_room import FreedRoom
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.power import Power
from control_plane.allocator.core.region_machines import RegionMachines
from control_plane.broker.core.assignment import FREE

T = TypeVar("T")
STEP = 500
"""Tasks that are charged between two checkpoints of the loop."""


class RegionIndex(RegionMachines):
    """Every machine of the region and every job's claims on them."""

    def __init__(self, power: Power | None = None) -> None:
        """Without `power` no place has a power budget."""
        super().__init__(power)
        self.claims: dict[str, Claims] = {}

    def remove(self, name: str) -> None:
        """Remove a machine, and all claims on it."""
        machine = self.machines.pop(name, None)
        if machine is None:
            return
        self._invalidate(machine)
        for claims in dict.fromkeys(holders(machine)):
            for claim in list(claims):
                if claim.machine is machine:
                    claims.unset(claim.task)
            if not claims.machines and claims.reserved is None:
                del self.claims[claims.job]
        self._drop_if_empty(self._leave(machine))
        self._release_power(machine)
        self._kinds.count(machine.capacity, machine.place, -1)
        self.losses += not machine.blocked
        machine.blocked, machine.at = "is gone", -1  # plans that use it fail

    def restore(self, job: str, pool: str, claims: Iterable[Claim]) -> None:
        """Restore claims that were decided earlier, whether or not they would fit today."""
        known = self.claims.setdefault(job, Claims(job, pool))
        for claim in (claims := list(claims)):
            self._charge((known,), claim)
        known.set(claims)
        for machine in dict.fromkeys(claim.machine for claim in claims):
            self._reclassify(machine)

    def restore_equal(
        self, job: str, pool: str, first: int, machines: Sequence[Machine | None], demand: Demand
    ) -> None:
        """Do `restore` for equal tasks without ports: task `first` and those after it.

        The index must not have these or later tasks of the job. None means no machine.
        """
        placed = [machine for machine in machines if machine is not None]
        if not placed:
            return
        claims = self.claims.setdefault(job, Claims(job, pool))
        claims.extend(first, machines, demand)
        only, capacity, cpu = (claims,), None, 0
        for machine in placed:
            if machine.capacity is not capacity:
                capacity = machine.capacity
                cpu = demand.cpu_on(capacity)
            machine.free_cpu -= cpu
            machine.free_memory -= demand.memory_bytes
            machine.free_gpus -= demand.gpus
            machine.free_network -= demand.network_mbps
            if demand.disk_bytes:
                machine.free_disk -= demand.disk_bytes
            if self.power is not None and not machine.jobs:
                self.power.reserve_power(machine)
            machine.jobs = machine.jobs + only if machine.jobs else only
        for machine in dict.fromkeys(placed):
            self._reclassify(machine)

    def reserve(self, change: Change) -> tuple[str, ...]:
        """Take the room of a plan, or nothing; then return the machines that lack it.

        The change can use the room that it frees at once. Other changes get that room after
        `settle`: until then a crash would undo the change.
        """
        return run_to_end(self.reserving(change))

    def reserving(
        self, change: Change, refused_machines: Callable[[], Iterable[str]] = tuple
    ) -> Generator[None, None, tuple[str, ...]]:
        """Do `reserve` in steps of bounded time.

        `refused_machines` returns the machines that the change may no longer use. It is called in
        the step that takes machines for the pool.
        """
        wanted = {claim.machine for claim in change.claims}
        for start in range(0, len(change.freed), STEP):
            if start:
                yield
            some = change.freed[start : start + STEP]
            self._record_freed_room(change, [claim for claim in some if claim.machine in wanted])
            change.granted = start + STEP
        claims = self.claims.get(change.job)
        if claims is None:
            claims = self.claims[change.job] = Claims(change.job, change.pool)
        claims.reserved = change
        conflicts = [m.name for m in change.takes if not self._is_takeable(m)]
        conflicts += () if conflicts else refused_machines()
        if not conflicts:
            change.took = True
            for machine in change.takes:
                self._taking[machine.name] = change.pool
                self._move(machine, change.pool)
        for start in range(0, len(change.claims), STEP):
            if conflicts:
                break
            if start:
                yield
            job = (claims,)  # one object for all machines: the garbage collector visits each
            for claim in change.claims[start : start + STEP]:
                if not self._charge_if_fits(change, job, claim):
                    conflicts.append(claim.machine.name)
                    break
        if conflicts:
            self.rollback(change)
        return tuple(conflicts)

    def settle(self, change: Change) -> list[Machine]:
        """Make a reserved change final; return the machines that have no tasks left."""
        self.end_taking(change)
        return run_to_end(self.settling(change))

    def end_taking(self, change: Change) -> None:
        """Record that brokers have assigned the taken machines: now their records are valid."""
        for machine in change.takes:
            self._end_taking(machine, change.pool)

    def settling(self, change: Change) -> Generator[None, None, list[Machine]]:
        """Do `settle` without `end_taking`, in steps of bounded time."""
        claims = self.claims[change.job]
        for start in range(0, len(change.freed), STEP):
            if start:
                yield
            for claim in change.freed[start : start + STEP]:
                if claim.machine.at >= 0:
                    self._uncharge(claims, claim)
                    freed_room = change.freed_rooms.get(claim.machine)
                    if freed_room is not None:
                        freed_room.release(claim.machine, claim.demand)
                    claims.unset(claim.task)
                    self._reclassify(claim.machine)
        claims.pool = change.pool
        claims.set(claim for claim in change.claims if claim.machine.at >= 0)
        self._end_reservation(claims)
        return [m for m in dict.fromkeys(c.machine for c in change.freed) if not m.jobs]

    def rollback(self, change: Change) -> None:
        """Undo `reserve`, or the part of it that is done."""
        claims = self.claims[change.job]
        for claim in change.claims[: change.charged]:
            self._uncharge(claims, claim)
        for machine, freed_room in change.freed_rooms.items():
            freed_room.pay(machine)
        for claim in change.claims[: change.charged]:
            self._reclassify(claim.machine)
        change.charged = 0
        if change.took:
            for machine in change.takes:
                self._end_taking(machine, FREE)
        change.took = False
        change.freed_rooms = {}
        self._end_reservation(claims)

    def _end_reservation(self, claims: Claims) -> None:
        claims.reserved = None
        if not claims.machines:
            del self.claims[claims.job]

    @staticmethod
    def _record_freed_room(change: Change, freed: list[Claim]) -> None:
        """Record the room that a change frees; its own claims on these machines may use it."""
        for claim in freed:
            freed_room = change.freed_rooms.get(claim.machine)
            if freed_room is None:
                freed_room = change.freed_rooms[claim.machine] = FreedRoom()
            freed_room.add(claim.demand, claim.machine.capacity)

    def _charge_if_fits(self, change: Change, job: tuple[Claims], claim: Claim) -> bool:
        """Charge a machine for one task of a change, if it has room and belongs to the pool."""
        machine, demand = claim.machine, claim.demand
        if machine.bucket.pool.name != change.pool:
            return False
        ports = machine.ports
        if claim.ports and ports and not ports.taken.isdisjoint(claim.ports.values()):
            return False
        freed_room = change.freed_rooms.get(machine) if change.freed_rooms else None
        if freed_room is not None:
            freed_room.lend(machine)
        fits = not judge(demand, machine, machine)
        if fits and self.power is not None:
            fits = not self._is_short(machine)
        if fits:
            self._charge(job, claim)
            change.charged += 1
        if freed_room is not None:
            freed_room.take_back(machine)
        if machine.at >= 0:
            machine.bucket.reclassify(machine)
        return fits

    def _end_taking(self, machine: Machine, pool: str) -> None:
        """End the taking of a machine: from now on it is in the pool that its broker reports."""
        if self._taking.pop(machine.name, None) is None:
            return
        pool = self._reported.pop(machine.name, pool)
        if pool != machine.pool and machine.at >= 0:
            self._move(machine, pool)
            self._invalidate(machine)

    def _is_takeable(self, machine: Machine) -> bool:
        return (
            machine.pool == FREE
            and not (machine.jobs or machine.blocked)
            and machine.name not in self._taking
        )

    def _charge(self, job: tuple[Claims], claim: Claim) -> None:
        machine = claim.machine
        if self.power is not None and not machine.jobs:
            self.power.reserve_power(machine)
        machine.jobs += job
        charge(claim)

    def _uncharge(self, claims: Claims, claim: Claim) -> None:
        machine = claim.machine
        machine.jobs = without_one(holders(machine), claims)
        if not machine.jobs:
            self._release_power(machine)
        uncharge(claim)
        self._count_gain(machine.bucket)

    def _reclassify(self, machine: Machine) -> None:
        if machine.at >= 0:
            machine.bucket.reclassify(machine)


def run_to_end(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
