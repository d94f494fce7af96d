"""Updates in the assembled control plane: canaries, gates, batches, rollback, extra tasks."""

import asyncio
from itertools import pairwise

import pytest
from msgspec.structs import replace
from virtual_time import clock, run
from world import World, a_job, a_region, scenario

from agent.api import Health, Limits
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import ControllerRef, JobPhase, TaskRecord
from control_plane.api.machines import EventKind
from control_plane.api.updates import Canary, OnFailure, UpdatePolicy
from control_plane.store.memory import MemoryStore
from taskcontrol.api import TaskControlRequest, TaskControlResponse

OTHER, THIRD = ["/bin/other"], ["/bin/third"]


def policy(**fields) -> UpdatePolicy:
    return UpdatePolicy(**({"drain_s": 0.0} | fields))


def break_version(w: World, *commands: str) -> None:
    """From now on, tasks with these commands never become healthy."""
    for machine in w.region.machines.values():
        machine.behaviour.healthy = lambda spec: spec.command[0] not in commands


async def versions(w: World) -> list[int]:
    return [task.version for task in (await w.cp.get_job("web")).record.tasks]


async def commands(w: World) -> set[str]:
    record = (await w.cp.get_job("web")).record
    return {record.specs[task.version].command[0] for task in record.tasks}


async def rollouts(w: World) -> list[str]:
    return [e.reason for e in (await w.cp.job_events("web")).events if e.kind == "rollout"]


async def is_reported(w: World, count: int) -> bool:
    return len(await rollouts(w)) == count


def heal(w: World) -> None:
    """From now on every task is healthy, including running ones."""
    break_version(w)
    for machine in w.region.machines.values():
        for task, status in list(machine.tasks.items()):
            if status.health is Health.UNHEALTHY:
                machine.report(task, health=Health.HEALTHY)


async def least_served(w: World, until, within_s: float = 600) -> int:
    """Return the smallest number of listed tasks until a condition holds."""
    least = len(await w.endpoints())

    async def is_so() -> bool:
        nonlocal least
        least = min(least, len(await w.endpoints()))
        return await until()

    await w.until(is_so, within_s)
    return least


@pytest.mark.behaviour("SC2", "SC15")
@scenario()
async def test_a_canary_runs_alone_until_it_was_healthy_for_long_enough(w: World):
    update = policy(max_unavailable=3, canary=Canary(tasks=1, share=0.3, hold_s=300))
    await w.deployed(a_job(6, update=update))
    await w.cp.apply_job(a_job(6, update=update, command=OTHER))

    async def two_serve() -> bool:
        return (await versions(w)).count(2) == 2 and len(await w.endpoints()) == 6

    await w.until(two_serve)
    await asyncio.sleep(250)
    assert (await versions(w)).count(2) == 2
    assert "2 of 2 canaries" in (await w.cp.get_job("web")).update
    await w.stable(within_s=400)
    assert await versions(w) == [2] * 6
    assert await rollouts(w) == [
        "2 canaries of version 2 stayed healthy",
        "all tasks run version 2",
    ]
    causes = [e.cause for e in (await w.cp.job_events("web")).events if e.kind == "update"]
    assert sorted(causes) == ["canary"] * 2 + ["release"] * 4


@scenario()
async def test_tasks_lost_during_the_canary_stage_restart_with_the_old_version(w: World):
    update = policy(canary=Canary(tasks=1, hold_s=3600))
    await w.deployed(a_job(6, update=update))
    await w.cp.apply_job(a_job(6, update=update, command=OTHER))
    await w.until(lambda: 2 in [t.version for t in w.cp._jobs.get("web").tasks])
    await w.until(lambda: w.endpoints_count(6))
    canary = next(t for t in w.cp._jobs.get("web").tasks if t.version == 2)
    other = next(n for n in w.region.machines if n != canary.placement.machine)
    w.region.machines[other].power_off()
    await w.until(lambda: w.endpoints_count(6), 300)
    assert sorted(await versions(w)) == [1] * 5 + [2]
    await w.cp.apply_job(a_job(7, update=update, command=OTHER))
    await w.until(lambda: w.endpoints_count(7), 300)
    assert sorted(await versions(w)) == [1] * 6 + [2]


