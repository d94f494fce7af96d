"""Which machines the control plane considers dead during failures of other components."""

import asyncio
import random

import pytest
from fake_agents import Region
from faulty_store import MADE, REFUSED, FaultyStore
from virtual_time import clock, run
from world import World, a_region, scenario

from control_plane.api.duplicates import Duplicate
from control_plane.api.inventory import MachineScope
from control_plane.api.machine_commands import MarkDown
from control_plane.api.machines import EventKind, MachineState
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.store.memory import MemoryStore
from wire.errors import Conflict


def live(region: Region, body, store=None, wall=None, **settings) -> World:
    """Run a body in a world; assert that no rule was broken, except copies caused by a cut."""

    async def main() -> World:
        world = World(region, store, **settings)
        if wall is not None:
            world.runtime = SteppedRuntime(wall, seed=0)
        async with asyncio.timeout(50_000), world.running():
            await body(world)
        assert [rule for rule in region.broken_rules if "runs on" not in rule] == []
        return world

    return run(main())


def of_parts(datacenters: int, msbs: int, machines: int) -> Region:
    region = Region()
    for d in range(datacenters):
        for b in range(msbs):
            for m in range(machines):
                region.add(f"d{d}-b{b}-m{m}", f"dc{d}", f"dc{d}-msb{b}")
    return region


async def pause(seconds: float) -> None:
    """Block this process."""
    asyncio.get_running_loop()._virtual.now += seconds
    await asyncio.sleep(0)


async def states(w: World) -> dict[str, MachineState]:
    views = (await w.cp.list_machines()).machines
    return {view.record.machine: view.record.state for view in views}


async def down(w: World) -> list[str]:
    return [name for name, state in (await states(w)).items() if state is MachineState.DOWN]


def starts(w: World) -> int:
    return sum(len(machine.starts) for machine in w.region.machines.values())


async def nothing_moves(w: World, seconds: float) -> None:
    before = starts(w)
    end = clock() + seconds
    while clock() < end:
        await asyncio.sleep(1)
        assert await down(w) == []
    assert starts(w) == before


@pytest.mark.behaviour("BUG-CP1")
@scenario()
async def test_one_slow_answer_after_a_blip_leaves_no_machine_down(w: World):
    """A machine whose list takes 8.5 s after a short cut does not stay down forever."""
    await w.deployed()
    m1 = w.region.machines["m1"]
    m1.behaviour.list_s = 8.5
    m1.reachable = False
    await asyncio.sleep(6)
    m1.reachable = True
    await asyncio.sleep(120)
    assert await down(w) == []
    assert all(count == 2 for count in w.alive().values())
    assert await w.endpoints_count(6)


@pytest.mark.behaviour("BUG-CP1")
@scenario()
async def test_a_machine_that_answers_is_up_even_if_it_was_marked_down(w: World):
    """Up is a state that is observed, not an event that can be missed."""
    await w.deployed()
    await w.cp.inventory._brokers.carry_out("m1", MarkDown(reason="a verdict that came too late"))
    await w.until(lambda: is_state(w, "m1", MachineState.UP), within_s=15)
    await w.stable()


@pytest.mark.behaviour("F-89")
@scenario()
async def test_a_second_host_at_a_machines_address_gets_no_data(w: World):
    """A clone has the identity of m1 and took its address. Once it is gone, m1 is accepted."""
    await w.deployed()
    m1 = w.region.machines["m1"]
    boot_id = m1.facts().boot_id
    second = Duplicate(machine="m1", boot_id=boot_id, address="", other_boot_id="other", at=0.0)
    w.cp.duplicates = {"m1": second}
    m1.reachable = False
    await w.until(lambda: is_ready(w, "m1", ready=False), within_s=15)
    m1.reachable = True
    for _ in range(20):
        await asyncio.sleep(0.5)
        assert await is_ready(w, "m1", ready=False)
    assert "keeps it" in (await w.cp.get_machine("m1")).duplicate
    w.cp.duplicates = {}
    await w.until(lambda: is_ready(w, "m1", ready=True), within_s=15)
    await w.stable()


async def is_ready(w: World, machine: str, *, ready: bool) -> bool:
    return (await w.cp.get_machine(machine)).ready is ready


async def is_state(w: World, machine: str, state: MachineState) -> bool:
    return (await w.cp.get_machine(machine)).record.state is state


@pytest.mark.behaviour("BUG-CP1", "F-49")
def test_after_blips_of_any_length_every_machine_is_up_and_every_task_runs_once():
    """Blips take 6 to 14 s, around the limit of 10 s."""
    live(a_region(), blips, flap_trust_s=1)


