"""Allocations are durable, complete and correct: on real brokers over the stores of three sites."""

import asyncio
from dataclasses import replace

import pytest
from allocating import SITES, TASK, WHOLE, Region, a_request, settle_all
from inventory import assign
from msgspec.structs import replace as changed

from control_plane.allocator.core.request import Group, Request, UnmovedTask
from control_plane.allocator.transactions import Allocation
from control_plane.api.machine_commands import MarkDown, MarkUp
from control_plane.api.machines import EventKind, UnavailabilityEvent
from control_plane.api.policy import Preference, Property, Strategy
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.unavailability import began
from control_plane.broker.holds import Take
from control_plane.store import Delete, Operation, Put
from control_plane.store.records import ALLOCATIONS
from wire.errors import Busy, Conflict, FieldError, TwineError, UnknownOutcome

ENGINES = ["memory", "sqlite"]


@pytest.fixture(params=ENGINES)
def region(request, tmp_path) -> Region:
    return Region(tmp_path if request.param == "sqlite" else None)


@pytest.fixture
def small() -> Region:
    """A region in memory, for tests that do not depend on the engine."""
    return Region(None)


# -- complete and durable


@pytest.mark.behaviour("AL1", "AL2", "AL10")
async def test_a_job_takes_machines_of_all_brokers_and_a_restart_finds_the_same(region: Region):

    async with region.process() as p:
        got = await p.allocate(a_request(6))
        assert got.unplaced == ()
        assert {name[:3] for name in p.where().values()} == set(SITES)
        assert p.held() == dict.fromkeys(sorted(set(p.where().values())), "front")
        await p.allocate(a_request(2, "calc", "back", WHOLE))
        await p.allocate(a_request([0, 1, 2, 5]))
        before = p.where(), p.where("calc"), p.held()
        await p.check()
    for _ in range(2):
        async with region.process() as p:
            assert (p.where(), p.where("calc"), p.held()) == before
            await p.check()
            await p.allocate(a_request([0, 1, 2, 5]))
            assert p.allocations.counts.stored == 0  # no write was necessary


@pytest.mark.behaviour("AL4")
async def test_a_request_can_use_the_room_that_it_frees(region: Region):
    async with region.process() as p:
        await p.allocate(a_request(2, demand=WHOLE), quota=2)
        swap = a_request([2, 3], demand=WHOLE)
        got = await p.allocate(swap, quota=2)
        assert got.unplaced == ()
        assert set(p.where()) == {2, 3}
        assert len(p.held()) == 2
        await p.check()
    async with region.process() as p:
        assert set(p.where()) == {2, 3}
        await p.check()


async def test_a_gang_gets_all_or_nothing_and_others_what_there_is(region: Region):
    async with region.process() as p:
        got = await p.allocate(a_request(10, "gang", "front", WHOLE, gang=True))
        assert (got.claims, got.unplaced) == (None, tuple(range(10)))
        assert got.reasons[0] == "all or nothing was requested, and 1 lack room"
        assert p.held() == {}
        got = await p.allocate(a_request(10, "part", "front", WHOLE))
        assert len(p.where("part")) == 9
        assert got.unplaced == (9,)
        await p.check()


async def test_a_job_that_is_gone_leaves_nothing(region: Region):
    async with region.process() as p:
        emptied = []
        p.allocations.listen(emptied.extend)
        await p.allocate(a_request(3))
        await p.allocate(a_request(0))
        assert await p.stored() == {}
        assert len(emptied) == 3
        await p.allocate(a_request(1, "other"))  # also stores the decision
        assert (await p.store.list_prefix("decisions/")).entries == ()
        await p.check()


# -- a crash at every point


async def first(p) -> Allocation:
    """Take machines of every broker."""
    return await p.allocate(a_request(6, demand=WHOLE))


async def exchange(p) -> None:
    """Free some machines, keep some, and take some more."""
    demand = replace(TASK, cpus=3.0)
    await p.allocate(a_request([0, 1, 6, 7, 8], demand=demand))


async def two_at_once(p) -> None:
    """One job takes machines while another one stacks on them."""
    requests = [a_request(9, "x", demand=replace(TASK, cpus=2.0)), a_request(9, "y")]
    await asyncio.gather(*(p.allocate(request, quota=9) for request in requests))


