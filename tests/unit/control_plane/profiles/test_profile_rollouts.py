"""Host profiles that change while jobs run, in the assembled control plane on virtual time."""

import asyncio
import tomllib
from pathlib import Path

import pytest
from inventory import assign
from virtual_time import run
from world import World, a_job, a_region, scenario

from agent.api import Health, Limits, ProfileState, ProfileStatus, SettingOutcome
from agent.api.profile import ProfileSwitch, SettingSwitch
from control_plane.api.jobs import ControllerRef, JobPhase, UpdatePolicy
from control_plane.api.machine_commands import ExpectReboot, QuarantineMachine
from control_plane.api.machines import EventKind
from control_plane.api.operations import STOP
from control_plane.api.profiles import ProfileProposal, version_name
from control_plane.api.settings import PortalSettings
from control_plane.broker.core.assignment import FREE, not_holdable
from control_plane.broker.core.unavailability import open_event
from control_plane.profiles.core.stats import ALL, stats_of
from taskcontrol.api import Ack, TaskControlRequest, TaskControlResponse
from wire.errors import Conflict, InvalidInput, NotFound

TEXT = """
description = "Front ends with a longer queue"
extends = "web"
owner = "web"
[sysctl]
"net.core.somaxconn" = 16384
"""
LARGE = Limits(memory_max_bytes=512 << 20)
"""One task of this size fills a machine."""
OTHER = TEXT.replace("16384", "32768")
NAME = version_name("web", TEXT)


def a_request(text: str = TEXT, **fields) -> ProfileProposal:
    return ProfileProposal(**({"text": text, "reason": "a longer queue", "gate_s": 10} | fields))


def rollout(w: World):
    return w.cp.profiles.show("front").rollout


async def arrived(w: World, state: str = "done", within_s: float = 900) -> None:
    await w.until(lambda: rollout(w).state == state, within_s)


async def spread(w: World, tasks: int = 3, **changes) -> None:
    """Run a job with a task on each machine."""
    await w.deployed(a_job(tasks, update=UpdatePolicy(drain_s=0), **changes))
    assert sorted(w.alive().values()) == [1] * 3


@pytest.mark.behaviour("HP13", "BUG-SK6")
@scenario()
async def test_a_profile_that_is_live_changes_machine_by_machine_under_running_tasks(w: World):
    """Tasks keep running. One machine changes at a time, and is proved before the next one."""
    await spread(w)
    where, most = w.region.where(), 0
    view = await w.cp.profiles.propose("front", a_request(), "eve")
    assert view.rollout is not None
    assert (view.profile, view.rollout.name, view.rollout.base) == ("web", NAME, "web")
    while rollout(w).state != "done":
        under_way = [m for m in w.region.machines.values() if m.profile.state != "verified"]
        most = max(most, len(under_way))
        await asyncio.sleep(0.1)
    assert most == 1
    assert w.region.where() == where
    assert {m.profile.name for m in w.region.machines.values()} == {NAME}
    assert {m.wanted.text for m in w.region.machines.values()} == {TEXT}
    view = w.cp.profiles.show("front")
    assert (view.profile, view.machines, view.proved) == (NAME, {NAME: 3}, {NAME: 3})
    assert not [e for e in (await w.cp.job_events("web")).events if e.cause == "profile"]


@pytest.mark.behaviour("HP12")
@scenario()
async def test_a_boot_waits_until_tasks_have_left_within_the_budget(w: World):
    """Each machine is drained, booted, verified and given back. One budget covers all causes."""
    await spread(w)
    for machine in w.region.machines.values():
        machine.behaviour.profile_end[NAME] = ProfileState.PENDING_REBOOT
    await w.cp.profiles.propose("front", a_request(), "eve")
    least = 3
    while rollout(w).state != "done":
        least = min(least, len(await w.endpoints()))
        await asyncio.sleep(0.1)
    await w.stable()
    assert least == 2
    assert {m.profile.name for m in w.region.machines.values()} == {NAME}
    assert {m.profile.state for m in w.region.machines.values()} == {ProfileState.VERIFIED}
    moves = [e for e in (await w.cp.job_events("web")).events if e.cause == "profile"]
    assert len(moves) >= 3
    assert {e.kind for e in moves} == {"move"}
    assert not any(
        r.unavailability[-1].end is None for r in w.cp._broker.held("front") if r.unavailability
    )


