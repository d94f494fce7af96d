"""TaskControl in the assembled control plane: requests to controllers, and their effects."""

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from virtual_time import clock, run
from world import World, a_job, a_region, scenario

from agent.api import Health, Limits
from control_plane.api.jobs import ControllerRef, JobSpec, UpdatePolicy
from control_plane.api.machines import EventKind
from control_plane.api.operations import JobEvent, RestartRequest
from taskcontrol.api import Ack, TaskControlRequest, TaskControlResponse
from taskcontrol.shards import Sharded
from wire.errors import InvalidInput, Unreachable

REF = ControllerRef(url="https://10.0.0.9:7450", name="db")
Rule = Callable[[TaskControlRequest], list[str | Ack]]


def everything(request: TaskControlRequest) -> list[str | Ack]:
    return [operation.id for operation in request.request]


def nothing(_: TaskControlRequest) -> list[str | Ack]:
    return []


class Controller:
    """A test controller that answers by a rule and records its requests."""

    def __init__(self, w: World, rule: Rule = everything) -> None:
        self.rule = rule
        self.requests: list[TaskControlRequest] = []
        self.delay_s = 0.05
        self.is_down = False
        w.controllers = w.cp._controllers._call = self

    async def __call__(
        self, ref: ControllerRef, request: TaskControlRequest
    ) -> TaskControlResponse:
        assert ref.name == REF.name
        await asyncio.sleep(self.delay_s)
        if self.is_down:
            raise Unreachable("no connection")
        if self.requests:  # also across restarts of the control plane
            assert request.sequence_number > self.requests[-1].sequence_number
        self.requests.append(request)
        return TaskControlResponse(ack=self.rule(request))

    @property
    def last(self) -> TaskControlRequest:
        """Return the last request; an empty request before the first call."""
        none = TaskControlRequest(job_handle="", sequence_number=0, tasks=0, at=0.0)
        return self.requests[-1] if self.requests else none

    def exchanges(self) -> list[tuple[list[int], list[int]]]:
        """Return (request, completed) of each call in which they differ from the previous call."""
        found: list[tuple[list[int], list[int]]] = []
        for r in self.requests:
            sent = ([o.task for o in r.request], [o.task for o in r.completed])
            if not found or sent != found[-1]:
                found.append(sent)
        return found


def a_controlled_job(tasks: int = 3, most: int = 3, ref: ControllerRef = REF, **changes) -> JobSpec:
    update = UpdatePolicy(max_unavailable=most, drain_s=1)
    return a_job(tasks, update=update, controller=ref, **changes)


async def deployed(w: World, tasks: int = 3, rule: Rule = everything, **changes) -> Controller:
    """Return the controller of a running job, without its requests so far."""
    controller = Controller(w, rule)
    await w.deployed(a_controlled_job(tasks, **changes))
    await w.until(lambda: controller.requests and not controller.last.all_unhealthy_tasks)
    controller.requests.clear()
    return controller


async def events(w: World) -> list[JobEvent]:
    return (await w.cp.job_events("web", 0, 500)).events


async def version(w: World, task: int) -> int:
    return (await w.cp.get_job("web")).record.tasks[task].version


@pytest.mark.behaviour("TC4")
@scenario()
async def test_figure_8_call_by_call(w: World):
    """request=[t0,t1] ack=[t1]; request=[t0] completed=[t1] ack=[t0]; completed=[t0]."""

    def rule(request: TaskControlRequest) -> list[str | Ack]:
        """One task stays available: t1 goes first, then t0."""
        pending = sorted(request.request, key=lambda o: -o.task)
        return [pending[0].id] if pending and not request.down else []

    controller = await deployed(w, 2, rule)
    await w.cp.apply_job(a_controlled_job(2, command=["/bin/other"]))
    await w.until(lambda: controller.last.completed)
    await w.stable()
    await w.until(lambda: controller.exchanges()[-1] == ([], [0]))
    assert controller.exchanges() == [
        ([0, 1], []),  # S1; ack=[t1]
        ([0], []),  # t1 is being updated, as allUnhealthyTasks shows; no acknowledgement
        ([0], [1]),  # S2; ack=[t0]
        ([], []),
        ([], [0]),  # S3
    ]
    numbers = [request.sequence_number for request in controller.requests]
    assert numbers == sorted(set(numbers))
    done = [event for event in await events(w) if event.kind == "update"]
    assert [event.task for event in done] == [1, 0]
    assert all(event.approved.startswith("db ") for event in done)


