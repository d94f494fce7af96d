"""The whole control plane on fake agents and virtual time: the life of jobs."""

import asyncio
import logging
from collections import Counter

import pytest
from fake_agents import IMAGE, IMAGE_2
from virtual_time import clock, run
from world import World, a_job, a_region, scenario

from agent.api import Health, Limits, ProfileState, TaskState
from agent.api.resources import Resources
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobPhase, JobProbe, TaskPhase, UpdatePolicy
from control_plane.api.machines import EventKind, MachineState
from control_plane.store.memory import MemoryStore
from wire.errors import Conflict, InvalidInput, NotFound, QuotaExceeded


@pytest.fixture(autouse=True)
def _no_bugs(caplog):
    yield
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert errors == []


@pytest.mark.behaviour("AL8", "SC1", "SC14", "SC20")
@scenario()
async def test_six_tasks_are_spread_over_three_msbs(w: World):
    await w.deployed()
    assert w.alive() == {"m1": 2, "m2": 2, "m3": 2}
    assert await w.endpoints() == [f"web-{i}" for i in range(6)]
    status = await w.cp.get_job("web")
    assert (status.running, status.healthy, status.updated) == (6, 6, 6)
    views = (await w.cp.list_machines()).machines
    assert {(v.record.entitlement, v.record.profile) for v in views} == {("front", "web")}
    assert all(v.record.profile_state is ProfileState.VERIFIED for v in views)


@scenario()
async def test_each_task_gets_its_port_and_name(w: World):
    await w.deployed()
    for machine in w.region.machines.values():
        ports = [spec.environment["TWINE_PORT_HTTP"] for spec in machine.specs.values()]
        assert len(set(ports)) == 2
        for task, spec in machine.specs.items():
            assert spec.command == ["/bin/serve", spec.environment["TWINE_PORT_HTTP"]]
            assert spec.environment["TWINE_TASK"] == task
            assert spec.probe.port == int(spec.environment["TWINE_PORT_HTTP"])


@pytest.mark.behaviour("HP15", "HP1")
@scenario()
async def test_no_task_starts_before_its_machine_proved_the_profile(w: World):
    """The fake agents record every earlier start as a broken rule. One machine here takes long."""
    w.region.machines["m2"].behaviour.switch_s = 40
    await w.set_up()
    await w.cp.apply_job(a_job())
    await w.until(lambda: w.alive()["m1"] == 2 and w.alive()["m3"] == 2)
    await asyncio.sleep(10)
    assert w.alive()["m2"] == 0
    await w.stable()
    assert w.alive() == {"m1": 2, "m2": 2, "m3": 2}


@pytest.mark.behaviour("HP1")
@scenario()
async def test_a_machine_that_must_reboot_for_its_profile_is_no_failure(w: World):
    w.region.machines["m3"].behaviour.profile_end["web"] = ProfileState.PENDING_REBOOT
    await w.set_up()
    await w.cp.apply_job(a_job())
    await w.stable(within_s=200)
    record = (await w.cp.get_machine("m3")).record
    assert [e.kind for e in record.unavailability] == [EventKind.PLANNED]
    assert record.unavailability[0].end is not None
    assert w.region.machines["m3"].boots == 2
    assert sum(w.alive().values()) == 6


@scenario()
async def test_a_machine_that_reboots_in_the_middle_of_its_switch_is_no_failure(w: World):
    machine = w.region.machines["m3"]
    machine.behaviour.switch_s = 5
    await w.set_up()
    await w.cp.apply_job(a_job())
    await w.until(lambda: machine.profile.state is ProfileState.APPLYING)
    await asyncio.sleep(1)
    machine.spawn_reboot()
    await w.stable()
    assert w.alive() == {"m1": 2, "m2": 2, "m3": 2}
    assert (await w.cp.get_machine("m3")).record.unavailability == ()


