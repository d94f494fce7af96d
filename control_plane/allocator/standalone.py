"""An allocator without a control plane, for programs that place jobs themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from control_plane.agents.observations import Observations
from control_plane.agents.region import Region
from control_plane.allocator.allocator import Allocator
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.machines import MachineRecord
from control_plane.api.settings import PortalSettings, SchedulerSettings
from control_plane.broker.brokers import Brokers
from control_plane.broker.keys import prefix_of
from control_plane.portal.portal import Portal
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.runtime import Runtime
from control_plane.store import Store
from control_plane.store.bulk import put_all
from control_plane.store.memory import MemoryStore
from control_plane.store.records import ENTITLEMENTS, encode

_NAME = "allocator"
"""The name of the single allocator that most regions have."""


@asynccontextmanager
async def allocator_over(
    store: Store,
    broker_stores: Mapping[str, Store] | None = None,
    settings: SchedulerSettings | None = None,
    portal: PortalSettings | None = None,
    runtime: Runtime | None = None,
    name: str = _NAME,
) -> AsyncIterator[Allocator]:
    """Run an allocator on open stores, with brokers and portal and without a scheduler.

    Callers use `place`, `plan` and `forget`. Another process may write to `broker_stores`: the
    stores' compare-and-set refuses conflicting writes. Each process needs a `name` of its own, the
    same after a restart: the name marks its holds and its writes.
    """
    runtime = runtime or Runtime()
    brokers = Brokers(store, runtime, broker_stores, "" if name == _NAME else name)
    region = Region(
        brokers, Observations(brokers, runtime), settings or SchedulerSettings(), runtime
    )
    await brokers.load()
    async with allocator_shard(region, store, name, portal) as made:
        yield made


@asynccontextmanager
async def allocator_shard(
    region: Region, store: Store, name: str, portal: PortalSettings | None = None
) -> AsyncIterator[Allocator]:
    """Run one of several allocators of a region: a shard that has some entitlements (AL19).

    The shard has the entitlements and jobs of its own store, and follows all machines. If two
    allocators want the same machine, its broker decides. Each shard needs a name of its own, the
    same after a restart: the name marks its holds at the brokers.
    """
    granted = Portal(store, region.runtime, portal)
    made = Allocator(region, granted, JobTable(store), store, name)
    await granted.load()
    await made.load()
    await made.quotas.promises.load()
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.close()


@asynccontextmanager
async def allocator_of(
    machines: Iterable[MachineRecord],
    entitlements: Mapping[str, EntitlementSpec] | None = None,
    settings: SchedulerSettings | None = None,
) -> AsyncIterator[Allocator]:
    """Run an allocator on machines in memory: plans without a control plane.

    A machine is in the entitlement that its record names, or free. All state is lost at the end.
    """
    async with MemoryStore() as store:
        keys = ((prefix_of(m.location.datacenter) + m.machine, encode(m)) for m in machines)
        await put_all(store, keys)
        granted = (EntitlementRecord(name=n, spec=s) for n, s in (entitlements or {}).items())
        await put_all(store, ((ENTITLEMENTS + e.name, encode(e)) for e in granted))
        async with allocator_over(store, settings=settings) as made:
            yield made