@pytest.mark.behaviour("TC5", "TC10", "WH2")
@scenario()
async def test_a_release_waits_forever_for_its_acknowledgement(w: World):
    """The status shows every user which component the release waits for."""
    controller = await deployed(w, rule=nothing)
    await w.cp.apply_job(a_controlled_job(command=["/bin/other"]))
    await asyncio.sleep(7200)
    assert [await version(w, task) for task in range(3)] == [1, 1, 1]
    assert len(controller.requests) > 100
    ids = {operation.id for r in controller.requests for operation in r.request}
    assert len(ids) == 3  # the same three, again and again
    status = await w.cp.get_job("web")
    assert status.detail == "3 operations wait for the controller db"
    explained = await w.cp.job_planner.explain("web")
    assert "answered" in explained.controller
    assert "0 of 3 acknowledged" in explained.controller
    assert len(explained.operations) == 3
    assert explained.operations[0].startswith("task 0: update because of release waits for its")
    controller.rule = everything
    await w.stable()
    assert await version(w, 0) == 2


@pytest.mark.behaviour("F-55")
@scenario()
async def test_a_controller_that_approves_everything_does_not_exceed_the_budget(w: World):
    """A faulty or careless controller cannot stop more tasks than its job allows."""
    controller = await deployed(w, 6, most=2)
    least = 6

    async def watch() -> None:
        nonlocal least
        while True:
            least = min(least, len(await w.endpoints()))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    await w.cp.apply_job(a_controlled_job(6, most=2, command=["/bin/other"]))
    await w.until(lambda: any(r.completed for r in controller.requests))
    await w.stable()
    watching.cancel()
    assert least == 4


@pytest.mark.behaviour("F-55", "TC18")
@scenario()
async def test_acknowledgements_of_unknown_operations_are_counted_and_have_no_effect(w: World):
    """Covers unknown, ended and repeated operations, and answers other than allow or delay."""
    ended = "web-0.1"

    def liar(request: TaskControlRequest) -> list[str | Ack]:
        wrong = [Ack(operation=o.id, instead="reboot") for o in request.request]
        return [ended, ended, "web-0.999", "", "x" * 1000, *wrong]

    controller = await deployed(w, 1, liar)
    assert ended in {event.operation for event in await events(w)}
    await w.cp.apply_job(a_controlled_job(1, command=["/bin/other"]))
    await asyncio.sleep(60)
    assert await version(w, 0) == 1
    assert "for unknown operations" in (await w.cp.job_planner.explain("web")).controller
    controller.rule = lambda request: everything(request) * 3
    await w.stable()
    assert len([event for event in await events(w) if event.kind == "update"]) == 1


@pytest.mark.behaviour("TC16", "F-55")
@scenario()
async def test_a_controller_that_is_away_holds_up_voluntary_operations_alone(w: World):
    """A failed task is replaced after its wait, and a new one starts at once."""
    controller = await deployed(w, 3)
    controller.is_down = True
    await w.cp.apply_job(a_controlled_job(4, command=["/bin/other"]))
    await w.until(lambda: w.alive().total() == 4)
    await asyncio.sleep(600)
    assert [await version(w, task) for task in range(4)] == [1, 1, 1, 2]
    assert "did not answer" in (await w.cp.job_planner.explain("web")).controller
    controller.is_down = False
    await w.stable()


@pytest.mark.behaviour("SC3", "SC5", "TC20")
@scenario()
async def test_a_failed_task_moves_once_it_is_acknowledged_or_its_wait_is_over(w: World):
    """The task is unlisted at once, and the controller may rebuild its data first."""
    ref = ControllerRef(url=REF.url, name="db", failure_wait_s=900)
    controller = Controller(w, nothing)
    await w.deployed(a_controlled_job(3, ref=ref))
    lost = (await w.cp.get_job("web")).record.tasks[0].placement.machine
    down = [
        t.index for t in (await w.cp.get_job("web")).record.tasks if t.placement.machine == lost
    ]
    w.region.machines[lost].power_off()
    await w.until(lambda: controller.last.request)
    request = controller.last
    assert [o.task for o in request.request] == down
    assert {(o.kind, o.cause) for o in request.request} == {("move", "failure")}
    assert request.down == set(down)
    assert not set(await w.endpoints()) & {f"web-{task}" for task in down}
    await asyncio.sleep(120)
    assert w.alive().total() == 3 - len(down)
    controller.rule = everything
    await w.stable()
    moved = [e for e in await events(w) if e.kind == "move"]
    assert moved
    assert all(e.approved.startswith("db ") for e in moved)


