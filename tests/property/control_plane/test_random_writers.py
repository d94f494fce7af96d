"""Five writers of one job act at random while machines fail; every intent always holds.

Whenever the control plane calls the job stable, exactly the share runs what is pushed. The job then
has exactly the wanted size, and exactly the canaries run their version. Otherwise an operation is
pending. The last write of every dimension is stored, and a stale one was refused. Under a hold no
task changes.
"""

import asyncio
import random
from collections import Counter
from fractions import Fraction

import pytest
from virtual_time import run
from world import World, a_job, a_region

from control_plane.api.intent_changes import (
    CanaryChange,
    HoldChange,
    IntentChange,
    PushChange,
    SizeChange,
)
from control_plane.api.jobs import JobPhase, JobRecord, TaskPhase, TaskRecord
from control_plane.api.operations import OperationKind, OperationState
from control_plane.api.updates import UpdatePolicy
from control_plane.scheduler.core.assignment import unified, unified_summary
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decision import DecisionInput
from control_plane.scheduler.core.release import with_rollout
from wire.errors import Conflict

SEEDS, EVENTS = 16, 40
MACHINES = 6
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
PACE = UpdatePolicy(drain_s=0.0, max_unavailable=3)


def half_up(share: float, size: int) -> int:
    """Repeats the rule of the page: half a task is rounded up."""
    return int(Fraction(str(share)) * size + Fraction(1, 2))


class Writers:
    """The five writers, their last intents, and the check that the job follows them."""

    def __init__(self, w: World, seed: int) -> None:
        self.w, self.chance = w, random.Random(f"writers {seed}")
        self.size, self.share, self.canaries, self.commands = 6, 1.0, 0, 0
        self.held: dict[int, int] | None = None
        self.down: list[str] = []
        self.stable_checks = self.refused = 0

    @property
    def record(self) -> JobRecord:
        return self.w.cp._jobs.get("web")

    def version(self, dimension: str) -> int:
        intent = self.record.intents.get(dimension)
        return 0 if intent is None else intent.version

    # -- writes

    async def owner(self) -> None:
        """Applies an old job file: another size and another command."""
        before = self.record.intents
        spec = a_job(3, update=PACE, command=["/bin/of-a-file"])
        with pytest.raises(Conflict, match="is its writer"):
            await self.w.cp.apply_job(spec, writer="user:owner")
        assert self.record.intents == before

    async def autoscaler(self) -> None:
        size = self.chance.randint(1, 12)
        await self.w.cp.intents.size("web", SizeChange(tasks=size), "user:scaler")
        self.size = size

    async def stale_autoscaler(self) -> None:
        """Writes a size that it computed from an outdated version; another writer wrote since."""
        change = SizeChange(tasks=15, expect=self.version("size") - 1)
        with pytest.raises(Conflict, match="and the request replaces version"):
            await self.w.cp.intents.size("web", change, "user:scaler")
        self.refused += 1

    async def conveyor(self) -> None:
        share, spec = self.chance.choice(SHARES), None
        if not self.commands or self.chance.random() < 0.4:
            self.commands += 1
            spec = a_job(1, update=PACE, command=[f"/bin/v{self.commands}"])
        change = PushChange(spec=spec, share=share, expect=self.version("push"))
        await self.w.cp.intents.push("web", change, "user:conveyor")
        self.share = share

    async def canary_tool(self) -> None:
        if self.canaries and self.chance.random() < 0.5:
            await self.w.cp.intents.withdraw("web", "canary", IntentChange(), "user:tester")
            self.canaries = 0
            return
        tasks, number = self.chance.randint(1, 3), self.chance.randint(1, 3)
        change = CanaryChange(tasks=tasks, environment={"N": str(number)}, lasts_s=86_400)
        await self.w.cp.intents.canary("web", change, "user:tester")
        self.canaries = tasks

    async def operator(self) -> None:
        if self.held is not None:
            await self.w.cp.intents.withdraw("web", "hold", IntentChange(), "user:sre")
            self.held = None
        elif self.chance.random() < 0.4:
            await self.w.cp.intents.hold("web", HoldChange(lasts_s=86_400), "user:sre")
            self.held = {t.index: t.version for t in self.record.tasks if not is_changing(t)}

    async def failure(self) -> None:
        """At most one of six machines is down at a time."""
        if self.down:
            self.w.region.machines[self.down.pop()].power_on()
        else:
            name = self.chance.choice(sorted(self.w.region.machines))
            self.w.region.machines[name].power_off()
            self.down.append(name)

    async def event(self) -> None:
        await self.chance.choice(
            (
                *(self.owner, self.autoscaler, self.autoscaler, self.stale_autoscaler),
                *(self.conveyor, self.conveyor, self.canary_tool, self.operator, self.failure),
            )
        )()

    # -- checks

    def check_written(self) -> None:
        intents = self.record.intents
        assert intents["size"].value["tasks"] == self.size
        assert intents["push"].value.get("share", 1.0) == self.share
        canary = intents.get("canary")
        assert (
            (canary.value or {}).get("tasks", 1 if self.canaries else 0) == self.canaries
            if (canary is not None and canary.value is not None)
            else not self.canaries
        )

    async def check(self) -> None:
        self.check_written()
        self.check_shown()
        if self.held is not None:
            for task in self.record.tasks:
                assert task.version == self.held.get(task.index, task.version), task
            return
        status = await self.w.cp.get_job("web")
        if status.phase is JobPhase.STABLE:
            self.stable_checks += 1
            self.check_exact(status.record)

    def check_shown(self) -> None:
        """Assert that the summary of a job, which is not composed, equals the composed one."""
        record, seen = (
            with_rollout(self.record),
            DecisionInput({}, Moment(self.w.runtime.date(), 0.0)),
        )
        reported, composed = unified_summary(record, seen), unified(record, seen)
        assert (reported.size, reported.runtime, reported.waits) == (
            composed.size,
            composed.runtime,
            composed.waits,
        )
        assert Counter(reported.tasks.values()) == Counter(composed.tasks.values())

    def check_exact(self, record: JobRecord) -> None:
        trial = min(self.canaries, self.size)
        target = min(half_up(self.share, self.size), self.size - trial)
        found = Counter(task.version for task in record.tasks)
        on_trial = sum(number for version, number in found.items() if version in record.trials)
        assert len(record.tasks) == self.size
        assert (found[record.version], on_trial) == (target, trial), (found, record.intents)
        assert len(found) <= 3, "more than what is pushed, what was before and the canaries"


