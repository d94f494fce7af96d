"""Idle machines are lent automatically, and return within their promise."""

import asyncio
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from world import World, a_job, scenario

from agent.api import Limits
from control_plane.api.autoscale import Autoscale, AutoscaleMode
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.elastic import (
    CapacityState,
    Elastic,
    ElasticMode,
    ElasticReport,
    ElasticSettings,
    Promise,
)
from control_plane.api.intent_changes import SizeChange
from control_plane.api.job_life import JobLife, JobNotice
from control_plane.api.jobs import JobSpec
from control_plane.elastic import survey
from control_plane.elastic.core.matching import OpenLoan
from control_plane.elastic.lender import Lender, PoolState
from control_plane.store.records import PROMISES
from wire.errors import Busy

pytestmark = pytest.mark.behaviour("EL1", "EL2", "EL7", "EL9")

APPLY = ElasticSettings(mode=ElasticMode.APPLY, every_s=30, free_idle_s=60)
WHOLE = Limits(memory_max_bytes=800 << 20)
"""One task fills a machine of the fake region."""


def best_effort(tasks: int = 3, **changes) -> JobSpec:
    return a_job(tasks, name="crunch", entitlement="batch", limits=WHOLE, **changes)


async def borrower(world: World, **elastic) -> None:
    spec = EntitlementSpec(
        machines=0, host_profile="batch", elastic=Elastic(**({"borrow": 3} | elastic))
    )
    await world.cp.capacity.put_entitlement("batch", spec)


def report(world: World) -> ElasticReport:
    return world.cp.elastic.report()


def lent(world: World) -> dict[str, str]:
    return {view.machine: view.borrower for view in report(world).loans}


def state(world: World) -> CapacityState:
    return world.cp.elastic.signal("batch").state


async def running(world: World, job: str) -> int:
    return (await world.cp.get_job(job)).healthy


@pytest.mark.behaviour("BUG-CP112")
@pytest.mark.parametrize("mode", ["off", "recommend", "apply"])
def test_a_task_that_waits_for_a_loan_says_whether_machines_are_lent(mode: str) -> None:
    @scenario(elastic=replace(APPLY, mode=ElasticMode(mode), free_idle_s=3600))
    async def waits(world: World) -> None:
        await world.set_up(quota=3)
        await borrower(world)
        await world.cp.apply_job(best_effort(1))
        await asyncio.sleep(120)
        detail = (await world.cp.get_job("crunch")).detail
        assert "the entitlement uses only machines that are lent to it" in detail
        assert (f"scheduler.elastic.mode is {mode}" in detail) == (mode != "apply")
        assert "used up" not in detail

    waits()


@pytest.mark.behaviour("EL1", "EL2", "EL6")
@scenario(elastic=APPLY)
async def test_free_machines_are_lent_and_come_back_when_an_owner_needs_them(
    world: World,
) -> None:
    """The owner gets its machines within the promise; the borrower's work is notified before."""
    await world.set_up(quota=3)
    await borrower(world)
    await world.cp.apply_job(best_effort())
    await world.until(lambda: len(lent(world)) == 3, 600)
    await world.stable("crunch")
    assert {v.donor for v in report(world).loans} == {""}
    assert {v.promise_s for v in report(world).loans} == {300.0}
    await world.until(lambda: state(world) is CapacityState.FULL)

    requested_at = world.runtime.now()
    await world.cp.apply_job(a_job(2, limits=WHOLE))
    await world.stable("web", 400)
    assert world.runtime.now() - requested_at <= 300
    found = report(world)
    assert len(found.loans) == 1
    (counts,) = found.promises
    assert (counts.revoked, counts.broken, found.late) == (2, 0, [])
    assert counts.mean_notice_s == 270.0
    assert counts.return_max_s <= 300
    assert counts.interrupted == 2
    await world.until(lambda: world.cp.elastic.signal("batch").wanted == 2)
    signal = world.cp.elastic.signal("batch")
    assert (signal.state, signal.machines) == (CapacityState.SHORT, 1)