@scenario()
async def test_the_next_batch_begins_when_the_last_one_passed_its_gate(w: World):
    update = policy(max_unavailable=6, batch=2, health_gate_s=60)
    await w.deployed(a_job(6, update=update))
    await w.cp.apply_job(a_job(6, update=update, command=OTHER))
    began = w.runtime.now()
    assert await least_served(w, lambda: is_on(w, 2)) == 4
    assert w.runtime.now() - began >= 120
    await w.stable()
    events = [e for e in (await w.cp.job_events("web")).events if e.kind == "update"]
    ends = sorted(e.end for e in events)
    assert ends[2] - ends[1] >= 60
    assert ends[4] - ends[3] >= 60


@scenario()
async def test_without_batches_each_task_that_passed_makes_room_for_one(w: World):
    update = policy(max_unavailable=1, health_gate_s=40)
    await w.deployed(a_job(4, update=update))
    await w.cp.apply_job(a_job(4, update=update, command=OTHER))
    await w.stable(within_s=400)
    ends = sorted(e.end for e in (await w.cp.job_events("web")).events if e.kind == "update")
    assert all(two - one >= 40 for one, two in pairwise(ends))


async def is_on(w: World, version: int) -> bool:
    return set(await versions(w)) == {version}


@pytest.mark.behaviour("SC6")
@pytest.mark.parametrize("canary", [None, Canary(tasks=1, hold_s=30)])
def test_a_failing_version_is_rolled_back_automatically(canary):
    """Unavailable tasks stay within the budget, and tasks that were not updated keep running."""

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            update = policy(
                max_unavailable=2, on_failure=OnFailure.ROLLBACK, health_gate_s=5, canary=canary
            )
            await w.deployed(a_job(6, update=update))
            untouched = {(t.index, t.generation) for t in w.cp._jobs.get("web").tasks}
            break_version(w, OTHER[0])
            await w.cp.apply_job(a_job(6, update=update, command=OTHER))

            async def is_rolled_back() -> bool:
                status = await w.cp.get_job("web")
                return status.phase is JobPhase.STABLE and await commands(w) == {"/bin/serve"}

            assert await least_served(w, is_rolled_back) >= (5 if canary else 4)
            status = await w.cp.get_job("web")
            assert status.record.version == 3
            assert "version 2 failed on 1 task" in status.update
            assert "was rolled back to version 1" in status.update
            await w.until(lambda: is_reported(w, 2))
            (text, end) = await rollouts(w)
            assert text.startswith("rolled back to version 1: version 2 failed on 1 task")
            assert end == "all tasks run version 3"
            kept = {(t.index, t.generation) for t in w.cp._jobs.get("web").tasks} & untouched
            assert len(kept) >= 4
            await asyncio.sleep(600)
            assert (await w.cp.get_job("web")).record.version == 3

    run(main())


@scenario()
async def test_versions_do_not_chase_each_other(w: World):
    """The version to roll back to fails too; the job does not alternate between versions."""
    update = policy(on_failure=OnFailure.ROLLBACK)
    await w.deployed(a_job(3, update=update))
    break_version(w, OTHER[0], "/bin/serve")
    await w.cp.apply_job(a_job(3, update=update, command=OTHER))
    await w.until(lambda: w.cp._jobs.get("web").version == 3)
    await asyncio.sleep(2000)
    assert (await w.cp.get_job("web")).record.version == 3
    assert len(await w.endpoints()) == 2
    heal(w)
    await w.stable(within_s=600)


@scenario()
async def test_a_later_version_that_fails_goes_back_to_what_ran_everywhere(w: World):
    """The rollback skips the version in between, which never ran on all tasks."""
    update = policy(on_failure=OnFailure.ROLLBACK, health_gate_s=30)
    await w.deployed(a_job(6, update=update))
    await w.cp.apply_job(a_job(6, update=update, command=OTHER))
    await w.until(lambda: 2 in [t.version for t in w.cp._jobs.get("web").tasks])
    break_version(w, THIRD[0])
    await w.cp.apply_job(a_job(6, update=update, command=THIRD))
    await w.until(lambda: w.cp._jobs.get("web").version == 4)
    await w.stable(within_s=900)
    assert await commands(w) == {"/bin/serve"}


