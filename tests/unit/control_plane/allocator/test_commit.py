"""The commit checks what a pool may take, and the effects of jobs on each other."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from test_place import a_job

from agent.api import Limits, Location
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.standalone import allocator_over
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.machines import Hardware, MachineRecord
from control_plane.api.policy import Neighbour, Preference, Property, Strategy
from control_plane.api.settings import PowerSettings, SchedulerSettings
from control_plane.broker.keys import prefix_of
from control_plane.runtime.runtime import Runtime
from control_plane.store import Store
from control_plane.store.bulk import put_all
from control_plane.store.memory import MemoryStore
from control_plane.store.records import ENTITLEMENTS, encode
from wire.errors import Busy

GIB = 1 << 30
WHOLE = Limits(memory_max_bytes=8 * GIB, cpu_max_cores=4.0)
"""Limits of a task that fills a machine."""


class HastyRuntime(Runtime):
    """Yields to other coroutines at every opportunity, as a region of many machines does."""

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)


def even(*levels: Property) -> list[Preference]:
    return [Preference(property=level, strategy=Strategy.EVEN) for level in levels]


def machines(number: int, types: Sequence[str] = ("web",), rru: float = 4.0) -> list[MachineRecord]:
    """Machines in racks of two, in four rows and two MSBs."""
    return [
        MachineRecord(
            machine=f"m{n}",
            location=Location(
                datacenter="dc1", msb=f"msb{n % 2}", row=f"row{n % 4}", rack=f"rack{n // 2}"
            ),
            machine_type=types[n % len(types)],
            hardware=Hardware(cpus=4, rru=rru, memory_bytes=10 * GIB),
        )
        for n in range(number)
    ]


async def stocked(
    store: Store, listed: Sequence[MachineRecord], granted: Mapping[str, EntitlementSpec]
) -> None:
    await put_all(store, ((prefix_of("dc1") + m.machine, encode(m)) for m in listed))
    records = (EntitlementRecord(name=name, spec=spec) for name, spec in granted.items())
    await put_all(store, ((ENTITLEMENTS + r.name, encode(r)) for r in records))


@asynccontextmanager
async def region(
    listed: Sequence[MachineRecord],
    granted: Mapping[str, EntitlementSpec],
    settings: SchedulerSettings | None = None,
) -> AsyncIterator[Allocator]:
    async with MemoryStore() as store:
        await stocked(store, listed, granted)
        async with allocator_over(store, settings=settings, runtime=HastyRuntime()) as allocator:
            yield allocator


async def place_all(allocator: Allocator, jobs: int, tasks: int, **fields: Any) -> int:
    """Place jobs at the same time; returns how many tasks have a machine."""
    specs = [a_job(tasks, f"j{n}", **{"limits": WHOLE, **fields}) for n in range(jobs)]
    made = await asyncio.gather(*map(allocator.place, specs))
    return sum(len(each.claims or ()) for each in made)


def held(allocator: Allocator, pool: str = "front") -> list[MachineRecord]:
    return allocator.broker.held(pool)


@pytest.mark.behaviour("CP3", "BUG-AL20")
@pytest.mark.parametrize(
    ("jobs", "levels"), [(4, (Property.RACK,)), (8, (Property.ROW, Property.MSB))]
)
async def test_jobs_placed_at_once_never_hold_more_than_the_quota(jobs, levels):
    """Each plan read the allowance when it began, and the commit did not check it again."""
    async with region(machines(100), {"front": EntitlementSpec(machines=10)}) as allocator:
        assert await place_all(allocator, jobs, 9, preferences=even(*levels)) == 10
        assert len(held(allocator)) == 10


@pytest.mark.behaviour("MO6", "BUG-AL20")
async def test_jobs_placed_at_once_keep_to_a_quota_per_type():
    """The same race for quotas per type."""
    granted = {"front": EntitlementSpec(machines=30, per_type={"web": 3, "db": 2})}
    async with region(machines(60, ("web", "db")), granted) as allocator:
        await place_all(allocator, 4, 4, preferences=even(Property.RACK))
        kinds = Counter(record.machine_type for record in held(allocator))
        assert kinds == {"web": 3, "db": 2}


@pytest.mark.behaviour("MO6", "BUG-AL20")
async def test_jobs_placed_at_once_keep_to_a_quota_in_rru():
    """The same race for quotas in RRU."""
    granted = {"front": EntitlementSpec(machines=None, rru=20.0)}
    async with region(machines(60), granted) as allocator:
        await place_all(allocator, 4, 4, preferences=even(Property.RACK))
        assert len(held(allocator)) == 5


@pytest.mark.behaviour("CP7", "BUG-AL20")
async def test_jobs_placed_at_once_leave_others_what_they_were_promised():
    """The same race for machines that are promised to other entitlements."""
    granted = {
        "front": EntitlementSpec(machines=20),
        "back": EntitlementSpec(machines=8, machine_types=["db"]),
    }
    async with region(machines(20, ("web", "db")), granted) as allocator:
        await place_all(allocator, 4, 5, preferences=even(Property.RACK))
        kinds = Counter(record.machine_type for record in held(allocator))
        assert kinds == {"web": 10, "db": 2}


@pytest.mark.behaviour("AL22")
async def test_jobs_placed_at_once_keep_to_a_budget_of_power():
    granted = {"front": EntitlementSpec(machines=60)}
    bears = SchedulerSettings(
        power=PowerSettings(budgets_w={"dc1/msb0": 2_000, "dc1/msb1": 3_000}, overcommit=1.0)
    )
    listed = machines(40)
    for n, record in enumerate(listed):
        hardware = Hardware(cpus=4, rru=4.0, memory_bytes=10 * GIB, power_w=1_000)
        listed[n] = MachineRecord(
            machine=record.machine,
            location=record.location,
            machine_type="web",
            hardware=hardware,
        )
    async with region(listed, granted, bears) as allocator:
        await place_all(allocator, 4, 4, preferences=even(Property.RACK))
        assert Counter(r.location.msb for r in held(allocator)) == {"msb0": 2, "msb1": 3}


@pytest.mark.behaviour("CP3", "BUG-AL20")
async def test_machines_taken_ahead_of_tasks_count_against_the_quota():
    """Moves that improve the spread took machines without a check of the quota."""
    async with region(machines(12), {"front": EntitlementSpec(machines=3)}) as allocator:
        await allocator.place(a_job(1, limits=WHOLE))
        free = [r.machine for r in held(allocator, "")]
        taken = await asyncio.gather(*(allocator.take(name, "front") for name in free[:6]))
        assert sum(taken) == 2
        assert len(held(allocator)) == 3
        assert allocator.index.claims.keys() == {"web"}
        assert await allocator.take("nowhere", "front") is False


async def test_a_neighbour_placed_meanwhile_is_seen_at_the_commit():
    """A plan whose answer is overdue continues without waiting for its turn."""
    async with region(machines(4), {"front": EntitlementSpec(machines=4)}) as allocator:
        first = await allocator.place(a_job(1, "a", apart_from=[Neighbour(job="b")]))
        (claim,) = first.claims or ()
        late = a_job(4, "b")
        request = allocator._request(late)
        stale, times = request, iter(range(99))

        def bound(rules):
            """Return the state at the start of the first plan, and the current state after that."""
            return stale if next(times) < 2 else allocator._affinity.with_terms(rules)

        made = await allocator.allocations.allocate(
            request, lambda: allocator.quotas.allowance(request), "", bound
        )
        assert claim.machine.name not in {c.machine.name for c in made.claims or ()}
        assert allocator.allocations.counts.conflicts == 1


async def test_an_allocation_that_is_overtaken_repeatedly_reports_what_others_received():
    async with region(machines(4), {"front": EntitlementSpec(machines=4)}) as allocator:
        request = allocator._request(a_job(1))
        times = iter(range(99))

        def allowance():
            found = allocator.quotas.allowance(request)
            if next(times) % 2:
                found.machines = 0
            return found

        with pytest.raises(Busy, match="the rest of its entitlement"):
            await allocator.allocations.allocate(request, allowance)
        assert held(allocator) == []
        assert allocator.index.claims == {}