@pytest.mark.behaviour("EL4")
@scenario(elastic=APPLY, give_back_after_s=100_000)
async def test_an_entitlement_lends_idle_machines_and_gets_them_back_first(world: World) -> None:
    """The loan names donor and borrower, and the donor's own machine returns to it."""
    elastic = Elastic(promise=Promise.QUICK, lend_after_s=60)
    await world.set_up(quota=3, elastic=elastic)
    await world.cp.apply_job(a_job(3, limits=WHOLE))
    await world.stable("web")
    await world.cp.apply_job(a_job(1, limits=WHOLE))
    await world.stable("web")
    await borrower(world, borrow=1)
    await world.cp.apply_job(best_effort(1))
    await world.until(lambda: lent(world), 900)
    (view,) = report(world).loans
    assert (view.donor, view.promise_s) == ("front", 120.0)
    await world.until(lambda: running_one(world), 200)

    requested_at = world.runtime.now()
    await world.cp.apply_job(a_job(3, limits=WHOLE))
    await world.stable("web", 400)
    assert world.runtime.now() - requested_at <= 120 + 10
    assert report(world).promises[0].broken == 0


async def running_one(world: World) -> bool:
    return await running(world, "crunch") == 1


@pytest.mark.behaviour("EL9")
@scenario(elastic=replace(APPLY, mode=ElasticMode.RECOMMEND))
async def test_a_recommendation_lends_nothing(world: World) -> None:
    await world.set_up(quota=3)
    await borrower(world)
    await world.cp.apply_job(best_effort())
    await world.until(lambda: report(world).proposed == 3, 600)
    assert lent(world) == {}
    signal = world.cp.elastic.signal("batch")
    assert (signal.state, signal.wanted) == (CapacityState.ABSENT, 3)


@scenario(elastic=replace(APPLY, keep_free=2))
async def test_machines_kept_free_are_not_lent(world: World) -> None:
    await world.set_up(quota=3)
    await borrower(world)
    await world.cp.apply_job(best_effort())
    await world.until(lambda: lent(world), 600)
    assert len(lent(world)) == 1
    assert report(world).free == 2


@scenario(elastic=APPLY)
async def test_a_borrower_that_needs_nothing_more_gives_its_machines_back(world: World) -> None:
    await world.set_up(quota=3)
    await borrower(world)
    await world.cp.apply_job(best_effort())
    await world.until(lambda: len(lent(world)) == 3, 600)
    await world.stable("crunch")
    await world.cp.apply_job(best_effort(1))
    await world.until(lambda: len(lent(world)) == 1, 600)
    assert report(world).promises[0].interrupted == 0


@scenario(elastic=APPLY)
async def test_a_loan_ends_at_its_time_and_another_one_follows(world: World) -> None:
    await world.set_up(quota=3)
    await borrower(world, borrow=1, loan_s=600)
    await world.cp.apply_job(best_effort(1))
    await world.until(lambda: lent(world), 600)
    first = report(world).loans[0].since
    await world.until(lambda: any(v.since > first for v in report(world).loans), 2000)
    assert report(world).promises[0].ended >= 1


@pytest.mark.behaviour("EL2")
@scenario(elastic=APPLY)
async def test_a_machine_that_fails_makes_room_for_its_owner_elsewhere(world: World) -> None:
    """A loss of machines revokes loans, and the owner's work runs again in time."""
    await world.set_up(quota=3)
    await borrower(world)
    await world.cp.apply_job(a_job(1, limits=WHOLE))
    await world.stable("web")
    await world.cp.apply_job(best_effort())
    await world.until(lambda: len(lent(world)) == 2, 600)
    (home,) = [n for n in world.region.machines if n not in lent(world)]
    world.region.machines[home].power_off()
    await world.until(lambda: len(lent(world)) == 1, 600)
    await world.until(lambda: web_elsewhere(world), 600)
    assert report(world).promises[0].broken == 0


async def web_elsewhere(world: World) -> bool:
    return len(await world.endpoints()) == 1


