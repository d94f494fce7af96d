"""The share of the requests that a canary gets, in the assembled control plane.

Results are read from discovery, as a proxy reads them.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from virtual_time import run
from world import World, a_job, a_region, scenario

from agent.api import Health
from control_plane.api.intent_changes import CanaryChange, IntentChange, PushChange, SizeChange
from control_plane.api.updates import UpdatePolicy
from control_plane.api.weights import EndpointWeights
from wire.errors import Conflict, InvalidInput
from wire.routes import decode_json

pytestmark = pytest.mark.behaviour("JC10")

OTHER = ["/bin/other", "${port:http}"]
FAST = UpdatePolicy(drain_s=0.0, max_unavailable=3)
SLOW = UpdatePolicy(drain_s=5.0, max_unavailable=1)
TESTER = "user:tester"


def a_canary(traffic: float | None, **changes) -> CanaryChange:
    values = {"tasks": 2, "command": OTHER, "traffic": traffic, "lasts_s": 9e4}
    return CanaryChange(**(values | changes))


async def parts(w: World) -> dict[int, float]:
    """Return the share of a proxy's requests that the tasks of each version get."""
    listed = (await w.cp.endpoints("web")).endpoints
    total, found = sum(e.weight for e in listed), dict[int, float]()
    for e in listed:
        found[e.version] = found.get(e.version, 0.0) + e.weight / total
    return found


async def weights(w: World) -> set[int]:
    return {e.weight for e in (await w.cp.endpoints("web")).endpoints}


def effect_of(w: World, shown) -> tuple[str, str]:
    (view,) = [view for view in shown.intents if view.dimension == "canary"]
    return view.effect, view.waits_for


@pytest.mark.behaviour("JC10")
@scenario()
async def test_a_canary_gets_its_part_of_the_requests_at_every_size_until_it_ends(w: World):
    """2 of 10 tasks get 5 % of the requests, and 5 % when there are 4 or 12."""
    await w.deployed(a_job(10, update=FAST))
    assert await weights(w) == {100}
    await w.cp.intents.canary("web", a_canary(0.05), TESTER)
    await w.stable()
    for size in (10, 4, 12):
        await w.cp.intents.size("web", SizeChange(tasks=size), TESTER)
        await w.stable()
        assert (await parts(w))[2] == pytest.approx(0.05, abs=0.001)
        effect, waits = effect_of(w, await w.cp.intents.show("web"))
        assert "with 5.0" in effect or "with 4.9" in effect
        assert not waits
    await w.cp.intents.push(
        "web", PushChange(spec=a_job(1, update=FAST, environment={"A": "1"})), TESTER
    )
    await w.stable()
    assert (await parts(w))[2] == pytest.approx(0.05, abs=0.001)
    before = await w.cp.endpoints("web")
    waiting = asyncio.create_task(w.cp.endpoints("web", after=before.revision, wait_s=50))
    await w.cp.intents.canary("web", a_canary(0.5), TESTER)  # the same variant with more tasks
    assert {e.weight for e in (await waiting).endpoints} != {e.weight for e in before.endpoints}
    assert (await parts(w))[2] == pytest.approx(0.5, abs=0.001)
    await w.cp.intents.withdraw("web", "canary", IntentChange(), TESTER)
    await w.stable()
    assert await weights(w) == {100}


@scenario()
async def test_a_part_of_none_or_all_is_kept_and_all_serve_when_one_kind_is_away(w: World):
    await w.deployed(a_job(4, update=FAST))
    await w.cp.intents.canary("web", a_canary(0.0), TESTER)
    await w.stable()
    assert await parts(w) == {1: 1.0, 2: 0.0}
    await w.cp.intents.canary("web", a_canary(1.0), TESTER)
    assert await parts(w) == {1: 0.0, 2: 1.0}
    await w.cp.intents.size("web", SizeChange(tasks=2), TESTER)
    await w.cp.intents.canary("web", a_canary(0.0), TESTER)
    await w.until(lambda: {t.version for t in w.cp._jobs.get("web").tasks} == {2}, 600)
    assert await weights(w) == {100}  # only canaries remain
    assert effect_of(w, await w.cp.intents.show("web"))[1].startswith(
        "0.00% of the requests: no other"
    )


