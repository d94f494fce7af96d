"""Requirements of jobs and entitlements, from the file to the machine, while labels change."""

import asyncio

import msgspec
import pytest
from inventory import a_machine
from test_growing_and_shrinking import SMALL, entitle, held, hosts, job, on, region_of
from test_machine_service import a_world
from world import World

from control_plane.allocator.core.allocation_record import _demand, _stored
from control_plane.allocator.core.demand import demand_of
from control_plane.api.allocations import StoredDemand
from control_plane.api.inventory import MachineScope, Relabel
from control_plane.broker.core.labels import read_labels
from control_plane.store.memory import MemoryStore
from wire.errors import InvalidInput


@pytest.mark.behaviour("AL5")
@on(region_of("dc1/msb1", "dc1/msb2", "dc1/msb3"))
async def test_a_job_waits_for_a_label_and_stays_when_it_goes(w: World):
    await entitle(w, "front", 3)
    fast = ["label.disk = nvme or label.disk = ssd and msb = msb1"]
    await w.cp.apply_job(job("a", 1, limits=SMALL, requires=fast))
    await asyncio.sleep(60)
    assert hosts(w, "a") == {}
    why = "requirement not met: label.disk = nvme or (label.disk = ssd and msb = msb1)"
    assert f"3 free machines: {why}" in (await w.cp.job_planner.explain("a")).reasons
    await w.cp.inventory.label(Relabel(machines=["m2"], set={"disk": "ssd"}))
    await asyncio.sleep(60)
    assert hosts(w, "a") == {}
    await w.cp.inventory.label(Relabel(machines=["m2"], set={"disk": "nvme"}))
    await asyncio.sleep(60)
    assert list(hosts(w, "a").values()) == ["m2"]
    await w.cp.inventory.label(Relabel(machines=["m2"], remove=["disk"]))
    await w.cp.inventory.label(Relabel(machines=["m1"], set={"disk": "ssd"}))
    await asyncio.sleep(60)
    assert list(hosts(w, "a").values()) == ["m2"]  # the task runs, and stays
    await w.cp.apply_job(job("a", 2, limits=SMALL, requires=fast))
    await asyncio.sleep(60)
    assert sorted(hosts(w, "a").values()) == ["m1", "m2"]


@on(region_of("dc1/msb1", "dc1/msb2", "dc1/msb3"))
async def test_requirements_of_an_entitlement_hold_for_all_its_jobs(w: World):
    await w.cp.inventory.label(Relabel(machines=["m3"], set={"team": "ads"}))
    await entitle(w, "front", 2, requires=["label.team = ads"])
    await w.cp.apply_job(job("a", 2, limits=SMALL))
    await asyncio.sleep(60)
    assert set(hosts(w, "a").values()) == {"m3"}
    assert held(w, "front") == ["m3"]


@on(region_of("dc1/msb1", "dc1/msb2", "dc1/msb3"))
async def test_a_job_is_kept_off_machines_with_a_reason_and_restarts_nothing(w: World):
    await entitle(w, "front", 3)
    pinned = 'machine in (m1, m2) because "the licence is bound to them"'
    await w.cp.apply_job(job("a", 2, requires=[pinned]))
    await asyncio.sleep(60)
    assert sorted(hosts(w, "a").values()) == ["m1", "m2"]
    before = (await w.cp.get_job("a")).record
    off = 'machine not in (m1, m3) because "disk errors, ticket 812"'
    await w.cp.apply_job(job("a", 3, requires=[off]))
    await asyncio.sleep(60)
    after = (await w.cp.get_job("a")).record
    assert after.version == before.version
    assert [t.generation for t in after.tasks[:2]] == [t.generation for t in before.tasks]
    assert sorted(hosts(w, "a").values()) == ["m1", "m2"]
    explained = await w.cp.job_planner.explain("a")
    assert explained.waiting == [2]
    assert any(off in reason for reason in explained.reasons)


@pytest.mark.behaviour("FE4")
@on(region_of("dc1/msb1", "dc1/msb2"))
async def test_requirements_that_no_machine_meets_are_refused(w: World):
    await entitle(w, "front", 2)
    with pytest.raises(
        InvalidInput, match="2 machines: requirement not met: gpus >= 1 and rack = r1"
    ):
        await w.cp.apply_job(job("a", 1, requires=["gpus >= 1 and rack = r1"]))
    await w.cp.apply_job(job("a", 1, requires=["gpus >= 1 or rack = r1"]))  # a rack may join


def test_claims_are_stored_as_before_where_nothing_new_is_required():
    old = job("a", 1, requires=["rack in (r2, r1)"], machine_types=["small"])
    stored = _stored(demand_of(old))
    assert stored.where == ()
    assert stored.requires == (("machine_type", ("small",)), ("rack", ("r1", "r2")))
    text = b'{"requires":[["machine_type",["small"]],["rack",["r1","r2"]]]}'
    assert _demand(msgspec.json.decode(text, type=StoredDemand)).requires == demand_of(old).requires


def test_claims_with_any_requirement_are_read_back_as_they_were():
    requirements = ["label.a = b", "rack = r1", "gpus > 1 or not msb in (a, b)"]
    demand = demand_of(job("a", 1, requires=requirements), "dc1")
    again = msgspec.json.decode(msgspec.json.encode(_stored(demand)), type=StoredDemand)
    assert _demand(again) == demand


async def test_labels_are_given_to_all_machines_or_to_none():
    async with MemoryStore() as store:
        world = await a_world(store)
        full = {f"l{i}": "x" for i in range(32)}
        await world.brokers.add({"m1": a_machine("m1"), "m2": a_machine("m2", labels=full)})
        with pytest.raises(InvalidInput, match="'m2' would have 33 labels, more than 32"):
            await world.service.label(Relabel(machines=["m1", "m2"], set={"new": "x"}))
        assert world.brokers.table.get("m1").labels is None
        swap = Relabel(scope=MachineScope(where="machine = m2"), set={"new": "x"}, remove=["l0"])
        (changed,) = (await world.service.label(swap)).machines
        assert changed.labels == {name: "x" for name in full if name != "l0"} | {"new": "x"}
        same = (await world.service.label(swap)).machines
        assert same == [changed]


@pytest.mark.parametrize(
    ("cell", "labels"),
    [
        ("a=b", {"a": "b"}),
        (" a=b;c.d=e-f  g_h=1:2 ", {"a": "b", "c.d": "e-f", "g_h": "1:2"}),
        ({"a": "b"}, {"a": "b"}),
        ({}, {}),
    ],
)
def test_labels_of_a_machine_list_are_stored(cell, labels):
    assert read_labels(cell) == labels


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("a", "'a' has no value"),
        ("a=b a=c", "each name once"),
        ("A=b", "'A' does not"),
        ("a=", "'' does not"),
        ("a=-x", "'-x' does not"),
        ({"a": 1}, "1 does not"),
        (7, "NAME=VALUE"),
        (" ".join(f"l{i}=x" for i in range(33)), "at most 32"),
    ],
)
def test_invalid_labels_of_a_machine_list_are_refused(cell, why):
    with pytest.raises(ValueError, match=why):
        read_labels(cell)
