"""Commands to agents: they carry what is wanted at sending, and a slow agent delays no other."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from fake_agents import IMAGE, IMAGE_2, find_image
from fake_agents import Region as Machines
from virtual_time import RUNTIME, run
from world import a_job, scenario

from agent import api
from control_plane.agents.core.commands import Start, Stop
from control_plane.agents.core.stop_queue import QueuePlace, StopQueue
from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.observations import Observations
from control_plane.agents.pool import AgentPool
from control_plane.agents.region import Region
from control_plane.api.jobs import Placement
from control_plane.api.settings import SchedulerSettings
from control_plane.broker.brokers import Brokers
from control_plane.runtime.limits import TokenBucket
from control_plane.store.memory import MemoryStore
from wire.errors import NotFound, Unreachable


class Agent:
    """One agent that takes its time. The bench records the time of each answer."""

    def __init__(self, bench: Bench, machine: str) -> None:
        self.bench, self.machine = bench, machine

    async def _answer(self, subject: str) -> None:
        await RUNTIME.sleep(self.bench.answer_s.get(self.machine, 0.01))
        if self.machine in self.bench.silent:
            raise Unreachable(f"cannot reach {self.machine}")
        self.bench.done[(self.machine, subject)] = RUNTIME.now()

    async def put_task(self, task: str, spec: api.TaskSpec) -> api.TaskStatus:
        await self._answer(task)
        return a_status(task, spec.generation, api.TaskState.RUNNING)

    async def delete_task(self, task: str, generation: int, _: int) -> api.TaskStatus:
        await self._answer(task)
        raise NotFound(f"no task {task}")

    async def pull_image(self, pull: api.ImagePull) -> api.ImageInfo:
        await RUNTIME.sleep(self.bench.pull_s.get(pull.digest, 0.1))
        if self.machine in self.bench.reboots:
            self.bench.reboots.discard(self.machine)
            self.bench.observations.observation(self.machine).boot_id = "another"
            raise Unreachable(f"cannot reach {self.machine}")
        if self.machine in self.bench.broken:
            self.bench.broken.discard(self.machine)
            raise RuntimeError("a fault of the program")
        return await find_image(pull.digest)

    async def close(self) -> None:
        self.bench.closed.append(self.machine)


def a_status(task: str, generation: int, state: api.TaskState, owner: str = "") -> api.TaskStatus:
    return api.TaskStatus(
        task_id=task,
        generation=generation,
        epoch=1,
        state=state,
        health=api.Health.HEALTHY,
        image=IMAGE,
        entitlement=owner,
        job=task.rpartition("-")[0],
    )


def a_spec(image: str = IMAGE) -> api.TaskSpec:
    return api.TaskSpec(generation=1, epoch=1, image=image, command=["/bin/x"], entitlement="e")


class Bench:
    """A dispatcher, agents that tests make slow, and their wanted state."""

    def __init__(self) -> None:
        self.answer_s: dict[str, float] = {}
        self.pull_s: dict[str, float] = {}
        self.silent: set[str] = set()
        self.reboots: set[str] = set()
        """Machines whose next pull fails at the moment at which the control plane observes another
        boot."""
        self.broken: set[str] = set()
        """Machines whose next pull fails with an error that no code expects."""
        self.closed: list[str] = []
        self.done: dict[tuple[str, str], float] = {}
        self.wanted: dict[tuple[str, str], api.TaskSpec | Stop] = {}
        self.hosts: Machines
        self.observations: Observations
        self.broker: Brokers
        self.dispatcher: Dispatcher
        self.loop: asyncio.Task[None]

    @asynccontextmanager
    async def running(self, machines: list[str], **settings):
        hosts = self.hosts = Machines()
        async with MemoryStore() as store:
            self.broker = Brokers(store, RUNTIME)
            await self.broker.load()
            for name in machines:
                await self.broker.join(hosts.add(name, "dc1", "msb1").join())
            self.observations = Observations(self.broker, RUNTIME)
            region = Region(self.broker, self.observations, SchedulerSettings(**settings), RUNTIME)
            pool = AgentPool(lambda record: Agent(self, record.machine))
            self.dispatcher = Dispatcher(region, pool, find_image)
            self.dispatcher.wanted = lambda machine, task: self.wanted.get((machine, task))
            self.loop = asyncio.create_task(self.dispatcher.run(lambda: 1))
            await RUNTIME.sleep(0)
            yield self
            self.loop.cancel()
            await asyncio.wait([self.loop])

    def list_(self, machine: str) -> None:
        """Make the control plane observe a machine in its present boot, without tasks or images."""
        facts = self.hosts.machines[machine].facts()
        self.observations.listed(machine, facts, [], api.ProfileStatus(), [])

    def start(self, machine: str, task: str, image: str = IMAGE) -> None:
        self.wanted[machine, task] = a_spec(image)
        self.dispatcher.send(Start(machine, task, 0, 1, 1, Placement(machine=machine)))

    def stop(self, machine: str, task: str, owner: str, *, urgent: bool = False) -> None:
        seen = a_status(task, 1, api.TaskState.RUNNING, owner)
        self.observations.observation(machine).tasks[task] = seen
        command = Stop(machine, task, 1, urgent=urgent)
        self.wanted[machine, task] = command
        self.dispatcher.send(command)

    def has_image(self, *machines: str) -> None:
        for machine in machines:
            self.observations.observation(machine).images |= {IMAGE}


@pytest.mark.behaviour("BUG-CP7")
@scenario()
async def test_an_unwanted_start_is_dropped_after_its_image_arrived(w):
    """The dispatcher derives a command when it sends it, not when the command is requested."""
    await w.set_up()
    for machine in w.region.machines.values():
        machine.behaviour.pull_s = 300.0
    await w.cp.apply_job(a_job(3))
    await asyncio.sleep(60)  # the images are in transfer
    await w.cp.stop_job("web")
    await asyncio.sleep(600)
    assert all(machine.images for machine in w.region.machines.values())
    assert [machine.starts for machine in w.region.machines.values()] == [[], [], []]


@pytest.mark.behaviour("BUG-CP7")
@scenario()
async def test_a_task_that_moved_while_its_image_came_runs_once(w):
    """The task leaves its first machine while the image is still in transfer there."""
    await w.set_up()
    for machine in w.region.machines.values():
        machine.behaviour.pull_s = 300.0
    await w.cp.apply_job(a_job(1))
    await asyncio.sleep(60)
    (task,) = (await w.cp.get_job("web")).record.tasks
    first = task.placement.machine
    w.region.machines[first].reachable = False  # the pull continues and succeeds
    for machine in w.region.machines.values():
        machine.behaviour.pull_s = 0.5
    await w.stable()
    w.region.machines[first].reachable = True
    await asyncio.sleep(600)
    assert w.region.machines[first].starts == []
    assert len(w.region.copies("web-0")) == 1


@pytest.mark.behaviour("BUG-CP11", "F-53")
def test_thirty_slow_agents_delay_no_other():
    """A long call gives its slot to others."""

    async def main() -> float:
        slow, quick = [f"s{n}" for n in range(30)], [f"q{n}" for n in range(200)]
        async with Bench().running(slow + quick) as bench:
            bench.has_image(*slow, *quick)
            bench.answer_s = dict.fromkeys(slow, 9.0)
            for machine in slow:
                for term in range(10):
                    bench.start(machine, f"a-{term}")
            await RUNTIME.sleep(0.1)
            began = RUNTIME.now()
            for machine in quick:
                bench.start(machine, "b-0")
            await RUNTIME.sleep(60)
            return max(bench.done[machine, "b-0"] for machine in quick) - began

    assert run(main()) <= 1.2  # 21 s if all share 64 slots


@pytest.mark.behaviour("F-53")
def test_commands_beyond_those_in_flight_follow_although_the_agent_is_slow():
    """Formerly the fifth command of a machine that answers after 5 s waited forever."""

    async def main() -> int:
        async with Bench().running(["m0"]) as bench:
            bench.has_image("m0")
            bench.answer_s = {"m0": 5.0}
            for term in range(9):
                bench.start("m0", f"a-{term}")
            await RUNTIME.sleep(30)
            return len(bench.done)

    assert run(main()) == 9


@pytest.mark.behaviour("BUG-CP11", "F-54")
def test_a_second_copy_is_removed_before_a_large_job_is_stopped():
    """A copy that must not run is removed first. The other commands take turns by entitlement."""

    async def main() -> tuple[float, float, float]:
        machines = [f"m{n}" for n in range(40)]
        async with Bench().running(machines) as bench:
            for term in range(400):
                bench.stop(machines[term % 40], f"big-{term}", "batch")
            await RUNTIME.sleep(1.0)
            began = RUNTIME.now()
            bench.stop("m7", "small-0", "front")
            bench.stop("m3", "web-0", "front", urgent=True)
            await RUNTIME.sleep(100)
            small, urgent = bench.done["m7", "small-0"], bench.done["m3", "web-0"]
            last = max(at for (_, task), at in bench.done.items() if task.startswith("big"))
            assert len(bench.done) == 402
            return urgent - began, small - began, last

    urgent_s, small_s, last = run(main())
    assert urgent_s <= 0.2
    assert small_s <= 0.5
    assert last >= (402 - 20) / 10  # the limit holds for all commands together


def test_a_start_waits_for_no_image_of_another_task():
    """A pull takes minutes, and occupies no slot of its machine."""

    async def main() -> dict[tuple[str, str], float]:
        async with Bench().running(["m1"]) as bench:
            bench.has_image("m1")
            bench.pull_s = {IMAGE_2: 600.0}
            for term in range(8):
                bench.start("m1", f"a-{term}", IMAGE_2)
            bench.start("m1", "b-0")
            await RUNTIME.sleep(700)
            return bench.done

    done = run(main())
    assert done["m1", "b-0"] < 1
    assert all(600 <= done["m1", f"a-{n}"] < 602 for n in range(8))


def test_a_pull_interrupted_by_a_boot_is_requested_again():
    """A host without power never reports the end of a pull, so its call would wait in vain."""

    async def main() -> None:
        bench = Bench()
        async with bench.running(["m1"]):
            bench.list_("m1")
            bench.pull_s = {IMAGE: 10_000.0}
            bench.start("m1", "a-0")
            await RUNTIME.sleep(5)
            bench.pull_s = {}
            bench.list_("m1")  # the same boot: the image may still be in transfer
            await RUNTIME.sleep(120)
            assert not bench.done
            began = RUNTIME.now()
            bench.hosts.machines["m1"].boots += 1
            bench.list_("m1")
            await RUNTIME.sleep(120)
            assert bench.done["m1", "a-0"] - began < 60

    run(main())


@pytest.mark.behaviour("BUG-UX60")
def test_a_failed_pull_is_not_cancelled_by_a_later_boot():
    """Formerly the dispatcher rescheduled a timeout that had already been left, and the process
    ended."""

    async def main() -> dict[tuple[str, str], float]:
        bench = Bench()
        async with bench.running(["m1"]):
            bench.list_("m1")
            bench.reboots = {"m1"}
            bench.start("m1", "a-0")
            await RUNTIME.sleep(120)
            return bench.done

    assert ("m1", "a-0") in run(main())


@pytest.mark.behaviour("BUG-CP7")
def test_a_stop_that_became_a_start_while_it_waited_stops_nothing():
    """The wait for the rate limit counts as well."""

    async def main() -> list[tuple[str, str]]:
        async with Bench().running(["m1"], destructive_burst=1, destructive_per_s=0.1) as bench:
            bench.has_image("m1")
            for term in range(3):
                bench.stop("m1", f"a-{term}", "e")
            await RUNTIME.sleep(1)
            bench.wanted["m1", "a-1"] = a_spec()
            del bench.wanted["m1", "a-2"]
            await RUNTIME.sleep(100)
            assert bench.observations.observation("m1").tasks["a-1"].state is api.TaskState.RUNNING
            return sorted(bench.done)

    assert run(main()) == [("m1", "a-0"), ("m1", "a-1")]


@pytest.mark.behaviour("BUG-CP23")
def test_work_waiting_for_a_removed_machine_is_dropped():
    """Formerly pauses, queues and connections of removed machines stayed forever."""

    async def main() -> None:
        async with Bench().running(["m1", "m2"]) as bench:
            bench.has_image("m1", "m2")
            bench.silent = {"m1"}
            bench.start("m1", "a-0")
            bench.start("m2", "a-1")
            await RUNTIME.sleep(1)
            assert list(bench.dispatcher._queues) == ["m1"]  # its pause
            record = bench.broker.table.get("m1")
            bench.dispatcher._machine_changed("m1", record, None)
            bench.wanted.clear()
            await RUNTIME.sleep(1000)
            assert bench.dispatcher._queues == {}
            assert bench.closed == ["m1"]

    run(main())


@pytest.mark.behaviour("BUG-CP23")
def test_a_failure_that_does_not_repeat_is_forgotten():
    """The pause of a command that is not wanted any more."""

    async def main() -> None:
        async with Bench().running(["m1"]) as bench:
            bench.has_image("m1")
            bench.silent = {"m1"}
            bench.start("m1", "a-0")
            await RUNTIME.sleep(1)
            bench.wanted.clear()
            await RUNTIME.sleep(200)
            assert bench.dispatcher._queues == {}

    run(main())


@pytest.mark.behaviour("BUG-CP145")
def test_an_unexpected_error_of_a_pull_stops_no_other_command():
    """The dispatcher logs it and tries again; commands to other machines continue."""

    async def main() -> None:
        async with Bench().running(["m1", "m2"]) as bench:
            bench.broken = {"m1"}
            bench.has_image("m2")
            bench.start("m1", "a-0")
            await RUNTIME.sleep(1)
            bench.start("m2", "b-0")
            await RUNTIME.sleep(120)
            assert set(bench.done) == {("m1", "a-0"), ("m2", "b-0")}

    run(main())


@pytest.mark.behaviour("BUG-CP145")
def test_a_pull_that_a_restart_of_the_dispatcher_cut_off_begins_again():
    """A task waits for its image only while that is pulled."""

    async def main() -> None:
        async with Bench().running(["m1"]) as bench:
            bench.pull_s = {IMAGE: 5.0}
            bench.start("m1", "a-0")
            await RUNTIME.sleep(1)
            bench.loop.cancel()
            await asyncio.wait([bench.loop])
            bench.loop = asyncio.create_task(bench.dispatcher.run(lambda: 1))
            await RUNTIME.sleep(0)
            bench.start("m1", "a-0")
            await RUNTIME.sleep(30)
            assert ("m1", "a-0") in bench.done

    run(main())


@pytest.mark.behaviour("BUG-CP145")
def test_stops_that_wait_for_the_rate_limit_continue_after_a_restart_of_the_dispatcher():
    async def main() -> None:
        async with Bench().running(["m1"], destructive_per_s=0.1, destructive_burst=1) as bench:
            bench.stop("m1", "a-0", "e")
            bench.stop("m1", "a-1", "e")
            await RUNTIME.sleep(1)
            assert ("m1", "a-1") not in bench.done
            bench.loop.cancel()
            await asyncio.wait([bench.loop])
            bench.loop = asyncio.create_task(bench.dispatcher.run(lambda: 1))
            await RUNTIME.sleep(30)
            assert ("m1", "a-1") in bench.done

    run(main())


@pytest.mark.parametrize("urgent_first", [True, False])
def test_the_stop_queue_takes_the_urgent_first_and_entitlements_by_turns(urgent_first):
    queue, order = StopQueue(), []
    places = [QueuePlace("m", f"a-{n}") for n in range(3)] + [
        QueuePlace("m", f"b-{n}") for n in range(2)
    ]
    if urgent_first:
        queue.add(QueuePlace("m", "x-0"), "c", urgent=True)
    for place in places:
        queue.add(place, place.task[0], urgent=False)
    if not urgent_first:
        queue.add(QueuePlace("m", "x-0"), "c", urgent=False)
        queue.add(QueuePlace("m", "x-0"), "c", urgent=True)
    assert len(queue) == 6
    while (place := queue.first()) is not None:
        queue.take(place)
        order.append(place.task)
    assert order == ["x-0", "a-0", "b-0", "a-1", "b-1", "a-2"]
    assert len(queue) == 0


def test_a_burst_passes_and_the_rest_goes_at_the_rate():
    bucket, now, times = TokenBucket(per_s=2, burst=3), 0.0, []
    while len(times) < 7:
        wait_s = bucket.take(now)
        now += wait_s
        if not wait_s:
            times.append(now)
    assert times == [0, 0, 0, 0.5, 1.0, 1.5, 2.0]
    assert bucket.take(12.0) == 0
