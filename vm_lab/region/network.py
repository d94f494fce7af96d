"""The network between the control plane and the agents: slow, lossy, or cut in either direction.

A request is two events: its arrival, and the arrival of its answer. Each depends on the network at
that time. TCP turns lost packets into delay, so only connections are lost here: before the request
arrived, or after it was carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.usage import TaskUsage
from vm_lab.region import agent as agents
from vm_lab.region.loop import Timeline
from vm_lab.region.machine import SimulatedMachine
from wire.errors import ProtocolError, Refused, Unreachable

if TYPE_CHECKING:
    from vm_lab.region.plane import PlaneLife

CONNECT_S = 4.0
"""Timeout of opening a connection, in seconds."""
ANSWER_S = 30.0
"""Timeout of an answer, in seconds (`WireClient`)."""
OPEN_CONNECTION_S = 5.0
"""Seconds that requests on an existing connection still arrive after the direction back is cut."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Effect of a fault on the path between the control plane and a machine."""

    cut_in: bool = False
    """Whether no packet reaches the machine."""
    cut_out: bool = False
    """Whether no packet leaves it."""
    delay_s: float = 0.0
    """Most seconds added to each message; drawn for each, so messages overtake each other."""
    loss: float = 0.0
    """Share of the exchanges whose connection breaks."""
    duplicate: float = 0.0
    """Share of the requests that arrive twice."""


@dataclass(slots=True)
class Path:
    """The path to one machine and back."""

    base_s: float
    conditions: dict[int, Condition] = field(default_factory=dict)
    cut_in: bool = False
    cut_out: bool = False
    cut_at: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0

    def refresh(self, now: float) -> None:
        """Combine all conditions."""
        conditions = self.conditions.values()
        was = self.cut_in or self.cut_out
        self.cut_in = any(c.cut_in for c in conditions)
        self.cut_out = any(c.cut_out for c in conditions)
        if not was and (self.cut_in or self.cut_out):
            self.cut_at = now
        self.delay_s = max((c.delay_s for c in conditions), default=0.0)
        self.loss = max((c.loss for c in conditions), default=0.0)
        self.duplicate = max((c.duplicate for c in conditions), default=0.0)

    @property
    def is_open(self) -> bool:
        """Return whether both directions work."""
        return not (self.cut_in or self.cut_out)


class SimulatedNetwork:
    """All paths."""

    def __init__(self, timeline: Timeline) -> None:
        """Start without machines."""
        self.timeline = timeline
        self.paths: dict[str, Path] = {}
        self.calls = 0
        """Number of requests sent."""
        self.usage: Callable[[SimulatedMachine], list[TaskUsage]] = lambda _: []
        """Returns the usage of a machine's tasks, as its agent answers."""

    def connect(self, machine: SimulatedMachine) -> None:
        """Connect a machine."""
        self.paths[machine.name] = Path(base_s=machine.random.uniform(0.0005, 0.004))

    def impose(self, fault: int, machine: SimulatedMachine, condition: Condition) -> None:
        """Apply a fault to the path to a machine."""
        self.paths[machine.name].conditions[fault] = condition
        self._changed(machine)

    def lift(self, fault: int, machine: SimulatedMachine) -> None:
        """Lift a fault from the path to a machine."""
        if self.paths[machine.name].conditions.pop(fault, None) is not None:
            self._changed(machine)

    def _changed(self, machine: SimulatedMachine) -> None:
        self.paths[machine.name].refresh(self.timeline.now)
        machine.reach_changed()

    def answers(self, machine: SimulatedMachine) -> bool:
        """Return whether an exchange with the machine's agent would work now."""
        return (
            machine.on
            and machine.agent_up
            and machine.hung_until <= self.timeline.now
            and self.paths[machine.name].is_open
        )

    def draw_latency(self, machine: SimulatedMachine) -> float:
        """Draw how many seconds a message takes."""
        path = self.paths[machine.name]
        if path.delay_s:
            return path.base_s + machine.random.uniform(0.0, path.delay_s)
        return path.base_s


class Exchange:
    """One request and its answer."""

    __slots__ = ("future", "life", "machine", "network", "request")

    def __init__(
        self,
        network: SimulatedNetwork,
        life: PlaneLife,
        machine: SimulatedMachine,
        request: agents.AgentCall,
    ) -> None:
        self.network, self.life, self.machine = network, life, machine
        self.request = request
        self.future: asyncio.Future[object] = life.loop.create_future()

    def send(self, *, deferred: bool) -> None:
        """Send the request; a `deferred` handler answers later, through `answer`."""
        network, machine = self.network, self.machine
        network.calls += 1
        path, timeline = network.paths[machine.name], network.timeline
        is_connected = (
            path.cut_out and not path.cut_in and timeline.now - path.cut_at < OPEN_CONNECTION_S
        )
        if not machine.on or self.life.path.cut_out or not (path.is_open or is_connected):
            self._fail_after(CONNECT_S)
            return
        if path.loss and machine.random.random() < path.loss / 2:
            self._fail_after(ANSWER_S)
            return
        takes = network.draw_latency(machine)
        timeline.after(takes, self._deliver_request, deferred)
        if self.request.mutates and path.duplicate and machine.random.random() < path.duplicate:
            timeline.after(takes + machine.random.uniform(0.0, 8.0), self._deliver_duplicate)

    def _deliver_request(self, deferred: bool) -> None:
        network, machine = self.network, self.machine
        now = network.timeline.now
        if not machine.on or network.paths[machine.name].cut_in:
            self._fail_after(ANSWER_S)
        elif not machine.agent_up:
            refused = Refused(f"cannot reach {machine.name}: connection refused")
            network.timeline.after(
                network.draw_latency(machine), self.life.complete, self.future, refused
            )
        elif machine.hung_until > now:
            network.timeline.at(machine.hung_until, self._deliver_request, deferred)
        else:
            if deferred:
                self.request.handle(machine, *self.request.args, self.answer)
            else:
                self.answer(agents.answer(machine, self.request))

    def _deliver_duplicate(self) -> None:
        """Deliver the same request once more, and drop the answer."""
        machine = self.machine
        if self.network.answers(machine):
            agents.answer(machine, self.request)

    def answer(self, outcome: object) -> None:
        """Send the answer back."""
        network, machine = self.network, self.machine
        path = network.paths[machine.name]
        if path.loss and machine.random.random() < path.loss / (2 - path.loss):
            self._fail_after(ANSWER_S)
            return
        if machine.garbled:
            outcome = ProtocolError(f"{machine.name} answered with nonsense")
        network.timeline.after(
            network.draw_latency(machine) + machine.slow_s, self._deliver_answer, outcome
        )

    def _deliver_answer(self, outcome: object) -> None:
        path = self.network.paths[self.machine.name]
        if path.cut_out or self.life.path.cut_in or not self.machine.on:
            self._fail_after(ANSWER_S)
        else:
            self.life.complete(self.future, outcome)

    def _fail_after(self, seconds: float) -> None:
        error = Unreachable(f"cannot reach {self.machine.name}: no answer")
        self.network.timeline.after(seconds, self.life.complete, self.future, error)
