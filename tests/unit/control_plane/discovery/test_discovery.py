"""What clients of a job receive, and when."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest
from msgspec.structs import replace
from virtual_time import run
from world import World, a_job, a_region, scenario

from agent.api import NetworkMode
from agent.api.network import Reach
from control_plane.api.jobs import TaskRecord
from control_plane.api.watch import EndpointChanges
from control_plane.api.weights import EndpointWeights
from wire.errors import NotFound


@pytest.mark.behaviour("BUG-CP12")
@scenario()
async def test_a_machine_that_joins_again_elsewhere_is_listed_at_its_new_address(w: World):
    """Formerly the endpoints kept the address that the machine had when its task was listed."""
    await w.deployed(a_job(3))
    before = await w.cp.endpoints("web")
    moved = w.region.machines["m1"]
    waiting = asyncio.create_task(w.cp.endpoints("web", after=before.revision, wait_s=30))
    await asyncio.sleep(1)
    await w.cp.joined(replace(moved.join(), address="192.0.2.7:7443"))
    after = await waiting
    hosts = {endpoint.machine: endpoint.host for endpoint in after.endpoints}
    assert after.revision > before.revision
    assert hosts == {"m1": "192.0.2.7", "m2": "m2.example", "m3": "m3.example"}


@scenario()
async def test_a_machine_that_joins_again_at_the_same_address_wakes_no_client(w: World):
    await w.deployed(a_job(3))
    before = await w.cp.endpoints("web")
    await w.cp.joined(w.region.machines["m1"].join())
    assert await w.cp.endpoints("web", after=before.revision, wait_s=5) == before


@pytest.mark.behaviour("BUG-CP23")
@scenario()
async def test_waiters_for_a_job_are_woken_when_it_ends_and_no_state_is_kept(w: World):
    """Entries of removed jobs do not stay."""
    await w.deployed(a_job(3))
    before = await w.cp.endpoints("web")

    async def wait() -> None:
        after = before.revision
        while True:
            after = (await w.cp.endpoints("web", after=after, wait_s=60)).revision

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(1)
    await w.cp.stop_job("web")
    with pytest.raises(NotFound):
        await waiting
    discovery = w.cp.discovery
    assert not discovery._wakeups
    assert not discovery._endpoints
    assert not discovery._revisions


@pytest.mark.behaviour("SD3")
@scenario()
async def test_one_call_follows_many_jobs(w: World):
    """A client that follows two jobs is notified of the one that changed, appeared or
    disappeared."""
    await w.deployed(a_job(3))
    first = await w.cp.watch_endpoints({"web": None, "api": None})
    assert [e.job for e in first.changed] == ["web"]
    assert first.missing == ["api"]
    known = {"web": first.changed[0].revision, "api": 0}
    assert await w.cp.watch_endpoints(known, wait_s=5) == EndpointChanges()

    waiting = asyncio.create_task(w.cp.watch_endpoints(known, wait_s=60))
    await w.deployed(a_job(1, name="api"))
    came = await waiting
    assert [e.job for e in came.changed] == ["api"]
    assert came.missing == []

    known["api"] = (await w.cp.watch_endpoints({"api": None})).changed[0].revision
    waiting = asyncio.create_task(w.cp.watch_endpoints(known, wait_s=60))
    await asyncio.sleep(1)
    await w.cp.stop_job("api")
    while (news := await waiting).changed:  # the job is unlisted first, then removed
        known["api"] = news.changed[0].revision
        waiting = asyncio.create_task(w.cp.watch_endpoints(known, wait_s=60))
    assert news.missing == ["api"]
    assert not w.cp.discovery._wakeups


@scenario()
async def test_a_lower_revision_than_the_known_one_counts_as_a_change(w: World):
    """The revisions of a restored store continue from those of the copy."""
    await w.deployed(a_job(3))
    [now] = (await w.cp.watch_endpoints({"web": 1_000_000}, wait_s=60)).changed
    assert now == await w.cp.endpoints("web")


@pytest.mark.behaviour("SD4", "SD3")
@scenario()
async def test_each_task_of_a_private_network_is_listed_at_its_address(w: World):
    """One line of the job file gives each task an address. A move gives the task another one."""
    await w.deployed(a_job(3, network=Reach(mode=NetworkMode.PRIVATE)))
    before = await w.cp.endpoints("web")
    hosts = {e.task: e.host for e in before.endpoints}
    assert len(set(hosts.values())) == 3
    assert all(ipaddress.ip_address(host).version == 6 for host in hosts.values())
    assert {task: record.address for task, record in zip(hosts, tasks(w), strict=True)} == hosts
    machine = before.endpoints[0].machine
    waiting = asyncio.create_task(w.cp.endpoints("web", after=before.revision, wait_s=60))
    w.region.machines[machine].report("web-0", addresses=["fd00:7477::99"])
    after = await waiting
    assert [e.host for e in after.endpoints if e.task == "web-0"] == ["fd00:7477::99"]


@pytest.mark.behaviour("SD4")
def test_addresses_survive_a_restart_of_the_control_plane() -> None:
    """Clients receive the same addresses before any agent has reported again."""

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await w.deployed(a_job(3, network=Reach(mode=NetworkMode.PRIVATE)))
            before = [e.host for e in (await w.cp.endpoints("web")).endpoints]
            assert len(before) == 3
            for machine in w.region.machines.values():
                machine.refusing = True
        again = World(w.region, w.store)
        async with again.running():
            assert [e.host for e in (await again.cp.endpoints("web")).endpoints] == before

    run(main())


@pytest.mark.behaviour("SD4")
@scenario()
async def test_an_invalid_address_of_a_task_is_not_listed(w: World):
    """Otherwise the resolver would write it into the configuration of proxies."""
    await w.deployed(a_job(3))
    before = (await w.cp.endpoints("web")).endpoints
    agent = w.region.machines[before[0].machine]
    zones = ("fd00::1%eth0", "fd00::1%x\n  server evil 192.0.2.9:80")
    none = ("127.0.0.1", "::1", "fe80::1", "ff02::1", "::", "a.b", "1 {", *zones)
    for address in (*none, "192.0.2.8"):
        agent.report(before[0].task, addresses=[address])
        await asyncio.sleep(5)
        host = (await w.cp.endpoints("web")).endpoints[0].host
        assert host == (address if address == "192.0.2.8" else before[0].host)


def tasks(w: World) -> list[TaskRecord]:
    return w.cp._jobs.get("web").tasks


@scenario()
async def test_weights_are_listed_for_a_limited_time(w: World):
    """If a load tester that shifts requests dies, its weights expire."""
    await w.deployed(a_job(3))
    before = await w.cp.endpoints("web")
    answer = w.cp.discovery.set_weights("web", EndpointWeights(weights={1: 200}, for_s=60))
    assert answer.revision > before.revision
    assert [e.weight for e in answer.endpoints] == [100, 200, 100]
    waiting = asyncio.create_task(w.cp.endpoints("web", after=answer.revision, wait_s=50))
    await asyncio.sleep(30)
    w.cp.discovery.set_weights("web", EndpointWeights(weights={0: 50}, for_s=60))
    assert [e.weight for e in (await waiting).endpoints] == [50, 100, 100]
    after = (await w.cp.endpoints("web")).revision
    back = await w.cp.endpoints("web", after=after, wait_s=60)
    assert [e.weight for e in back.endpoints] == [100, 100, 100]
    with pytest.raises(NotFound):
        w.cp.discovery.set_weights("nothing", EndpointWeights(weights={0: 50}))


@pytest.mark.behaviour("BUG-CP143")
@scenario()
async def test_a_job_with_the_name_of_a_stopped_one_has_the_usual_weights(w: World):
    """Formerly the weights of a load test on the stopped job applied to the new one."""
    await w.deployed(a_job(3))
    w.cp.discovery.set_weights("web", EndpointWeights(weights={1: 200}, for_s=3600))
    await w.cp.stop_job("web")
    while True:  # until its last task has ended
        try:
            await w.cp.endpoints("web")
        except NotFound:
            break
        await asyncio.sleep(1)
    await w.deployed(a_job(3))
    assert [e.weight for e in (await w.cp.endpoints("web")).endpoints] == [100, 100, 100]