async def blips(w: World) -> None:
    await w.deployed()
    chance = random.Random(1)
    for _ in range(20):
        machine = w.region.machines[chance.choice(["m1", "m2", "m3"])]
        machine.behaviour.list_s = chance.uniform(0, 9)
        machine.reachable = False
        await asyncio.sleep(chance.uniform(6, 14))
        machine.reachable = True
        await asyncio.sleep(chance.uniform(0, 30))
    await asyncio.sleep(300)
    assert await down(w) == []
    assert sum(w.alive().values()) == 6
    assert all(len(w.region.copies(f"web-{i}")) == 1 for i in range(6))


@pytest.mark.behaviour("BUG-CP3")
@pytest.mark.parametrize("seconds", [12, 299, 330, 400])
def test_a_pause_of_the_control_plane_is_no_silence_of_its_machines(seconds: float):
    """The process is suspended, stopped (SIGSTOP) or swapped out, for as long as any grace."""

    async def body(w: World) -> None:
        await w.deployed()
        await asyncio.sleep(1)
        await pause(seconds)
        await nothing_moves(w, 60)

    live(a_region(), body)


@pytest.mark.behaviour("BUG-CP3")
def test_a_machine_that_died_before_a_pause_is_down_after_it():
    """Its silence is counted from the end of the pause, and not forgotten."""

    async def body(w: World) -> None:
        await w.deployed()
        w.region.machines["m1"].power_off()
        await asyncio.sleep(5)
        await pause(330)
        await asyncio.sleep(5)
        assert await down(w) == []
        await w.until(lambda: is_state(w, "m1", MachineState.DOWN), within_s=15)
        await w.stable()

    live(a_region(), body)


@pytest.mark.behaviour("BUG-CP4", "F-46")
def test_a_full_disk_ends_neither_the_process_nor_the_patience():
    """Marks that the store refuses are made once it accepts them."""
    store = FaultyStore(MemoryStore())

    async def body(w: World) -> None:
        await w.deployed()
        store.outcome = lambda _: REFUSED
        w.region.machines["m1"].power_off()
        await asyncio.sleep(120)
        assert (await w.cp.ready()).ok
        assert await down(w) == []
        store.outcome = lambda _: MADE
        await w.until(lambda: is_state(w, "m1", MachineState.DOWN), within_s=30)
        await w.stable()
        store.outcome = lambda _: REFUSED
        w.region.machines["m1"].power_on()
        await asyncio.sleep(60)
        assert await down(w) == ["m1"]
        store.outcome = lambda _: MADE
        await w.until(lambda: is_state(w, "m1", MachineState.UP), within_s=30)

    live(a_region(), body, store)


@pytest.mark.behaviour("BUG-CP4", "BUG-CP23")
def test_a_machine_removed_while_its_mark_is_written_ends_nothing():
    """No component waits for the machine, and no data about it remains."""

    async def body(w: World) -> None:
        await w.set_up(quota=2)
        await w.until(w.all_answer)
        brokers = w.cp.inventory._brokers
        await w.cp.inventory.outages.plan_unavailability(["m3"], EventKind.DECOMMISSION, "old")
        w.region.machines["m3"].power_off()
        await asyncio.sleep(9.3)
        async with brokers.of("m3").table.lock("m3"):
            await asyncio.sleep(5)
            await brokers.of("m3").table.commit("m3", None)
        await asyncio.sleep(60)
        assert (await w.cp.ready()).ok
        assert "m3" not in await states(w)
        assert "m3" not in w.cp._observations._observations
        assert w.cp._observations.observation("m3") is not w.cp._observations.observation("m3")

    live(a_region(), body)


@pytest.mark.behaviour("BUG-CP9", "F-44", "F-63")
@pytest.mark.parametrize("step_s", [-3600.0, 3600.0, -7200.0, 7200.0])
def test_a_step_of_the_wall_clock_changes_no_verdict(step_s: float):
    """The dead machine is down after 10 s; the machine that has just joined is not."""
    off = [0.0]

    async def body(w: World) -> None:
        machines = w.region.machines
        await w.cp.joined(machines["m1"].join())
        await w.cp.joined(machines["m2"].join())
        await asyncio.sleep(70)
        machines["m3"].reachable = False
        await w.cp.joined(machines["m3"].join())
        await asyncio.sleep(2)
        machines["m1"].power_off()
        off[0] += step_s
        await asyncio.sleep(5)
        assert await down(w) == []
        await asyncio.sleep(12)
        assert await down(w) == ["m1"]
        await asyncio.sleep(30)
        assert await down(w) == ["m1"]
        await asyncio.sleep(30)
        assert await down(w) == ["m1", "m3"]

    live(a_region(), body, wall=lambda: clock() + off[0], join_grace_s=60, brake_share=1.0)


def cut(w: World, prefix: str, *, reachable: bool = False) -> None:
    for name, machine in w.region.machines.items():
        if name.startswith(prefix):
            machine.reachable = reachable