@pytest.mark.behaviour("BUG-CP53")
@scenario()
async def test_a_boot_without_spare_machines_stops_a_task_in_its_place(w: World):
    """In a full entitlement one task at a time stops, and starts again on the same machine."""
    await w.deployed(a_job(3, update=UpdatePolicy(drain_s=0), limits=LARGE))
    where = w.region.where()
    for machine in w.region.machines.values():
        machine.behaviour.profile_end[NAME] = ProfileState.PENDING_REBOOT
    await w.cp.profiles.propose("front", a_request(), "eve")
    least = 3
    while rollout(w).state != "done":
        least = min(least, len(await w.endpoints()))
        await asyncio.sleep(0.1)
    await w.stable()
    assert least == 2
    assert {m.profile.name for m in w.region.machines.values()} == {NAME}
    assert w.region.where() == where
    moves = [e for e in (await w.cp.job_events("web")).events if e.cause == "profile"]
    assert [(e.outcome, e.from_machine == e.to_machine) for e in moves] == [("done", True)] * 3


@pytest.mark.behaviour("BUG-CP53")
@scenario()
async def test_a_task_that_may_not_stop_for_a_boot_reports_that_it_waits_for_room(w: World):
    """The owner of a job that can spare no task sees why a switch waits."""
    update = UpdatePolicy(drain_s=0, max_unavailable=0, surge=1)
    await w.deployed(a_job(3, update=update, limits=LARGE))
    for machine in w.region.machines.values():
        machine.behaviour.profile_end[NAME] = ProfileState.PENDING_REBOOT
    await w.cp.profiles.propose("front", a_request(), "eve")
    await asyncio.sleep(300)
    status = await w.cp.get_job("web")
    assert status.phase is JobPhase.WAITING
    assert "waits for an extra task" in status.detail
    assert len(await w.endpoints()) == 3


@pytest.mark.behaviour("BUG-CP53")
@pytest.mark.parametrize("instead", ["", STOP])
def test_a_controller_that_approves_a_move_for_a_boot_learns_of_missing_room(instead: str):
    """The owner sees that the task waits for room. A controller may let it stop instead."""

    async def acknowledge(_, request: TaskControlRequest) -> TaskControlResponse:
        kinds = {o.id: instead if instead in o.instead else "" for o in request.request}
        return TaskControlResponse(ack=[Ack(operation=i, instead=k) for i, k in kinds.items()])

    async def main() -> None:
        w = World(a_region())
        w.controllers = acknowledge
        async with w.running():
            update = UpdatePolicy(drain_s=0)
            ref = ControllerRef(url="https://10.0.0.9:7450", name="db")
            await w.deployed(a_job(3, update=update, limits=LARGE, controller=ref))
            for machine in w.region.machines.values():
                machine.behaviour.profile_end[NAME] = ProfileState.PENDING_REBOOT
            await w.cp.profiles.propose("front", a_request(), "eve")
            if instead:
                await arrived(w)
                await w.stable()
            else:
                await asyncio.sleep(300)
                status = await w.cp.get_job("web")
                assert status.phase is JobPhase.WAITING
                assert "waits for room" in status.detail

    run(main())


@scenario()
async def test_a_host_that_refuses_because_of_tasks_is_drained_and_requested_again(w: World):
    await spread(w)
    for machine in w.region.machines.values():
        refuses_while_full(machine)
    await w.cp.profiles.propose("front", a_request(), "eve")
    await arrived(w)
    assert {m.profile.name for m in w.region.machines.values()} == {NAME}
    assert rollout(w).failed == ()


