"""Rollouts under random failures keep the budget, and every rollout ends."""

from collections import Counter

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.api import Health, Location, TaskState, TaskStatus
from control_plane.agents.core.commands import Start
from control_plane.agents.core.observed import ObservedMachine
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allocation, Allowance
from control_plane.api.jobs import JobRecord, JobSpec, TaskPhase, UpdatePolicy, task_id
from control_plane.api.updates import Canary, OnFailure
from control_plane.broker.core.capacity import Capacity, Place
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decide import begin_operations, decide, settle
from control_plane.scheduler.core.decision import DecisionInput, FoundPlaces
from control_plane.scheduler.core.job_request import placed, request_of
from control_plane.scheduler.core.operations import is_being_removed
from control_plane.scheduler.core.reconcile import observe
from control_plane.scheduler.core.rollout import PlacementResult, summarize
from control_plane.scheduler.core.task_commands import commands

IMAGE = "sha256:" + "1" * 64
MACHINES = ("m1", "m2", "m3")


POLICIES = st.one_of(
    st.builds(UpdatePolicy, max_unavailable=st.integers(1, 3), drain_s=st.just(1.0)),
    st.builds(
        UpdatePolicy,
        max_unavailable=st.integers(0, 3),
        drain_s=st.sampled_from([0.0, 1.0]),
        batch=st.none() | st.integers(1, 3),
        health_gate_s=st.sampled_from([0.0, 2.0]),
        healthy_within_s=st.just(5.0),
        canary=st.none() | st.builds(Canary, tasks=st.integers(1, 4), hold_s=st.just(3.0)),
        on_failure=st.sampled_from([OnFailure.CONTINUE, OnFailure.ROLLBACK]),
        failures=st.integers(1, 2),
        surge=st.integers(1, 2),
    ),
)


def a_spec(tasks: int, update: UpdatePolicy) -> JobSpec:
    return JobSpec(
        name="web",
        entitlement="front",
        tasks=tasks,
        image=IMAGE,
        command=["/x"],
        update=update,
    )


class Model:
    """A job on three machines whose agents carry out each command in one step."""

    def __init__(self, tasks: int, update: UpdatePolicy | None = None) -> None:
        spec = a_spec(tasks, update or UpdatePolicy(drain_s=1))
        self.record = JobRecord(name="web", spec=spec, version=1, specs={1: spec})
        self.clock = 0.0
        self.up = dict.fromkeys(MACHINES, True)
        self.index = RegionIndex()
        for name in MACHINES:
            capacity = Capacity("small", 64.0, 64.0, 1 << 40)
            self.index.put(name, capacity, Place.of(Location(msb=name)), "front", "")
        self.tasks: dict[str, dict[str, TaskStatus]] = {m: {} for m in MACHINES}
        self.stopped: dict[str, dict[str, int]] = {m: {} for m in MACHINES}

    @property
    def now(self) -> Moment:
        return Moment(wall=1e9 + self.clock, steady=self.clock)

    def view(self) -> dict[str, ObservedMachine]:
        return {
            m: ObservedMachine(
                up=self.up[m],
                answering=self.up[m],
                ready=self.up[m],
                tasks=self.tasks[m],
                stopped=self.stopped[m],
            )
            for m in MACHINES
        }

    def round(self) -> None:
        """One round of the scheduler, followed by the reactions of the agents."""
        self.clock += 0.5
        view = self.view()
        seen = DecisionInput(view, self.now, claims=self.index.claims.get("web") or ())
        made = decide(self.record, seen)
        serving = self.serving(made.record)
        begin_operations(made, FoundPlaces(ready=frozenset(made.chosen)), seen)
        wanted = made.record.spec.tasks
        if self.serving(made.record) < serving:  # only within the budget
            assert wanted - self.serving(made.record) <= made.record.spec.update.max_unavailable
        extras = sum(task.extra for task in made.record.tasks)
        assert extras <= made.record.spec.update.surge
        settle(made, self.allocate(made.record, view), self.now)
        self.record = made.record
        self.obey()

    def allocate(self, record: JobRecord, view: dict[str, ObservedMachine]) -> PlacementResult:
        """Allocates as the allocator does, but immediately."""
        for name in MACHINES:
            unfit = "still has tasks to lose" if record.leaving.get(name) else ""
            self.index.block(name, unfit if self.up[name] else "is down")
        made = plan(self.index, request_of(record, view, "front", None), Allowance(machines=0))
        assert self.index.reserve(made.change) == ()
        self.index.settle(made.change)
        claims = self.index.claims.get(record.name)
        return placed(record, view, Allocation(claims, made.unplaced, made.reasons))

    def obey(self) -> None:
        for command in commands(self.record, self.view()):
            tasks = self.tasks[command.machine]
            if isinstance(command, Start):
                assert self.up[command.machine]
                known = tasks.get(command.task)
                assert known is None or known.generation < command.generation
                tasks[command.task] = TaskStatus(
                    task_id=command.task,
                    generation=command.generation,
                    epoch=1,
                    state=TaskState.RUNNING,
                    health=Health.HEALTHY,
                    image=IMAGE,
                    job="web",
                )
            else:
                known = tasks.pop(command.task, None)
                assert known is None or known.generation <= command.generation
                self.stopped[command.machine][command.task] = command.generation

    def serving(self, record: JobRecord) -> int:
        return sum(
            task.phase is TaskPhase.RUNNING and task.listed and not is_being_removed(task)
            for task in record.tasks
        )

    def apply(self, **changes) -> None:
        spec = replace(self.record.spec, **changes)
        version = self.record.version + ("command" in changes)
        specs = self.record.specs | {version: spec}
        self.record = replace(self.record, spec=spec, version=version, specs=specs)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("round"), st.just(0)),
        st.tuples(st.just("round"), st.just(0)),
        st.tuples(st.just("update"), st.integers(0, 99)),
        st.tuples(st.just("resize"), st.integers(0, 7)),
        st.tuples(st.just("down"), st.sampled_from(MACHINES)),
        st.tuples(st.just("up"), st.sampled_from(MACHINES)),
        st.tuples(st.just("sick"), st.integers(0, 6)),
        st.tuples(st.just("vanish"), st.integers(0, 6)),
        st.tuples(st.just("reboot"), st.sampled_from(MACHINES)),
    ),
    max_size=40,
)


