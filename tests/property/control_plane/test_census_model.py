"""Counts that are updated as records change equal the counts of a full recount."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from inventory import assign
from msgspec.structs import replace

from agent.api import Location
from control_plane.api.jobs import JobRecord, JobSpec, TaskPhase, TaskRecord
from control_plane.api.machine_commands import MarkDown, MarkUp
from control_plane.api.machines import EventKind, MachineRecord
from control_plane.broker.brokers import Brokers
from control_plane.broker.outages import Outages
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.runtime import Runtime
from control_plane.scheduler.counters import Counters
from control_plane.store.memory import MemoryStore
from wire.errors import Conflict, NotFound

MACHINE = st.sampled_from(["m1", "m2", "m3", "m4"])
DATACENTER = st.sampled_from(["dc1", "dc2", "dc3"])
JOB = st.sampled_from(["a", "b"])
PHASES = st.lists(st.sampled_from(TaskPhase), max_size=6)
SPEC = JobSpec(
    name="a", entitlement="front", tasks=1, image="sha256:" + "a" * 64, command=["/bin/serve"]
)


class Failing(MemoryStore):
    """Fails one of the next writes, before or after the write is made."""

    fails_in, made = 0, False

    async def txn(self, compare, operations) -> int:
        self.fails_in -= 1
        if self.fails_in != 0:
            return await super().txn(compare, operations)
        if self.made:
            await super().txn(compare, operations)
        raise OSError("no space left on device")


class CensusModel(RuleBasedStateMachine):
    """Brokers of three data centers and the jobs' table; any count may be queried."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = Failing()
        self.start()

    def start(self) -> None:
        self.run(self.store.__aenter__())
        self.counters = Counters()
        self.brokers = Brokers(self.store, Runtime(lambda: 0.0))
        self.brokers.listen(self.counters.machine_changed)
        self.jobs = JobTable(self.store)
        self.jobs.listen(self.counters.job_changed)
        self.run(self.brokers.load())
        self.run(self.jobs.load())

    def run(self, work: Coroutine[Any, Any, object]) -> Any:
        return self.runner.run(work)

    def attempt(self, work: Coroutine[Any, Any, object]) -> None:
        with contextlib.suppress(Conflict, NotFound, OSError):
            self.run(work)

    @rule(write=st.integers(1, 3), made=st.booleans())
    def let_a_write_fail(self, write: int, made: bool) -> None:
        self.store.fails_in, self.store.made = write, made

    @rule(name=MACHINE, datacenter=DATACENTER)
    def add(self, name: str, datacenter: str) -> None:
        location = Location(datacenter=datacenter)
        record = MachineRecord(machine=name, location=location, machine_type="web")
        self.attempt(self.brokers.add({name: record}))

    @rule(name=MACHINE)
    def fail(self, name: str) -> None:
        self.attempt(self.brokers.carry_out(name, MarkDown(reason="test")))

    @rule(name=MACHINE)
    def come_back(self, name: str) -> None:
        self.attempt(self.brokers.carry_out(name, MarkUp()))

    @rule(name=MACHINE, datacenter=DATACENTER)
    def move(self, name: str, datacenter: str) -> None:
        self.attempt(self.brokers.move(name, datacenter))

    @rule(name=MACHINE)
    def assign(self, name: str) -> None:
        if (home := self.brokers.table.broker_of(name)) is not None:
            self.attempt(assign(home, name, "front"))

    @rule(name=MACHINE)
    def release(self, name: str) -> None:
        self.attempt(self.brokers.release(name, revision=self.brokers.table.revision(name)))

    @rule(name=MACHINE)
    def remove(self, name: str) -> None:
        async def drained() -> None:
            outages = Outages(self.brokers, Runtime(lambda: 0.0))
            await outages.plan_unavailability([name], EventKind.DECOMMISSION, "old")
            await self.brokers.remove(name)

        self.attempt(drained())

    @rule(name=JOB, phases=PHASES, entitlement=st.sampled_from(["front", "back"]))
    def write_job(self, name: str, phases: list[TaskPhase], entitlement: str) -> None:
        tasks = [
            TaskRecord(index=i, version=1, generation=1, phase=p) for i, p in enumerate(phases)
        ]
        spec = replace(SPEC, entitlement=entitlement)
        record = JobRecord(name=name, spec=spec, version=1, tasks=tasks)
        self.attempt(self.written(name, record))

    @rule(name=JOB)
    def forget_job(self, name: str) -> None:
        self.attempt(self.written(name, None))

    async def written(self, name: str, record: JobRecord | None) -> None:
        async with self.jobs.lock(name):
            await self.jobs.commit(name, record)

    @rule()
    def restart(self) -> None:
        self.store.fails_in = 0
        self.run(self.store.__aexit__(None, None, None))
        self.start()

    @invariant()
    def it_is_what_a_recount_finds(self) -> None:
        found: dict[str, MachineRecord] = {}
        for broker in self.brokers.by_datacenter.values():
            for record in broker.table.records():  # a failed move leaves two records
                known = found.get(record.machine, record)
                generations = known.assignment_generation, record.assignment_generation
                found[record.machine] = known if max(generations) == generations[0] else record
        machines = Counter(record.state for record in found.values())
        tasks = Counter(task.phase for job in self.jobs.values() for task in job.tasks)
        assert {state: n for state, n in self.counters.machines.items() if n} == machines
        assert {phase: n for phase, n in self.counters.tasks.items() if n} == tasks
        jobs = Counter(job.spec.entitlement for job in self.jobs.values())
        assert {name: n for name, n in self.counters.jobs_of.items() if n} == jobs
        tasks_of = sum(
            (Counter({j.spec.entitlement: len(j.tasks)}) for j in self.jobs.values()), Counter()
        )
        assert {name: n for name, n in self.counters.tasks_of.items() if n} == tasks_of

    def teardown(self) -> None:
        self.run(self.store.__aexit__(None, None, None))
        self.runner.close()


CensusModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_census = CensusModel.TestCase