@pytest.mark.behaviour("HP12")
@scenario()
async def test_a_machine_that_fails_its_profile_is_put_aside_for_another(w: World):
    w.region.machines["m3"].behaviour.profile_end["web"] = ProfileState.DEGRADED
    w.region.add("m4", "dc2", "msb3")
    await w.deployed()
    record = (await w.cp.get_machine("m3")).record
    assert (record.entitlement, record.quarantined_profile) == ("", "web")
    assert w.alive() == {"m1": 2, "m2": 2, "m4": 2, "m3": 0}


@pytest.mark.behaviour("SC2", "MO15", "AL8")
@scenario()
async def test_a_job_grows_and_shrinks_from_its_highest_index(w: World):
    await w.deployed(a_job(3))
    runs = {t: s.invocation_id for m in w.region.machines.values() for t, s in m.tasks.items()}
    await w.cp.apply_job(a_job(7))
    await w.stable()
    assert max(w.alive().values()) - min(w.alive().values()) <= 1
    await w.cp.apply_job(a_job(2))
    await w.stable()
    assert sum(w.alive().values()) == 2
    await w.until(lambda: {t for ts in w.region.where().values() for t in ts} == {"web-0", "web-1"})
    after = {t: s.invocation_id for m in w.region.machines.values() for t, s in m.tasks.items()}
    assert after == {t: runs[t] for t in ("web-0", "web-1")}  # a resize restarts nothing
    await w.cp.apply_job(a_job(6))
    await w.stable()
    assert sum(w.alive().values()) == 6


async def watch_availability(w: World, seen: list[int]) -> None:
    """Continuously count the listed tasks that really serve; every listed task must serve."""
    while True:
        try:
            endpoints = (await w.cp.endpoints("web")).endpoints
        except NotFound:
            endpoints = []
        serving = 0
        for e in endpoints:
            status = w.region.machines[e.machine].tasks.get(e.task)
            if status is None or status.state is not TaskState.RUNNING:
                w.region.broke(f"{e.task} is listed but does not run on {e.machine}")
            else:
                serving += 1
        seen.append(serving)
        await asyncio.sleep(0.05)


@pytest.mark.behaviour("SC6", "SC8", "SC10", "SD1")
@scenario()
async def test_a_rolling_update_keeps_the_budget_and_lists_nothing_that_stops(w: World):

    await w.deployed()
    seen: list[int] = []
    phases = set[JobPhase]()
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch_availability(w, seen))
        await w.cp.apply_job(a_job(image=IMAGE_2))
        while (status := await w.cp.get_job("web")).phase is not JobPhase.STABLE:
            phases.add(status.phase)
            await asyncio.sleep(0.05)
        watcher.cancel()
    assert min(seen) == 5  # max_unavailable is 1
    assert phases == {JobPhase.PROGRESSING}  # a full budget in use is no waiting
    images = {s.image for m in w.region.machines.values() for s in m.tasks.values()}
    assert images == {IMAGE_2}
    assert w.alive() == {"m1": 2, "m2": 2, "m3": 2}
    record = (await w.cp.get_job("web")).record
    assert set(record.specs) == {1, 2}  # the previous version is kept for a rollback


@pytest.mark.behaviour("SC6")
@scenario()
async def test_a_larger_budget_updates_several_at_once(w: World):
    policy = UpdatePolicy(max_unavailable=3, drain_s=1)
    await w.deployed(a_job(update=policy))
    seen: list[int] = []
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch_availability(w, seen))
        await w.cp.apply_job(a_job(image=IMAGE_2, update=policy))
        await w.stable(within_s=300)
        watcher.cancel()
    assert min(seen) == 3


@pytest.mark.behaviour("SC8")
@scenario()
async def test_a_task_is_drained_before_it_is_stopped(w: World):
    await w.deployed(a_job(3, update=UpdatePolicy(drain_s=5)))
    await w.cp.apply_job(a_job(3, image=IMAGE_2, update=UpdatePolicy(drain_s=5)))
    await w.until(lambda: w.endpoints_count(2))
    unlisted_at = clock()
    await w.until(
        lambda: any(
            s.state is TaskState.STOPPING
            for m in w.region.machines.values()
            for s in m.tasks.values()
        )
    )
    assert clock() - unlisted_at == pytest.approx(5, abs=0.3)