def refuses_while_full(machine) -> None:
    """Make a host refuse, as sidekick does, to change settings that running tasks depend on."""
    switch = machine._switch

    async def refuse(wanted) -> None:
        if wanted.name == NAME and machine.tasks:
            await asyncio.sleep(0.2)
            machine._profile(ProfileState.DEGRADED)
        else:
            await switch(wanted)

    machine._switch = refuse


@scenario()
async def test_a_profile_that_a_host_cannot_reach_is_taken_back_everywhere(w: World):
    await spread(w)
    for machine in w.region.machines.values():
        machine.behaviour.profile_end[NAME] = ProfileState.DEGRADED
    await w.cp.profiles.propose("front", a_request(), "eve")
    await arrived(w, "returned")
    view = w.cp.profiles.show("front")
    assert view.profile == "web"
    assert set(view.machines) == {"web"}
    assert len(view.rollout.failed) == 1
    assert f"{NAME} failed on" in view.rollout.reason
    await w.until(lambda: w.alive().total() == 3)


@pytest.mark.behaviour("BUG-CP155")
@scenario(quarantine_s=600)
async def test_a_profile_that_is_proposed_again_starts_without_failures(w: World):
    """Formerly machines that were still quarantined for the first attempt failed the second one."""
    await spread(w)
    for machine in w.region.machines.values():
        machine.behaviour.profile_end[NAME] = ProfileState.DEGRADED
    await w.cp.profiles.propose("front", a_request(), "eve")
    await arrived(w, "returned")
    for machine in w.region.machines.values():
        del machine.behaviour.profile_end[NAME]
    await w.cp.profiles.propose("front", a_request(), "eve")
    await w.until(lambda: rollout(w).state in ("done", "back", "returned"))
    assert (rollout(w).state, rollout(w).failed) == ("done", ())


@pytest.mark.behaviour("BUG-CP54")
@scenario(quarantine_s=60)
async def test_a_machine_that_failed_a_profile_is_promised_again_afterwards(w: World):
    """The switch ends with the assignment, so it does not block the machine forever."""
    await spread(w)
    for machine in w.region.machines.values():
        machine.behaviour.profile_end[NAME] = ProfileState.DEGRADED
    await w.cp.profiles.propose("front", a_request(), "eve")
    await arrived(w, "returned")
    (failed,) = rollout(w).failed
    record = w.cp._broker.table.get(failed)
    assert open_event(record, EventKind.PROFILE) is None
    await w.until(lambda: len(w.cp._broker.held("front")) == 3 and w.alive().total() == 3)


@pytest.mark.behaviour("BUG-CP54")
@pytest.mark.parametrize("leave", ["release", "quarantine"])
def test_a_machine_that_leaves_its_entitlement_leaves_its_switch_of_profile_behind(leave: str):
    """The event ends on release, on quarantine, and if an earlier release stored it open."""

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await spread(w)
            broker, name = w.cp._broker, sorted(w.region.machines)[0]
            await w.cp.stop_job("web")
            await w.cp.profiles._begin_drain(name, NAME)
            if leave == "release":
                await broker.release(name, revision=broker.table.revision(name))
            else:
                await broker.carry_out(
                    name, QuarantineMachine(reason="it cannot be brought to it", until=0.0)
                )
            record = broker.table.get(name)
            assert record.entitlement == FREE
            assert not_holdable(record, w.runtime.date()) == ""

    run(main())


@pytest.mark.behaviour("BUG-CP54")
@scenario()
async def test_a_reboot_owed_to_one_entitlement_is_not_awaited_by_the_next(w: World):
    """Otherwise the old deadline would quarantine the machine before the new switch begins."""
    await w.set_up()
    broker, name = w.cp._broker, sorted(w.region.machines)[0]
    await broker.carry_out(
        name, ExpectReboot(reason="for the old profile", deadline=w.runtime.date() + 60)
    )
    await assign(broker.of(name), name, "front", "web")
    assert open_event(broker.table.get(name), EventKind.PLANNED) is None