@pytest.mark.behaviour("TC16")
@scenario()
async def test_a_failed_task_moves_after_its_wait_without_an_acknowledgement(w: World):
    """A controller that is unreachable cannot keep a task from running forever."""
    controller = Controller(w, nothing)
    await w.deployed(
        a_controlled_job(3, ref=ControllerRef(url=REF.url, name="db", failure_wait_s=90))
    )
    lost = (await w.cp.get_job("web")).record.tasks[0].placement.machine
    w.region.machines[lost].power_off()
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].phase == "lost")
    controller.is_down, began = True, clock()
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].phase == "running", 300)
    assert 90 <= clock() - began < 150
    await w.stable()
    moved = [e for e in await events(w) if e.kind == "move"]
    assert [e.approved for e in moved] == ["deadline"] * len(moved)


@pytest.mark.behaviour("TC20")
@scenario()
async def test_a_task_whose_machine_returns_before_it_was_acknowledged_stays(w: World):
    """The task was not moved, and does not move afterwards."""
    controller = await deployed(w, 3, nothing)
    lost = (await w.cp.get_job("web")).record.tasks[0].placement.machine
    w.region.machines[lost].power_off()
    await w.until(lambda: controller.last.request)
    w.region.machines[lost].power_on()
    await w.stable()
    assert (await w.cp.get_job("web")).record.tasks[0].placement.machine == lost
    assert [e.outcome for e in await events(w) if e.kind == "move"] == ["withdrawn"]


@pytest.mark.behaviour("TC7", "TC10", "TC21")
@scenario()
async def test_no_controller_can_block_a_maintenance_beyond_its_deadline(w: World):
    """The task is announced in advance, offered a move, and stopped at the deadline."""
    controller = await deployed(w, 3, nothing)
    leaving = (await w.cp.get_job("web")).record.tasks[0].placement.machine
    start, deadline = clock() + 300, clock() + 900
    await w.cp.inventory.outages.plan_unavailability(
        [leaving], EventKind.MAINTENANCE, "new switch", start=start, deadline=deadline
    )
    await w.until(lambda: controller.last.advance_notices)
    (notice,) = controller.last.advance_notices
    assert (notice.machine, notice.start, notice.deadline) == (leaving, start, deadline)
    assert controller.last.request == []
    await w.until(lambda: controller.last.request, 400)
    assert clock() >= start
    (offered,) = controller.last.request
    assert (offered.notice, offered.deadline) == (notice.id, deadline)
    await w.until(lambda: w.alive()[leaving] == 0, 700)
    assert deadline <= clock() < deadline + 60
    await w.stable()
    (moved,) = [e for e in await events(w) if e.kind == "move"]
    assert (moved.cause, moved.approved) == ("maintenance", "deadline")


@pytest.mark.behaviour("F-55", "TC10")
@scenario()
async def test_a_controller_that_was_away_learns_of_a_deadline_in_time(w: World):
    """The deadline was half a minute away when it was announced, and the next try a minute."""
    controller = await deployed(w, 3, nothing)
    leaving = (await w.cp.get_job("web")).record.tasks[0].placement.machine
    controller.is_down = True
    await w.cp.apply_job(a_controlled_job(3, command=["/bin/other"]))
    await w.until(lambda: w.cp._controllers._conversations["web"].failures == 9, 600)
    controller.is_down, deadline = False, clock() + 30
    await w.cp.inventory.outages.plan_unavailability(
        [leaving], EventKind.MAINTENANCE, "new switch", start=clock(), deadline=deadline
    )
    await w.until(lambda: controller.last.advance_notices, 60)
    assert clock() < deadline - 15


@pytest.mark.behaviour("TC12", "F-55")
@scenario()
async def test_a_request_lists_the_existing_tasks_so_removed_ones_are_known(w: World):
    """A task that did not serve is removed without a request, and is missing in `indexes`."""
    controller = await deployed(w, 4, nothing)
    record = (await w.cp.get_job("web")).record
    lost = record.tasks[1].placement.machine
    down = {t.index for t in record.tasks if t.placement.machine == lost}
    w.region.machines[lost].power_off()
    await w.until(lambda: w.cp._jobs.get("web").tasks[1].phase == "lost")
    await w.cp.apply_job(a_controlled_job(4 - len(down) - 1))
    await w.until(lambda: controller.last.request and not controller.last.down & down, 600)
    kept = sorted(set(range(4)) - down)
    assert [first for first, _ in controller.last.indexes] == [i for i in kept if i - 1 not in kept]
    assert controller.last.gone(range(4)) == down
    assert [o.kind for o in controller.last.request] == ["remove"]


