"""Tasks on a machine that is cut off: `stop` allows no second copy; `keep` does and reports it."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from virtual_time import clock, run
from world import World, a_job, a_region, scenario

from agent.api import Disconnect, DisconnectPolicy, Exit, Health, TaskState, certainly_ended_s
from control_plane.agents.core.observed import ObservedMachine
from control_plane.api.jobs import JobSpec
from control_plane.cli.jobfile import read_job
from control_plane.scheduler.core.copies import ended_in_s

STOP = Disconnect(policy=DisconnectPolicy.STOP, after_s=60)


async def cut_off(w: World, machine: str) -> None:
    """Cut a machine off; its host ends tasks with the policy `stop` as late as allowed."""
    found = w.region.machines[machine]
    found.reachable = False

    async def end(task: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        ended = Exit(result="cut-off", at=clock())
        found.report(task, state=TaskState.STOPPED, health=Health.UNKNOWN, last_exit=ended)

    for task, spec in found.specs.items():
        latest_s = certainly_ended_s(spec.disconnect, spec.stop_timeout_s)
        if latest_s is not None:
            found.spawn(end(task, latest_s - 0.5))


@scenario()
async def test_a_task_that_is_to_stop_never_has_two_copies(w: World):
    """The replacement waits until the old copy has certainly ended."""
    spec = a_job(3, disconnect=STOP)
    await w.deployed(spec)
    latest_s = certainly_ended_s(STOP, spec.stop_timeout_s)
    assert latest_s is not None
    await cut_off(w, "m1")
    began = clock()
    task = w.region.where()["m1"][0]
    while w.region.copies(task) in (["m1"], []):
        await asyncio.sleep(0.5)
        assert len(w.region.copies(task)) <= 1
        assert clock() - began < latest_s + 60
    assert len(w.region.copies(task)) == 1
    assert clock() - began >= latest_s - 1
    await w.stable()
    assert w.cp._jobs.get("web").leaving  # it will be deleted there, and does not run any more
    status = await w.cp.get_job("web")
    assert (status.detail, (await w.cp.job_planner.explain("web")).second_copies) == ("", [])
    w.region.machines["m1"].reachable = True
    await asyncio.sleep(120)
    assert len(w.region.copies(task)) == 1


@scenario()
async def test_a_task_that_may_continue_when_cut_off_has_two_copies_in_its_job_status(w: World):
    await w.deployed(a_job(3))
    task = w.region.where()["m1"][0]
    w.region.machines["m1"].reachable = False
    await w.until(lambda: len(w.region.copies(task)) == 2)
    await w.stable()
    expected = f"{task} may still run on m1, which is cut off"
    assert (await w.cp.get_job("web")).detail == expected
    assert (await w.cp.job_planner.explain("web")).second_copies == [expected]
    w.region.machines["m1"].reachable = True
    await w.until(lambda: len(w.region.copies(task)) == 1)
    await asyncio.sleep(10)
    assert (await w.cp.get_job("web")).detail == ""
    w.region.broken_rules.clear()  # two copies for a moment, which `keep` allows


def test_after_a_restart_the_certain_end_counts_from_the_start():
    async def main() -> None:
        spec = a_job(3, disconnect=STOP)
        latest_s = certainly_ended_s(STOP, spec.stop_timeout_s)
        w = World(a_region())
        async with w.running():
            await w.deployed(spec)
            task = w.region.where()["m1"][0]
            await cut_off(w, "m1")
            await asyncio.sleep(latest_s - 5)
        again = World(w.region, w.store)
        began = clock()
        async with again.running():
            await again.until(lambda: w.region.copies(task) in (["m2"], ["m3"]), 600)
        assert clock() - began >= latest_s
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.parametrize("spec", [a_job(1), a_job(1, disconnect=STOP)])
def test_the_certain_end_of_a_copy_follows_from_reports_of_its_machine(spec: JobSpec) -> None:
    silent = ObservedMachine(up=False, answering=False, ready=False, no_report_s=20.0)
    latest_s = certainly_ended_s(spec.disconnect, spec.stop_timeout_s)
    left_s = 0.0 if latest_s is None else latest_s - 20
    assert ended_in_s(spec, "web-0", silent) == pytest.approx(left_s)
    assert ended_in_s(spec, "web-0", with_silence(silent, 1e6)) == 0.0
    assert ended_in_s(spec, "web-0", None) == 0.0


def with_silence(machine: ObservedMachine, no_report_s: float) -> ObservedMachine:
    return ObservedMachine(up=machine.up, answering=False, ready=False, no_report_s=no_report_s)


def test_a_job_file_has_it_in_the_notation_for_people(tmp_path: Path) -> None:
    file = tmp_path / "web.toml"
    image = "sha256:" + "1" * 64
    file.write_text(
        f'name = "web"\nentitlement = "front"\ntasks = 1\nimage = "{image}"\n'
        'command = ["/x"]\ndisconnect = { policy = "stop", after = "45s" }\n'
    )
    assert read_job(file, ()).disconnect == replace(STOP, after_s=45.0)