@scenario()
async def test_an_update_that_is_to_be_halted_waits_for_its_owner(w: World):
    update = policy(max_unavailable=3, on_failure=OnFailure.PAUSE, failures=2)
    await w.deployed(a_job(6, update=update))
    break_version(w, OTHER[0])
    await w.cp.apply_job(a_job(6, update=update, command=OTHER))

    async def halted() -> bool:
        return "the update stays until" in (await w.cp.get_job("web")).detail

    await w.until(halted)
    assert (await w.cp.get_job("web")).phase is JobPhase.WAITING
    seen = await versions(w)
    await asyncio.sleep(300)
    assert await versions(w) == seen
    heal(w)
    await asyncio.sleep(300)
    assert await versions(w) == seen
    explanation = await w.cp.job_planner.explain("web")
    assert "the update stays until" in explanation.update
    await w.cp.pause_job("web", paused=False)
    await w.stable(within_s=300)
    assert await versions(w) == [2] * 6


@pytest.mark.behaviour("SC21")
@scenario()
async def test_a_successor_serves_before_its_predecessor_stops(w: World):
    """With room for one more task, the wanted number of tasks serves all the time."""
    update = policy(max_unavailable=0, surge=1, health_gate_s=5)
    await w.deployed(a_job(3, update=update))
    await w.cp.apply_job(a_job(3, update=update, command=OTHER))
    most = 0

    async def done() -> bool:
        nonlocal most
        most = max(most, w.alive().total())
        return (await w.cp.get_job("web")).phase is JobPhase.STABLE and await is_on(w, 2)

    assert await least_served(w, done) == 3
    assert most == 4
    assert [t.index for t in w.cp._jobs.get("web").tasks] == [0, 1, 2]
    causes = {(e.kind, e.cause) for e in (await w.cp.job_events("web")).events}
    assert {("start", "surge"), ("remove", "surge")} <= causes


@pytest.mark.behaviour("BUG-AU1")
@scenario()
async def test_a_release_repairs_a_job_of_which_every_task_is_broken(w: World):
    """Two tasks are replaced at a time, as the budget permits (ADR 0132)."""
    update = policy(max_unavailable=2)
    await w.deployed(a_job(4, update=update))
    bad = w.cp._jobs.get("web").spec.command[0]
    break_version(w, bad)
    for machine in w.region.machines.values():
        for task in list(machine.tasks):
            machine.report(task, health=Health.UNHEALTHY)
    await w.until(lambda: w.endpoints_count(0))
    await w.cp.apply_job(a_job(4, update=update, command=OTHER))
    most = 0

    async def done() -> bool:
        nonlocal most
        tasks = w.cp._jobs.get("web").tasks
        most = max(most, sum(1 for t in tasks if not (t.listed or t.phase == "running")))
        return (await w.cp.get_job("web")).phase is JobPhase.STABLE

    await w.until(done, 600)
    assert await versions(w) == [2] * 4
    assert most == 2


@scenario()
async def test_an_extra_task_serves_while_machines_are_emptied_too(w: World):
    update = policy(max_unavailable=0, surge=2)
    await w.deployed(a_job(3, update=update))
    leaving = (await w.cp.get_job("web")).record.tasks[0].placement.machine
    await w.cp.inventory.outages.plan_unavailability([leaving], EventKind.MAINTENANCE, "work")

    async def empty() -> bool:
        return w.alive()[leaving] == 0 and w.alive().total() == 3

    assert await least_served(w, empty) == 3
    await w.stable()


LARGE = Limits(memory_max_bytes=512 << 20)


@scenario()
async def test_without_room_for_an_extra_task_the_update_continues_within_the_budget(w: World):
    update = policy(max_unavailable=1, surge=1)
    await w.deployed(a_job(3, update=update, limits=LARGE))
    await w.cp.apply_job(a_job(3, update=update, limits=LARGE, command=OTHER))
    assert await least_served(w, lambda: is_on(w, 2)) == 2
    await w.stable()


@scenario()
async def test_an_update_that_needs_an_extra_task_reports_it_where_there_is_no_room(w: World):
    update = policy(max_unavailable=0, surge=1)
    await w.deployed(a_job(3, update=update, limits=LARGE))
    await w.cp.apply_job(a_job(3, update=update, limits=LARGE, command=OTHER))

    async def shows_update() -> bool:
        return "waits for an extra task" in (await w.cp.get_job("web")).detail

    await w.until(shows_update)
    await asyncio.sleep(300)
    assert len(await w.endpoints()) == 3
    update = policy(max_unavailable=1)
    await w.cp.apply_job(a_job(3, update=update, limits=LARGE, command=OTHER))
    await w.stable()
    assert len(w.cp._jobs.get("web").tasks) == 3