@pytest.mark.behaviour("TC6")
@scenario()
async def test_a_restart_of_one_task_waits_for_the_controller(w: World):
    """The restart bypassed the controller. The task serves until the acknowledgement."""
    controller = await deployed(w, 3, nothing)
    generation = w.cp._jobs.get("web").tasks[1].generation
    await w.cp.restart_task("web", 1, RestartRequest(reason="it leaks"))
    await w.until(lambda: controller.last.request)
    (offered,) = controller.last.request
    assert (offered.kind, offered.cause, offered.task) == ("restart", "owner", 1)
    await asyncio.sleep(120)
    assert w.cp._jobs.get("web").tasks[1].generation == generation
    controller.rule = everything
    await w.until(lambda: w.cp._jobs.get("web").tasks[1].generation > generation)
    await w.stable()
    assert [e.approved[:3] for e in await events(w) if e.kind == "restart"] == ["db "]


@pytest.mark.behaviour("TC6")
@scenario()
async def test_a_smaller_job_asks_its_controller_before_stopping_tasks(w: World):
    controller = await deployed(w, 3, nothing)
    await w.cp.apply_job(a_controlled_job(2))
    await w.until(lambda: controller.last.request)
    (offered,) = controller.last.request
    assert (offered.kind, offered.cause) == ("remove", "resize")
    await asyncio.sleep(120)
    assert w.alive().total() == 3
    await w.cp.apply_job(a_controlled_job(3))  # the task is wanted again
    await w.until(lambda: not controller.last.request)
    await w.stable()
    await w.cp.apply_job(a_controlled_job(2))
    controller.rule = everything
    await w.until(lambda: w.alive().total() == 2)
    await w.stable()
    outcomes = [(e.outcome, bool(e.approved)) for e in await events(w) if e.kind == "remove"]
    assert outcomes == [("withdrawn", False), ("done", True)]


@scenario()
async def test_a_whole_job_is_stopped_without_approval(w: World):
    controller = await deployed(w, 3, nothing)
    await w.cp.apply_job(a_controlled_job(2))
    await w.until(lambda: controller.last.request)
    await w.cp.stop_job("web")
    await w.until(lambda: w.cp._jobs.find("web") is None)
    assert w.alive().total() == 0


@pytest.mark.behaviour("WH2")
@scenario()
async def test_an_acknowledgement_lapses_when_something_fails_before_it_was_used(w: World):
    """The circumstances have changed, so operations that had not begun are requested again."""
    controller = await deployed(w, 3, most=1)

    def two(request: TaskControlRequest) -> list[str | Ack]:
        return [o.id for o in request.request if o.task != 2] if not request.down else []

    controller.rule = two
    record = (await w.cp.get_job("web")).record
    last = record.tasks[2].placement.machine
    await w.cp.apply_job(a_controlled_job(3, most=1, command=["/bin/other"]))
    await w.until(lambda: any(not r.down and r.request for r in controller.requests))
    controller.rule = nothing

    def states() -> dict[int, str]:
        tasks = w.cp._jobs.get("web").tasks
        return {t.index: t.operation.state.value for t in tasks if t.operation is not None}

    await w.until(lambda: "acknowledged" in states().values())
    w.region.machines[last].power_off()
    await w.until(lambda: w.cp._jobs.get("web").tasks[2].phase == "lost")
    await asyncio.sleep(60)
    assert "acknowledged" not in states().values()
    assert states()[2] == "offered"
    controller.rule = everything
    await w.stable()