@scenario(elastic=APPLY)
async def test_counts_and_loans_outlive_the_process(world: World) -> None:
    await world.set_up(quota=3)
    await borrower(world)
    await world.cp.apply_job(best_effort())
    await world.until(lambda: len(lent(world)) == 3, 600)
    await world.cp.apply_job(a_job(2, limits=WHOLE))
    await world.until(lambda: len(lent(world)) == 1, 400)
    await world.runtime.sleep(APPLY.look_s)
    before = report(world).promises
    again = world.control_plane()
    async with again:
        assert again.elastic.report().promises == before
        assert [v.machine for v in again.elastic.report().loans] == list(lent(world))


@pytest.mark.behaviour("BUG-CP93")
@scenario(elastic=APPLY)
async def test_a_new_process_reports_no_full_capacity_before_it_knows(world: World) -> None:
    await world.set_up(quota=3)
    await borrower(world, borrow=4)
    await world.cp.apply_job(
        a_job(1, limits=WHOLE, life=JobLife(notice=JobNotice(capacity_of=["batch"])))
    )
    await world.cp.apply_job(best_effort(4))
    await world.stable("web")
    (mine,) = [name for name, tasks in world.region.where().items() if "web-0" in tasks]
    sent = world.region.machines[mine].notices
    await world.until(lambda: sent and sent[-1].capacity[0].state == "short", 600)
    known, again = len(sent), world.control_plane()
    async with again:
        with pytest.raises(Busy, match="has just started"):
            again.elastic.signal("batch")
        await world.until(lambda: len(sent) > known, 60)
        assert sent[known].capacity[0].state == "short"


@pytest.mark.behaviour("AS3", "AS6", "EL6", "EL11")
@scenario(elastic=APPLY, give_back_after_s=60)
async def test_the_report_has_machine_hours_by_entitlement_that_left_them(world: World) -> None:
    """Whole machines are lent; the report names the job and the owner."""
    await world.set_up(quota=3)
    policy = Autoscale(minimum=1, maximum=10, target=0.5, mode=AutoscaleMode.APPLY)
    limits = Limits(memory_max_bytes=800 << 20, cpu_max_cores=1.0)
    await world.cp.apply_job(a_job(3, limits=limits, autoscale=policy))
    await world.stable("web")
    await asyncio.sleep(600)
    await borrower(world)
    await world.cp.apply_job(best_effort(2))
    smaller_at = world.runtime.now()
    await world.cp.intents.size("web", SizeChange(tasks=1, reason="few users"), "autoscaler")
    await world.until(lambda: world.cp.elastic.report().free == 2, 900)
    assert world.runtime.now() - smaller_at <= 120  # 60 s, and the time to stop
    await world.until(lambda: len(lent(world)) == 2, 900)
    found = report(world)
    assert {(v.donor, v.left_by) for v in found.loans} == {("", "front")}
    (front,) = [pool for pool in found.pools if pool.entitlement == "front"]
    assert (front.used, front.left, front.lent) == (1, 2, 0)
    before = found.freed[0].machine_hours if found.freed else 0.0
    owner_before = front.freed_machine_hours
    await asyncio.sleep(2 * 3600)
    (job,) = report(world).freed
    assert (job.job, job.entitlement) == ("web", "front")
    share = 2 * 800 / 1024  # two tasks of 800 MiB on machines of 1 GiB, minus the host's reserve
    assert 2 * share <= job.machine_hours - before <= 4.2
    (front,) = [pool for pool in report(world).pools if pool.entitlement == "front"]
    assert 3.8 <= front.freed_machine_hours - owner_before <= 4.2


@pytest.mark.behaviour("BUG-CP76")
@scenario(elastic=APPLY)
async def test_free_machines_are_lent_for_no_longer_than_all_owners_were_promised(
    world: World,
) -> None:
    """Owners without a promise in their specification got free machines after 15 minutes."""
    await world.set_up(quota=2, elastic=Elastic(promise=Promise.SLOW))
    await world.cp.capacity.put_entitlement("back", EntitlementSpec(machines=1, host_profile="web"))
    await borrower(world)
    await world.cp.apply_job(best_effort())
    await world.until(lambda: len(lent(world)) == 3, 900)
    assert {v.promise_s for v in report(world).loans} == {APPLY.promise.seconds}


