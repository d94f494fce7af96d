"""A task's life is compared with a small model of a host; the agent is killed at any step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from builders import IMAGE, OTHER_IMAGE, a_record, a_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from agent.api import RestartPolicy, TaskSpec, TaskState
from agent.lease.core.lease import LeaseMoment
from agent.runtime.core.records import TaskRecord, Wanted, durable_part, key_of
from agent.tasks.core.admission import accept
from agent.tasks.core.lifecycle import Action, Decision, ObservedTask, ObservedUnit, decide

pytestmark = pytest.mark.behaviour("AG5")

QUICK = RestartPolicy(backoff_s=0.001, backoff_max_s=0.001)


@dataclass
class Unit:
    """A unit in the state that systemd would report."""

    invocation: str
    key: str
    started: int
    active: str = "active"
    sub: str = "running"
    result: str = "success"
    code: int | None = None

    @property
    def alive(self) -> bool:
        return self.sub in ("running", "stop-sigterm")


@dataclass
class Model:
    """One host with one task, and an agent that carries out what `decide` returns."""

    spec: TaskSpec = field(default_factory=lambda: a_spec(restart=QUICK, offline_restart=True))
    unit: Unit | None = None
    root: str = ""
    boot: int = 1
    clock: int = 0
    starts: int = 0
    requested_at: int = 0
    """When the owner last requested a change that stops the running unit."""
    generations: itertools.count[int] = field(default_factory=lambda: itertools.count(2))

    def __post_init__(self) -> None:
        self.journal: TaskRecord | None = a_record(spec=self.spec, boot_id="1")
        self.memory = self.journal
        self.decision: Decision | None = None

    # The agent, in the steps between which it can be killed.

    def observe(self) -> None:
        if self.memory is not None and self.decision is None:
            self.clock += 1
            self.decision = decide(self.memory, self.seen(), self.now())
            self.keep(self.decision.task)

    def keep(self, task: TaskRecord) -> None:
        if self.journal is None or durable_part(task) != durable_part(self.journal):
            self.journal = task
        self.memory = task

    def act(self) -> None:
        decision, self.decision = self.decision, None
        if decision is None:
            return
        match decision.action:
            case Action.PREPARE:
                self.root = decision.task.spec.image
            case Action.START if self.unit is None:
                self.starts += 1
                key = key_of(decision.task.spec)
                self.unit = Unit(f"i{self.starts}", key, self.clock)
            case Action.LIMIT:
                assert self.memory is not None
                self.keep(replace(self.memory, limits=decision.task.spec.limits))
            case Action.STOP:
                self.stop(decision.task)
            case Action.REMOVE_ROOT:
                assert self.unit is None
                self.root = ""
            case Action.FORGET if self.memory is decision.task:
                assert self.unit is None
                assert not self.root
                self.memory = self.journal = None

    def stop(self, task: TaskRecord) -> None:
        if self.unit is None:
            return
        if self.unit.alive and self.memory is task:
            by_owner = self.requested_at >= self.unit.started or self.unit.key != key_of(self.spec)
            assert by_owner, f"stopped without a request: {task}"
        if self.unit.alive and self.clock % 2:
            self.unit.active, self.unit.sub = "deactivating", "stop-sigterm"
        else:
            self.unit = None

    def now(self) -> LeaseMoment:
        return LeaseMoment(wall=float(self.clock), boot_s=float(self.clock))

    def crash(self) -> None:
        self.decision, self.memory = None, self.journal

    def seen(self) -> ObservedTask:
        unit, spec = self.unit, (self.memory or a_record()).spec
        found = None
        if unit is not None:
            found = ObservedUnit(
                active=unit.active,
                sub=unit.sub,
                result=unit.result,
                invocation_id=unit.invocation,
                key=unit.key,
                exit_code=unit.code,
                exited_at=None if unit.alive else float(self.clock),
                started_at=float(unit.started),
            )
        return ObservedTask(found, self.root == spec.image, bool(self.root), str(self.boot))

    def settle(self) -> None:
        for _ in range(60):
            if self.unit is not None and self.unit.active == "deactivating":
                self.unit = None
            self.observe()
            self.act()

    # The world.

    def end(self, code: int, result: str = "") -> None:
        if self.unit is None or self.unit.sub != "running":
            return
        failed = code != 0
        self.unit.active, self.unit.sub = ("failed", "failed") if failed else ("active", "exited")
        self.unit.result = result or ("exit-code" if failed else "success")
        self.unit.code = code

    def reboot(self) -> None:
        self.unit = None
        self.boot += 1
        self.crash()

    # The owner.

    def put(self, **changes: object) -> None:
        spec = replace(self.spec, generation=next(self.generations), **changes)
        if self.memory is not None and self.memory.wanted is Wanted.GONE:
            self.requested_at = self.clock
        new = accept("web", spec, self.memory)
        assert new is not None
        self.spec = spec
        self.memory = self.journal = replace(new, boot_id=str(self.boot))

    def ask(self, **intent: object) -> None:
        if self.memory is not None:
            self.requested_at = self.clock
            self.memory = self.journal = replace(self.memory, **intent)


class TaskLife(RuleBasedStateMachine):
    """Anything may happen, in any order, between any two steps of the agent."""

    @initialize()
    def begin(self) -> None:
        self.model = Model()

    @rule()
    def agent_observes(self) -> None:
        self.model.observe()

    @rule()
    def agent_acts(self) -> None:
        self.model.act()

    @rule()
    def agent_is_killed(self) -> None:
        self.model.crash()

    @rule(code=st.sampled_from([0, 1, 203]), result=st.sampled_from(["", "oom-kill"]))
    def process_ends(self, code: int, result: str) -> None:
        self.model.end(code, result if code else "")

    @rule()
    def unit_vanishes(self) -> None:
        self.model.unit = None

    @rule()
    def host_reboots(self) -> None:
        self.model.reboot()

    @rule()
    def snapshot_is_deleted(self) -> None:
        if self.model.unit is None:
            self.model.root = ""

    @rule(image=st.sampled_from([IMAGE, OTHER_IMAGE]), command=st.sampled_from(["/a", "/b"]))
    def owner_puts(self, image: str, command: str) -> None:
        self.model.put(image=image, command=[command])

    @rule()
    def owner_deletes(self) -> None:
        self.model.ask(wanted=Wanted.GONE)

    @rule()
    def owner_restarts(self) -> None:
        memory = self.model.memory
        if memory is not None and memory.wanted is Wanted.RUN:
            self.model.ask(restart_asked=True)

    @rule()
    def everything_settles(self) -> None:
        self.model.settle()
        model, unit = self.model, self.model.unit
        if model.memory is None:
            assert (unit, model.root, model.journal) == (None, "", None)
            return
        assert model.memory.wanted is Wanted.RUN
        assert model.memory.state is TaskState.RUNNING
        assert unit is not None
        assert (unit.sub, unit.key) == ("running", key_of(model.spec))
        assert model.memory.invocation_id == unit.invocation

    @rule()
    def an_agent_restart_restarts_no_task(self) -> None:
        self.model.settle()
        starts, unit = self.model.starts, self.model.unit
        self.model.crash()
        self.model.settle()
        assert (self.model.starts, self.model.unit) == (starts, unit)

    @invariant()
    def a_decision_is_stable(self) -> None:
        model = getattr(self, "model", None)
        if model is None or model.memory is None:
            return
        first = decide(model.memory, model.seen(), model.now())
        second = decide(first.task, model.seen(), model.now())
        assert second.action in (first.action, Action.WAIT)


TestTaskLife = TaskLife.TestCase
TestTaskLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

EVENTS = st.lists(
    st.sampled_from(["observe", "act", "crash", "exit 0", "exit 1", "oom", "vanish", "reboot"]),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=150, deadline=None)
def test_each_end_is_counted_exactly_once(events: list[str]) -> None:
    model = Model()
    model.settle()
    for event in events:
        journal, unit = model.journal, model.unit
        assert journal is not None
        known = unit is not None and journal.invocation_id == unit.invocation
        match event:
            case "observe" | "act" | "crash":
                getattr(model, event)()
            case "vanish" if known:
                model.unit = None
            case "reboot" if known or unit is None:
                model.reboot()
            case "oom":
                model.end(137, "oom-kill")
            case "exit 0" | "exit 1":
                model.end(int(event[-1]))
    model.settle()

    assert model.memory is not None
    assert model.memory.restarts == model.starts - 1