@pytest.mark.behaviour("BUG-CP52")
@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize("what", ["transfer", "update"])
def test_an_extra_task_that_took_the_last_room_stays_for_a_task_that_waits_for_it(
    most: int, controlled: bool, what: str
):
    """A job that wants two tasks ends with two, and keeps its budget meanwhile."""

    async def main() -> None:
        w = World(a_region(5))
        w.controllers = acknowledge_all
        async with w.running():
            await w.set_up(2 if what == "transfer" else 3)
            await w.cp.capacity.put_entitlement(
                "back", EntitlementSpec(machines=2, host_profile="web")
            )
            ref = ControllerRef(url="https://10.0.0.9:7450", name="db") if controlled else None
            values = {"update": policy(max_unavailable=most, surge=1), "controller": ref}
            spec = a_job(2, limits=LARGE, **values)
            await w.cp.apply_job(spec)
            await w.stable()
            if what == "transfer":
                await w.cp.move_job("web", "back")
            else:
                await w.cp.apply_job(replace(spec, command=OTHER))

            async def done() -> bool:
                return (await w.cp.get_job("web")).phase is JobPhase.STABLE and await is_new(w, 2)

            assert await least_served(w, done) == 2 - most
            assert w.alive().total() == 2
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("BUG-CP59")
@pytest.mark.parametrize("pace", [{"batch": 1}, {"canary": Canary(tasks=1, hold_s=1.0)}, {}])
def test_an_update_does_not_wait_for_extra_tasks_that_have_no_room(pace: dict):
    """Extra tasks without a machine counted as part of the current batch or canaries."""

    async def main() -> None:
        w = World(a_region(5))
        async with w.running():
            await w.set_up(2)
            update = policy(max_unavailable=1, surge=2, **pace)
            spec = a_job(2, limits=LARGE, update=update)
            await w.cp.apply_job(spec)
            await w.stable()
            await w.cp.apply_job(replace(spec, command=OTHER))

            async def done() -> bool:
                return (await w.cp.get_job("web")).phase is JobPhase.STABLE and await is_new(w, 2)

            assert await least_served(w, done) == 1
            assert w.alive().total() == 2
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("BUG-CP67")
@pytest.mark.parametrize(
    ("pace", "why"),
    [
        ({"batch": 1, "health_gate_s": 60.0}, "the batch waits until task 0 has a machine"),
        ({"canary": Canary(tasks=1, hold_s=60.0)}, "the canaries wait until task 0 has a machine"),
    ],
)
def test_an_update_names_the_task_without_a_machine_that_it_waits_for(pace: dict, why: str):
    """The update waited for a task that was lost with its machine, and did not report it."""

    async def main() -> None:
        w = World(a_region(3))
        async with w.running():
            await w.set_up(3)
            spec = a_job(3, limits=LARGE, update=policy(max_unavailable=2, **pace))
            await w.cp.apply_job(spec)
            await w.stable()
            await w.cp.apply_job(replace(spec, command=OTHER))

            async def one_is_new() -> bool:
                return (await versions(w)).count(2) == 1 and len(await w.endpoints()) == 3

            async def is_reported() -> bool:
                return why in (await w.cp.get_job("web")).update

            await w.until(one_is_new)
            first = (await w.cp.get_job("web")).record.tasks[0]
            assert first.version == 2
            assert first.placement is not None
            lost = w.region.machines[first.placement.machine]
            lost.power_off()
            await w.until(is_reported, 600)
            assert (await w.cp.shards.explain("web")).update.count(why) == 1
            lost.power_on()
            await w.until(lambda: is_new(w, 3), 900)
            assert not (await w.cp.get_job("web")).update

    run(main())


