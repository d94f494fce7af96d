"""Modelled machines keep the rules of the real agent's API, and the network loses what it must."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from agent import api
from agent.api import Health, ProfileState, TaskState
from vm_lab.region import agent
from vm_lab.region.history import History
from vm_lab.region.link import EVENTS_TIMEOUT_S, POLL_S, AgentLink
from vm_lab.region.loop import Timeline
from vm_lab.region.machine import MachineContext, SimulatedMachine
from vm_lab.region.network import Condition, SimulatedNetwork
from vm_lab.region.observer import Observer
from vm_lab.region.plane import PlaneLife
from wire.errors import (
    Busy,
    Conflict,
    NotFound,
    ProtocolError,
    Refused,
    Unprocessable,
    Unreachable,
)

IMAGE = "sha256:" + "1" * 64


class World:
    """One machine, the network to it, and a process that may call it."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        history = History(self.timeline)
        self.machine_context = MachineContext(self.timeline, history)
        self.machine_context.known_images.add(IMAGE)
        self.network = SimulatedNetwork(self.timeline)
        self.machine = SimulatedMachine(self.machine_context, "m1", api.Location(), "seed")
        self.network.connect(self.machine)
        self.life = PlaneLife(1, self.timeline, history, Observer())
        self.link = AgentLink(self.network, self.life, self.machine)

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        self.life.loop.run_until_complete(body())

    def close(self) -> None:
        self.life.sever()
        self.life.loop.free()

    def wait(self, seconds: float) -> None:
        self.timeline.run_until(self.timeline.now + seconds)


def spec(generation: int = 1, epoch: int = 1, **changes: object) -> api.TaskSpec:
    values: dict[str, object] = {"image": IMAGE, "command": ["x"], "job": "web"} | changes
    return api.TaskSpec(generation=generation, epoch=epoch, **values)  # type: ignore[arg-type]


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    found.machine.images.add(IMAGE)
    yield found
    found.close()


def test_a_task_starts_and_becomes_healthy(world: World) -> None:
    agent.put_task(world.machine, "web-0", spec())
    world.wait(10)
    copy = world.machine.copies["web-0"]
    assert (copy.state, copy.health, copy.alive) == (TaskState.RUNNING, Health.HEALTHY, True)


@pytest.mark.behaviour("F-43", "F-48")
def test_an_order_older_than_the_current_one_is_refused(world: World) -> None:
    """The newer epoch wins, then the higher generation."""
    agent.put_task(world.machine, "web-0", spec(5, 2))
    for generation, epoch in [(4, 2), (9, 1)]:
        with pytest.raises(Conflict):
            agent.put_task(world.machine, "web-0", spec(generation, epoch))
        with pytest.raises(Conflict):
            agent.delete_task(world.machine, "web-0", generation, epoch)
    before = world.machine.sequence
    assert agent.put_task(world.machine, "web-0", spec(5, 2)).generation == 5
    assert world.machine.sequence == before  # a repeated command changes nothing
    assert agent.put_task(world.machine, "web-0", spec(1, 3)).epoch == 3


def test_an_old_command_does_not_restore_a_removed_task(world: World) -> None:
    agent.put_task(world.machine, "web-0", spec(3))
    agent.delete_task(world.machine, "web-0", 4, 1)
    world.wait(10)
    assert world.machine.copies == {}
    with pytest.raises(Conflict):
        agent.put_task(world.machine, "web-0", spec(4))
    with pytest.raises(NotFound):
        agent.delete_task(world.machine, "web-7", 9, 1)
    with pytest.raises(Conflict):  # a delete that arrived before its put wins
        agent.put_task(world.machine, "web-7", spec(9))
    assert agent.put_task(world.machine, "web-0", spec(5)).state is TaskState.STARTING


def test_a_task_without_its_image_or_without_room_is_refused(world: World) -> None:
    with pytest.raises(Unprocessable, match="image"):
        agent.put_task(world.machine, "web-0", spec(image="sha256:" + "9" * 64))
    huge = api.Limits(memory_max_bytes=world.machine.memory_bytes)
    with pytest.raises(Unprocessable, match="does not fit"):
        agent.put_task(world.machine, "web-0", spec(limits=huge))


def test_tasks_do_not_come_back_by_themselves_after_a_reboot(world: World) -> None:
    agent.put_task(world.machine, "web-0", spec())
    world.wait(10)
    world.machine.reboot()
    assert not world.machine.copies["web-0"].alive
    world.wait(100)
    copy = world.machine.copies["web-0"]
    assert world.machine.agent_up
    assert (copy.state, copy.alive) == (TaskState.STOPPED, False)
    assert copy.last_exit is not None
    assert copy.last_exit.result == "lost"
    assert world.machine.boot_id() == "m1-boot-2"


def test_a_profile_that_needs_a_boot_waits_for_one(world: World) -> None:
    world.machine_context.reboot_profiles = frozenset({"boot"})
    agent.put_profile(world.machine, api.ProfileSpec(name="boot", epoch=1, allow_reboot=True))
    world.wait(10)
    assert world.machine.boots == 1
    world.wait(200)
    assert world.machine.boots == 2
    assert world.machine.profile.status.state is ProfileState.VERIFIED
    with pytest.raises(Conflict):
        agent.put_profile(world.machine, api.ProfileSpec(name="old", epoch=0))