@pytest.mark.behaviour("SC6", "SC2")
@scenario()
async def test_a_bad_version_stops_at_the_budget_and_can_be_replaced(w: World):
    await w.deployed()
    for machine in w.region.machines.values():
        machine.behaviour.healthy = lambda spec: spec.image != IMAGE_2
    await w.cp.apply_job(a_job(image=IMAGE_2))
    await asyncio.sleep(300)
    status = await w.cp.get_job("web")
    assert (status.healthy, status.updated) == (5, 1)
    assert status.phase is JobPhase.WAITING
    assert "at most 1 may be" in status.detail
    assert len(await w.endpoints()) == 5
    await w.cp.apply_job(a_job())
    await w.stable()
    versions = {t.version for t in (await w.cp.get_job("web")).record.tasks}
    assert versions == {3}
    assert len(await w.endpoints()) == 6


@pytest.mark.behaviour("SC6")
@scenario()
async def test_failures_use_up_the_budget_of_an_update(w: World):
    await w.deployed()
    machine = w.region.machines["m1"]
    victim = next(iter(machine.tasks))
    machine.report(victim, health=Health.UNHEALTHY)
    await w.until(lambda: w.endpoints_count(5))
    for m in w.region.machines.values():
        m.behaviour.healthy = lambda spec: False
    await w.cp.apply_job(a_job(image=IMAGE_2))
    await asyncio.sleep(120)
    record = (await w.cp.get_job("web")).record
    assert [f"web-{t.index}" for t in record.tasks if t.version == 2] == [victim]


@pytest.mark.behaviour("SC8")
@scenario()
async def test_an_update_that_fits_nowhere_stops_nothing(w: World):
    await w.deployed(a_job(limits=Limits(memory_max_bytes=400 << 20)))
    await w.cp.apply_job(a_job(limits=Limits(memory_max_bytes=800 << 20), tasks=3))
    await asyncio.sleep(60)
    assert len(await w.endpoints()) == 3
    await w.stable()
    await w.cp.apply_job(a_job(limits=Limits(memory_max_bytes=400 << 20), tasks=3))
    await w.stable()


@scenario()
async def test_an_image_that_cannot_be_fetched_stops_nothing(w: World):
    await w.deployed()
    for machine in w.region.machines.values():
        machine.behaviour.refuse_pull = "the stream is damaged"
    await w.cp.apply_job(a_job(image=IMAGE_2))
    await asyncio.sleep(60)
    assert len(await w.endpoints()) == 6
    assert "the stream is damaged" in (await w.cp.get_job("web")).detail
    for machine in w.region.machines.values():
        machine.behaviour.refuse_pull = ""
    await w.stable(within_s=300)


@pytest.mark.behaviour("SC3", "SC13", "RB3", "HC10")
@scenario()
async def test_tasks_of_a_dead_machine_run_elsewhere_and_twice_nowhere(
    w: World,
):
    await w.deployed()
    w.region.machines["m1"].power_off()
    await w.until(lambda: w.alive() == {"m1": 0, "m2": 3, "m3": 3})
    record = (await w.cp.get_machine("m1")).record
    assert record.state is MachineState.DOWN
    assert record.unavailability[-1].kind is EventKind.FAILURE
    await w.stable()
    assert len(await w.endpoints()) == 6
    w.region.machines["m1"].power_on()
    await w.until(lambda: w.region.machines["m1"].tasks == {})
    await asyncio.sleep(30)
    assert w.alive() == {"m1": 0, "m2": 3, "m3": 3}
    await w.until(lambda: w.alive() == {"m1": 2, "m2": 2, "m3": 2}, 300)
    record = (await w.cp.get_machine("m1")).record
    assert record.state is MachineState.UP
    assert record.unavailability[-1].end is not None
    assert (await w.cp.get_job("web")).record.leaving == {}


