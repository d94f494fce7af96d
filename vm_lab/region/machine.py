"""A modelled machine: the processes that run on it, and the journal of its agent.

It follows the rules of the real agent (`agent/tasks/core/admission.py`, docs/task-lifecycle.md):
records and tombstones survive reboots, processes do not. An idle machine has no events.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent import api
from agent.api import Health, RestartWhen, TaskState
from agent.api.joining import JoinRequest
from agent.api.notices import HostNotices
from vm_lab.region.history import History
from vm_lab.region.loop import Timeline
from vm_lab.region.observer import Observer
from vm_lab.region.plane_contact import PlaneContact
from vm_lab.region.simulated_profile import SimulatedProfile

if TYPE_CHECKING:
    from vm_lab.region.link import FollowedEvents

EPOCH_S = 1_800_000_000.0
"""Unix time of a correct clock when a run starts."""
EVENTS_KEPT = 1000
"""Events that an agent keeps."""
STUBBORN = "IGNORES_TERM"
"""In the environment of a task that uses its whole `stop_timeout_s` to stop."""
RESERVE_BYTES = 128 << 20
"""Memory that an agent reserves for its host (`agent/config.py`)."""
_ENDED = (TaskState.STOPPED, TaskState.FAILED)


@dataclass(slots=True)
class MachinePace:
    """Shortest and longest durations on a machine, in seconds; each one is drawn between them."""

    start: tuple[float, float] = (0.3, 3.0)
    stop: tuple[float, float] = (0.1, 2.0)
    pull: tuple[float, float] = (1.0, 20.0)
    switch: tuple[float, float] = (0.5, 6.0)
    boot: tuple[float, float] = (20.0, 60.0)
    agent: tuple[float, float] = (0.5, 3.0)


@dataclass(slots=True)
class Copy:
    """One task on a machine: the agent's record, and whether processes run."""

    task_id: str
    spec: api.TaskSpec
    state: TaskState = TaskState.STARTING
    health: Health = Health.UNKNOWN
    wanted: bool = True
    """Whether it must run; else it is being removed."""
    alive: bool = False
    """Whether processes of it exist."""
    running_image: str = ""
    """The image of these processes."""
    reason: str = ""
    invocation: int = 0
    restarts: int = 0
    healthy_since: float | None = None
    cut_off: bool = False
    """Whether the agent ended it because the control plane was silent for too long."""
    last_exit: api.Exit | None = None
    step_number: int = 0
    """Rises with each scheduled step, so that an outdated step does nothing."""


@dataclass(slots=True)
class MachineContext:
    """State that all machines of a region share."""

    timeline: Timeline
    history: History
    observer: Observer = field(default_factory=Observer)
    on_command: Callable[[SimulatedMachine, int], None] = lambda _machine, _sender: None
    """Called with the machine and the sender (number of a process life) of each command that the
    machine's agent obeyed."""
    known_images: set[str] = field(default_factory=set)
    bad_images: set[str] = field(default_factory=set)
    """Images whose tasks never become healthy."""
    reboot_profiles: frozenset[str] = frozenset()
    """Profiles that take effect at a boot only."""


