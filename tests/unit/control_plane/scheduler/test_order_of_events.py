"""The order of events of tasks and machines, as the components report them."""

import asyncio
from collections.abc import Callable

import pytest
from fake_agents import find_image
from virtual_time import run
from world import World, a_job, a_region, scenario

from agent.api import TaskState
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.inventory import Drain, Lend, Revoke
from control_plane.api.jobs import ControllerRef, JobRecord, UpdatePolicy
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.roles import ControlPlane
from control_plane.store.memory import MemoryStore
from taskcontrol.api import TaskControlRequest, TaskControlResponse
from wire.errors import Busy

REF = ControllerRef(url="https://10.0.0.9:7450", name="db", failure_wait_s=3600)


class Steps:
    """Records events as short sentences, in the order in which they were reported."""

    def __init__(self, w: World) -> None:
        self.seen: list[str] = []
        self.permits = False
        self.rule: Callable[[TaskControlRequest], list[str]] = lambda r: [o.id for o in r.request]
        w.cp._broker.listen(self._machine)
        w.cp._jobs.listen(self._job)
        w.cp._controllers._call = self._controller_called
        for machine in w.region.machines.values():
            self._follow(machine)

    def once(self, *words: str) -> list[str]:
        """Return these sentences in the order of their first occurrence."""
        return sorted(words, key=self.seen.index)

    def _machine(
        self, name: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        if before is None or after is None:
            return
        if after.state is MachineState.DOWN and before.state is MachineState.UP:
            assert after.unavailability[-1].end is None
            self.seen.append(f"{name} is down, by an open event")
        if before.entitlement != after.entitlement:
            self.seen.append(f"{name} is {after.entitlement or 'free'}")

    def _job(self, _: str, before: JobRecord | None, after: JobRecord | None) -> None:
        if before is None or after is None:
            return
        known = {task.index: task for task in before.tasks}
        for task in after.tasks:
            old = known.get(task.index)
            if old is None:
                continue
            if old.listed != task.listed:
                self.seen.append(f"{task.index} {'listed' if task.listed else 'unlisted'}")
            if task.placement is not None and old.placement != task.placement:
                self.seen.append(f"{task.index} placed")

    async def _controller_called(
        self, _: ControllerRef, request: TaskControlRequest
    ) -> TaskControlResponse:
        for operation in request.request:
            self.seen.append(f"{operation.task} requested")
        ack = self.rule(request) if self.permits else []
        for operation in request.request:
            if operation.id in ack:
                self.seen.append(f"{operation.task} acknowledged")
        return TaskControlResponse(ack=ack)

    def _follow(self, machine) -> None:
        send_event = machine.send_event

        def record_event(kind: str, name: str, task=None) -> None:
            index = name.rpartition("-")[2]
            if task is not None and task.state is TaskState.RUNNING:
                self.seen.append(f"{index} started")
            elif kind == "task-removed":
                self.seen.append(f"{index} stopped")
            send_event(kind, name, task)

        machine.send_event = record_event


def on(w: World, machine: str) -> list[int]:
    tasks = w.cp._jobs.get("web").tasks
    return [t.index for t in tasks if t.placement and t.placement.machine == machine]


@pytest.mark.behaviour("SC3", "SC9", "HC1", "HC10", "HC11")
@scenario()
async def test_the_order_of_events_when_a_machine_fails(w: World):
    """Order: event, unlisted, requested, acknowledged, placed elsewhere, started, listed."""
    await w.deployed(a_job(6, controller=REF, update=UpdatePolicy(max_unavailable=2)))
    counts = w.cp.allocations[0].counts
    steps_seen, lost, misses = Steps(w), on(w, "m1"), counts.misses
    w.region.machines["m1"].power_off()
    await w.until(lambda: steps_seen.seen.count(f"{lost[0]} requested") > 2)
    assert counts.misses == misses  # no allocation before the controller's acknowledgement
    steps_seen.permits = True
    await w.stable()
    for index in lost:
        steps = [
            "m1 is down, by an open event",
            *(
                f"{index} {step}"
                for step in ("unlisted", "requested", "acknowledged", "placed", "started")
            ),
            f"{index} listed",
        ]
        assert steps_seen.once(*steps) == steps
    assert counts.misses > misses  # the earlier answer is not used any more
    assert {int(s.split()[0]) for s in steps_seen.seen if s.endswith("placed")} == set(lost)


@pytest.mark.behaviour("SC19", "SD2")
@scenario()
async def test_a_lent_machine_returns_after_its_tasks_have_stopped(w: World):
    """Order: requested, unlisted, stopped; only then the machine gets another owner."""
    w.region.add("m4", "dc1", "msb1")
    await w.set_up()
    await w.cp.capacity.put_entitlement("back", EntitlementSpec(machines=1, host_profile="web"))
    await w.until(w.all_answer)
    await w.cp.inventory.lend(Lend(machine="m4", borrower="front"))
    job_spec = a_job(8, controller=REF, update=UpdatePolicy(max_unavailable=2, drain_s=2))
    await w.cp.apply_job(job_spec)
    await w.stable()
    there = on(w, "m4")
    assert there
    steps_seen = Steps(w)
    steps_seen.permits = True
    await w.cp.inventory.revoke(Revoke(machines=["m4"], return_within_s=600))
    await w.until(lambda: "m4 is free" in steps_seen.seen)
    for index in there:
        steps = [
            f"{index} requested",
            f"{index} acknowledged",
            f"{index} unlisted",
            f"{index} stopped",
        ]
        assert steps_seen.once(*steps, "m4 is free") == [*steps, "m4 is free"]
    assert w.alive()["m4"] == 0


@pytest.mark.behaviour("SD2", "SD1")
@scenario()
async def test_no_task_of_a_machine_that_is_drained_is_listed_when_it_stops(w: World):
    """Tasks leave one after the other, as the budget requires."""
    await w.deployed(a_job(6, update=UpdatePolicy(max_unavailable=1, drain_s=3)))
    steps_seen, leaving = Steps(w), on(w, "m1")
    await w.cp.inventory.drain(Drain(machines=["m1"], reason="a fan"))
    await w.until(lambda: on(w, "m1") == [] and w.alive()["m1"] == 0)
    await w.stable()
    for index in leaving:
        steps = [f"{index} unlisted", f"{index} stopped", f"{index} placed", f"{index} started"]
        assert steps_seen.once(*steps) == steps
    assert "m1" not in {e.machine for e in (await w.cp.endpoints("web")).endpoints}


@pytest.mark.behaviour("TC19", "TC20")
@scenario()
async def test_an_application_scheduler_takes_over_the_life_of_its_tasks(w: World):
    """It moves its data first, and gets each release in the order that it chooses.

    The application's scheduler records which task holds which data. Before a task stops, it copies
    the data to another task, which takes time. Twine does not know about this.
    """
    await w.deployed(a_job(4, controller=REF, update=UpdatePolicy(max_unavailable=4)))
    steps_seen, held = Steps(w), {index: {f"shard{index}"} for index in range(4)}
    order, empty = [2, 0, 3, 1], set[int]()
    moved: list[tuple[int, int]] = []

    def rule(request: TaskControlRequest) -> list[str]:
        for done in (o for o in request.completed if o.kind == "update"):
            assert held[done.task] == set()
            order.remove(done.task)
        if request.down or not order:
            return []
        ready = [o.id for o in request.request if o.task == order[0] and o.task in empty]
        if not ready and order[0] in {o.task for o in request.request}:
            heir = next(index for index in held if index != order[0])
            held[heir] |= held[order[0]]
            held[order[0]] = set()
            moved.append((order[0], heir))
            empty.add(order[0])  # copied before the next request
        return ready

    steps_seen.rule, steps_seen.permits = rule, True
    await w.cp.apply_job(
        a_job(4, controller=REF, update=UpdatePolicy(max_unavailable=4), command=["/bin/other"])
    )
    await w.stable(within_s=600)
    gone = [s for s in steps_seen.seen if s.endswith("unlisted")]
    assert gone == ["2 unlisted", "0 unlisted", "3 unlisted", "1 unlisted"]
    assert [index for index, _ in moved] == [2, 0, 3, 1]
    assert sorted(set().union(*held.values())) == [f"shard{index}" for index in range(4)]


class Failing(MemoryStore):
    """A store that fails on demand."""

    fails = False

    async def txn(self, compare, operations) -> int:
        if self.fails:
            raise Busy("the disk is gone")
        return await super().txn(compare, operations)


@pytest.mark.behaviour("AV7")
@pytest.mark.parametrize("lost", ["dc1", "dc2"])
def test_a_shard_that_fails_holds_up_its_own_machines_and_no_others(lost: str):
    """One data center's store fails. All tasks keep running, and other machines are served."""

    async def main() -> None:
        w = World(a_region(6))
        shards = {"dc1": Failing(), "dc2": Failing()}

        def control_plane() -> ControlPlane:
            return ControlPlane(
                w.store, w.region.agent, w.runtime, w.settings, find_image, broker_stores=shards
            )

        w.control_plane = control_plane
        async with shards["dc1"], shards["dc2"], w.running():
            await w.set_up(quota=6)
            await w.cp.capacity.put_entitlement(
                "front", EntitlementSpec(machines=6, host_profile="web")
            )
            await w.cp.apply_job(a_job(6))
            await w.stable()
            shards[lost].fails = True
            before = w.region.where()
            ours = {m: r.location.datacenter for m, r in w.region.machines.items()}
            in_it = [m for m, dc in ours.items() if dc == lost]
            other = next(m for m, dc in ours.items() if dc != lost)
            await w.cp.apply_job(a_job(6, command=["/bin/other"]))  # needs no write of a broker
            await w.stable(within_s=300)
            await w.cp.inventory.drain(Drain(machines=[other], reason="works elsewhere"))
            with pytest.raises(Busy):
                await w.cp.inventory.drain(Drain(machines=in_it[:1], reason="cannot be written"))
            await w.until(lambda: w.alive()[other] == 0, 300)
            await asyncio.sleep(300)
            assert w.alive().total() == 6
            assert await w.endpoints_count(6)
            assert {m for m in in_it if before[m]} <= {m for m in in_it if w.region.where()[m]}
            shards[lost].fails = False
            await w.cp.inventory.drain(Drain(machines=in_it[:1], reason="now it can"))
            await w.until(lambda: w.alive()[in_it[0]] == 0, 300)
        assert w.region.broken_rules == []

    run(main())