@pytest.mark.behaviour("TC2", "TC16")
@pytest.mark.parametrize("after_s", [0.3, 1.0, 3.0])
def test_calls_of_a_controller_continue_after_a_restart(after_s: float):
    """Numbers rise, ended operations are reported, and no finished operation is requested again."""

    def one_by_one(request: TaskControlRequest) -> list[str | Ack]:
        return [o.id for o in request.request[:1]] if not request.down else []

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            controller = await deployed(w, 3, one_by_one)
            await w.cp.apply_job(a_controlled_job(command=["/bin/other"]))
            await asyncio.sleep(after_s)
        for _ in range(3):
            async with w.running():
                await asyncio.sleep(after_s)
        async with w.running():
            await w.stable()
            await w.until(lambda: not controller.last.request)
            done = {
                e.operation for e in await events(w) if e.kind == "update" and e.outcome == "done"
            }
            assert len(done) == 3
            await w.until(lambda: done <= {o.id for r in controller.requests for o in r.completed})
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("BUG-CP34", "TC2")
def test_a_later_job_of_a_name_numbers_its_calls_above_the_earlier_one():
    """This also holds if the control plane restarted in between; `Controller` checks it."""

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            controller = await deployed(w, 3)
        async with w.running():
            await w.cp.apply_job(a_controlled_job(command=["/bin/other"]))
            await w.stable()
            await w.until(lambda: not controller.last.request)
            await w.cp.stop_job("web")
            await w.until(lambda: w.cp._jobs.find("web") is None)
            last = controller.last.sequence_number
            await w.cp.apply_job(a_controlled_job())
            await w.stable()
            await w.until(lambda: controller.last.sequence_number > last)

    run(main())


@pytest.mark.behaviour("TC11", "SC7")
@scenario()
async def test_a_job_that_drops_its_controller_sends_it_no_more_requests(w: World):
    """From then on only the built-in policies apply."""
    controller = await deployed(w, 3, nothing)
    await w.cp.apply_job(a_controlled_job(command=["/bin/other"]))
    await w.until(lambda: controller.last.request)
    await w.cp.apply_job(a_job(3, command=["/bin/other"], update=UpdatePolicy(drain_s=1)))
    await w.stable()
    assert await version(w, 0) == 2
    count = len(controller.requests)
    await asyncio.sleep(60)
    assert len(controller.requests) == count


# -- three ways of a maintenance


async def planned(w: World, machine: str, **more) -> None:
    """Announce work that begins in ten minutes."""
    now = clock()
    await w.cp.inventory.outages.plan_unavailability(
        [machine], EventKind.MAINTENANCE, "kernel", start=now, deadline=now + 600, **more
    )


def stopping(request: TaskControlRequest) -> list[str | Ack]:
    return [Ack(operation=o.id, instead="stop") for o in request.request if "stop" in o.instead]


async def first_machine(w: World) -> str:
    return (await w.cp.get_job("web")).record.tasks[0].placement.machine


@pytest.mark.behaviour("TC8")
@scenario()
async def test_way_one_a_task_moves_before_the_deadline(w: World):
    await deployed(w, 3, everything)
    leaving = await first_machine(w)
    await planned(w, leaving)
    await w.until(lambda: w.alive()[leaving] == 0, 100)
    await w.stable()
    (moved,) = [e for e in await events(w) if e.kind == "move"]
    assert moved.from_machine == leaving != moved.to_machine
    assert moved.approved.startswith("db ")


@pytest.mark.behaviour("TC8")
@scenario()
async def test_way_two_a_task_stops_and_starts_again_after_the_maintenance(w: World):
    """The task keeps its place, regardless of what happens to the machine meanwhile."""
    await deployed(w, 3, stopping)
    leaving = await first_machine(w)
    await planned(w, leaving)
    await w.until(lambda: w.alive()[leaving] == 0, 100)
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].phase == "parked")
    assert len(await w.endpoints()) == 2
    await asyncio.sleep(700)
    w.region.machines[leaving].power_off()
    await asyncio.sleep(300)
    assert w.cp._jobs.get("web").tasks[0].phase == "parked"
    w.region.machines[leaving].power_on()
    await asyncio.sleep(30)
    assert w.alive()[leaving] == 0  # the machine is up, and still under maintenance
    await w.cp.inventory.outages.undrain([leaving])
    await w.stable()
    assert await first_machine(w) == leaving
    (done,) = [e for e in await events(w) if e.kind == "move"]
    assert (done.outcome, done.from_machine, done.to_machine) == ("done", leaving, leaving)