@pytest.mark.behaviour("AG11", "AV4", "BUG-CP16", "F-49")
def test_a_data_center_that_is_cut_off_is_not_taken_for_dead():
    """A fifth of a region is cut off. No task moves, all stay listed, and the reason is shown."""

    async def body(w: World) -> None:
        await w.deployed(quota=10)
        cut(w, "d1")
        await nothing_moves(w, 250)
        held = w.cp.health.held_back()
        assert [h.machine for h in held] == sorted(m for m in w.region.machines if m[:2] == "d1")
        assert {h.part for h in held} == {"local/dc1"}
        assert "4 of 4 machines of data center local/dc1" in held[0].reason
        assert "held back" in (await w.cp.ready()).detail
        assert (await w.cp.get_machine(held[0].machine)).health == held[0].reason
        cut(w, "d1", reachable=True)
        await nothing_moves(w, 60)
        assert w.cp.health.held_back() == []
        assert (await w.cp.ready()).detail == ""

    live(of_parts(5, 2, 2), body)


@pytest.mark.behaviour("F-49")
def test_a_data_center_that_stays_silent_is_given_up_in_the_end():
    """After its delay the data center is declared down automatically."""

    async def body(w: World) -> None:
        await w.set_up(quota=10)
        await w.until(w.all_answer)
        cut(w, "d1")
        await w.until(lambda: down(w), within_s=320)
        await asyncio.sleep(10)
        assert await down(w) == sorted(m for m in w.region.machines if m[:2] == "d1")

    live(of_parts(5, 2, 2), body)


@pytest.mark.behaviour("BUG-CP16", "BUG-CP23")
def test_an_operator_can_end_the_wait_for_silent_machines():
    """The confirmation has a scope. Machines that return are up, and later held back again."""

    async def body(w: World) -> None:
        await w.deployed(quota=10)
        with pytest.raises(Conflict, match="each of these machines answers, or is down"):
            await w.cp.health.confirm(["d0-b0-m0"], None, "I think so", "ops")
        cut(w, "d1")
        await asyncio.sleep(20)
        assert await down(w) == []
        scope = MachineScope(datacenter="dc1")
        named = await w.cp.health.confirm([], scope, "fire", "ops")
        lost = sorted(m for m in w.region.machines if m[:2] == "d1")
        assert named.machines == lost
        await asyncio.sleep(5)
        assert await down(w) == lost
        event = (await w.cp.get_machine(lost[0])).record.unavailability[-1]
        assert "ops" in event.reason
        assert "fire" in event.reason
        await w.stable()
        cut(w, "d1", reachable=True)
        await w.until(lambda: is_empty(down(w)), within_s=60)
        cut(w, "d1")
        await asyncio.sleep(60)
        assert await down(w) == []

    live(of_parts(5, 2, 2), body)


async def is_empty(found) -> bool:
    return not await found


@pytest.mark.behaviour("BUG-CP16")
def test_an_msb_without_power_is_recovered_without_an_operator():
    """Its delay is short, and the loss is not mistaken for a cut of its data center."""

    async def body(w: World) -> None:
        await w.deployed(quota=8)
        cut(w, "d0-b1")
        await asyncio.sleep(25)
        assert await down(w) == []
        await w.until(lambda: down(w), within_s=15)
        await asyncio.sleep(5)
        assert await down(w) == [f"d0-b1-m{i}" for i in range(4)]
        cut(w, "d0-b1", reachable=True)
        await w.until(lambda: is_empty(down(w)), within_s=60)
        await w.stable()

    live(of_parts(1, 2, 4), body, brake_window_s=60)


@pytest.mark.behaviour("F-51")
def test_most_of_the_region_silent_at_once_is_a_cut_of_our_own():
    """With 60 % of all hosts silent, the brake names the control plane."""

    async def body(w: World) -> None:
        await w.deployed(quota=5)
        for d in range(3):
            cut(w, f"d{d}-")
        await nothing_moves(w, 290)
        assert "this control plane is cut off" in (await w.cp.ready()).detail

    live(of_parts(5, 1, 2), body)


@pytest.mark.behaviour("BUG-CP21", "F-53")
@scenario()
async def test_a_host_that_lives_is_not_down_because_its_agent_is_slow(w: World):
    """23 s pass without an answer, but connections succeed. Other hosts are served at once."""
    await w.deployed()
    m1 = w.region.machines["m1"]
    m1.behaviour.answer_s = 23
    await nothing_moves(w, 100)
    assert "host is up" in (await w.cp.get_machine("m1")).health
    m1.behaviour.answer_s = 0
    await asyncio.sleep(15)
    assert (await w.cp.get_machine("m1")).health == ""
    assert await w.endpoints_count(6)


