"""A task with a lease never outlives its contact, whatever fails, in whatever order.

The model has a control plane, systemd, and a network that delays, repeats and loses messages in
each direction independently. The agent stops or dies between any two steps, and the fence is
killed. `Contact`, `decide` and the fence are the product's own code, on one clock that only the
rules move.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from builders import a_spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from agent import fence
from agent.api import Disconnect, DisconnectPolicy, TaskSpec, TaskState, certainly_ended_s
from agent.lease.contact import Contact
from agent.lease.core.lease import ends_at
from agent.runtime.core.records import TaskRecord, key_of
from agent.runtime.journal import Replay
from agent.tasks.core.admission import accept
from agent.tasks.core.lifecycle import Action, Decision, ObservedTask, ObservedUnit, decide
from wire.errors import TwineError

AFTER_S, STOP_TIMEOUT_S = 20.0, 5.0
DISCONNECT = Disconnect(policy=DisconnectPolicy.STOP, after_s=AFTER_S)
BOUND_S = certainly_ended_s(DISCONNECT, STOP_TIMEOUT_S) or 0.0
SPEC = a_spec(disconnect=DISCONNECT, stop_timeout_s=STOP_TIMEOUT_S)
PAUSES = st.sampled_from([0.1, 0.5, 1.0, 3.0, 7.0, 19.0, 60.0])
WHICH = st.integers(0, 1000)


class Request(NamedTuple):
    """A request in transfer to the agent."""

    answered: str
    put: TaskSpec | None


@dataclass
class Unit:
    """A unit that systemd runs."""

    number: int
    ends_at: float | None = None
    """When systemd kills the unit after a stop request."""
    ended: bool = False


@dataclass
class ControlPlane:
    """The control plane's knowledge of the host; `gone` once it assumes that the task has ended."""

    contact_at: float
    name: str = ""
    generation: int = 0
    gone: bool = False


@dataclass
class World:
    folder: Path
    clock: float = 100.0
    unit: Unit | None = None
    starts: int = 0
    fence_back_at: float = 0.0
    to_agent: list[Request] = field(default_factory=list)
    to_control_plane: list[str] = field(default_factory=list)
    late_starts: list[float] = field(default_factory=list)
    """Starts that were sent to systemd and not carried out; none is carried out after this time."""

    def __post_init__(self) -> None:
        self.control_plane = ControlPlane(contact_at=self.clock)
        self.journal: TaskRecord | None = None
        self.memory: TaskRecord | None = None
        self.decision: Decision | None = None
        self.contact = self.new_contact()
        fence.check(self.folder, self.clock, self.kill)

    def new_contact(self) -> Contact:
        return Contact(self.folder, "boot", lambda: self.clock)

    # Time.

    def pass_time(self, seconds: float) -> None:
        end = self.clock + seconds
        while self.clock < end:
            self.clock = min(end, self.clock + fence.EVERY_S)
            unit = self.unit
            if unit is not None and unit.ends_at is not None and self.clock >= unit.ends_at:
                self.unit = None
            if self.clock >= self.fence_back_at:
                fence.check(self.folder, self.clock, self.kill)

    def kill(self, unit: str) -> bool:
        if unit != "twine-task-web.service":
            return False
        if self.unit is None or self.unit.ended:
            return False
        self.unit.ended = True
        return True

    # The agent.

    def take(self, request: Request) -> None:
        spec = request.put
        self.contact.record_contact(request.answered, 0)
        if spec is not None:
            try:
                self.contact.check_command("web", spec, request.answered, 0)
            except TwineError:
                return
            known = self.memory
            stale = known is not None and spec.generation < known.spec.generation
            record = None if stale else accept("web", spec, known)
            if record is not None:
                renewed = known is None or (known.cut_off and not record.cut_off)
                self.contact.bind(record, renewed=renewed)
                self.memory = self.journal = replace(record, boot_id="boot")
                self.decision = None
        self.to_control_plane.append(self.contact.answer())

    def observe(self) -> None:
        if self.memory is not None:
            now = self.contact.moment("web")
            self.decision = decide(self.memory, self.seen(), now)
            self.memory = self.journal = self.decision.task

    def seen(self) -> ObservedTask:
        unit = self.unit
        found = None
        if unit is not None:
            active = "failed" if unit.ended else "deactivating" if unit.ends_at else "active"
            found = ObservedUnit(
                active=active,
                sub="failed" if unit.ended else "running",
                result="signal" if unit.ended else "success",
                invocation_id=f"i{unit.number}",
                key=key_of(SPEC),
                exited_at=self.clock if unit.ended else None,
                started_at=1.0,
            )
        return ObservedTask(found, root=True, leftover=True, boot_id="boot")

    def act(self) -> None:
        decision, self.decision = self.decision, None
        match decision.action if decision is not None else None:
            case Action.START:
                try:
                    self.late_starts.append(self.contact.start_deadline_s("web"))
                except TwineError:
                    return
            case Action.STOP if self.unit is not None:
                if self.unit.ended:
                    self.unit = None
                elif self.unit.ends_at is None:
                    self.unit.ends_at = self.clock + STOP_TIMEOUT_S
            case Action.LIMIT:
                assert self.memory is not None
                self.memory = replace(self.memory, limits=SPEC.limits)

    def start(self, not_after: float) -> None:
        """Make systemd carry out a start, with the condition that came with it."""
        if self.unit is None and int(self.clock) < int(not_after):
            self.starts += 1
            self.unit = Unit(self.starts)

    def crash(self) -> None:
        self.memory, self.decision = self.journal, None
        self.contact = self.new_contact()
        tasks = {} if self.journal is None else {"web": self.journal}
        self.contact.adopt(Replay(tasks=tasks))
        self.observe()