@pytest.mark.behaviour("TC8")
@pytest.mark.parametrize("kind", [EventKind.DECOMMISSION, EventKind.REFRESH])
def test_a_parked_task_goes_elsewhere_when_its_machine_will_not_be_back(kind: EventKind):

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            await deployed(w, 3, stopping)
            leaving = await first_machine(w)
            await planned(w, leaving)
            await w.until(lambda: w.cp._jobs.get("web").tasks[0].phase == "parked")
            now = clock()
            await w.cp.inventory.outages.plan_unavailability(
                [leaving], kind, "old", start=now, deadline=now + 600
            )
            await w.stable()
            assert await first_machine(w) != leaving

    run(main())


@pytest.mark.behaviour("TC8", "TC9")
@scenario()
async def test_way_three_work_on_a_switch_moves_nothing_that_sits_it_out(w: World):
    """No task of a stateful service moves, and no task is stopped at the deadline."""
    controller = await deployed(w, 3, nothing)
    leaving = await first_machine(w)
    before = w.region.where()
    await planned(w, leaving, expected_duration_s=300.0, tasks_survive=True)
    await w.until(lambda: controller.last.request)
    (notice,) = controller.last.advance_notices
    assert notice.tasks_survive
    assert notice.expected_duration_s == 300.0
    await asyncio.sleep(595)
    assert w.region.where() == before
    agent = w.region.machines[leaving]
    agent.reachable = False  # the switch is out
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].phase == "lost")
    assert len(await w.endpoints()) == 2
    controller.rule = lambda request: [o.id for o in request.request if o.cause == "failure"]
    await asyncio.sleep(200)
    agent.reachable = True
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].phase == "running")
    assert w.region.where() == before
    assert [e for e in await events(w) if e.outcome == "done" and e.kind == "move"] == []


@pytest.mark.behaviour("TC9")
@scenario()
async def test_work_that_takes_longer_than_announced_is_a_failure(w: World):
    """The machine may be silent for the announced time, and not longer."""
    controller = await deployed(w, 3, lambda r: [o.id for o in r.request if o.cause == "failure"])
    leaving = await first_machine(w)
    await planned(w, leaving, expected_duration_s=120.0, tasks_survive=True)
    await asyncio.sleep(601)
    w.region.machines[leaving].reachable = False
    await asyncio.sleep(100)
    assert w.cp._jobs.get("web").tasks[0].placement.machine == leaving
    await w.until(lambda: w.cp._jobs.get("web").tasks[0].phase == "running", 120)
    assert await first_machine(w) != leaving
    assert controller.requests


@scenario()
async def test_a_notice_of_work_that_tasks_survive_has_its_duration(w: World):
    await deployed(w, 3, nothing)
    with pytest.raises(InvalidInput, match="needs a deadline and a duration"):
        await planned(w, await first_machine(w), tasks_survive=True)
    with pytest.raises(InvalidInput, match="tasks do not survive a decommission"):
        await w.cp.inventory.outages.plan_unavailability(
            ["m1"], EventKind.DECOMMISSION, "old", deadline=clock() + 9, tasks_survive=True
        )


@pytest.mark.behaviour("HC6", "BUG-AU5")
@scenario()
async def test_of_all_machines_for_a_kernel_one_waits_for_a_job_that_cannot_spare_it(w: World):
    """The case "49 of 50": a replica is down, so its counterpart stays until the deadline."""
    held = {task: {f"s{task // 2}"} for task in range(6)}  # pairs: 0 and 1, 2 and 3, …
    rule = Sharded(rebuild_s=3600)

    def pairs(request: TaskControlRequest) -> list[str | Ack]:
        kept = [o for o in request.request if o.cause != "failure"]  # waits for the machine
        return rule.answer(replace(request, request=kept), held).ack

    ref = ControllerRef(url=REF.url, name="db", failure_wait_s=7200)
    controller = Controller(w, pairs)
    for number in range(3, 7):
        w.region.add(f"m{number + 1}", "dc1", "msb1")
    large = Limits(memory_max_bytes=700 << 20)  # one on each machine
    await w.deployed(a_controlled_job(6, most=6, ref=ref, limits=large), quota=7)
    where = {t.index: t.placement.machine for t in (await w.cp.get_job("web")).record.tasks}
    failed, other = 2, 3
    w.region.machines[where[failed]].power_off()
    await w.until(lambda: w.cp._jobs.get("web").tasks[failed].phase == "lost")
    kernels = sorted(set(where.values()) - {where[failed]})
    now = clock()
    await w.cp.inventory.outages.plan_unavailability(
        kernels, EventKind.MAINTENANCE, "kernel", now, now + 1200, 600.0
    )
    seen: set[int] = set()

    def stopped() -> set[int]:
        seen.update(t.index for t in w.cp._jobs.get("web").tasks if t.phase == "parked")
        for t in w.cp._jobs.get("web").tasks:  # machines whose work is finished return
            if t.phase == "parked" and t.placement is not None:
                back.add(t.placement.machine)
        return seen

    back: set[str] = set()
    while clock() < now + 1100:
        stopped()
        for machine in list(back):
            back.discard(machine)
            await w.cp.inventory.outages.undrain([machine])
        await asyncio.sleep(5)
    assert seen == set(where) - {failed, other}
    assert f"web-{other}" in await w.endpoints()
    assert controller.requests
    await asyncio.sleep(200)
    tasks = w.cp._jobs.get("web").tasks
    assert (tasks[other].phase, tasks[other].operation) == ("running", None)
    assert tasks[other].placement.machine not in where.values()  # on the spare machine
    moves = [e for e in await events(w) if e.task == other and e.kind == "move"]
    assert [e.approved for e in moves] == ["deadline"]


