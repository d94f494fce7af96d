"""Random lives of an allocator: jobs of one entitlement at once, labels, power, restarts.

These invariants hold throughout. An entitlement holds at most its quota, and a power budget keeps
its limit. The store agrees with the index. A machine is in one entitlement. No task waits while it
has room.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed
from regions import check
from test_commit import HastyRuntime, even, stocked
from test_place import a_job

from agent.api import Limits, Location
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.core.feasibility import judge
from control_plane.allocator.core.request import Group, Request, UnmovedTask
from control_plane.allocator.standalone import allocator_over
from control_plane.api.allocations import AllocationRecord
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.machine_commands import MarkDown, MarkUp
from control_plane.api.machines import Hardware, MachineRecord
from control_plane.api.policy import Neighbour, Property
from control_plane.api.settings import PowerSettings, SchedulerSettings
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.labels import relabelled
from control_plane.store.memory import MemoryStore
from control_plane.store.records import ALLOCATIONS, decode

GIB = 1 << 30
QUOTAS = {"front": 5, "back": 4}
POWER = SchedulerSettings(power=PowerSettings(budgets_w={"dc1/msb0": 500}, overcommit=1.0))
SIZES = [
    Hardware(cpus=8, rru=4.0, memory_bytes=16 * GIB, power_w=100),
    Hardware(cpus=2, rru=4.0, memory_bytes=16 * GIB, power_w=100),
    Hardware(cpus=8, rru=4.0, memory_bytes=16 * GIB, power_w=100, gpus=4),
]
"""Sizes of one type and RRU; no bucket may treat them as equal."""
PREFERENCES = [None, even(Property.RACK), even(Property.MSB, Property.RACK)]


def a_region() -> list[MachineRecord]:
    return [
        MachineRecord(
            machine=f"m{n}",
            location=Location(datacenter="dc1", msb=f"msb{n % 2}", rack=f"rack{n // 2}"),
            machine_type="web",
            hardware=SIZES[n % 3],
            labels={"disk": "fast"} if n % 3 else {},
        )
        for n in range(14)
    ]


JOBS = st.builds(
    lambda pool, tasks, cpus, gpus, preferences, requires, apart: {
        "entitlement": pool,
        "tasks": tasks,
        "limits": Limits(memory_max_bytes=GIB, cpu_max_cores=cpus),
        "gpus": gpus,
        "preferences": preferences,
        "requires": requires,
        "apart_from": [Neighbour(job=job) for job in apart],
    },
    st.sampled_from(sorted(QUOTAS)),
    st.integers(1, 9),
    st.sampled_from([0.5, 2.0, 8.0]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from(PREFERENCES),
    st.sampled_from([[], [], ["label.disk = fast"], ["not label.disk exists"]]),
    st.sampled_from([[], [], ["j0"]]),
)
MACHINE = st.integers(0, 13)
EVENTS = st.one_of(
    st.tuples(st.just("crowd"), st.lists(JOBS, min_size=1, max_size=4)),
    st.tuples(st.just("crowd"), st.lists(JOBS, min_size=2, max_size=4)),
    st.tuples(st.just("forget"), st.integers(0, 3)),
    st.tuples(st.just("stay"), st.integers(0, 3)),
    st.tuples(st.just("relabel"), st.tuples(MACHINE, st.sampled_from(["fast", ""]))),
    st.tuples(st.just("correct"), st.tuples(MACHINE, st.sampled_from(SIZES))),
    st.tuples(st.just("down"), MACHINE),
    st.tuples(st.just("up"), MACHINE),
    st.tuples(st.just("tidy"), st.just(0)),
    st.tuples(st.just("restart"), st.just(0)),
)


class Life:
    """Successive allocators on the same store, and the invariants of each."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.specs: dict[str, JobSpec] = {}
        self.at: Allocator

    async def crowd(self, jobs: list[dict[str, Any]]) -> None:
        """Place several jobs at the same time."""
        specs = []
        for n, fields in enumerate(jobs):
            name = f"j{n}"
            apart = [near for near in fields["apart_from"] if near.job != name]
            rest = {k: v for k, v in fields.items() if k not in ("tasks", "apart_from")}
            specs.append(a_job(fields["tasks"], name, apart_from=apart, **rest))
        self.specs |= {spec.name: spec for spec in specs}
        await asyncio.gather(*map(self.at.place, specs))

    async def forget(self, number: int) -> None:
        self.specs.pop(f"j{number}", None)
        await self.at.forget(f"j{number}")

    async def stay(self, number: int) -> None:
        """Move a task, then return it to its machine before it leaves."""
        claims = self.at.index.claims.get(f"j{number}")
        claim = next(iter(claims or ()), None)
        if claims is None or claim is None or claim.machine.pool != claims.pool:
            return
        home, pool = claim.machine, claims.pool
        names = tuple(c.task for c in claims if c.task != claim.task and c.demand == claim.demand)
        rest = (Group(claim.demand, names),) if names else ()
        leaving = Group(claim.demand, (claim.task,), leave=frozenset({home.name}))
        await self.at.allocate(Request(f"j{number}", pool, (*rest, leaving)))
        if judge(claim.demand, home, home) or home.pool != pool:
            return
        back = (UnmovedTask(claim.task, home.name, {}),)
        stays = Group(claim.demand, (claim.task,))
        await self.at.allocate(Request(f"j{number}", pool, (*rest, stays), unmoved=back))

    async def relabel(self, what: tuple[int, str]) -> None:
        number, disk = what
        to, gone = ({"disk": disk}, []) if disk else ({}, ["disk"])
        await self.at.broker.of(f"m{number}").change_many(
            [f"m{number}"], lambda r: relabelled(r, to, gone)
        )

    async def correct(self, what: tuple[int, Hardware]) -> None:
        """Correct the inventory data of a machine that has no tasks, held or not."""
        number, hardware = what
        machine = self.at.index.machines[f"m{number}"]
        if not machine.jobs:
            await self.at.broker.of(machine.name).change_many(
                [machine.name], lambda r: changed(r, hardware=hardware)
            )

    async def down(self, number: int) -> None:
        await self.at.broker.carry_out(f"m{number}", MarkDown(reason="says the test"))

    async def up(self, number: int) -> None:
        await self.at.broker.carry_out(f"m{number}", MarkUp())

    async def tidy(self, _: int) -> None:
        """Return empty machines."""
        for pool in QUOTAS:
            for machine in list(self.at.index.pool(pool).machines()):
                if not machine.jobs:
                    await self.at.give_back(machine)

    # -- invariants

    async def check(self) -> None:
        index, brokers = self.at.index, self.at.broker
        check(index)
        held = {r.machine: r.entitlement for r in brokers.table.records()}
        for pool, count in Counter(filter(None, held.values())).items():
            assert count <= QUOTAS[pool], f"{pool} holds {count} of {QUOTAS[pool]}"
        drawn = sum(
            m.capacity.power_w
            for m in index.machines.values()
            if m.jobs and m.place.msb == "dc1/msb0"
        )
        (budget,) = index.power_budgets()
        assert drawn == budget.used_w <= budget.limit_w
        listing = await self.store.list_prefix(ALLOCATIONS)
        stored = {}
        for entry in listing.entries:
            record = decode(entry.value, AllocationRecord, entry.key)
            stored[record.job] = {t: name for t, name in enumerate(record.machines) if name}
            assert {held[name] for name in stored[record.job].values()} <= {record.pool}
        assert stored == {
            job: {c.task: c.machine.name for c in claims} for job, claims in index.claims.items()
        }

    async def place_what_waits(self) -> None:
        """Place each job once more, and assert that no task waits while it has room."""
        for spec in list(self.specs.values()):
            made = await self.at.place(spec)
            if not made.unplaced:
                continue
            request = self.at._affinity.with_terms(self.at._request(spec))
            allowance = self.at.quotas.allowance(request)
            demand, among = request.groups[0].demand, request.groups[0].among
            for machine in self.at.index.machines.values():
                usable = machine.pool == request.pool or (
                    machine.pool == FREE and not machine.jobs and not allowance.lacks(machine)
                )
                if usable and not among and not self.at.index.why_short(machine):
                    fits = not judge(demand, machine, machine)
                    assert not fits, f"{spec.name} waits, {machine.name} fits"


async def live(events: list[tuple[str, Any]]) -> None:
    store = MemoryStore()
    async with store:
        granted = {name: EntitlementSpec(machines=most) for name, most in QUOTAS.items()}
        await stocked(store, a_region(), granted)
    life = Life(store)
    left = list(events)
    while left or life.specs:
        async with (  # opening the store again is a restart
            store,
            allocator_over(store, settings=POWER, runtime=HastyRuntime()) as allocator,
        ):
            life.at = allocator
            await life.check()
            while left:
                name, what = left.pop(0)
                if name == "restart":
                    break
                await getattr(life, name)(what)
                await life.check()
            else:
                await life.place_what_waits()
                await life.check()
                life.specs.clear()


@pytest.mark.behaviour("BUG-AL20", "BUG-AL21", "BUG-AL35")
@settings(deadline=None, max_examples=150)
@given(st.lists(EVENTS, min_size=1, max_size=12))
def test_whatever_an_allocator_lives_through_its_limits_hold_and_nothing_that_fits_waits(events):
    asyncio.run(live(events))
