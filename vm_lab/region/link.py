"""The control plane's client of one modelled agent: its calls, and the events it follows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar

from agent import api
from agent.api.notices import HostNotices
from agent.api.term import OWNER_HEADER, read_owner
from agent.usage import Usages
from vm_lab.region import agent as agents
from vm_lab.region.machine import SimulatedMachine
from vm_lab.region.network import Exchange, SimulatedNetwork
from wire.duplex import Duplex
from wire.errors import NotFound, Refused, TwineError, Unreachable

if TYPE_CHECKING:
    from vm_lab.region.plane import PlaneLife

_T = TypeVar("_T")
OwnerHeaders = Callable[[str], Mapping[str, str]]
"""Returns the ownership headers of requests to a machine."""
POLL_S = 3.0
"""Seconds that an agent holds a request for events (`SchedulerSettings.poll_wait_s`)."""
EVENTS_TIMEOUT_S = 5.5
"""Timeout of a request for events, in seconds."""


class AgentLink:
    """Implements the control plane's `AgentApi` for one modelled machine.

    Calls of a killed process do not arrive.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        life: PlaneLife,
        machine: SimulatedMachine,
        owner_headers: OwnerHeaders = lambda _: {},
    ) -> None:
        self._network, self._life, self._machine = network, life, machine
        self._owner_headers = owner_headers

    async def _call(
        self,
        kind: type[_T],
        handle: Callable[..., object],
        *args: object,
        deferred: bool = False,
        mutates: bool = False,
    ) -> _T:
        if not self._life.alive:
            raise asyncio.CancelledError
        owner = read_owner(self._owner_headers(self._machine.name).get(OWNER_HEADER, ""))
        request = agents.AgentCall(handle, args, owner, mutates, self._life.number)
        exchange = Exchange(self._network, self._life, self._machine, request)
        exchange.send(deferred=deferred)
        answer = await exchange.future
        assert isinstance(answer, kind)
        return answer

    async def get_machine(self) -> api.MachineFacts:
        """Return the facts about the machine."""
        return await self._call(api.MachineFacts, agents.get_machine)

    async def list_images(self) -> api.Images:
        """Return all images that are completely fetched."""
        return await self._call(api.Images, agents.list_images)

    async def pull_image(self, pull: api.ImagePull) -> api.ImageInfo:
        """Have the agent fetch an image."""
        return await self._call(api.ImageInfo, agents.pull_image, pull, deferred=True)

    async def list_tasks(self) -> api.Tasks:
        """Return all tasks of the machine."""
        return await self._call(api.Tasks, agents.list_tasks)

    async def put_task(self, task_id: str, spec: api.TaskSpec) -> api.TaskStatus:
        """Set the desired state of a task."""
        if self._life.leads:  # for a deposed process, only commands that agents obey are checked
            self._life.observer.put_sent(self._machine, task_id, spec)
        return await self._call(api.TaskStatus, agents.put_task, task_id, spec, mutates=True)

    async def delete_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        """Stop a task and tear it down."""
        self._life.observer.delete_sent(self._machine, task_id)
        return await self._call(
            api.TaskStatus, agents.delete_task, task_id, generation, epoch, mutates=True
        )

    def task_logs(
        self,
        task_id: str,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        """Yield one line: modelled tasks write nothing."""

        async def lines() -> AsyncIterator[bytes]:
            yield f"{task_id} {follow} {since} {tail} {previous}\n".encode()

        return lines()

    async def get_task(self, task_id: str) -> api.TaskStatus:
        """Return the observed state of a task."""
        tasks = await self.list_tasks()
        matching = [t for t in tasks.tasks if t.task_id == task_id]
        if not matching:
            raise NotFound(f"there is no task {task_id} on this machine")
        return matching[0]

    async def restart_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        """Raise `NotFound`: only faults restart modelled tasks."""
        asked = f"generation {generation}, epoch {epoch}"
        raise NotFound(f"task {task_id} is a model and is not restarted by hand ({asked})")

    async def get_usage(self) -> Usages:
        """Return the usage of the modelled tasks; zero unless the region has load."""
        await self._call(api.Tasks, agents.list_tasks)
        tasks = self._network.usage(self._machine)
        return Usages(at_boot_s=self._network.timeline.now, tasks=tasks)

    def open_exec(self, task_id: str, asked: dict[str, str]) -> AbstractAsyncContextManager[Duplex]:
        """Raise `NotFound`: a modelled task has no processes."""
        raise NotFound(f"task {task_id} is a model: {asked.get('command')} cannot be run in it")

    async def put_profile(self, spec: api.ProfileSpec) -> api.ProfileStatus:
        """Set the desired host profile."""
        return await self._call(api.ProfileStatus, agents.put_profile, spec, mutates=True)

    async def put_notices(self, notices: HostNotices) -> HostNotices:
        """Send the notices for the tasks of the machine."""
        return await self._call(HostNotices, agents.put_notices, notices, mutates=True)

    async def get_profile(self) -> api.ProfileStatus:
        """Return the profile the machine runs."""
        return await self._call(api.ProfileStatus, agents.get_profile)

    async def get_events(self, after: int, wait_s: float = 0.0) -> api.Events:
        """Return events after a sequence number; wait up to `wait_s` for the first one."""
        if wait_s <= 0:
            return await self._call(api.Events, _events, after)
        stream = self.follow(after)
        try:
            async with asyncio.timeout(wait_s):
                return await stream.next()
        except TimeoutError:
            return await self._call(api.Events, _events, after)
        finally:
            await stream.close()

    def follow(self, after: int) -> FollowedEvents:
        """Return the agent's events after a sequence number, as they come."""
        return FollowedEvents(self._network, self._life, self._machine, after)

    async def close(self) -> None:
        """Close all connections."""


class FollowedEvents:
    """Implements the control plane's `EventStream` without making its long polls.

    The time of the last contact with the agent is computed when it is read, so an idle machine
    costs nothing.
    """

    def __init__(
        self, network: SimulatedNetwork, life: PlaneLife, machine: SimulatedMachine, after: int
    ) -> None:
        """Start listening now."""
        self._network, self._life, self._machine = network, life, machine
        self._after, self._boot = after, machine.boot_id()
        self._answered_at = network.timeline.now
        """When the last answer arrived, or else the first request was sent."""
        self._broken_at: float | None = None
        self._failure: TwineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_delivering = self._closed = False
        machine.streams.append(self)
        life.streams.append(self)
        self.path_changed()
        self.event_added()

    # -- used by the control plane

    @property
    def last_contact_at(self) -> float:
        """Return when the agent last answered, on the loop's clock."""
        at = self._broken_at
        return self._life.read_time(
            self._last_answer_at(self._network.timeline.now) if at is None else at
        )

    @property
    def is_alive(self) -> bool:
        """Return whether the process that follows the events is alive."""
        return self._life.alive

    async def next(self) -> api.Events:
        """Return the next events, or raise the error that ended the stream."""
        if not self._life.alive:
            raise asyncio.CancelledError
        while not self._has_new_events() or self._broken_at is not None:
            if self._failure is not None:
                raise self._failure
            self._waiter = self._life.loop.create_future()
            await self._waiter
        events = _events(self._machine, self._after, self._boot)
        self._after = events.latest
        return events

    async def close(self) -> None:
        """Stop following."""
        self.sever()

    # -- called by the model

    def sever(self) -> None:
        """Remove the stream from its machine and its process."""
        if not self._closed:
            self._closed = True
            self._machine.streams.remove(self)
            self._life.streams.remove(self)
            self._life.contact_changed(self._machine)

    def event_added(self) -> None:
        """Deliver the agent's new events, if there are any."""
        if self._is_delivering or self._broken_at is not None or not self._has_new_events():
            return
        self._is_delivering = True
        machine = self._machine
        takes = self._network.draw_latency(machine) + machine.slow_s
        self._network.timeline.after(takes, self._deliver)

    def path_changed(self) -> None:
        """Handle a change of the path to the agent, or of the agent itself."""
        now, machine = self._network.timeline.now, self._machine
        # an answer after the timeout counts as no answer
        works = self._network.answers(machine) and machine.slow_s < EVENTS_TIMEOUT_S - POLL_S
        works = works and self._life.path.is_open
        if works and not machine.garbled:
            if self._broken_at is not None and self._failure is None:
                self._broken_at, self._answered_at = None, now
                self.event_added()
        elif self._broken_at is None:
            self._broken_at = self._last_answer_at(now)
            path = self._network.paths[machine.name]
            refuses = (
                machine.on and not machine.agent_up and path.is_open and self._life.path.is_open
            )
            wait = (
                2 * path.base_s if refuses else max(0.1, self._broken_at + EVENTS_TIMEOUT_S - now)
            )
            self._network.timeline.after(wait, self._time_out, self._broken_at)
        self._life.contact_changed(machine)

    def contact_lost_at(self) -> float | None:
        """Return when the agent last had certain contact; None: it has contact now.

        An answer counts as contact once a later request confirms it.
        """
        if self._broken_at is None and not self._life.frozen:
            return None
        at = self._broken_at
        return self._last_answer_at(self._network.timeline.now) if at is None else at

    def _has_new_events(self) -> bool:
        machine = self._machine
        return machine.sequence > self._after or machine.boot_id() != self._boot

    def _last_answer_at(self, now: float) -> float:
        polls = math.floor(max(0.0, now - self._answered_at) / POLL_S)
        return self._answered_at + polls * POLL_S

    def _deliver(self) -> None:
        self._is_delivering = False
        if self._closed or self._broken_at is not None:
            return
        self._answered_at = self._network.timeline.now
        self._wake()

    def _time_out(self, broken_at: float) -> None:
        if self._closed or self._broken_at != broken_at or self._failure is not None:
            return
        machine = self._machine
        kind = Unreachable
        if machine.on and not machine.agent_up and self._network.paths[machine.name].is_open:
            kind = Refused
        self._failure = kind(f"cannot reach {machine.name}: its events stopped")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _events(machine: SimulatedMachine, after: int, boot: str = "") -> api.Events:
    """Return the agent's answer to a request for events."""
    first = machine.events[0].sequence if machine.events else machine.sequence + 1
    lost = after > machine.sequence or after < first - 1
    return api.Events(
        events=[event for event in machine.events if event.sequence > after],
        latest=machine.sequence,
        lost=lost or bool(boot and boot != machine.boot_id()),
        boot_id=machine.boot_id(),
    )