@pytest.mark.parametrize(
    ("condition", "error"),
    [
        (Condition(cut_in=True, cut_out=True), Unreachable),
        (Condition(cut_in=True), Unreachable),
        (Condition(loss=1.0), Unreachable),
    ],
)
def test_a_call_over_a_cut_link_times_out(
    world: World, condition: Condition, error: type[Exception]
) -> None:
    world.network.impose(1, world.machine, condition)

    async def body() -> None:
        with pytest.raises(error):
            await world.link.list_tasks()

    world.run(body)


@pytest.mark.behaviour("F-50")
def test_a_request_whose_answer_is_lost_was_carried_out(world: World) -> None:
    """The machine receives requests, but its answers are lost."""
    world.timeline.at(0.0001, world.network.impose, 1, world.machine, Condition(cut_out=True))

    async def body() -> None:
        with pytest.raises(Unreachable):
            await world.link.put_task("web-0", spec())

    world.run(body)
    assert "web-0" in world.machine.copies


def test_a_host_without_agent_refuses_and_a_wrong_server_sends_an_invalid_answer(
    world: World,
) -> None:
    async def body() -> None:
        world.machine.set_agent(up=False)
        with pytest.raises(Refused):
            await world.link.get_machine()
        world.machine.set_agent(up=True)
        world.machine.garbled = True
        with pytest.raises(ProtocolError):
            await world.link.get_machine()

    world.run(body)


def test_nothing_that_a_dead_process_sends_arrives(world: World) -> None:
    async def body() -> None:
        world.life.sever()
        with pytest.raises(asyncio.CancelledError):
            await world.link.put_task("web-0", spec())

    world.run(body)
    assert world.machine.copies == {}


def test_an_idle_machine_without_events_still_counts_as_alive(world: World) -> None:
    async def body() -> None:
        stream = world.link.follow(0)
        before = world.timeline.events
        await asyncio.sleep(1000)
        assert world.timeline.events - before <= 1
        assert 1000 - POLL_S <= stream.last_contact_at <= 1000

    world.run(body)


def test_news_arrive_and_a_line_that_is_silent_for_too_long_is_given_up(world: World) -> None:
    async def body() -> None:
        stream = world.link.follow(0)
        world.timeline.after(5.0, world.machine.add_event, "image", IMAGE)
        assert [event.kind for event in (await stream.next()).events] == ["image"]
        cut_at = world.timeline.now + 1.0
        cut = Condition(cut_in=True, cut_out=True)
        world.timeline.at(cut_at, world.network.impose, 1, world.machine, cut)
        with pytest.raises(Unreachable):
            await stream.next()
        assert stream.last_contact_at <= cut_at
        assert world.timeline.now <= cut_at + EVENTS_TIMEOUT_S

    world.run(body)


def test_a_stopped_process_receives_nothing_until_it_continues(world: World) -> None:
    async def body() -> None:
        stream = world.link.follow(0)
        await asyncio.sleep(10)
        world.life.freeze(300.0)
        await asyncio.sleep(1)
        assert world.timeline.now == 310.0
        assert stream.last_contact_at <= 10.0
        await asyncio.sleep(1)
        assert stream.last_contact_at >= 310

    world.run(body)


def bound() -> api.TaskSpec:
    """Return a task that must end after 30 s without its control plane."""
    policy = api.Disconnect(policy=api.DisconnectPolicy.STOP, after_s=30.0)
    return spec(disconnect=policy, stop_timeout_s=5.0)


@pytest.mark.behaviour("F-50")
@pytest.mark.parametrize("hangs", [False, True])
def test_a_task_ends_with_its_contact_although_requests_arrive(world: World, hangs: bool) -> None:
    """Arriving requests do not prove that answers arrive. If the agent hangs, the fence ends the
    task."""
    machine = world.machine
    stream = world.link.follow(0)
    agent.put_task(machine, "web-0", bound())
    world.wait(20)
    copy = machine.copies["web-0"]
    assert copy.alive
    machine.slow_s = EVENTS_TIMEOUT_S + 6
    machine.hung_until = 1e9 if hangs else 0.0
    machine.reach_changed()
    last_contact_at = stream.last_contact_at

    async def ask() -> None:
        await world.link.list_tasks()

    if not hangs:
        world.run(ask)
    world.wait(last_contact_at + 30 + 5 + 3 - world.timeline.now)
    assert (copy.alive, copy.cut_off) == (False, True)
    with pytest.raises(Busy):
        agent.put_task(machine, "web-1", bound())


def test_expired_tasks_end_before_renewed_contact_counts(world: World) -> None:
    machine = world.machine
    machine.contact.changed(True, 0.0)
    agent.put_task(machine, "web-0", bound())
    world.wait(20)
    machine.hung_until = 60.0
    machine.contact.changed(False, 20.0)
    world.wait(31)
    assert machine.copies["web-0"].alive
    machine.contact.changed(True, 0.0)
    world.wait(5)
    assert machine.copies["web-0"].last_exit is not None
    assert not machine.copies["web-0"].alive