async def leave(p) -> None:
    await p.allocate(a_request(0))


STORY = [first, exchange, two_at_once, leave]


async def live_and_die(region: Region, die_at: int, *, after: bool) -> bool:
    """Return whether the story ended before the death."""
    crash = region.crash
    async with region.process() as p:
        crash.die_at, crash.after = crash.writes + die_at, after

        async def story() -> None:
            for step in STORY:
                await step(p)

        work = asyncio.create_task(story())
        death = asyncio.create_task(crash.dead.wait())
        await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
        alive = work.done()
        if alive:
            await work
        await settle_all()
        crash.die_at = 0
        crash.dead = asyncio.Event()
    return alive


@pytest.mark.behaviour("AL12")
@pytest.mark.parametrize("after", [False, True], ids=["before-the-write", "after-the-write"])
@pytest.mark.parametrize("engine", ENGINES)
async def test_a_crash_at_any_write_of_any_store_leaves_nothing_half_done(
    engine: str, after: bool, tmp_path
):
    die_at, ended = 0, False
    while not ended:
        die_at += 1
        folder = tmp_path / str(die_at)
        region = Region(folder if engine == "sqlite" else None)
        ended = await live_and_die(region, die_at, after=after)
        decided = {name for d in region.crash.decisions.values() for name in d.machines}
        async with region.process() as p:
            assert set(p.held()) == decided
            await p.check()
            for step in STORY:  # and everything can be done again
                await step(p)
            await p.check()
            assert (p.where(), p.where("x") != {}, p.where("y") != {}) == ({}, True, True)
    assert die_at > 15


@pytest.mark.behaviour("AL12")
async def test_a_crash_while_recovering_is_recovered_from():
    for die_at in range(1, 5):
        region = Region(None)
        crash = region.crash
        async with region.process() as p:
            crash.die_at, crash.after = crash.writes + 4, True  # decided; no broker was notified
            work = asyncio.create_task(first(p))
            await crash.dead.wait()
            work.cancel()
            await settle_all()
        assert len(crash.decisions) == 1
        crash.die_at, crash.dead = crash.writes + die_at, asyncio.Event()
        again = asyncio.create_task(one_life(region))
        death = asyncio.create_task(crash.dead.wait())
        await asyncio.wait([again, death], return_when=asyncio.FIRST_COMPLETED)
        await settle_all()
        crash.die_at, crash.dead = 0, asyncio.Event()
        async with region.process() as p:
            assert len(p.held()) == 6 == len(p.where())
            await p.check()


async def one_life(region: Region) -> None:
    async with region.process():
        pass


# -- brokers that refuse or do not answer


@pytest.mark.behaviour("BUG-CP5", "AL12")
async def test_the_second_phase_is_repeated_until_a_broker_answers(small: Region):
    """The caller gets an answer although the broker of one data center fails."""
    async with small.process() as p:
        work = asyncio.create_task(first(p))
        broken = p.brokers.at("dc2").table.store
        while not small.crash.decisions:
            await asyncio.sleep(0)
        broken.fails = [Busy("the store cannot be used"), *[OSError("I/O error")] * 1000]
        got = await work
        assert got.unplaced == ()
        assert len(p.held()) == 4  # the others were notified
        assert p.index.pool("front").size == 6  # the change is decided, so it counts
        assert list(p.brokers.unreachable()) == ["dc2"]
        there = ((Property.DATACENTER, frozenset({"dc1"})),)
        guest = await p.allocate(a_request(1, "guest", demand=replace(TASK, requires=there)))
        assert guest.unplaced == ()
        broken.fails = []
        async with asyncio.timeout(20):
            while len(p.held()) < 7:
                await asyncio.sleep(0.01)
        await p.allocations.close()
        await p.check()


@pytest.mark.behaviour("MO9")
async def test_an_allocation_waits_for_machines_that_another_one_is_taking(small: Region):
    async with small.process() as p:
        site = p.brokers.at("dc2").table.store
        site.fails = [Conflict("cannot write")]
        taker = asyncio.create_task(p.allocate(a_request(3, "taker"), quota=3))
        while not p.index.pool("front").size:
            await asyncio.sleep(0)
        assert p.held() == {}
        guest = asyncio.create_task(p.allocate(a_request(3, "guest"), quota=3))
        await asyncio.gather(taker, guest)
        assert p.allocations.counts.conflicts >= 2  # the taker's record, then its guest's
        assert len(p.held()) == 3
        await p.check()