@pytest.mark.behaviour("BUG-CP54")
@scenario()
async def test_an_event_that_an_earlier_release_left_on_a_free_machine_is_ended(w: World):
    """A machine that the store has as stuck is usable again after an upgrade."""
    await w.set_up()
    name = sorted(w.region.machines)[0]
    assert w.cp._broker.table.get(name).entitlement == FREE
    await w.cp.profiles._begin_drain(name, NAME)
    await w.until(lambda: not_holdable(w.cp._broker.table.get(name), w.runtime.date()) == "")


@scenario()
async def test_tasks_that_are_not_well_under_a_profile_take_it_back(w: World):
    await spread(w)
    first = sorted(w.region.machines)[0]
    await w.cp.profiles.propose("front", a_request(gate_s=30), "eve")
    await w.until(lambda: w.region.machines[first].profile.name == NAME)
    (task,) = w.region.machines[first].tasks
    w.region.machines[first].report(task, health=Health.UNHEALTHY)
    await arrived(w, "returned")
    assert rollout(w).failed == (first,)
    assert {m.profile.name for m in w.region.machines.values()} == {"web"}


@scenario()
async def test_an_owner_goes_back_by_hand_and_may_propose_another(w: World):
    await spread(w)
    with pytest.raises(Conflict, match="no previous profile"):
        await w.cp.profiles.roll_back("front", "eve")
    await w.cp.profiles.propose("front", a_request(), "eve")
    await w.cp.profiles.propose("front", a_request(), "eve")  # a repeated proposal changes nothing
    with pytest.raises(Conflict, match="is changing to"):
        await w.cp.profiles.propose("front", a_request(OTHER), "eve")
    await arrived(w)
    await w.cp.profiles.propose("front", a_request(OTHER), "eve")  # based on the previous one
    await arrived(w)
    assert rollout(w).base == NAME
    await w.cp.profiles.roll_back("front", "eve")
    await arrived(w, "returned")
    assert {m.profile.name for m in w.region.machines.values()} == {NAME}
    assert w.cp.profiles.show("front").profile == NAME


@scenario()
async def test_forbidden_keys_of_an_owner_are_refused_with_all_reasons(w: World):
    await w.set_up()
    text = TEXT.replace('extends = "web"', 'extends = "base"') + (
        '"kernel.panic" = 1\n[kernel]\ncmdline = ["quiet"]\n'
        '[[when]]\nif = "true"\n[when.cpu]\nsmt = false\n'
    )
    with pytest.raises(InvalidInput) as refusal:
        await w.cp.profiles.propose("front", a_request(text), "eve")
    fields = {e.field for e in refusal.value.errors}
    assert fields == {"extends", "sysctl.kernel.panic", "kernel.cmdline", "cpu.smt"}
    with pytest.raises(InvalidInput, match="not TOML"):
        await w.cp.profiles.propose("front", a_request("= ="), "eve")
    with pytest.raises(NotFound):
        await w.cp.profiles.propose("other", a_request(), "eve")
    assert rollout(w) is None
    view = await w.cp.profiles.propose("front", a_request(), "eve", dry_run=True)
    assert view.rollout is None


@pytest.mark.behaviour("HP12")
@pytest.mark.parametrize("after_s", [0.3, 1.5, 4, 12, 30, 60, 95])
def test_a_rollout_continues_after_a_kill(after_s):

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await spread(w)
            for machine in w.region.machines.values():
                machine.behaviour.profile_end[NAME] = ProfileState.PENDING_REBOOT
            await w.cp.profiles.propose("front", a_request(), "eve")
            await asyncio.sleep(after_s)
        async with w.running():
            await arrived(w)
            await w.stable(within_s=300)
            assert {m.profile.name for m in w.region.machines.values()} == {NAME}
            held = w.cp._broker.held("front")
            assert all(e.end is not None for r in held for e in r.unavailability)
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("HP12")
@scenario()
async def test_a_machine_whose_profile_waits_for_a_boot_is_emptied_for_it(w: World):
    """No new profile is needed for this: the repair of a drift may need a boot."""
    await spread(w)
    name = sorted(w.region.machines)[0]
    machine = w.region.machines[name]
    machine.behaviour.profile_end["web"] = ProfileState.PENDING_REBOOT
    machine._profile(ProfileState.DRIFTED)
    await w.until(lambda: machine.profile.state is ProfileState.PENDING_REBOOT)
    await w.until(lambda: machine.profile.state is ProfileState.VERIFIED, 600)
    await w.stable()

    def is_over() -> bool:
        record = w.cp._broker.table.get(name)
        return all(event.end is not None for event in record.unavailability)

    await w.until(is_over)