class Lease(RuleBasedStateMachine):
    @initialize()
    def world(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.w = World(self.folder)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(seconds=PAUSES)
    def time_passes(self, seconds: float) -> None:
        self.w.pass_time(seconds)
        control = self.w.control_plane
        if self.w.clock - control.contact_at >= BOUND_S:
            control.gone = True

    @rule(put=st.booleans())
    def the_control_plane_asks(self, put: bool) -> None:
        control, spec = self.w.control_plane, None
        if put and not control.gone and control.name:
            control.generation += 1
            spec = replace(SPEC, generation=control.generation)
        self.w.to_agent.append(Request(control.name, spec))

    @rule(put=st.booleans())
    def a_call_succeeds(self, put: bool) -> None:
        self.the_control_plane_asks(put)
        self.a_request_arrives(len(self.w.to_agent) - 1, again=False)
        self.an_answer_arrives(len(self.w.to_control_plane) - 1, again=False)

    @rule(starts=st.booleans())
    def the_host_works(self, starts: bool) -> None:
        for _ in range(4):
            self.w.observe()
            self.w.act()
            if starts:
                self.systemd_gets_to_it(0)

    @rule(seconds=st.sampled_from([3.0, 7.0]))
    def requests_arrive_and_answers_do_not(self, seconds: float) -> None:
        for _ in range(12):
            self.time_passes(seconds)
            self.the_control_plane_asks(put=False)
            self.w.take(self.w.to_agent.pop())
            self.w.observe()
            self.w.act()

    @rule(which=WHICH, again=st.booleans())
    def a_request_arrives(self, which: int, again: bool) -> None:
        if self.w.to_agent:
            at = which % len(self.w.to_agent)
            self.w.take(self.w.to_agent[at] if again else self.w.to_agent.pop(at))

    @rule(which=WHICH, again=st.booleans())
    def an_answer_arrives(self, which: int, again: bool) -> None:
        answers, control = self.w.to_control_plane, self.w.control_plane
        if answers:
            at = which % len(answers)
            control.name = answers[at] if again else answers.pop(at)
            control.contact_at = self.w.clock

    @rule(which=WHICH)
    def systemd_gets_to_it(self, which: int) -> None:
        starts = self.w.late_starts
        if starts:
            self.w.start(starts.pop(which % len(starts)))

    @rule()
    def the_agent_observes(self) -> None:
        self.w.observe()

    @rule()
    def the_agent_acts(self) -> None:
        self.w.act()

    @rule()
    def the_agent_is_killed(self) -> None:
        self.w.crash()

    @rule()
    def the_fence_is_killed(self) -> None:
        self.w.fence_back_at = self.w.clock + 3.0

    @rule()
    def the_control_plane_is_restarted(self) -> None:
        control = self.w.control_plane
        control.name, control.contact_at = "", self.w.clock

    @invariant()
    def a_task_that_counts_as_ended_has_ended(self) -> None:
        w = getattr(self, "w", None)
        if w is not None and w.control_plane.gone:
            assert w.unit is None or w.unit.ended

    @invariant()
    def a_running_task_ends_in_time(self) -> None:
        w = getattr(self, "w", None)
        if w is not None and w.unit is not None and not w.unit.ended and w.memory is not None:
            end = ends_at(w.memory.spec, w.control_plane.contact_at)
            assert end is not None
            assert w.clock <= end - AFTER_S + BOUND_S


def _a_world() -> Lease:
    """Return a world in which the task runs, and its control plane receives the host's messages."""
    lease = Lease()
    lease.world()
    for put in (False, True):
        lease.a_call_succeeds(put)
    lease.the_host_works(starts=True)
    assert lease.w.unit is not None
    return lease


@pytest.fixture
def lease() -> Iterator[Lease]:
    lease = _a_world()
    yield lease
    lease.teardown()


def _ended_and_given_up(lease: Lease) -> None:
    lease.time_passes(60.0)
    lease.the_host_works(starts=True)
    assert lease.w.unit is None
    assert lease.w.control_plane.gone


@pytest.mark.behaviour("F-50")
def test_requests_that_arrive_prolong_nothing_while_no_answer_does(lease: Lease) -> None:
    """The network transmits in one direction only."""
    lease.requests_arrive_and_answers_do_not(7.0)
    assert lease.w.control_plane.gone
    lease.a_task_that_counts_as_ended_has_ended()


def test_a_start_delayed_too_long_is_dropped(lease: Lease) -> None:
    w = lease.w
    w.unit = None
    lease.the_host_works(starts=False)
    lease.time_passes(0.1)
    lease.the_host_works(starts=False)
    assert w.late_starts
    lease.time_passes(60.0)
    lease.systemd_gets_to_it(0)
    lease.a_task_that_counts_as_ended_has_ended()
    assert w.unit is None


@pytest.mark.behaviour("F-48", "F-49")
def test_a_command_that_arrives_too_late_starts_nothing(lease: Lease) -> None:
    """The command was sent before the machine was cut off."""
    lease.the_control_plane_asks(put=True)
    late = lease.w.to_agent.pop()
    _ended_and_given_up(lease)
    for _ in range(2):
        lease.a_call_succeeds(put=False)
    lease.w.take(late)
    lease.the_host_works(starts=True)
    lease.a_task_that_counts_as_ended_has_ended()


def test_an_agent_starts_nothing_right_after_a_pause(lease: Lease) -> None:
    lease.time_passes(60.0)
    for _ in range(2):
        lease.a_call_succeeds(put=False)
    for _ in range(3):
        lease.the_host_works(starts=True)
        lease.time_passes(7.0)
    assert lease.w.starts == 1
    assert lease.w.memory
    assert lease.w.memory.cut_off


@pytest.mark.behaviour("F-49")
@pytest.mark.parametrize("steps", range(10))
def test_a_task_ends_in_time_wherever_its_agent_died(lease: Lease, steps: int) -> None:
    """The host is cut off, and its agent dies as well."""
    lease.time_passes(19.0)
    for step in range(steps):
        lease.w.observe() if step % 2 == 0 else lease.w.act()
        lease.time_passes(0.5)
    lease.time_passes(BOUND_S)
    lease.a_task_that_counts_as_ended_has_ended()
    lease.w.crash()
    lease.the_host_works(starts=True)
    assert lease.w.unit is None
    assert lease.w.memory
    assert (lease.w.memory.state, lease.w.memory.cut_off) == (TaskState.STOPPED, True)


TestLease = Lease.TestCase
TestLease.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