@pytest.mark.behaviour("SC3")
@scenario()
async def test_a_reconnected_machine_is_cleaned_before_it_gets_work(w: World):
    """Its tasks kept running. When it is back, tasks that moved away must be removed first."""
    await w.deployed()
    machine = w.region.machines["m1"]
    machine.reachable = False
    await w.until(lambda: w.alive() == {"m1": 2, "m2": 3, "m3": 3})
    await w.cp.apply_job(a_job(16))  # two tasks more than the other machines can hold
    await w.until(lambda: w.alive() == {"m1": 2, "m2": 7, "m3": 7})
    w.region.broken_rules.clear()  # two copies exist from here until the machine is cleaned
    starts, machine.behaviour.stop_s = len(machine.starts), 8
    machine.reachable = True
    moved = set(machine.tasks)
    await w.until(lambda: all(s.state is TaskState.STOPPING for s in machine.tasks.values()))
    async with asyncio.timeout(60):
        while moved & set(machine.tasks):
            assert len(machine.starts) == starts
            await asyncio.sleep(0.001)
    w.region.broken_rules.clear()
    await w.stable()
    copies = Counter(t for ts in w.region.where().values() for t in ts)
    assert copies == {f"web-{i}": 1 for i in range(16)}
    assert w.alive()["m1"] == 2


@pytest.mark.behaviour("SC1", "F-51")
@scenario(down_after_s=10, brake_window_s=60, partition_grace_s=300)
async def test_two_of_three_machines_silent_at_once_move_nothing(w: World):
    await w.deployed()
    w.region.machines["m1"].reachable = False
    w.region.machines["m2"].reachable = False
    await asyncio.sleep(200)
    assert w.alive() == {"m1": 2, "m2": 2, "m3": 2}
    assert "cut off" in (await w.cp.ready()).detail
    assert len(await w.endpoints()) == 6  # clients may reach tasks that the control plane cannot
    w.region.machines["m1"].reachable = True
    w.region.machines["m2"].reachable = True
    await asyncio.sleep(10)
    assert (await w.cp.ready()).detail == ""
    assert all(len(m.starts) == 2 for m in w.region.machines.values())


@scenario(down_after_s=10, join_grace_s=60)
async def test_a_machine_that_joined_a_moment_ago_may_still_be_starting(w: World):
    w.region.machines["m1"].reachable = False
    await w.set_up()
    await asyncio.sleep(50)
    assert (await w.cp.get_machine("m1")).record.state is MachineState.UP
    await asyncio.sleep(20)
    assert (await w.cp.get_machine("m1")).record.state is MachineState.DOWN


@pytest.mark.behaviour("AG5")
@scenario(down_after_s=10, agent_grace_s=90)
async def test_an_agent_that_restarts_for_a_minute_moves_nothing(w: World):  # P1
    await w.deployed()
    machine = w.region.machines["m1"]
    machine.refusing = True
    await asyncio.sleep(60)
    assert (await w.cp.get_machine("m1")).record.state is MachineState.UP
    machine.refusing = False
    await asyncio.sleep(60)
    assert all(len(m.starts) == 2 for m in w.region.machines.values())


@scenario(down_after_s=10, agent_grace_s=90)
async def test_an_agent_that_stays_away_loses_its_tasks_to_others(w: World):
    await w.deployed()
    w.region.machines["m1"].power_off()  # the machine boots again, but its agent does not start
    w.region.machines["m1"].refusing = True
    await asyncio.sleep(80)
    assert (await w.cp.get_machine("m1")).record.state is MachineState.UP
    await w.until(lambda: w.alive()["m2"] + w.alive()["m3"] == 6)
    assert (await w.cp.get_machine("m1")).record.state is MachineState.DOWN