@pytest.mark.behaviour("BUG-CP77")
@scenario(elastic=APPLY)
async def test_a_store_that_is_slow_to_lend_does_not_delay_owners(world: World) -> None:
    """No owner was checked until all machines of a matching were lent."""
    await world.set_up(quota=3)
    await borrower(world)
    lender, loans = world.cp.elastic._lender, world.cp.elastic._parts.loans
    of_round, lend, run_round = [0], loans.lend, lender._round

    async def slowly(*given, **named):
        of_round[-1] += 1
        await asyncio.sleep(10)
        return await lend(*given, **named)

    async def counted() -> None:
        of_round.append(0)
        await run_round()

    loans.lend, lender._round = slowly, counted
    await world.cp.apply_job(best_effort())
    await world.until(lambda: len(lent(world)) == 3, 300)
    assert max(of_round) == 1


@pytest.mark.behaviour("BUG-CP77")
@scenario(elastic=APPLY)
async def test_a_store_that_is_slow_to_call_back_does_not_use_up_the_promise(world: World) -> None:
    """Loans were revoked one after the other, each after a write of the store."""
    await world.set_up(quota=3)
    await borrower(world)
    await world.cp.apply_job(best_effort())
    await world.until(lambda: len(lent(world)) == 3, 600)
    loans = world.cp.elastic._parts.loans
    revoke = loans.revoke

    async def slowly(*given):
        await asyncio.sleep(100)
        return await revoke(*given)

    loans.revoke = slowly
    await world.cp.apply_job(a_job(3, limits=WHOLE))
    await world.until(lambda: any(v.revoked_at for v in report(world).loans), 300)
    await asyncio.sleep(1)
    assert all(v.revoked_at for v in report(world).loans)


@pytest.mark.behaviour("BUG-CP77")
@pytest.mark.behaviour("BUG-CP78")
@scenario(elastic=APPLY)
async def test_a_store_that_is_slow_to_take_machines_back_does_not_use_up_the_promise(
    world: World,
) -> None:
    """Machines were returned one after the other."""
    await world.set_up(quota=3)
    await borrower(world)
    await world.cp.apply_job(best_effort())
    await world.until(lambda: len(lent(world)) == 3, 600)
    loans = world.cp.elastic._parts.loans
    give_back = loans.give_back

    async def slowly(*given, **named):
        await asyncio.sleep(100)
        return await give_back(*given, **named)

    loans.give_back = slowly
    await world.cp.apply_job(a_job(3, limits=WHOLE))
    await world.until(lambda: len(lent(world)) < 3, 600)
    await asyncio.sleep(1)
    assert lent(world) == {}


@pytest.mark.behaviour("BUG-CP89")
@scenario(elastic=APPLY)
async def test_counts_that_cannot_be_stored_do_not_stop_the_lender(world: World) -> None:
    """The lender's loop ended each time, and restarted after up to a minute."""
    await world.set_up(quota=3)
    await borrower(world, borrow=1, loan_s=600)
    await world.cp.apply_job(best_effort(1))
    await world.until(lambda: lent(world), 600)
    lender, txn = world.cp.elastic._lender, world.store.txn
    refused, rounds, take_survey = [], [], lender._survey

    async def refusing(compare, operations):
        if any(operation.key.startswith(PROMISES) for operation in operations):
            refused.append(world.runtime.now())
            raise Busy("the disk is full")
        return await txn(compare, operations)

    async def counted(*given):
        rounds.append(world.runtime.now())
        return await take_survey(*given)

    world.store.txn, lender._survey = refusing, counted
    await world.until(lambda: len(refused) >= 20, 5_000)
    assert max(after - before for before, after in pairwise(rounds)) <= 2 * APPLY.look_s
    world.store.txn = txn
    await world.until(lambda: world.cp.elastic._ledger._promises.names(), 60)