@pytest.mark.behaviour("JC10")
@scenario()
async def test_the_requests_of_a_canary_that_failed_do_not_rise_before_its_tasks_are_replaced(
    w: World,
):
    """When the canary ends, 2 bad tasks of 10 must not get their usual 20 %."""
    await w.deployed(a_job(10, update=SLOW))
    await w.cp.intents.canary("web", a_canary(0.02), TESTER)
    await w.stable(within_s=600)
    failing = next(t for t in w.cp._jobs.get("web").tasks if t.version == 2)
    machine = w.region.machines[failing.placement.machine]
    machine.report(f"web-{failing.index}", health=Health.UNHEALTHY)
    await w.until(lambda: w.cp._jobs.get("web").intents["canary"].value is None)
    seen = 0
    while 2 in (found := await parts(w)):
        assert found[2] <= 0.021
        seen += 1
        await asyncio.sleep(0.5)
    assert seen  # the other canary task was still listed after the end
    await w.stable(within_s=600)
    assert await weights(w) == {100}


@scenario()
async def test_a_canary_without_a_part_takes_that_of_the_one_before_away(w: World):
    await w.deployed(a_job(6, update=FAST))
    await w.cp.intents.canary("web", a_canary(0.02), TESTER)
    await w.stable()
    await w.cp.intents.canary("web", a_canary(None), TESTER)
    assert await weights(w) == {100}


@scenario()
async def test_a_canary_is_stronger_than_a_load_test(w: World):
    """One rule for both: while a canary has a share of the requests, no load test shifts any."""
    await w.deployed(a_job(6, update=FAST))
    test = EndpointWeights(weights={0: 200}, for_s=600)
    w.cp.discovery.set_weights("web", test)
    assert await weights(w) == {100, 200}
    await w.cp.intents.canary("web", a_canary(0.1), TESTER)
    await w.stable()
    assert (await parts(w))[2] == pytest.approx(0.1, abs=0.001)
    with pytest.raises(Conflict, match=r"a canary gets 10.00% of its requests"):
        w.cp.discovery.set_weights("web", test)
    w.cp.discovery.set_weights("web", EndpointWeights())  # the end of a test is always allowed
    assert (await parts(w))[2] == pytest.approx(0.1, abs=0.001)
    await w.cp.intents.withdraw("web", "canary", IntentChange(), TESTER)
    await w.stable()
    assert await weights(w) == {100}
    w.cp.discovery.set_weights("web", test)


@scenario()
async def test_a_traffic_share_that_weights_cannot_reach_is_reported(w: World):
    await w.deployed(a_job(6, update=FAST))
    await w.cp.intents.canary("web", a_canary(0.001, tasks=5), TESTER)
    await w.stable()
    effect, waits = effect_of(w, await w.cp.intents.show("web"))
    assert effect == "5 tasks should run version 2, with 1.92% of the requests"
    assert waits == "0.10% of the requests: weights must be from 1 to 256"


@pytest.mark.parametrize("traffic", [-0.1, 1.01, "half"])
def test_an_invalid_traffic_share_is_refused(traffic: object):
    body = msgspec.json.encode({"lasts_s": 60, "environment": {"A": "1"}, "traffic": traffic})
    with pytest.raises(InvalidInput, match=r"traffic: .* is not valid; expected"):
        decode_json(body, CanaryChange, "the request body")


@scenario()
async def test_a_job_without_a_port_has_no_requests_to_share(w: World):
    await w.deployed(a_job(2, command=["/bin/work"], ports=[], probe=None))
    before = w.cp._jobs.get("web")
    with pytest.raises(InvalidInput, match="has no port for clients"):
        await w.cp.intents.canary("web", a_canary(0.1, command=["/bin/x"]), TESTER)
    assert w.cp._jobs.get("web").intents == before.intents


def test_the_part_holds_over_a_restart_of_the_control_plane_and_after_the_end():
    async def main() -> None:
        world = World(a_region())
        async with world.running() as w:
            await w.deployed(a_job(6, update=SLOW))
            await w.cp.intents.canary("web", a_canary(0.1), TESTER)
            await w.stable(within_s=600)
            before = {e.task: e.weight for e in (await w.cp.endpoints("web")).endpoints}
        async with world.running() as w:
            after = {e.task: e.weight for e in (await w.cp.endpoints("web")).endpoints}
            assert after == before
            await w.cp.intents.withdraw("web", "canary", IntentChange(), TESTER)
        async with world.running() as w:
            assert (await parts(w))[2] == pytest.approx(0.1, abs=0.001)
            await w.stable(within_s=600)
            assert await weights(w) == {100}
        assert world.region.broken_rules == []

    run(main())