@pytest.mark.behaviour("BUG-CP63")
def test_a_task_that_has_no_room_elsewhere_does_not_hold_up_the_update_of_others():
    """The task used the whole budget, round after round, while it waited for room."""

    async def main() -> None:
        w = World(a_region(5))

        async def moved(command: list[str]) -> bool:
            record = (await w.cp.get_job("web")).record
            runs = [record.specs[task.version] for task in record.tasks if task.listed]
            return sorted(of.entitlement for of in runs) == ["back", "front"] and command in [
                of.command for of in runs if of.entitlement == "back"
            ]

        async with w.running():
            await w.set_up(2)
            await w.cp.capacity.put_entitlement(
                "back", EntitlementSpec(machines=2, host_profile="web")
            )
            await w.cp.apply_job(a_job(1, name="other", limits=LARGE, entitlement="back"))
            spec = a_job(2, limits=LARGE, update=policy(max_unavailable=1))
            await w.cp.apply_job(spec)
            await w.stable()
            await w.stable("other")
            await w.cp.move_job("web", "back")
            await w.until(lambda: moved(spec.command))
            await w.cp.apply_job(replace(spec, entitlement="back", command=OTHER))
            await w.until(lambda: moved(OTHER))

    run(main())


async def is_new(w: World, tasks: int) -> bool:
    return await versions(w) == [2] * tasks


async def acknowledge_all(_, request: TaskControlRequest) -> TaskControlResponse:
    return TaskControlResponse(ack=[operation.id for operation in request.request])


@scenario()
async def test_a_version_that_fails_in_extra_tasks_is_rolled_back_without_a_loss(w: World):
    update = policy(max_unavailable=0, surge=1, on_failure=OnFailure.ROLLBACK)
    await w.deployed(a_job(3, update=update))
    break_version(w, OTHER[0])
    await w.cp.apply_job(a_job(3, update=update, command=OTHER))

    async def is_rolled_back() -> bool:
        status = await w.cp.get_job("web")
        return status.phase is JobPhase.STABLE and status.record.version == 3

    assert await least_served(w, is_rolled_back) == 3
    assert w.alive().total() == 3


@pytest.mark.behaviour("AV3")
@pytest.mark.parametrize("after_s", [1, 4, 8, 15, 25, 40, 60])
def test_an_update_continues_after_the_process_is_killed(after_s):
    """The stage, the failures and the extra tasks are stored with the job."""

    async def main() -> None:
        w = World(a_region())
        update = policy(
            max_unavailable=0,
            surge=1,
            health_gate_s=5,
            canary=Canary(hold_s=20),
            on_failure=OnFailure.ROLLBACK,
        )
        async with w.running():
            await w.deployed(a_job(3, update=update))
            await w.cp.apply_job(a_job(3, update=update, command=OTHER))
            await asyncio.sleep(after_s)
        async with w.running():
            await w.until(w.all_answer)
            await w.stable(within_s=600)
            assert await is_on(w, 2)
            assert w.alive().total() == 3
        assert w.region.broken_rules == []

    run(main())


@scenario()
async def test_an_update_that_cannot_reach_its_failure_limit_continues(w: World):
    """One task is new at a time, so two can never fail together."""
    update = policy(max_unavailable=1, on_failure=OnFailure.ROLLBACK, failures=2)
    await w.deployed(a_job(3, update=update))
    break_version(w, OTHER[0])
    await w.cp.apply_job(a_job(3, update=update, command=OTHER))
    await w.until(lambda: w.cp._jobs.get("web").version == 3)
    await w.stable()


@scenario()
async def test_the_version_after_a_failed_canary_gets_canaries(w: World):
    """Tasks that an earlier update started are no canaries of the next version."""
    update = policy(max_unavailable=2, canary=Canary(tasks=2, hold_s=5))
    await w.deployed(a_job(4, update=update))
    break_version(w, OTHER[0])
    await w.cp.apply_job(a_job(4, update=update, command=OTHER))
    await w.until(lambda: [t.version for t in w.cp._jobs.get("web").tasks].count(2) == 2)
    await w.cp.apply_job(a_job(4, update=update, command=THIRD))
    await w.stable(within_s=300)
    assert await commands(w) == {THIRD[0]}