# -- after a start of the control plane


@pytest.mark.behaviour("BUG-TC2")
@pytest.mark.parametrize("answers_after_s", [2.0, 6.0])
def test_after_a_start_tasks_on_silent_machines_are_not_reported_as_down(answers_after_s: float):
    """Tasks were reported as unhealthy while their machines had not been queried yet."""

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            controller = await deployed(w, 3, nothing)
            await w.cp.apply_job(a_controlled_job(command=["/bin/other"]))
            await w.until(lambda: controller.last.request)
        for machine in w.region.machines.values():
            machine.behaviour.list_s = answers_after_s
        controller.requests.clear()
        async with w.running():
            await w.until(lambda: controller.last.request)
            assert [r.down for r in controller.requests] == [frozenset()]

    run(main())


@pytest.mark.behaviour("BUG-TC2")
@scenario()
async def test_an_acknowledgement_for_a_down_task_is_void_once_it_is_up(w: World):
    """An acknowledgement because "it is down anyway" stopped tasks that served again."""

    def down_anyway(request: TaskControlRequest) -> list[str | Ack]:
        return [o.id for o in request.request if o.task in request.down]

    controller = await deployed(w, 3, nothing, most=1)
    record = (await w.cp.get_job("web")).record
    machine = w.region.machines[record.tasks[1].placement.machine]
    other = w.region.machines[record.tasks[2].placement.machine]
    await w.cp.apply_job(a_controlled_job(3, most=1, command=["/bin/other"]))
    await w.until(lambda: controller.last.request)
    machine.behaviour.healthy = lambda spec: False  # its new version fails too
    machine.report("web-1", health=Health.UNHEALTHY)
    other.report("web-2", health=Health.UNHEALTHY)
    await w.until(lambda: controller.last.down == {1, 2})
    controller.rule = down_anyway
    await asyncio.sleep(20)
    assert [await version(w, task) for task in (1, 2)] == [2, 1]  # one at a time
    controller.rule = nothing
    other.report("web-2", health=Health.HEALTHY)
    machine.behaviour.healthy = lambda spec: True
    machine.report("web-1", health=Health.HEALTHY)
    await asyncio.sleep(60)
    assert await version(w, 2) == 1
    controller.rule = everything
    await w.stable()


@pytest.mark.behaviour("TC5")
@scenario()
async def test_approval_of_an_update_is_no_approval_of_a_removal(w: World):
    """A shrinking job requests the removal. Without an acknowledgement the task starts again."""

    def only_updates(request: TaskControlRequest) -> list[str | Ack]:
        wanted = [o for o in request.request if o.kind == "update" and o.task == 1]
        return [operation.id for operation in wanted]

    controller = await deployed(w, 3, only_updates)
    await w.cp.apply_job(a_controlled_job(3, command=["/bin/other"]))
    await w.until(lambda: 1 in controller.last.down)
    await w.cp.apply_job(a_controlled_job(2, command=["/bin/other"]))
    await w.until(lambda: any(o.kind == "remove" for o in controller.last.request))
    assert [o.task for o in controller.last.request if o.kind == "remove"] == [1]
    await asyncio.sleep(300)
    assert [t.index for t in w.cp._jobs.get("web").tasks] == [0, 1, 2]
    assert len(await w.endpoints()) == 3
    controller.rule = everything
    await w.stable()
    assert [t.index for t in w.cp._jobs.get("web").tasks] == [0, 2]