def happen(model: Model, kind: str, what) -> None:
    match kind:
        case "round":
            model.round()
        case "update":
            model.apply(command=[f"/x{what}"])
        case "resize":
            model.apply(tasks=what)
        case "down":
            model.up[what] = False
        case "up":
            model.up[what] = True
        case "reboot":
            model.up[what] = True
            model.tasks[what] = {}
            model.stopped[what] = {}
        case "sick" | "vanish":
            name = task_id("web", what)
            for machine in MACHINES:
                if name in model.tasks[machine] and kind == "vanish":
                    del model.tasks[machine][name]
                elif name in model.tasks[machine]:
                    status = model.tasks[machine][name]
                    model.tasks[machine][name] = replace(status, health=Health.UNHEALTHY)


def get_well(model: Model) -> None:
    for machine in MACHINES:
        model.up[machine] = True
        for name, status in model.tasks[machine].items():
            model.tasks[machine][name] = replace(status, health=Health.HEALTHY)


@pytest.mark.behaviour("SC6", "SC10", "SC21")
@settings(deadline=None, max_examples=300)
@given(st.integers(0, 6), POLICIES, EVENTS)
def test_a_rollout_keeps_its_budget_and_always_ends(tasks, update, events):
    model = Model(tasks, update)
    for kind, what in events:
        happen(model, kind, what)
    get_well(model)
    for _ in range(500):
        model.round()
        if summarize(model.record).phase == "stable":
            break
    status = summarize(model.record)
    wanted = model.record.spec.tasks
    assert (status.phase, status.healthy, status.updated) == ("stable", wanted, wanted)
    copies = Counter(name for m in MACHINES for name in model.tasks[m])
    for _ in range(4):
        model.round()
    copies = Counter(name for m in MACHINES for name in model.tasks[m])
    assert len(copies) == copies.total() == wanted  # no task runs twice, and none remains
    assert copies.keys() == {task_id("web", task.index) for task in model.record.tasks}
    assert all(task.operation is None for task in model.record.tasks)
    assert model.record.leaving == {}


@settings(deadline=None)
@given(st.integers(1, 6), EVENTS)
def test_generations_only_rise(tasks, events):
    model = Model(tasks)
    last: dict[int, int] = {}
    for kind, what in events:
        happen(model, kind, what)
        for task in model.record.tasks:
            assert task.generation >= last.get(task.index, 0)
            last[task.index] = task.generation
        assert model.record.generation >= max(last.values(), default=0)


@given(EVENTS)
@example([("round", 0), ("down", "m1"), ("down", "m2"), ("down", "m3"), ("round", 0), ("up", "m1")])
def test_observing_twice_is_observing_once(events):
    model = Model(4)
    for kind, what in events:
        happen(model, kind, what)
    once = observe(model.record, model.view(), model.now)
    assume(all(not task.retry_at for task in once.tasks))
    assert observe(once, model.view(), model.now) == once