@scenario()
async def test_a_broken_extra_task_does_not_hold_its_batch_and_the_verdict_up(w: World):
    """The extra task begins alone and fails. It must not block the rest of its batch."""
    update = policy(
        max_unavailable=1,
        batch=3,
        surge=1,
        health_gate_s=5,
        healthy_within_s=60,
        on_failure=OnFailure.ROLLBACK,
        failures=3,
    )
    await w.deployed(a_job(3, update=update))
    break_version(w, OTHER[0])
    await w.cp.apply_job(a_job(3, update=update, command=OTHER))
    await w.until(lambda: w.cp._jobs.get("web").version == 3, 600)
    await w.stable()
    assert w.alive().total() == 3


@scenario()
async def test_no_verdict_while_another_new_task_may_still_add_evidence(w: World):
    """Two failures are required and one task has failed. The other one becomes healthy slowly."""
    update = policy(
        max_unavailable=2,
        health_gate_s=5,
        healthy_within_s=60,
        on_failure=OnFailure.ROLLBACK,
        failures=2,
    )
    await w.deployed(a_job(3, update=update))
    broken = (await w.cp.get_job("web")).record.tasks[0].placement.machine
    w.region.machines[broken].behaviour.healthy = lambda spec: spec.command != OTHER
    await w.cp.apply_job(a_job(3, update=update, command=OTHER))
    await asyncio.sleep(600)
    assert w.cp._jobs.get("web").version == 2


@pytest.mark.behaviour("SC6")
@scenario()
async def test_a_new_task_that_served_once_and_is_unhealthy_since_is_a_failure_of_its_batch(
    w: World,
):
    """The task will never pass its gate, so the next batch would wait forever."""
    update = policy(
        max_unavailable=2,
        batch=2,
        health_gate_s=30,
        healthy_within_s=60,
        on_failure=OnFailure.ROLLBACK,
        failures=2,
    )
    await w.deployed(a_job(4, update=update))
    await w.cp.apply_job(a_job(4, update=update, command=OTHER))

    def first() -> list[TaskRecord]:
        return [t for t in w.cp._jobs.get("web").tasks if t.version == 2 and t.listed]

    await w.until(lambda: len(first()) == 2)
    task, began = first()[0], clock()
    w.region.machines[task.placement.machine].report(f"web-{task.index}", health=Health.UNHEALTHY)
    await w.until(lambda: w.cp._jobs.get("web").version == 3, 600)
    assert 60 <= clock() - began < 120
    heal(w)
    await w.stable()
    assert await commands(w) == {"/bin/serve"}


@scenario()
async def test_a_new_task_that_is_unhealthy_for_a_moment_fails_no_batch(w: World):
    """The task served, was unhealthy for less than `healthy_within_s`, and serves again."""
    update = policy(
        max_unavailable=2,
        batch=2,
        health_gate_s=30,
        healthy_within_s=60,
        on_failure=OnFailure.ROLLBACK,
        failures=2,
    )
    await w.deployed(a_job(4, update=update))
    await w.cp.apply_job(a_job(4, update=update, command=OTHER))

    def first() -> list[TaskRecord]:
        return [t for t in w.cp._jobs.get("web").tasks if t.version == 2 and t.listed]

    await w.until(lambda: len(first()) == 2)
    task = first()[0]
    machine = w.region.machines[task.placement.machine]
    machine.report(f"web-{task.index}", health=Health.UNHEALTHY)
    await asyncio.sleep(40)
    machine.report(f"web-{task.index}", health=Health.HEALTHY)
    await w.stable(within_s=600)
    assert await versions(w) == [2] * 4


@pytest.mark.behaviour("BUG-CP103")
def test_a_job_with_a_long_environment_is_rolled_back_on_every_engine():
    """Its record has a copy of each version. Formerly etcd refused it, and each round failed."""

    async def main() -> None:
        region, store = a_region(), MemoryStore(strict=True)
        update = policy(max_unavailable=2, on_failure=OnFailure.ROLLBACK, health_gate_s=5)
        long = {f"V{number}": f"{number} " * 250 for number in range(90)}
        world = World(region, store)
        async with world.running():
            await world.deployed(a_job(6, update=update, environment=long))
            break_version(world, OTHER[0])
            await world.cp.apply_job(a_job(6, update=update, environment=long, command=OTHER))
            await world.until(lambda: world.cp._jobs.get("web").version == 3)
            await world.stable()
            assert await commands(world) == {"/bin/serve"}
        again = World(region, store)
        async with again.running():
            await again.until(again.all_answer)
            assert again.cp._jobs.get("web").spec.environment == long

    run(main())