@pytest.mark.parametrize("phase", ["prepare", "decide"])
async def test_a_store_that_fails_before_the_decision_changes_nothing(small: Region, phase: str):
    async with small.process() as p:
        failing = p.brokers.at("dc3").table.store if phase == "prepare" else p.store
        failing.fails = [Busy("the store cannot be used")]
        with pytest.raises(Busy, match="the store cannot be used"):
            await first(p)
        assert (p.where(), p.held()) == ({}, {})
        await p.check()
        await first(p)
        await p.check()


@pytest.mark.behaviour("BUG-CP14", "AL12")
async def test_a_write_with_unknown_outcome_is_read_back(small: Region):
    """The allocator finds the outcome, even if the write is made late."""
    async with small.process() as p:
        p.store.fails_after = [UnknownOutcome("the answer was lost")]
        got = await p.allocate(a_request(3))
        assert got.unplaced == ()
        await p.check()
        p.store.fails_after = [UnknownOutcome("the answer was lost")]
        await p.allocate(a_request(2))
        await p.check()
        p.store.fails_after = [UnknownOutcome("the answer was lost")]
        await p.allocate(a_request(0))
        await p.allocate(a_request(3))
        await p.check()


@pytest.mark.behaviour("F-47")
async def test_a_job_with_a_failed_write_can_be_allocated_again(small: Region):
    """Ensuring that the write is never made costs a revision of the job's record.

    The allocator did not record that revision, and the job got no machines until the next restart.
    """
    async with small.process() as p:
        await p.allocate(a_request(6))
        await p.allocate(a_request(5))  # also stores the decision, so the next write has one key
        p.store.fails = [UnknownOutcome("the answer was lost")]
        with pytest.raises(UnknownOutcome):
            await p.allocate(a_request(4))
        assert (await p.allocate(a_request(4))).unplaced == ()
        assert len(p.where()) == 4
        await p.check()


@pytest.mark.behaviour("AL12", "BUG-AL35")
async def test_a_task_that_never_moved_keeps_its_machine_in_the_store_too(small: Region):
    """Claims were restored in memory only; after a restart a job claimed another pool's machine."""
    async with small.process() as p:
        await p.allocate(a_request(1))
        (home,) = p.where().values()
        leaving = Group(TASK, (0,), leave=frozenset({home}))
        await p.allocate(Request("web", "front", (leaving,)))
        (elsewhere,) = p.where().values()
        assert elsewhere != home
        after_all = replace(a_request(1), unmoved=(UnmovedTask(0, home, {}),))
        p.store.fails = [Busy("the store cannot be used")]
        with pytest.raises(Busy):
            await p.allocate(after_all)
        await p.check()
        assert p.where() == {0: elsewhere}  # memory and store agree
        emptied: list[str] = []
        p.allocations.listen(lambda machines: emptied.extend(m.name for m in machines))
        await p.allocate(after_all)
        assert p.where() == {0: home}
        assert emptied == [elsewhere]
        await p.check()
        hits = p.allocations.counts.hits
        await p.allocate(a_request(1))
        assert p.allocations.counts.hits == hits + 1
        await p.brokers.release(elsewhere, revision=p.brokers.table.revision(elsewhere))
        await p.allocate(a_request(1, "other", "back", WHOLE))
    async with small.process() as p:
        assert p.where() == {0: home}
        await p.check()


@pytest.mark.behaviour("BUG-AL6")
@pytest.mark.parametrize("is_made", [True, False])
async def test_holds_without_an_answer_are_released(small: Region, is_made: bool):
    """A hold leaked if `prepare` was written but its answer was lost."""
    async with small.process() as p:
        site = p.brokers.at("dc3").table.store
        lost = [UnknownOutcome("the answer was lost")]
        site.fails_after, site.fails = (lost, []) if is_made else ([], lost)
        site.unread = 2  # the next outcome queries fail too
        with pytest.raises(TwineError):
            await first(p)
        async with asyncio.timeout(20):
            while site.unread:
                await asyncio.sleep(0.01)
        await p.allocations.close()
        assert all(r.hold is None for r in p.brokers.table.records())
        await p.check()
        assert (await first(p)).unplaced == ()
        await p.check()