@scenario(partition_grace_s=100)
async def test_the_brake_gives_way_after_its_grace(w: World):
    await w.deployed(a_job(3))
    w.region.machines["m1"].power_off()
    w.region.machines["m2"].power_off()
    await asyncio.sleep(90)
    assert w.alive()["m3"] == 1
    await w.until(lambda: w.alive()["m3"] == 3)


@pytest.mark.behaviour("HP15")
@scenario()
async def test_a_rebooted_machine_gets_its_tasks_back_after_the_proof(w: World):
    await w.deployed()
    machine = w.region.machines["m2"]
    machine.power_off()
    machine.power_on()
    machine.behaviour.switch_s = 3
    await asyncio.sleep(5)
    await w.stable()
    assert w.alive() == {"m1": 2, "m2": 2, "m3": 2}
    assert len(machine.starts) == 4


@scenario()
async def test_a_task_that_vanished_is_started_again(w: World):
    await w.deployed()
    machine = w.region.machines["m2"]
    machine.kill_task(next(iter(machine.tasks)))
    await asyncio.sleep(5)
    await w.stable()
    assert len(machine.starts) == 3


@scenario()
async def test_a_task_that_fails_to_start_is_tried_again_with_pauses(w: World):
    await w.deployed(a_job(1))
    (machine,) = [m for m in w.region.machines.values() if m.tasks]
    for _ in range(4):
        await w.until(lambda: machine.tasks["web-0"].state is TaskState.RUNNING)
        machine.report("web-0", state=TaskState.FAILED, reason="exec format error")
        await asyncio.sleep(1)
        assert await w.endpoints() == []
    await w.stable()


@pytest.mark.behaviour("SD1")
@scenario()
async def test_an_unhealthy_task_is_not_listed(w: World):
    await w.deployed()
    machine = w.region.machines["m1"]
    task = next(iter(machine.tasks))
    before = (await w.cp.endpoints("web")).revision
    machine.report(task, health=Health.UNHEALTHY)
    after = await w.cp.endpoints("web", after=before, wait_s=10)
    assert after.revision > before
    assert task not in [e.task for e in after.endpoints]
    machine.report(task, health=Health.HEALTHY)
    again = await w.cp.endpoints("web", after=after.revision, wait_s=10)
    assert task in [e.task for e in again.endpoints]


@pytest.mark.behaviour("AL10")
@scenario()
async def test_a_stopped_job_disappears_and_its_machines_go_back(w: World):
    await w.deployed()
    await w.cp.stop_job("web")
    await w.until(lambda: sum(w.alive().values()) == 0)
    await asyncio.sleep(1)
    with pytest.raises(NotFound):
        await w.cp.get_job("web")
    await asyncio.sleep(90)
    assert (await w.cp.capacity.list_entitlements()).entitlements[0].held == []
    await w.cp.apply_job(a_job())  # the same name again; generations continue
    await w.stable()
    assert sum(w.alive().values()) == 6


@scenario()
async def test_a_job_stopped_while_a_machine_was_away_leaves_nothing_there(w: World):
    await w.deployed()
    w.region.machines["m1"].reachable = False
    await asyncio.sleep(30)
    await w.cp.stop_job("web")
    await asyncio.sleep(30)
    assert (await w.cp.list_jobs()).jobs == []
    w.region.broken_rules.clear()
    w.region.machines["m1"].reachable = True
    await w.until(lambda: sum(w.alive().values()) == 0)


