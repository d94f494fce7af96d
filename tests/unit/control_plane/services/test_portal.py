"""The capacity portal: requests that are granted at once, wait, are refused, or survive."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import asynccontextmanager
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inventory import some_facts
from msgspec.structs import replace
from virtual_time import clock, run

from agent.api import Location, Relaxation
from control_plane.api.capacity import EntitlementChange, EntitlementSpec, RequestState
from control_plane.api.machines import (
    EventKind,
    Hardware,
    MachineRecord,
    UnavailabilityEvent,
)
from control_plane.api.settings import PortalSettings
from control_plane.broker.core.capacity import micro
from control_plane.portal.core.grants import MachineClass, is_leaving, rru_of, unkept
from control_plane.portal.portal import Person, Portal, Use
from control_plane.portal.request_book import RequestBook
from control_plane.portal.supply import SupplyIndex
from control_plane.runtime.runtime import Runtime
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from control_plane.store.records import QUARANTINE, REQUESTS
from wire.errors import Busy, Conflict, Forbidden, InvalidInput, NotFound, TwineError, Unprocessable

NOTHING = Use()
ANN, BOB, ROOT = Person("ann"), Person("bob"), Person("local:0", is_operator=True)
KEYS = ["key a", "key b"]
MANUAL = {"approval": "always", "approvers": ["bob"]}


def supply_of(machines: Iterable[MachineRecord]) -> Counter[MachineClass]:
    return Counter(
        MachineClass(m.machine_type, m.location.datacenter, micro(rru_of(m)), m.location.region)
        for m in machines
        if not is_leaving(m)
    )


def machine(i: int, kind: str = "small", datacenter: str = "dc1") -> MachineRecord:
    place = Location(datacenter=datacenter)
    hardware = Hardware(rru=2.0)
    return MachineRecord(machine=f"m{i}", location=place, machine_type=kind, hardware=hardware)


def with_profiles(record: MachineRecord, *profiles: str) -> MachineRecord:
    found = some_facts(record.machine)
    return replace(record, facts=replace(found, profiles=profiles))


def change(**fields) -> EntitlementChange:
    return EntitlementChange(spec=EntitlementSpec(**fields))


REMOVE = EntitlementChange(spec=None)


@asynccontextmanager
async def a_portal(store: MemoryStore | None = None, machines: int = 10, **rules):
    async with store or MemoryStore() as opened:
        portal = Portal(opened, Runtime(clock), msgspec.convert(rules, PortalSettings))
        for i in range(machines):
            portal.supply.on_machine_change(f"m{i}", None, machine(i))
        await portal.load()
        yield portal


def scenario(**rules):
    def decorate(body):
        def test() -> None:
            async def main() -> None:
                async with a_portal(**rules) as portal:
                    await body(portal)

            run(main())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


@pytest.mark.behaviour("CP1")
@scenario()
async def test_entitlements_are_created_grown_shrunk_and_deleted(p: Portal):
    for machines in (3, 10, 1):
        request = await p.request("front", change(machines=machines), ANN, NOTHING)
        assert request.state is RequestState.APPROVED
        assert p.specs()["front"].machines == machines
    assert p.table.get("front").generation == 3
    assert (await p.request("front", REMOVE, ANN, NOTHING)).state is RequestState.APPROVED
    assert p.specs() == {}
    assert [r.requester for r in p.requests] == ["ann"] * 4


@pytest.mark.behaviour("CP1", "CP7")
@scenario()
async def test_more_than_the_region_has_is_refused_with_the_sum(p: Portal):
    await p.request("front", change(machines=7), ANN, NOTHING)
    with pytest.raises(Unprocessable, match="7 machines granted to others") as refusal:
        await p.request("back", change(machines=4), ANN, NOTHING)
    assert refusal.value.hint == "3 machines of these could be granted"
    with pytest.raises(Unprocessable):
        await p.put("front", EntitlementSpec(machines=11), jobs=[])
    assert p.specs() == {"front": EntitlementSpec(machines=7)}
    await p.request("back", change(rru=6.0), ANN, NOTHING)
    with pytest.raises(Unprocessable, match="RRU"):
        await p.request("back", change(rru=6.5), ANN, NOTHING)


@pytest.mark.behaviour("CP1")
@scenario()
async def test_two_grants_that_fit_alone_are_not_both_made(p: Portal):
    requested = [p.request(f"e{i}", change(machines=4), ANN, NOTHING) for i in range(5)]
    answers = await asyncio.gather(*requested, return_exceptions=True)
    assert [isinstance(a, Unprocessable) for a in answers] == [False, False, True, True, True]
    assert len(p.specs()) == 2


@scenario(overgrant="allow")
async def test_a_region_may_promise_more_than_it_has_if_its_operator_permits_it(p: Portal):
    await p.put("front", EntitlementSpec(machines=10), jobs=[])
    await p.put("back", EntitlementSpec(machines=10), jobs=[])


@scenario(machines=0)
async def test_a_region_that_has_no_machines_yet_can_be_set_up(p: Portal):
    spec = EntitlementSpec(machines=3, machine_types=["later"], datacenter="later")
    await p.put("front", spec, jobs=[])


@scenario()
async def test_machines_that_left_do_not_keep_an_entitlement_from_shrinking(p: Portal):
    await p.request("front", change(machines=10, machine_types=["small"]), ANN, NOTHING)
    for i in range(10):
        p.supply.on_machine_change(f"m{i}", machine(i), machine(i, "large", "dc2"))
    with pytest.raises(InvalidInput, match="no machines of type small; it has: large"):
        await p.request("back", change(per_type={"small": 1}), ANN, NOTHING)
    await p.request("front", change(machines=5, machine_types=["small"]), ANN, NOTHING)
    await p.request("back", change(machines=10, datacenter="dc2"), ANN, NOTHING)


@scenario()
async def test_all_errors_are_reported_at_once(p: Portal):
    bad = change(machines=1, machine_types=["huge"], datacenter="dc9", materialization="none")
    with pytest.raises(InvalidInput) as refusal:
        await p.request("front", bad, ANN, NOTHING)
    fields = {e.field: e.reason for e in refusal.value.errors}
    assert fields == {
        "machine_types": "the region has no machines of type huge; it has: small",
        "datacenter": "the region has no data center dc9; it has: dc1",
        "materialization": "there is no entitlement 'none'",
    }


@pytest.mark.behaviour("BUG-UX120")
@scenario()
async def test_a_host_profile_that_no_machine_has_is_refused(p: Portal):
    """An entitlement with a misspelled host profile was created."""
    known = {f"m{i}": machine(i) for i in range(2)}
    p.supply.on_machine_change("m0", known["m0"], with_profiles(known["m0"], "base", "web"))
    p.supply.on_machine_change("m1", known["m1"], with_profiles(known["m1"]))
    early = change(machines=1, host_profile="early")
    await p.request("front", early, ANN, NOTHING)  # an agent of an earlier release reports none
    p.supply.on_machine_change("m1", with_profiles(known["m1"]), None)
    with pytest.raises(InvalidInput) as refusal:
        await p.request("back", change(machines=1, host_profile="nosuch"), ANN, NOTHING)
    assert [(e.field, e.reason) for e in refusal.value.errors] == [
        ("host_profile", "no machine has a host profile 'nosuch'; they have: base, web")
    ]
    await p.request("back", change(machines=1, host_profile="web"), ANN, NOTHING)
    await p.request("front", replace(early, spec=replace(early.spec, machines=2)), ANN, NOTHING)


@pytest.mark.behaviour("MO11", "MO16")
@scenario()
async def test_the_base_of_running_jobs_is_not_changed(p: Portal):
    await p.put("front", EntitlementSpec(machines=2), jobs=[])
    await p.put("pool", EntitlementSpec(machines=2, host_profile="web"), jobs=[])
    moved = EntitlementSpec(machines=2, host_profile="web", materialization="pool")
    with pytest.raises(Conflict, match="while jobs run on its machines: calc") as refusal:
        await p.put("front", moved, jobs=["calc"])
    assert {e.field for e in refusal.value.errors} == {"host_profile", "materialization"}
    await p.put("front", moved, jobs=[])
    with pytest.raises(Conflict, match="job calc, machine m1"):
        await p.request("front", REMOVE, ANN, Use(["calc"], ["m1"]))
    with pytest.raises(NotFound):
        await p.request("nothing", REMOVE, ANN, NOTHING)


@pytest.mark.behaviour("MO16")
@scenario()
async def test_reservations_fit_their_materialization(p: Portal):
    await p.put("pool", EntitlementSpec(machines=4, host_profile="web"), jobs=[])

    async def errors(name: str = "ads", **fields) -> set[str]:
        values = {"machines": 2, "host_profile": "web", "materialization": "pool"} | fields
        try:
            await p.put(name, EntitlementSpec(**values), jobs=[])
        except TwineError as e:
            return {f.field for f in e.errors}
        return set()

    assert await errors() == set()
    assert await errors(name="feed", machines=3) == set()
    assert await errors(name="feed", materialization="ads") == {"materialization"}
    assert await errors(name="pool") == {"materialization"}
    assert await errors(name="x", host_profile="base") == {"host_profile"}
    assert await errors(name="x", machines=None, rru=2.0) == {"machines"}
    assert await errors(name="x", machine_types=["small"]) == {"machine_types"}
    assert await errors(name="x", datacenter="dc1") == {"datacenter"}
    with pytest.raises(InvalidInput, match="the reservation 'ads' would not fit any more"):
        await p.put("pool", EntitlementSpec(machines=4, host_profile="base"), jobs=[])
    with pytest.raises(Conflict, match="reservation ads, reservation feed"):
        await p.delete("pool", Use())
    with pytest.raises(Unprocessable):  # 4 + 2 + 3 of 10 are promised already
        await p.put("x", EntitlementSpec(machines=2), jobs=[])


@pytest.mark.behaviour("CP6", "CP12")
@scenario(**MANUAL)
async def test_more_waits_for_approval_and_less_does_not(p: Portal):
    requested = await p.request("front", change(machines=5), ANN, NOTHING)
    assert (requested.state, requested.why_pending) == (
        RequestState.PENDING,
        "approval is required for more capacity",
    )
    assert p.specs() == {}
    assert p.requests.pending("front") == [requested.request_id]
    with pytest.raises(Forbidden, match="ann may not decide"):
        await p.approve(requested.request_id, ANN, "", NOTHING)
    decided = await p.approve(requested.request_id, BOB, "in the budget", NOTHING)
    assert (decided.state, decided.decided_by, decided.note) == (
        RequestState.APPROVED,
        "bob",
        "in the budget",
    )
    assert p.specs()["front"].machines == 5
    shrunk = await p.request("front", change(machines=2), ANN, NOTHING)
    assert shrunk.state is RequestState.APPROVED
    with pytest.raises(Forbidden, match="approval is required"):
        await p.put("front", EntitlementSpec(machines=3), jobs=[])
    with pytest.raises(Conflict, match="is already approved"):
        await p.deny(requested.request_id, ROOT, "")


@pytest.mark.behaviour("F-83")
@scenario()
async def test_more_relaxations_are_never_granted_by_the_rules(p: Portal):
    """The owner may change anything else at once, and may give relaxations up."""
    given = [Relaxation.OWN_INIT]
    new = await p.request("front", change(machines=2, relaxations=given), ANN, NOTHING)
    assert new.why_pending == "approval is required for the relaxations own-init of its jobs"
    await p.approve(new.request_id, ROOT, "", NOTHING)
    assert p.specs()["front"].relaxations == given
    kept = await p.request("front", change(machines=3, relaxations=given), ANN, NOTHING)
    assert kept.state is RequestState.APPROVED
    less = await p.request("front", change(machines=3), ANN, NOTHING)
    assert less.state is RequestState.APPROVED
    again = await p.request("front", change(machines=3, relaxations=given), ANN, NOTHING)
    assert again.state is RequestState.PENDING
    by_root = await p.request("back", change(machines=1, relaxations=given), ROOT, NOTHING)
    assert by_root.state is RequestState.APPROVED


@pytest.mark.behaviour("BUG-HT26")
@scenario()
async def test_an_owner_raises_capacity_alone_and_neither_priority_nor_rights(p: Portal):
    """The rule is portal.owners_raise. Returning capacity needs no approval."""
    made = await p.request("front", change(machines=2, image_keys=KEYS[:1]), ANN, NOTHING)
    assert made.state is RequestState.APPROVED
    for changes, why in (
        ({"priority": 1000}, "approval is required for priority 1000 instead of 500"),
        ({"image_keys": []}, "approval is required for the change or removal of its image keys"),
        ({"image_keys": KEYS}, "approval is required for the change or removal of its image keys"),
    ):
        spec = replace(p.specs()["front"], **changes)
        requested = await p.request("front", EntitlementChange(spec=spec), ANN, NOTHING)
        assert (requested.state, requested.why_pending) == (RequestState.PENDING, why)
    new = await p.request("back", change(machines=1, priority=501), ANN, NOTHING)
    assert new.state is RequestState.PENDING
    more = replace(p.specs()["front"], machines=3, priority=400)
    assert (
        await p.request("front", EntitlementChange(spec=more), ANN, NOTHING)
    ).state == "approved"
    back = replace(more, priority=500)
    requested = await p.request("front", EntitlementChange(spec=back), ANN, NOTHING)
    assert requested.why_pending == "approval is required for priority 500 instead of 400"
    await p.approve(requested.request_id, ROOT, "", NOTHING)
    assert p.specs()["front"].priority == 500


@pytest.mark.behaviour("BUG-HT26")
@scenario(owners_raise=["priority"], approvers=["bob"])
async def test_operators_decide_what_owners_may_raise(p: Portal):
    """Under another rule, approvers still raise everything at once."""
    requested = await p.request("front", change(machines=2), ANN, NOTHING)
    assert requested.why_pending == "approval is required for more capacity"
    assert (await p.request("front", change(machines=2), BOB, NOTHING)).state == "approved"
    raised = await p.request("front", change(machines=2, priority=900), ANN, NOTHING)
    assert raised.state is RequestState.APPROVED


@pytest.mark.behaviour("BUG-UX8")
@scenario()
async def test_a_dry_run_reports_the_outcome_of_a_request_and_stores_nothing(p: Portal):
    for spec, state in (
        (change(machines=4), "approved"),
        (change(machines=4, priority=9), "approved"),
    ):
        made = await p.request("front", replace(spec, dry_run=True), ANN, NOTHING)
        assert (made.state, made.request_id) == (state, "")
    waits = replace(change(machines=4, priority=900), dry_run=True)
    made = await p.request("front", waits, ANN, NOTHING)
    assert (made.state, made.request_id) == ("pending", "")
    assert "priority 900" in made.why_pending
    with pytest.raises(Unprocessable):
        await p.request("front", replace(change(machines=400), dry_run=True), ANN, NOTHING)
    assert p.specs() == {}
    assert list(p.requests) == []


@pytest.mark.behaviour("CP12")
@scenario(**MANUAL)
async def test_requests_are_denied_and_withdrawn(p: Portal):
    one = await p.request("front", change(machines=5), ANN, NOTHING)
    two = await p.request("front", change(machines=6), ANN, NOTHING)
    denied = await p.deny(one.request_id, ROOT, "no budget")
    assert (denied.state, denied.decided_by) == (RequestState.DENIED, "local:0")
    with pytest.raises(Forbidden, match="made by ann"):
        await p.withdraw(two.request_id, BOB, "")
    assert (await p.withdraw(two.request_id, ANN, "")).state is RequestState.WITHDRAWN
    assert p.requests.pending("front") == []
    with pytest.raises(NotFound):
        await p.deny("r99", ROOT, "")
    assert p.specs() == {}


@pytest.mark.behaviour("CP12")
@scenario()
async def test_a_request_for_machines_that_are_still_to_be_bought_waits(p: Portal):
    later = EntitlementChange(spec=EntitlementSpec(machines=12), queue=True)
    requested = await p.request("front", later, ANN, NOTHING)
    assert "the region has too few machines: the whole region" in requested.why_pending
    with pytest.raises(Unprocessable):
        await p.approve(requested.request_id, ROOT, "", NOTHING)
    for i in (10, 11):
        p.supply.on_machine_change(f"m{i}", None, machine(i))
    await p.approve(requested.request_id, ROOT, "", NOTHING)
    assert p.specs()["front"].machines == 12


@scenario(**MANUAL)
async def test_an_overtaken_request_is_not_approved(p: Portal):
    first = await p.request("front", change(machines=5), ANN, NOTHING)
    second = await p.request("front", change(machines=2), ANN, NOTHING)
    await p.approve(second.request_id, BOB, "", NOTHING)
    with pytest.raises(Conflict, match="has changed since"):
        await p.approve(first.request_id, BOB, "", NOTHING)


@pytest.mark.behaviour("CP12")
def test_requests_and_their_effect_survive_a_restart_together():
    async def main() -> None:
        store = MemoryStore()
        async with a_portal(store, **MANUAL) as portal:
            for i in range(12):
                await portal.request(f"e{i}", change(machines=1), ANN, NOTHING)
            await portal.approve("r1", BOB, "", NOTHING)
        async with a_portal(store, **MANUAL) as portal:
            assert portal.specs().keys() == {"e0"}
            assert [r.request_id for r in portal.requests] == [f"r{i}" for i in range(1, 13)]
            assert (
                await portal.request("e0", change(machines=2), ANN, NOTHING)
            ).request_id == "r13"
            assert portal.requests.pending("e5") == ["r6"]

    run(main())


@pytest.mark.behaviour("CP1")
def test_the_index_of_supply_agrees_with_a_count_of_all_machines():
    leaving = UnavailabilityEvent(
        event_id="1", kind=EventKind.DECOMMISSION, reason="old", start=0.0
    )
    index = SupplyIndex()
    now: dict[str, MachineRecord] = {}
    changes = [machine(i, kind, dc) for i, (kind, dc) in enumerate(product("ab", "xyz"))]
    changes += [machine(0, "b", "x"), replace(changes[1], unavailability=(leaving,))]
    changes += [replace(changes[2], hardware=None), replace(changes[3], entitlement="e")]
    changes += [replace(changes[3], entitlement="f"), changes[1]]
    for record in changes:
        index.on_machine_change(record.machine, now.get(record.machine), record)
        now[record.machine] = record
        assert index.counts() == supply_of(now.values())
    for name in list(now):
        index.on_machine_change(name, now.pop(name), None)
        assert index.counts() == supply_of(now.values())
    assert index.counts() == {}


@pytest.mark.behaviour("CP8")
def test_a_large_portal_does_its_sums_in_a_thread():
    """On a real loop, the sums of many entitlements are computed in a thread."""

    async def main() -> None:
        async with MemoryStore() as store:
            portal = Portal(store, Runtime())
            for i in range(300):
                portal.supply.on_machine_change(f"m{i}", None, machine(i))
            for i in range(300):
                await portal.request(f"e{i}", change(machines=1), ANN, NOTHING)
            with pytest.raises(Unprocessable, match="300 machines granted"):
                await portal.request("more", change(machines=1), ANN, NOTHING)

    asyncio.run(main())


def test_old_decided_requests_are_forgotten():
    async def main() -> None:
        store = MemoryStore()
        async with a_portal(store, keep_requests=10) as portal:
            later = EntitlementChange(spec=EntitlementSpec(machines=1), queue=True)
            await portal.request("waits", later, ANN, NOTHING)
            for i in range(15):
                await portal.request("front", change(machines=10 - i % 2), ANN, NOTHING)
        async with a_portal(store, keep_requests=10) as portal:
            found = [r.request_id for r in portal.requests]
            assert found == ["r1", *(f"r{i}" for i in range(7, 17))]

    run(main())


@pytest.mark.behaviour("BUG-UX176")
def test_denied_and_withdrawn_requests_are_forgotten_too():
    async def main() -> None:
        later = EntitlementChange(spec=EntitlementSpec(machines=1), queue=True)
        async with a_portal(MemoryStore(), keep_requests=10) as portal:
            for i in range(15):
                made = await portal.request("front", later, ANN, NOTHING)
                if i % 2:
                    await portal.withdraw(made.request_id, ANN, "")
                else:
                    await portal.deny(made.request_id, ROOT, "")
            assert len(list(portal.requests)) == 10

    run(main())


@pytest.mark.behaviour("BUG-UX176")
def test_an_approval_succeeds_although_older_requests_cannot_be_deleted(monkeypatch):
    async def main() -> None:
        async with a_portal(MemoryStore(), keep_requests=10) as portal:

            async def refuse() -> None:
                raise Busy("the store cannot be used")

            monkeypatch.setattr(portal.requests, "drop_old", refuse)
            made = await portal.request("front", change(machines=1), ANN, NOTHING)
            assert made.state is RequestState.APPROVED

    run(main())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.none()
        | st.builds(EntitlementSpec, machines=st.integers(1, 9))
        | st.builds(EntitlementSpec, rru=st.integers(1, 20).map(float))
        | st.builds(
            EntitlementSpec,
            per_type=st.dictionaries(
                st.sampled_from(["small", "large"]), st.integers(1, 5), min_size=1
            ),
        ),
        st.booleans(),
        st.sampled_from(["approve", "deny", "leave"]),
    ),
    max_size=15,
)


@pytest.mark.behaviour("CP1", "CP7")
@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_grants_never_exceed_the_region_for_any_requests_and_decisions(steps):
    async def main() -> None:
        async with a_portal(machines=0) as portal:
            for i in range(8):
                portal.supply.on_machine_change(
                    f"m{i}", None, machine(i, "large" if i < 3 else "small")
                )
            for name, spec, queue, then in steps:
                try:
                    request = await portal.request(
                        name, EntitlementChange(spec=spec, queue=queue), ANN, NOTHING
                    )
                    if request.state is RequestState.PENDING and then == "approve":
                        await portal.approve(request.request_id, ROOT, "", NOTHING)
                    elif request.state is RequestState.PENDING and then == "deny":
                        await portal.deny(request.request_id, ROOT, "")
                except (Unprocessable, NotFound, Conflict):
                    pass
                assert unkept(portal.specs(), portal.supply.counts()) == {}

    run(main())


@pytest.mark.behaviour("BUG-CP137")
async def test_the_id_of_a_damaged_request_is_not_used_again() -> None:
    async with MemoryStore() as store:
        await store.txn({}, [Put(f"{QUARANTINE}{REQUESTS}r7", b"{}")])
        book = RequestBook(store, keep=10)
        await book.load()

        assert book.new_id() == "r8"