@pytest.mark.behaviour("BUG-CP5")
async def test_an_allocation_answers_although_a_broker_never_does(small: Region):
    """`job apply` hung for minutes if a store neither wrote nor failed."""
    async with small.process() as p:
        site = p.brokers.at("dc3").table.store
        site.hangs = True
        with pytest.raises(Busy, match="a broker did not answer"):
            await first(p)
        assert "dc3" in p.brokers.unreachable()
        assert (p.where(), p.held()) == ({}, {})
        site.hangs = False


async def test_holds_with_a_failed_release_are_released_later(small: Region):
    async with small.process() as p:
        p.store.fails = [Busy("no")]
        site = p.brokers.at("dc1").table.store
        work = asyncio.create_task(first(p))
        while len(p.brokers.in_doubt()) == 0:
            await asyncio.sleep(0)
        site.fails = [Busy("no")]
        with pytest.raises(Busy):
            await work
        await p.allocate(a_request(1, "other"))
        await p.allocations.close()
        assert p.brokers.in_doubt() == {}
        await p.check()


def maintenance(record):
    event = UnavailabilityEvent(
        event_id="e", kind=EventKind.MAINTENANCE, reason="new fans", start=1000.0
    )
    return began(record, event)


async def take_down(p, name: str) -> None:
    await p.brokers.carry_out(name, MarkDown(reason="fire"))


async def is_taken(p, name: str) -> None:
    await assign(p.brokers.of(name), name, "others", "web")


async def is_promised(p, name: str) -> None:
    await p.brokers.prepare("other:1-1", {name: Take("others", "web")})


async def is_planned_away(p, name: str) -> None:
    await p.brokers.of(name).change_many([name], maintenance)


async def is_removed(p, name: str) -> None:
    end = UnavailabilityEvent(event_id="d", kind=EventKind.DECOMMISSION, reason="old", start=1.0)
    await p.brokers.of(name).change_many([name], lambda record: began(record, end))
    await p.brokers.remove(name)


@pytest.mark.behaviour("AL2", "AL11")
@pytest.mark.parametrize(
    "happens", [take_down, is_taken, is_promised, is_planned_away], ids=lambda f: f.__name__
)
async def test_machines_that_the_broker_does_not_give_lead_to_another_plan(small: Region, happens):

    async with small.process() as p:
        p.is_connected = False  # events were missed, so the index is outdated
        gone = [f"{site}-1" for site in SITES]
        for name in gone:
            await happens(p, name)
        await p.allocate(a_request(6, demand=WHOLE))
        assert not set(p.where().values()) & set(gone)
        assert len(p.where()) == 6
        assert not any(p.index.machines[name].pool == "front" for name in gone)


async def test_a_machine_removed_without_an_event_leads_to_another_plan(small: Region):
    async with small.process() as p:
        p.is_connected = False
        await is_removed(p, "dc1-1")
        got = await p.allocate(a_request(9, demand=WHOLE))
        assert len(p.where()) == 8
        assert got.unplaced == (8,)
        assert "dc1-1" not in p.index.machines


# -- cancellation


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_caller_that_gives_up_changes_nothing_for_the_others(small: Region, turns: int):
    async with small.process() as p:
        work = asyncio.create_task(p.allocate(a_request(6, demand=WHOLE)))
        for _ in range(turns):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await p.allocate(a_request(2, "other", demand=WHOLE))
        await p.allocations.close()
        assert len(p.where()) in (0, 6)
        await p.check()
        await p.allocate(a_request(6, demand=WHOLE))
        assert len(p.where()) == 6
        await p.check()


async def test_a_failure_without_a_waiting_caller_is_only_logged(small: Region, caplog):
    async with small.process() as p:
        p.store.fails = [Busy("no")]
        work = asyncio.create_task(p.allocate(a_request(3)))
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await p.allocate(a_request(3))
        assert not [r for r in caplog.records if r.levelname == "ERROR"]
        await p.check()


# -- the cache


