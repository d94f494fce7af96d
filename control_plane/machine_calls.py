"""The calls of the front end about machines, and the views of machines for other services."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from agent.api.joining import JoinRequest
from control_plane.agents.observations import Observations
from control_plane.agents.pool import AgentPool
from control_plane.allocator.allocator import Allocator
from control_plane.api.duplicates import Duplicate
from control_plane.api.machines import MachineRecord, Machines, MachineView
from control_plane.broker.brokers import Brokers
from control_plane.broker.service import MachineService
from control_plane.health.checker import HealthChecker
from control_plane.identity.core.duplicates import describe_clone
from control_plane.portal.core.report import Used
from control_plane.portal.portal import Portal
from control_plane.rebalancer.core.loads import modelled_w
from control_plane.running_shards import RunningShards
from control_plane.runtime.runtime import Runtime
from control_plane.shards.ownership import OwnershipMap


class MachineCalls:
    """Answers from the brokers and observations of this process; a part of `ControlPlane`."""

    ask_shard: Callable[[int, str], Awaitable[None]]
    inventory: MachineService
    ownership: OwnershipMap
    shards: RunningShards
    identity_ends: Mapping[str, float]
    duplicates: Mapping[str, Duplicate]
    _allocator: Allocator
    _broker: Brokers
    _checker: HealthChecker
    _observations: Observations
    _pool: AgentPool
    _portal: Portal
    _runtime: Runtime

    async def list_machines(self) -> Machines:
        """Return all machines, by name."""
        return Machines(
            machines=[self._machine_view(record) for record in self._broker.table.records()]
        )

    async def get_machine(self, name: str) -> MachineView:
        """Return a machine, or raise `NotFound`."""
        return self.inventory.get(name)

    async def joined(self, request: JoinRequest) -> MachineRecord:
        """Record a host with a proved identity; updates the record of a known one."""
        return await self._broker.join(request)

    async def disconnect(self, machine: str) -> None:
        """Close the connections to a machine's agent, whose identity is no longer valid."""
        await self._pool.drop(machine)

    async def release_idle(self, entitlement: str) -> None:
        """Return the empty machines of an entitlement to the free pool."""
        shard = self.shards.find_pool(entitlement)
        if shard is not None:
            await shard.keeper.release_idle(entitlement)
        else:
            await self.ask_shard(self.ownership.shard_of(entitlement), entitlement)

    # -- for other services

    def _find_allocator(self, pool: str) -> Allocator | None:
        """Return the allocator of the shard that owns a pool; None: another process runs it."""
        shard = self.shards.find_pool(pool)
        return None if shard is None else shard.allocator

    def _claimed(self, record: MachineRecord) -> Used:
        """Return the RRU and the memory in bytes that tasks claim of a machine."""
        owner = self._find_allocator(record.entitlement)
        machine = (owner or self._allocator).index.machines.get(record.machine)
        if machine is None:
            return Used()
        capacity = machine.capacity
        rru = capacity.rru_of(capacity.cpu_room - machine.free_cpu)
        memory = capacity.memory_bytes - machine.free_memory
        return Used(max(0.0, rru), max(0, memory))

    def _tasks_of(self, machine: str) -> tuple[int, bool]:
        """Return how many tasks a machine has, and whether its agent answers."""
        tasks = self._allocator.directory.tasks(machine)
        return len(tasks), self._observations.peek(machine).answering

    def _power_draw(self, record: MachineRecord) -> tuple[float, float]:
        """Return the promised share of a machine's CPU, and its draw in watts by the model."""
        hardware, facts = record.hardware, record.facts
        size = (hardware.rru if hardware else 0.0) or float(facts.cpus if facts else 0)
        share = self._claimed(record).rru / size if size else 0.0
        return share, modelled_w(hardware.power_w if hardware else 0, share)

    def _profile_of(self, entitlement: str) -> str:
        """Return the host profile of an entitlement's own machines; empty: it has none."""
        record = self._portal.table.find(entitlement)
        return "" if record is None or record.spec.materialization else record.spec.host_profile

    def _machine_view(self, record: MachineRecord) -> MachineView:
        """Return the API's view of a machine."""
        observation = self._observations.observation(record.machine)
        now, clone = self._runtime.now(), self.duplicates.get(record.machine)
        return MachineView(
            record=record,
            tasks=sorted(self._allocator.directory.tasks(record.machine)),
            ready=observation.answering,
            last_seen_s=None
            if observation.last_contact_at is None
            else now - observation.last_contact_at,
            health=self._checker.held_reason(record.machine),
            identity_not_after=self.identity_ends.get(record.machine),
            duplicate=describe_clone(clone) if clone is not None else "",
        )