class SimulatedMachine:
    """One host: power, agent, tasks, images, profile."""

    def __init__(
        self,
        context: MachineContext,
        name: str,
        location: api.Location,
        seed: str,
        *,
        memory_bytes: int = 8 << 30,
        cpus: int = 8,
    ) -> None:
        """Start powered on, with an agent that answers, and without tasks."""
        self.context, self.name, self.location = context, name, location
        self.memory_bytes, self.cpus = memory_bytes, cpus
        self.random = random.Random(f"{seed} {name}")
        self.pace = MachinePace()
        self.on = True
        self.agent_up = True
        self.hung_until = 0.0
        self.slow_s = 0.0
        """Seconds added to each answer."""
        self.garbled = False
        """Whether its answers are malformed."""
        self.pull_fails = False
        self.start_fails = False
        self.clock_offset_s = 0.0
        self.boots = 1
        self.copies: dict[str, Copy] = {}
        self.tombstones: dict[str, tuple[int, int]] = {}
        self.owners: Mapping[str, int] = {}
        """Entitlement → newest term of an owner that sent a request (docs/adr/0150)."""
        self.images: set[str] = set()
        self.pulls: dict[str, list[Callable[[str], None]]] = {}
        self.profile = SimulatedProfile(self)
        self.notices = HostNotices()
        self.events: deque[api.Event] = deque(maxlen=EVENTS_KEPT)
        self.sequence = 0
        self.streams: list[FollowedEvents] = []
        self.contact = PlaneContact(self)
        self.power_changes = 0
        """Rises each time the power goes off or on."""

    # -- state

    def wall_time(self) -> float:
        """Return the time of the machine's clock."""
        return EPOCH_S + self.context.timeline.now + self.clock_offset_s

    def boot_id(self) -> str:
        """Return the name of this boot."""
        return f"{self.name}-boot-{self.boots}"

    def facts(self) -> api.MachineFacts:
        """Return the facts that the agent reports about its host."""
        return api.MachineFacts(
            machine_id=self.name,
            boot_id=self.boot_id(),
            kernel="6.12",
            cpu_model="modelled",
            cpus=self.cpus,
            sockets=1,
            numa_nodes=1,
            memory_bytes=self.memory_bytes,
            disk_bytes=1 << 40,
            disk_free_bytes=1 << 39,
            agent_version="0",
        )

    def join_request(self) -> JoinRequest:
        """Return the request with which the host joins the region."""
        return JoinRequest(
            token="",
            machine=self.name,
            csr_pem="",
            address=f"{self.name}.sim:7443",
            location=self.location,
            facts=self.facts(),
        )

    def status(self, copy: Copy) -> api.TaskStatus:
        """Return a task as the agent reports it."""
        return api.TaskStatus(
            task_id=copy.task_id,
            generation=copy.spec.generation,
            epoch=copy.spec.epoch,
            state=copy.state,
            health=copy.health,
            reason=copy.reason,
            image=copy.spec.image,
            entitlement=copy.spec.entitlement,
            job=copy.spec.job,
            invocation_id=f"{self.name}-{copy.invocation}" if copy.invocation else "",
            restarts=copy.restarts,
            last_exit=copy.last_exit,
        )

    def committed_bytes(self, without: str) -> int:
        """Return the memory limits of all wanted tasks, except one."""
        return sum(
            copy.spec.limits.memory_max_bytes
            for copy in self.copies.values()
            if copy.wanted and copy.task_id != without
        )

    def draw(self, bounds: tuple[float, float]) -> float:
        """Draw a duration between two bounds."""
        return self.random.uniform(*bounds)

    # -- the event log

    def add_event(self, kind: str, name: str, task: api.TaskStatus | None = None) -> None:
        """Add an event, and notify the streams that follow the agent."""
        self.sequence += 1
        event = api.Event(
            sequence=self.sequence,
            at=self.wall_time(),
            kind=kind,
            object=name,
            message="",
            task=task,
        )
        self.events.append(event)
        for stream in self.streams:
            stream.event_added()

    def after(self, copy: Copy, delay_s: float, step: Callable[[Copy], None]) -> None:
        """Schedule the next step of a task; a later step of the task cancels it."""
        copy.step_number += 1
        self.context.timeline.after(delay_s, self._run_step, copy, copy.step_number, step)

    def _run_step(self, copy: Copy, number: int, step: Callable[[Copy], None]) -> None:
        if copy.step_number == number and self.copies.get(copy.task_id) is copy and self.on:
            step(copy)

    def set_state(
        self, copy: Copy, state: TaskState, health: Health = Health.UNKNOWN, reason: str = ""
    ) -> None:
        """Change the state of a task, and report it to the observer, the history and the events."""
        was_alive = copy.alive
        copy.state, copy.health, copy.reason = state, health, reason
        if health is Health.HEALTHY:
            if copy.healthy_since is None:
                copy.healthy_since = self.context.timeline.now
        else:
            copy.healthy_since = None
        if state is TaskState.STARTING:
            copy.alive, copy.running_image = True, copy.spec.image
        elif state in _ENDED or state is TaskState.BACKOFF:
            copy.alive = False
        self.context.observer.copy_changed(self, copy, was_alive=was_alive)
        self.context.history.note(f"{self.name} {copy.task_id} {state} {health} {reason}".rstrip())
        self.add_event("task", copy.task_id, self.status(copy))

    # -- a task's life

    def start(self, copy: Copy) -> None:
        """Start the processes of a task, unless the control plane was silent for too long."""
        if self.contact.has_run_out(copy.spec):
            self.contact.end_as_cut_off(copy)
            return
        copy.cut_off = False
        self.set_state(copy, TaskState.STARTING)
        self.after(copy, self.draw(self.pace.start), self._started)

    def _started(self, copy: Copy) -> None:
        if self.start_fails:
            self.end(copy, "exit-code", "it does not start here")
            return
        copy.invocation += 1
        copy.last_exit = None
        if copy.spec.image in self.context.bad_images:
            self.set_state(copy, TaskState.RUNNING, Health.UNHEALTHY, "this version is no good")
            return
        self.set_state(copy, TaskState.RUNNING, Health.HEALTHY)

    def end(self, copy: Copy, result: str, reason: str) -> None:
        """End a task as if it had exited; the agent restarts it if its policy says so."""
        copy.last_exit = api.Exit(result=result, at=self.wall_time())
        when = copy.spec.restart.when
        restarts = when is RestartWhen.ALWAYS or (
            when is RestartWhen.ON_FAILURE and result != "success"
        )
        if not restarts:
            state = TaskState.STOPPED if result == "success" else TaskState.FAILED
            self.set_state(copy, state, reason=reason)
            return
        copy.restarts += 1
        backoff_s = min(
            copy.spec.restart.backoff_s * 2.0 ** min(copy.restarts - 1, 16),
            copy.spec.restart.backoff_max_s,
        )
        self.set_state(copy, TaskState.BACKOFF, reason=reason)
        self.after(copy, backoff_s, self.start)

    def stop_processes(self, copy: Copy, then: Callable[[Copy], None]) -> None:
        """End the processes of a task, then call `then`."""
        if not copy.alive:
            self.after(copy, 0.01, then)
            return
        self.set_state(copy, TaskState.STOPPING, reason=copy.reason)
        bounds = self.pace.stop
        took = min(self.draw(bounds), copy.spec.stop_timeout_s)
        if STUBBORN in copy.spec.environment:
            took = copy.spec.stop_timeout_s
        self.after(copy, took, then)

    def forget(self, copy: Copy) -> None:
        """Remove a stopped task, and keep its tombstone."""
        was_alive, copy.alive, copy.healthy_since = copy.alive, False, None
        self.tombstones[copy.task_id] = (copy.spec.epoch, copy.spec.generation)
        del self.copies[copy.task_id]
        self.context.observer.copy_changed(self, copy, was_alive=was_alive)
        self.context.history.note(f"{self.name} {copy.task_id} gone")
        self.add_event("task-removed", copy.task_id)

    # -- power, agent

    def power_off(self) -> None:
        """End all processes at once; records on disk survive."""
        if not self.on:
            return
        self.context.history.note(f"{self.name} goes down")
        self.on = self.agent_up = False
        self.power_changes += 1
        self.pulls.clear()
        for copy in list(self.copies.values()):
            was_alive = copy.alive
            copy.alive, copy.healthy_since = False, None
            copy.step_number += 1
            self.context.observer.copy_changed(self, copy, was_alive=was_alive)
        self.reach_changed()

    def power_on(self) -> None:
        """Boot; the agent comes up later, and starts no task without a command."""
        if self.on:
            return
        self.on = True
        self.boots += 1
        self.power_changes += 1
        self.hung_until = 0.0
        self.events.clear()
        self.sequence = 0
        self.context.timeline.after(self.draw(self.pace.agent), self._booted, self.power_changes)

    def reboot(self) -> None:
        """Go down now, and boot again."""
        self.power_off()
        self.context.timeline.after(
            self.draw(self.pace.boot), self._power_on_later, self.power_changes
        )

    def _power_on_later(self, power_changes: int) -> None:
        if power_changes == self.power_changes:
            self.power_on()

    def _booted(self, power_changes: int) -> None:
        if power_changes != self.power_changes:
            return
        self.agent_up = True
        for copy in list(self.copies.values()):
            if not copy.wanted:
                self.forget(copy)
                continue
            copy.last_exit = api.Exit(result="lost", at=self.wall_time())
            copy.state, copy.health = TaskState.STOPPED, Health.UNKNOWN
            copy.reason = "the host was rebooted"
        if self.profile.wanted is not None:
            self.profile.switch(self.profile.wanted, booted=True)
        self.set_agent(up=True)

    def set_agent(self, *, up: bool) -> None:
        """Stop or start the agent; tasks are not affected."""
        self.agent_up = up and self.on
        if not up:
            self.pulls.clear()
        self.reach_changed()

    def reach_changed(self) -> None:
        """Notify the agent's streams and the observer that its reachability has changed."""
        for stream in list(self.streams):
            stream.path_changed()
        self.context.observer.reach_changed(self)