@pytest.mark.behaviour("AL13")
async def test_the_same_request_is_answered_from_the_cache_until_something_changes(small: Region):

    async with small.process() as p:
        counts = p.allocations.counts

        async def hits(request: Request) -> bool:
            before = counts.hits
            got = await p.allocate(request)
            assert got.unplaced == ()
            return counts.hits > before

        request = a_request(3)
        assert [await hits(request) for _ in range(3)] == [False, True, True]
        different = [
            a_request(4),
            a_request(3),
            a_request(3, demand=replace(TASK, cpus=2.0)),
            a_request(3, gang=True),
            Request("web", "front", (Group(TASK, (0, 1, 2), leave=frozenset({p.where()[0]})),)),
            Request("web", "front", (Group(TASK, (0, 1, 2), running=False),)),
            a_request(3, preferences=(Preference(property=Property.MSB, strategy=Strategy.PACK),)),
        ]
        for other in different:
            assert not await hits(other)
            await hits(other)  # tasks have left their machines; this may have been the last change
            assert await hits(other)
        name = p.where()[0]
        broker, loc = p.brokers.of(name), p.brokers.table.get(name).location
        happens = [
            lambda r: changed(r, hardware=changed(r.hardware, memory_bytes=8 << 30)),
            lambda r: changed(r, hardware=changed(r.hardware, rru=5.0)),
            lambda r: changed(r, hardware=changed(r.hardware, gpus=1)),
            lambda r: changed(r, hardware=changed(r.hardware, network_mbps=1)),
            lambda r: changed(r, hardware=changed(r.hardware, generation="skylake")),
            lambda r: changed(r, machine_type="other"),
            lambda r: changed(r, location=changed(loc, msb="msb9")),
            lambda r: changed(r, location=changed(loc, rack="rack9")),
        ]
        last = different[-1]
        for happening in happens:
            assert await hits(last)
            await broker.change_many([name], happening)
            assert not await hits(last)
        still = Request("web", "front", (Group(TASK, (0, 1, 2), running=False),))
        assert [await hits(still), await hits(still)] == [False, True]
        await p.brokers.of(name).change_many([name], maintenance)
        assert not await hits(still)  # tasks that do not run yet go elsewhere
        await hits(last)
        assert await hits(last)
        elsewhere = next(n for n in p.index.machines if n not in p.where().values())
        assert await hits(last)
        await p.brokers.of(elsewhere).change_many([elsewhere], maintenance)
        assert await hits(last)  # this does not concern the job


@pytest.mark.behaviour("AL13")
async def test_failures_are_not_cached(small: Region):
    async with small.process() as p:
        request = Request("web", "front", (Group(TASK, (0,), running=False),))
        await p.allocate(request)
        was = p.where()[0]
        await p.brokers.carry_out(was, MarkDown(reason="fire"))  # its claims are invalid now
        p.store.fails = [Busy("no"), Busy("no")]
        for _ in range(2):
            with pytest.raises(Busy):
                await p.allocate(request)
        await p.allocate(request)
        assert p.where()[0] != was


@pytest.mark.behaviour("AL13", "AL3")
async def test_tasks_without_room_are_retried_once_there_is_room(small: Region):
    async with small.process() as p:
        counts, request = p.allocations.counts, a_request(5, demand=WHOLE)
        await p.allocate(request, quota=3)
        await p.allocate(request, quota=3)  # the job's own takes may have changed the room
        got = await p.allocate(request, quota=3)
        assert (counts.hits, got.unplaced) == (1, (3, 4))
        assert any("quota of machines is used up" in reason for reason in got.reasons)
        p.index.note_gain()  # a larger quota
        got = await p.allocate(request, quota=4)
        assert (counts.hits, got.unplaced) == (1, (4,))
        rest = [name for name in p.index.machines if name not in p.held()]
        for name in rest:
            await p.brokers.carry_out(name, MarkDown(reason="fire"))
        assert (await p.allocate(request)).unplaced == (4,)
        await p.brokers.carry_out(rest[0], MarkUp())
        assert (await p.allocate(request)).unplaced == ()


# -- many at once