@pytest.mark.behaviour("MO8", "BUG-UX130")
@scenario()
async def test_a_bad_job_gets_all_its_errors_and_changes_nothing(w: World):
    await w.set_up()
    bad = a_job(
        entitlement="none",
        image="sha256:" + "9" * 64,
        command=["${port:nope}", "${what}"],
        environment={"TWINE_X": "1", "HOME": "$${ok} ${task}"},
        probe=JobProbe(port="admin"),
        ports=["http", "http"],
    )
    with pytest.raises(InvalidInput) as refused:
        await w.cp.apply_job(bad)
    assert [e.field for e in refused.value.errors] == [
        "ports",
        "probe.port",
        "command[0]",
        "command[1]",
        "environment.TWINE_X",
        "image",
        "entitlement",
    ]
    assert (await w.cp.list_jobs()).jobs == []
    huge = a_job(limits=Limits(memory_max_bytes=2 << 30, cpu_max_cores=8))
    with pytest.raises(InvalidInput) as refused:
        await w.cp.apply_job(huge)
    assert [e.field for e in refused.value.errors] == [
        "limits.memory_max_bytes",
        "limits.cpu_max_cores",
    ]
    for key in ({"cpus": 8.0}, {"resources": Resources(exclusive_cpus=8)}):
        with pytest.raises(InvalidInput) as refused:
            await w.cp.apply_job(a_job(**key))
        fields = [e.field for e in refused.value.errors]
        assert fields == ["cpus" if "cpus" in key else "resources.exclusive_cpus"]
    with pytest.raises(QuotaExceeded, match="at most 7 on each"):
        await w.cp.apply_job(a_job(22))


@pytest.mark.behaviour("BUG-UX144")
@scenario()
async def test_a_type_that_no_machine_has_is_an_error_of_its_own_key(w: World):
    """The error was about `requires`, which the file did not have."""
    await w.set_up()
    with pytest.raises(InvalidInput, match="machine_type = gold") as refused:
        await w.cp.apply_job(a_job(machine_types=["gold"]))
    assert [e.field for e in refused.value.errors] == ["machine_types"]


@scenario()
async def test_a_dry_run_changes_nothing(w: World):
    await w.set_up()
    assert (await w.cp.apply_job(a_job(), dry_run=True)).wanted == 6
    assert (await w.cp.list_jobs()).jobs == []


@scenario()
async def test_tasks_that_find_no_room_say_why(w: World):
    await w.set_up(quota=1)
    await w.cp.apply_job(a_job(2, limits=Limits(memory_max_bytes=300 << 20)))
    await w.stable()
    other = a_job(2, name="other", limits=Limits(memory_max_bytes=200 << 20))
    await w.cp.apply_job(other)
    await asyncio.sleep(30)
    status = await w.cp.get_job("other")
    assert status.phase is JobPhase.WAITING
    waiting = next(t for t in status.record.tasks if t.phase is TaskPhase.PENDING)
    assert "1 machine: memory: 200 MiB wanted, at most 96 MiB free" in waiting.reason
    assert "quota of machines is used up" in waiting.reason
    await w.cp.stop_job("web")
    await w.stable("other")


@pytest.mark.behaviour("MO9", "MO12")
@scenario()
async def test_two_entitlements_never_share_a_machine(w: World):
    w.region.add("m4", "dc2", "msb3")
    await w.set_up(quota=2)
    await w.cp.capacity.put_entitlement("back", EntitlementSpec(machines=2, host_profile="batch"))
    await w.cp.apply_job(a_job(4))
    await w.cp.apply_job(a_job(4, name="calc", entitlement="back"))
    await w.stable("web")
    await w.stable("calc")
    for machine in w.region.machines.values():
        assert len({spec.job for spec in machine.specs.values()}) == 1
        assert (
            machine.profile.name
            == {"web": "web", "calc": "batch"}[next(iter(machine.specs.values())).job]
        )
    with pytest.raises(Conflict, match="jobs run on its machines: calc"):
        await w.cp.capacity.put_entitlement("back", EntitlementSpec(machines=2, host_profile="web"))
    with pytest.raises(Conflict, match="job calc"):
        await w.cp.capacity.delete_entitlement("back")
    await w.cp.stop_job("calc")
    await asyncio.sleep(20)
    await w.cp.capacity.delete_entitlement("back")