def is_changing(task: TaskRecord) -> bool:
    operation = task.operation
    return task.phase is TaskPhase.PENDING or (
        operation is not None
        and operation.state is OperationState.RUNNING
        and operation.kind is OperationKind.UPDATE
    )


@pytest.mark.behaviour("JC5", "JC6", "JC8", "JC15")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_five_writers_and_failing_machines(seed: int) -> None:
    async def main() -> None:
        w = World(a_region(MACHINES))
        async with asyncio.timeout(1_000_000), w.running():
            await w.set_up(quota=MACHINES)
            await w.cp.apply_job(a_job(6, update=PACE))
            await w.stable()
            writers = Writers(w, seed)
            await w.cp.intents.size("web", SizeChange(tasks=6), "user:scaler")
            await w.cp.intents.push("web", PushChange(), "user:conveyor")
            for _ in range(EVENTS):
                await writers.event()
                for _ in range(writers.chance.choice((1, 1, 3, 40))):
                    await asyncio.sleep(writers.chance.choice((0.1, 1.0, 5.0)))
                    await writers.check()
            if writers.held is not None:
                await w.cp.intents.withdraw("web", "hold", IntentChange(), "user:sre")
                writers.held = None
            for name in writers.down:
                w.region.machines[name].power_on()
            await w.stable(within_s=3600)
            writers.check_written()
            writers.check_exact(writers.record)
            assert writers.stable_checks > 0
        assert w.region.broken_rules == []

    run(main())