@scenario(elastic=APPLY)
async def test_a_deleted_entitlement_leaves_no_history_of_use(world: World) -> None:
    """Histories of deleted entitlements were kept, and counted as machines in use."""
    await world.set_up(quota=3)
    await borrower(world)
    service = world.cp.elastic
    await world.until(lambda: "batch" in service._lender.by_msb, 300)
    await world.cp.capacity.delete_entitlement("batch")
    await world.until(lambda: "batch" not in service._lender.by_msb, 300)
    assert "batch" not in service._ledger._history


@pytest.mark.behaviour("BUG-CP91")
@scenario(elastic=replace(APPLY, every_s=100_000), give_back_after_s=100_000)
async def test_a_machine_that_was_used_between_two_matchings_is_not_idle_since_the_first(
    world: World,
) -> None:
    await world.set_up(quota=3, elastic=Elastic(lend_after_s=60))
    await world.cp.apply_job(a_job(3, limits=WHOLE))
    await world.stable("web")
    lender = world.cp.elastic._lender

    async def stopped() -> None:
        await world.cp.stop_job("web")
        own = partial(survey.unused, lender._parts.owner_of, "front")
        await world.until(lambda: len(list(own())) == 3, 300)

    await stopped()
    await world.until(lambda: "front" in lender.now)
    before = {one.machine: one.idle_s for one in await lender._idle_machines()}
    await world.runtime.sleep(100)
    await world.cp.apply_job(a_job(1, limits=WHOLE))
    await world.stable("web")
    (used,) = [name for name, tasks in world.region.where().items() if tasks]
    await stopped()
    after = {one.machine: one.idle_s for one in await lender._idle_machines()}
    assert len(before) == len(after) == 3
    assert {name for name, idle_s in after.items() if idle_s < 100} == {used}


@pytest.mark.behaviour("BUG-CP134")
@scenario(elastic=replace(APPLY, every_s=100_000), give_back_after_s=100_000)
async def test_a_machine_that_is_used_during_a_matching_is_not_idle_since_before(
    world: World,
) -> None:
    await world.set_up(quota=3, elastic=Elastic(lend_after_s=60))
    lender = world.cp.elastic._lender
    await world.until(lambda: "front" in lender.now)
    first, *others = [machine.machine for machine in await lender._idle_machines()]
    await world.runtime.sleep(100)

    async def used() -> None:
        lender.note_use([first])

    lender._runtime = SimpleNamespace(now=world.runtime.now, checkpoint=used)
    await lender._idle_machines()
    lender._runtime = world.runtime
    idle_s = {machine.machine: machine.idle_s for machine in await lender._idle_machines()}
    assert idle_s[first] == 0
    assert all(idle_s[machine] >= 100 for machine in others)


@pytest.mark.behaviour("BUG-CP79")
def test_machines_that_return_count_for_owners_that_can_use_them_only(monkeypatch) -> None:
    """Loans of another type were revoked, so those of the owner's type were not."""
    monkeypatch.setattr(survey, "usable_free", lambda *_: 0)
    runtime = SimpleNamespace(now=lambda: 100.0)
    settings = SimpleNamespace(elastic=ElasticSettings())
    region = SimpleNamespace(settings=settings, runtime=runtime, broker=None)
    lender = Lender(SimpleNamespace(region=region, free=lambda: 0, owner_of=None), None)
    monkeypatch.setattr(lender, "_quota_left", lambda *_: None)
    spec = EntitlementSpec(machines=3, host_profile="web")
    lender.now = {
        name: PoolState(name, spec, 0, 0, 1, 0, frozenset({kind}))
        for name, kind in (("gpus", "gpu"), ("webs", "web"))
    }
    lender.short_since = dict.fromkeys(lender.now, 0.0)
    returning = [
        OpenLoan(f"{kind}{i}", donor, "batch", kind, "d", 300.0, None, revoked=True, tasks=1)
        for i, (donor, kind) in enumerate([("", "web"), ("gpus", "web")])
    ]
    assert {need.pool: need.machines for need in lender._needs(returning)} == {"gpus": 1, "webs": 0}