@pytest.mark.behaviour("AL11")
async def test_many_at_once_on_few_machines_never_take_too_much(region: Region):
    async with region.process() as p:
        requests = [a_request(3, f"job{n}", f"pool{n % 3}") for n in range(30)]
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(patient(p, request))
        await p.check()
        placed = sum(len(p.where(request.job)) for request in requests)
        assert placed == 36  # nine machines of four tasks each, all of them in use
        async with asyncio.TaskGroup() as group:
            for request in requests[::2]:
                group.create_task(patient(p, a_request(0, request.job, request.pool)))
            for request in requests[1::2]:
                group.create_task(patient(p, a_request(1, request.job, request.pool)))
        await p.check()
    async with region.process() as p:
        await p.check()


async def patient(p, request: Request) -> None:
    while True:
        try:
            await p.allocate(request)
        except Busy:
            await asyncio.sleep(0.01)
        else:
            return


async def test_busy_after_too_many_conflicts_changes_nothing(small: Region, monkeypatch):
    async with small.process() as p:
        await p.allocate(a_request(2))
        before = p.where(), p.held(), await p.stored()

        async def conflict(transaction, takes):
            raise Conflict("no", errors=tuple(FieldError(field=n, reason="no") for n in takes))

        monkeypatch.setattr(p.brokers, "prepare", conflict)
        with pytest.raises(Busy, match="10 times in a row"):
            await p.allocate(a_request(5, demand=WHOLE))
        assert (p.where(), p.held(), await p.stored()) == before
        monkeypatch.undo()
        await p.check()


@pytest.mark.behaviour("RB12", "AL19", "F-57")
async def test_two_allocators_with_one_set_of_brokers_never_get_the_same_machine(region: Region):

    async with region.process("second") as p:
        q = p.with_own("second")
        await q.recover()
        async with asyncio.TaskGroup() as group:
            for n in range(4):
                group.create_task(patient(p, a_request(2, f"a{n}", "pa", WHOLE)))
                group.create_task(patient(q, a_request(2, f"b{n}", "pb", WHOLE)))
        mine = {m for n in range(4) for m in p.where(f"a{n}").values()}
        others = {m for n in range(4) for m in q.where(f"b{n}").values()}
        assert not mine & others
        assert mine | others == set(p.held())
        assert {m for m, pool in p.held().items() if pool == "pa"} == mine
        assert len(mine | others) == 9


@pytest.mark.behaviour("WH8")
async def test_an_entitlement_moves_to_another_allocator_while_its_tasks_stay(region: Region):
    """Covers the records: their place decides which allocator plans for an entitlement.

    Brokers know entitlements and no allocators, so no machine changes hands.
    """
    async with region.process("second") as p:
        q = p.with_own("second")
        await q.recover()
        await patient(p, a_request(3, "a", "pa", WHOLE))
        await patient(q, a_request(2, "b", "pb", WHOLE))
        where, held = p.where("a"), p.held()
        entries = (await p.store.list_prefix(ALLOCATIONS)).entries
        copied: list[Operation] = [Put(entry.key, entry.value) for entry in entries]
        deleted: list[Operation] = [Delete(entry.key) for entry in entries]
        await q.store.txn({entry.key: 0 for entry in entries}, copied)
        await p.store.txn({entry.key: entry.revision for entry in entries}, deleted)
    async with region.process("second") as p:
        q = p.with_own("second")
        await q.recover()
        assert p.index.claims == {}
        assert (q.where("a"), q.held()) == (where, held)
        await patient(q, a_request(4, "a", "pa", WHOLE))
        assert where.items() < q.where("a").items()
        assert len(q.where("b")) == 2


@pytest.mark.behaviour("RB12")
async def test_an_allocator_leaves_the_transactions_of_another_alone(small: Region):
    crash = small.crash
    async with small.process("second") as p:
        crash.die_at = crash.writes + 4  # held at all brokers, not decided
        work = asyncio.create_task(first(p))
        await crash.dead.wait()
        crash.dead = asyncio.Event()
        q = p.with_own("second")
        await q.recover()
        assert len(p.brokers.in_doubt()) == 1
        await q.allocate(a_request(2, "b", "pb", WHOLE))
        assert len(q.where("b")) == 2
        work.cancel()
        await settle_all()
    async with small.process() as p:
        assert p.brokers.in_doubt() == {}
        assert set(p.held().values()) == {"pb"}
        assert p.brokers.count(FREE) == 7