@pytest.mark.behaviour("HP9")
def test_owners_may_change_only_the_keys_of_the_profiles():
    """The control plane refuses early what sidekick would refuse on the host."""
    folder = Path(__file__).parents[4] / "profiles"
    for name, keys in PortalSettings().profile_keys.items():
        document = tomllib.loads((folder / f"{name}.toml").read_text())
        assert document["allow"] == {name: keys}


@pytest.mark.behaviour("HP4")
def test_times_of_switches_are_reported_by_kind_of_setting():
    """The rows have the form of Figure 17."""

    def a_report(**took_ms: float) -> ProfileStatus:
        settings = [
            SettingSwitch(setting=f"{kind}.x", outcome=SettingOutcome.APPLIED, took_ms=ms)
            for kind, ms in took_ms.items()
        ]
        switched = ProfileSwitch(settings=settings, took_ms=sum(took_ms.values()))
        return ProfileStatus(switched=switched)

    reports = [a_report(cpu=float(ms), hugepages=100.0 * ms) for ms in range(1, 11)]
    found = stats_of([*reports, ProfileStatus(switched=ProfileSwitch(rolled_back=True))])
    assert found.machines == 11
    rows = {row.setting: (row.switches, row.p50_ms, row.p90_ms) for row in found.settings}
    assert rows["cpu"] == (10, 5.0, 9.0)
    assert rows["hugepages"] == (10, 500.0, 900.0)
    assert [row.setting for row in found.settings] == ["cpu", "hugepages", ALL]


@pytest.mark.behaviour("BUG-CP32")
@scenario()
async def test_a_profile_that_no_machine_proved_is_taken_back_when_the_first_one_fails(w: World):
    """Formerly such a profile, proposed while the entitlement held no machine, kept every machine
    out."""
    await w.set_up()
    for machine in w.region.machines.values():
        machine.behaviour.profile_end[NAME] = ProfileState.DEGRADED
    await w.cp.profiles.propose("front", a_request(), "eve")
    await arrived(w)
    assert rollout(w).unproved
    assert w.cp.profiles.show("front").profile == NAME
    await w.cp.apply_job(a_job(2))
    await arrived(w, "returned")
    await w.stable(within_s=900)
    view = w.cp.profiles.show("front")
    assert (view.profile, set(view.proved)) == ("web", {"web"})
    assert f"{NAME} failed on" in view.rollout.reason


@pytest.mark.behaviour("BUG-CP32")
@scenario()
async def test_a_profile_that_a_first_machine_proved_stays(w: World):
    """Machines that fail later are quarantined, and the others keep the profile."""
    await w.set_up()
    await w.cp.profiles.propose("front", a_request(), "eve")
    await arrived(w)
    await w.cp.apply_job(a_job(2))
    await w.stable()
    await w.until(lambda: not rollout(w).unproved)
    for machine in w.region.machines.values():
        machine.behaviour.profile_end[NAME] = ProfileState.DEGRADED
    await asyncio.sleep(60)
    assert (rollout(w).state, w.cp.profiles.show("front").profile) == ("done", NAME)


@pytest.mark.behaviour("BUG-CP32")
@scenario()
async def test_the_next_profile_after_an_unproved_one_has_the_proved_one_to_go_back_to(w: World):
    """An entitlement cannot go back to a profile that no machine has reached."""
    await w.set_up()
    await w.cp.profiles.propose("front", a_request(), "eve")
    await arrived(w)
    view = await w.cp.profiles.propose("front", a_request(OTHER), "eve")
    assert view.rollout is not None
    assert view.rollout.base == "web"
