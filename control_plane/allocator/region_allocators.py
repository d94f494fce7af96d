"""The allocators of one process, and the state that they share (AL19).

Each allocator has the entitlements and jobs of its own store, and an index of all machines. Power,
promises and priorities concern all machines. So all allocators share one `Power`, and each sums up
the quotas of all. When one takes a machine, the others see it in its new pool in the same step.
Allocators in other processes get that change from the brokers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from control_plane.agents.region import Region
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.power import Power
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.waiting import Waiting
from control_plane.api.capacity import EntitlementSpec


@dataclass(frozen=True, slots=True, eq=False)
class AllocatorMember:
    """The parts of one allocator that the others use."""

    index: RegionIndex
    waiting: Waiting
    specs: Callable[[], Mapping[str, EntitlementSpec]]
    refresh: Callable[[Iterable[str]], None]
    quotas_changed: Callable[[], None]


class RegionAllocators:
    """The allocators of one region in this process."""

    def __init__(self, power: Power | None) -> None:
        self.power = power
        self._members: list[AllocatorMember] = []
        self._taking: dict[str, tuple[AllocatorMember, str]] = {}
        """Machine that is being taken → the allocator that takes it, and for which pool."""

    @staticmethod
    def of(region: Region) -> RegionAllocators:
        """Return the shared state of a region's allocators."""
        found = region.shared.get("allocators")
        if not isinstance(found, RegionAllocators):
            found = region.shared["allocators"] = RegionAllocators(Power.of(region.settings.power))
        return found

    def enter(self, member: AllocatorMember) -> None:
        """Add an allocator."""
        self._members.append(member)
        if self.power is not None:
            self.power.listen(member.index.note_gain)
        self.quotas_changed()

    def leave(self, member: AllocatorMember) -> None:
        """Remove an allocator that ends; the power that it uses counts until the process ends."""
        if member in self._members:
            self._members.remove(member)
            if self.power is not None:
                self.power.unlisten(member.index.note_gain)
            self._drop([name for name, (by, _) in self._taking.items() if by is member])
            self.quotas_changed()

    def specs(self) -> dict[str, EntitlementSpec]:
        """Return the granted specifications of all entitlements."""
        return {name: spec for member in self._members for name, spec in member.specs().items()}

    def quotas_changed(self) -> None:
        """Notify each allocator that a portal has changed a grant."""
        for member in self._members:
            member.quotas_changed()

    def waiting(self) -> Iterator[Waiting]:
        """Yield the queues of all allocators."""
        return (member.waiting for member in self._members)

    def served(self) -> None:
        """Let jobs of all allocators try again that waited behind a job that had its turn."""
        for waiting in self.waiting():
            waiting.let_others_try()

    def taking(self, member: AllocatorMember, machines: Iterable[Machine], pool: str) -> None:
        """Notify the other allocators that one takes machines for a pool."""
        names = [machine.name for machine in machines]
        if len(self._members) > 1:
            self._taking.update(dict.fromkeys(names, (member, pool)))
            self._notify_others(member, names)

    def taken(self, member: AllocatorMember, machines: Iterable[Machine]) -> None:
        """Record that an allocator took machines or failed to; the brokers' records have which."""
        names = [m.name for m in machines if self._taking.get(m.name, (None,))[0] is member]
        self._drop(names)

    def pool_of(self, name: str, member: AllocatorMember) -> str | None:
        """Return the pool for which another allocator takes a machine; None if none does."""
        by, pool = self._taking.get(name, (member, None))
        return None if by is member else pool

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            by, _ = self._taking.pop(name)
            self._notify_others(by, [name])

    def _notify_others(self, by: AllocatorMember, names: list[str]) -> None:
        for member in self._members:
            if member is not by:
                member.refresh(names)