@scenario()
async def test_logs_come_from_where_the_task_is(w: World):
    await w.deployed(a_job(1))
    where = next(m for m, tasks in w.region.where().items() if tasks)
    lines = [chunk async for chunk in w.cp.job_logs("web", 0, tail=5)]
    assert lines == [f"web-0 on {where} follow=False since=None tail=5\n".encode()]
    with pytest.raises(NotFound):
        await anext(aiter(w.cp.job_logs("web", 7)))
    with pytest.raises(NotFound):
        await anext(aiter(w.cp.job_logs("none", 0)))


@pytest.mark.behaviour("AG4")
@scenario()
async def test_tasks_of_a_local_operator_are_left_alone(w: World):
    from agent.api import TaskStatus

    own = TaskStatus(
        task_id="mine",
        generation=1,
        epoch=0,
        state=TaskState.RUNNING,
        health=Health.HEALTHY,
        image=IMAGE,
    )
    await w.set_up()
    w.region.machines["m1"]._set(own)
    await w.cp.apply_job(a_job())
    await w.stable()
    assert "mine" in w.region.machines["m1"].tasks


@scenario()
async def test_one_dead_agent_does_not_slow_the_others(w: World):
    await w.set_up()
    w.region.machines["m3"].reachable = False
    await asyncio.sleep(15)
    await w.cp.apply_job(a_job())
    began = clock()
    await w.stable()
    assert clock() - began < 10
    assert w.alive() == {"m1": 3, "m2": 3, "m3": 0}


@scenario()
async def test_a_machine_that_keeps_refusing_tasks_is_given_up_for_another(w: World):
    w.region.machines["m1"].behaviour.refuse_pull = "no space left on device"
    await w.set_up()
    await w.cp.apply_job(a_job())
    await asyncio.sleep(20)
    status = await w.cp.get_job("web")
    assert status.healthy == 4
    assert status.detail.endswith(": m1: no space left on device")
    await w.stable()
    assert w.alive() == {"m1": 0, "m2": 3, "m3": 3}


@scenario()
async def test_a_removed_image_is_fetched_again(w: World):
    await w.deployed(a_job(3))
    for machine in w.region.machines.values():
        machine.images.clear()
    await w.cp.apply_job(a_job(6))
    await w.stable()
    assert all(m.images == {IMAGE} for m in w.region.machines.values())


@pytest.mark.behaviour("MO11")
@scenario()
async def test_a_change_of_the_host_profile_waits_for_the_jobs(w: World):
    await w.deployed()
    with pytest.raises(Conflict, match="jobs run"):
        await w.cp.capacity.put_entitlement(
            "front", EntitlementSpec(machines=3, host_profile="cache")
        )
    await w.cp.stop_job("web")
    await w.until(lambda: sum(w.alive().values()) == 0)
    await asyncio.sleep(1)
    await w.cp.capacity.put_entitlement("front", EntitlementSpec(machines=3, host_profile="cache"))
    await w.cp.apply_job(a_job())
    await w.stable()
    assert {m.profile.name for m in w.region.machines.values()} == {"cache"}


@pytest.mark.behaviour("RB2")
@scenario()
async def test_a_machine_that_joins_again_keeps_its_assignment(w: World):
    await w.deployed()
    record = await w.cp.joined(w.region.machines["m1"].join())
    assert record.entitlement == "front"
    await asyncio.sleep(20)
    assert [len(m.starts) for m in w.region.machines.values()] == [2, 2, 2]


class SlowStore(MemoryStore):
    """Delays writes of machines, so that rounds of jobs run in between."""

    async def txn(self, compare, operations) -> int:
        if any(operation.key.startswith("machines/") for operation in operations):
            await asyncio.sleep(0.05)
        return await super().txn(compare, operations)


@pytest.mark.behaviour("AL8", "AL10")
def test_machines_for_all_tasks_are_taken_at_once():
    async def main() -> None:
        world = World(a_region(), SlowStore())
        async with world.running():
            await world.set_up()
            await world.until(world.all_answer)
            await world.cp.apply_job(a_job())
            await world.stable()
            assert world.alive() == {"m1": 2, "m2": 2, "m3": 2}
        assert world.region.broken_rules == []

    run(main())