@pytest.mark.behaviour("HC1")
@scenario()
async def test_a_host_that_announced_its_shutdown_is_down_once_silent(w: World):
    """After the announcement, refused connections are no sign that its tasks run."""
    await w.deployed()
    m1 = w.region.machines["m1"]
    m1.leaving = True
    m1.send_event("leaving", "host")
    await asyncio.sleep(2)
    assert "goes down" in (await w.cp.get_machine("m1")).health
    assert await down(w) == []

    m1.power_off()
    m1.refusing = True
    await asyncio.sleep(20)
    assert await down(w) == ["m1"]
    [event] = (await w.cp.get_machine("m1")).record.unavailability
    assert "announced that it goes down" in event.reason

    m1.leaving = m1.refusing = False
    m1.power_on()
    await asyncio.sleep(60)
    assert (await states(w))["m1"] is MachineState.UP
    assert (await w.cp.get_machine("m1")).health == ""


@pytest.mark.behaviour("F-52")
def test_a_host_that_comes_and_goes_each_second_moves_its_tasks_at_most_once():
    """Polls are out of step with the outages, so the host is rarely silent for long enough."""
    live(a_region(), coming_and_going)


async def coming_and_going(w: World) -> None:
    await w.deployed()
    before = starts(w)
    for _ in range(60):
        w.region.machines["m1"].reachable = False
        await asyncio.sleep(1)
        w.region.machines["m1"].reachable = True
        await asyncio.sleep(1)
    assert starts(w) <= before + 2


@pytest.mark.behaviour("F-52")
def test_a_host_that_fails_again_and_again_is_trusted_less_each_time():
    """The host is up for half a minute and down for half a minute. Tasks move once per back-off."""
    live(a_region(), flapping)


async def flapping(w: World) -> None:
    await w.deployed()
    fell, was = 0, MachineState.UP
    for second in range(3600):
        w.region.machines["m1"].reachable = second % 60 >= 30
        await asyncio.sleep(1)
        state = (await states(w))["m1"]
        fell += was is MachineState.UP and state is MachineState.DOWN
        was = state
        if second % 60 == 55:  # tasks that moved away are removed there before the host is trusted
            assert all(len(w.region.copies(f"web-{i}")) == 1 for i in range(6))
    assert fell <= 4
    w.region.machines["m1"].reachable = True
    await asyncio.sleep(20)
    assert "times recently" in (await w.cp.get_machine("m1")).health
    await w.until(lambda: is_state(w, "m1", MachineState.UP), within_s=700)
    await w.stable()


@pytest.mark.behaviour("F-52")
def test_a_restart_of_the_control_plane_forgives_no_host_that_fails_again_and_again():
    """The host's failures are in its record, and determine how far it is trusted."""
    store = MemoryStore(strict=True)
    region = a_region()

    async def fails_twice(w: World) -> None:
        await w.deployed()
        for _ in range(2):
            region.machines["m1"].power_off()
            await w.until(lambda: is_state(w, "m1", MachineState.DOWN), 1000)
            region.machines["m1"].power_on()
            await w.until(lambda: is_state(w, "m1", MachineState.UP), 1000)
        region.machines["m1"].power_off()
        await w.until(lambda: is_state(w, "m1", MachineState.DOWN), 1000)

    async def is_not_trusted_at_once(w: World) -> None:
        region.machines["m1"].power_on()
        await w.until(w.all_answer)
        await asyncio.sleep(2)
        assert "it was down 3 times recently" in (await w.cp.get_machine("m1")).health
        await w.until(lambda: is_state(w, "m1", MachineState.UP), 1000)
        await w.stable()

    async def main() -> None:
        for body in (fails_twice, is_not_trusted_at_once):
            world = World(region, store)
            async with asyncio.timeout(5_000), world.running():
                await body(world)
        assert region.broken_rules == []

    run(main())


@pytest.mark.behaviour("BUG-CP21")
@scenario()
async def test_answers_to_commands_are_signs_of_life_too(w: World):
    """A host that carries out commands is not silent."""
    await w.deployed()
    observations = w.cp._observations
    w.region.machines["m1"].reachable = False
    for _ in range(30):
        await asyncio.sleep(1)
        observations.saw_profile("m1", observations.observation("m1").profile)
        assert await down(w) == []
    await w.until(lambda: down(w), within_s=30)


@pytest.mark.behaviour("BUG-AG4")
@scenario()
async def test_pages_that_a_profile_took_are_known_before_it_counts_as_in_force(w: World):
    """Capacity is updated at the switch of profiles, not at the next full list."""
    await w.deployed()
    machine = w.region.machines["m1"]
    machine.hugepages_bytes = 1 << 28
    machine.send_event("profile", machine.profile.name)

    async def known() -> bool:
        facts = w.cp._broker.table.get("m1").facts
        return facts is not None and facts.hugepages_bytes == 1 << 28

    await w.until(known, within_s=5)
