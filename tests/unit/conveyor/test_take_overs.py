"""A conveyor on another host takes over: the clocks of two hosts may differ by minutes."""

from __future__ import annotations

import pytest

from conveyor.api import ControlRequest, ControlVerb
from conveyor.core.fleet import (
    FleetRecord,
    FleetTimeouts,
    HostChange,
    ObservedHost,
    advance,
    continued_on,
)
from conveyor.core.transitions import OBSERVED_S
from conveyor.runs import RunState
from tests.unit.conveyor.delivery_model import World, a_pipeline, digest

pytestmark = pytest.mark.behaviour("BUG-CP126")
SOAK_S = 600.0
STAGES = [
    {"kind": "canary", "tasks": 1, "soak_s": SOAK_S, "reach_s": 900.0, "gates": ["errors"]},
    {"kind": "all"},
]


async def begun(boot: str) -> World:
    """Return a world in which a process on a host has begun a run."""
    world = World(a_pipeline(stages=STAGES))
    await world.store.__aenter__()
    world.restart(boot)
    await world.service.apply(world.spec, "user:ann")
    world.plane.images["web"] = digest(2)
    for _ in range(10):
        await world.rounds(1)
        if (await world.service.view("web")).record.active is not None:
            return world
    raise AssertionError("no run begins")


async def soaking(boot: str) -> World:
    """Return a world whose canary has soaked for 300 s on a host."""
    world = await begun(boot)
    for _ in range(20):
        if (reached := (await world.run()).steps[-1].reached) is not None:
            await world.rounds(round((reached + 300.0 - world.now) / 10.0))
            return world
        await world.rounds(1)
    raise AssertionError("the canary is not reached")


async def left_s(world: World) -> float:
    """Return for how long the canary soaks from now on."""
    for count in range(200):
        if (await world.run()).step == 1:
            return count * 10.0
        await world.rounds(1)
    raise AssertionError("the soak does not end")


@pytest.mark.parametrize("ahead_s", [-7200.0, -480.0, 0.0, 480.0, 7200.0])
async def test_the_soak_is_as_long_as_it_was_observed(ahead_s: float):
    world = await soaking("host a")
    world.now += ahead_s
    world.restart("host b")
    assert 300.0 <= await left_s(world) <= 300.0 + OBSERVED_S + 20.0


async def test_a_process_on_the_same_boot_counts_the_time_of_its_restart():
    world = await soaking("host a")
    world.now += 200.0
    world.restart("host a")
    assert 80.0 <= await left_s(world) <= 120.0


async def test_a_request_right_after_the_takeover_changes_no_times():
    world = await soaking("host a")
    world.now += 7200.0
    world.restart("host b")
    await world.service.load()
    for verb in (ControlVerb.PAUSE, ControlVerb.RESUME):
        await world.service.control("web", ControlRequest(verb=verb), "user:ann")
    assert SOAK_S <= await left_s(world) <= SOAK_S + 20.0


async def test_a_stage_with_time_left_does_not_fail():
    world = await begun("host a")
    assert (await world.run()).steps[-1].reached is None
    world.plane.jobs["web"].broken.add(digest(2))
    world.now += 7200.0
    world.restart("host b")
    await world.rounds(3)
    assert (await world.run()).state is RunState.RUNNING


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_a_host_of_a_fleet_is_watched_again(ahead_s: float):
    work = HostChange(host="m1", release="2", since=1e9, installed=1e9, boot="a")
    record = FleetRecord(release="2", version=1, work=work)
    patience, now = FleetTimeouts(healthy_s=300.0, settle_s=10.0), 1e9 + 5.0 + ahead_s
    taken = continued_on(record, now, "b")
    starting, healthy = ObservedHost("m1", "", False), ObservedHost("m1", "2", True)
    assert advance(taken, [starting], patience, now).work is not None
    settling = advance(taken, [healthy], patience, now)
    assert settling.work is not None
    assert advance(settling, [healthy], patience, now + 10.0).work is None
    assert continued_on(taken, now + 200.0, "b") == taken
