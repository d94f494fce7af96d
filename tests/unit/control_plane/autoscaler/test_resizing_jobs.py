"""The size of an autoscaled job in the assembled control plane: which writers may set it."""

import pytest
from msgspec.structs import replace
from world import World, a_job, scenario

from agent.api import Limits
from control_plane.api.autoscale import AutoscaleMode
from control_plane.api.intent_changes import SizeChange
from control_plane.api.updates import UpdatePolicy
from control_plane.autoscaler.sizes import NewSize, size_change
from tests.unit.control_plane.autoscaler.sizing_builders import a_policy
from wire.errors import Conflict

APPLY = a_policy(minimum=2, maximum=9)
SCALER, OWNER = "user:scaler", "user:ada"


async def resize(w: World, tasks: int) -> None:
    """Write a size as the autoscaler does: based on the version that it read."""
    status = await w.cp.get_job("web")
    await w.cp.intents.size("web", size_change(NewSize(status, tasks, "load 9 cores")), SCALER)


async def size(w: World) -> int:
    return (await w.cp.get_job("web")).record.spec.tasks


@pytest.mark.behaviour("AS7", "AS8")
@scenario()
async def test_a_size_changes_the_size_and_nothing_else(w: World):
    await w.deployed(a_job(3, autoscale=APPLY))
    before = (await w.cp.get_job("web")).record
    await resize(w, 5)
    await w.stable()
    after = (await w.cp.get_job("web")).record
    assert (await w.endpoints_count(5), after.version) == (True, before.version)
    assert replace(after.spec, tasks=3) == before.spec


@scenario()
async def test_the_owners_file_does_not_undo_the_size_of_the_autoscaler(w: World):
    """In Kubernetes, `replicas` of a manifest undoes the size of the autoscaler."""
    await w.deployed(a_job(3, autoscale=APPLY))
    await resize(w, 6)
    status = await w.cp.apply_job(a_job(3, autoscale=APPLY, command=["/bin/other"]), writer=OWNER)
    assert (status.record.spec.tasks, status.record.version) == (6, 2)
    plan = await w.cp.job_planner.plan(a_job(3, autoscale=APPLY, command=["/bin/third"]))
    assert plan.wanted == 6
    await w.cp.rollback_job("web", OWNER)
    assert await size(w) == 6
    await resize(w, 7)
    assert await size(w) == 7


@scenario()
async def test_new_bounds_count_at_once(w: World):
    await w.deployed(a_job(3, autoscale=APPLY))
    await w.cp.apply_job(a_job(3, autoscale=a_policy(minimum=4, maximum=9)), writer=OWNER)
    assert await size(w) == 4
    await w.cp.apply_job(a_job(9, autoscale=a_policy(minimum=2, maximum=3)), writer=OWNER)
    assert await size(w) == 3


@scenario()
async def test_the_file_counts_where_the_autoscaler_does_not_apply(w: World):
    await w.deployed(a_job(3, autoscale=APPLY))
    await resize(w, 6)
    await w.cp.apply_job(a_job(4, autoscale=a_policy(mode=AutoscaleMode.RECOMMEND)), writer=OWNER)
    assert await size(w) == 4
    # the owner has just set this size
    await w.cp.apply_job(a_job(5, autoscale=APPLY), writer=OWNER)
    assert await size(w) == 5
    await w.cp.apply_job(a_job(3), writer=OWNER)
    assert await size(w) == 3


@pytest.mark.behaviour("FE11", "JC15")
@scenario()
async def test_a_size_of_a_person_stays_until_the_file_is_applied_again(w: World):
    """One writer of the size at a time."""
    await w.deployed(a_job(3, autoscale=APPLY))
    await resize(w, 6)
    await w.cp.intents.size("web", SizeChange(tasks=8, take_over=True), OWNER)
    with pytest.raises(Conflict, match="user:ada is its writer"):
        await resize(w, 5)
    assert await size(w) == 8
    await w.cp.apply_job(a_job(3, autoscale=APPLY), writer=OWNER)
    assert await size(w) == 8
    await resize(w, 5)
    assert await size(w) == 5


@scenario()
async def test_a_size_over_an_unseen_change_is_refused(w: World):
    await w.deployed(a_job(3, autoscale=APPLY))
    stale = size_change(NewSize(await w.cp.get_job("web"), 5, "late"))
    await resize(w, 4)
    with pytest.raises(Conflict, match="and the request replaces version"):
        await w.cp.intents.size("web", stale, SCALER)
    with pytest.raises(Conflict, match="bounds are 2 to 9"):
        await resize(w, 10)
    await w.cp.stop_job("web")
    with pytest.raises(Conflict, match="is being stopped"):
        await resize(w, 5)


@pytest.mark.behaviour("AS5")
@scenario()
async def test_a_size_beyond_the_room_of_the_entitlement_stops_no_release(w: World):
    memory = next(iter(w.region.machines.values())).facts().memory_bytes
    update = UpdatePolicy(max_unavailable=3)  # two tasks wait for room, and count as unavailable
    limits = Limits(memory_max_bytes=int(0.6 * memory))
    whole = {"limits": limits, "autoscale": APPLY, "update": update}
    await w.deployed(a_job(3, **whole))
    await resize(w, 5)  # the entitlement has three machines
    status = await w.cp.apply_job(a_job(3, command=["/bin/other"], **whole), writer=OWNER)
    assert (status.record.spec.tasks, status.record.version) == (5, 2)
    await w.until(lambda: {t.version for t in w.cp._jobs.get("web").tasks[:3]} == {2})
