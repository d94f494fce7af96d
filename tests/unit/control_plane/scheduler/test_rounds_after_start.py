"""After a start, a job gets a round once all of its machines have answered."""

import asyncio
from types import SimpleNamespace

import pytest
from fake_agents import FakeMachine
from virtual_time import run
from world import World, a_job, a_region

from control_plane.api.jobs import JobPhase
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.startup_barrier import ARRIVING_S, StartupBarrier

MACHINES, JOBS = 6, ("web", "second", "third")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the jobs that got rounds, in order."""
    seen, real = list[str](), Scheduler._work

    async def count_round(self: Scheduler, name: str) -> float | None:
        seen.append(name)
        return await real(self, name)

    monkeypatch.setattr(Scheduler, "_work", count_round)
    return seen


def in_use(w: World) -> list[FakeMachine]:
    """Return the machines on which each of the jobs has tasks: more than two machines."""
    on = {m: {task.rpartition("-")[0] for task in tasks} for m, tasks in w.region.where().items()}
    found = [w.region.machines[m] for m, jobs in sorted(on.items()) if jobs.issuperset(JOBS)]
    assert len(found) > 2
    return found


async def started_again(w: World) -> World:
    """Run jobs on all machines, and return a world whose control plane has no report yet."""
    async with w.running():
        await w.deployed(a_job(MACHINES), quota=MACHINES)
        for name in JOBS[1:]:
            await w.cp.apply_job(a_job(MACHINES, name=name))
            await w.stable(name)
    for machine in w.region.machines.values():
        machine.reachable = False
    return World(w.region, w.store, down_after_s=600)


def test_a_job_gets_a_round_when_its_last_machine_has_reported(rounds: list[str]) -> None:
    """Each answer of a machine caused a round of every job, which could not change anything."""

    async def main() -> None:
        w = await started_again(World(a_region(MACHINES)))
        rounds.clear()
        async with w.running():
            *others, last = in_use(w)
            for machine in others:
                machine.reachable = True
                observation = w.cp._observations.observation(machine.name)
                await w.until(lambda observation=observation: observation.answering)
                await asyncio.sleep(1.0)
            assert rounds == []
            last.reachable = True
            observation = w.cp._observations.observation(last.name)
            await w.until(lambda: observation.answering)
            await w.until(lambda: set(rounds) == set(JOBS), within_s=1.0)
            for name in JOBS:
                assert (await w.cp.get_job(name)).phase is JobPhase.STABLE

    run(main())


def test_a_machine_that_stays_away_is_not_waited_for_long(rounds: list[str]) -> None:
    async def main() -> None:
        w = await started_again(World(a_region(MACHINES)))
        rounds.clear()
        async with w.running():
            *others, _ = in_use(w)
            for machine in others:
                machine.reachable = True
            await w.until(lambda: set(rounds) == set(JOBS), within_s=2 * ARRIVING_S)

    run(main())


def a_record(machines: list[str | None]) -> SimpleNamespace:
    placed = (None if m is None else SimpleNamespace(machine=m) for m in machines)
    return SimpleNamespace(tasks=[SimpleNamespace(placement=place) for place in placed])


@pytest.mark.parametrize("backwards", [False, True])
def test_a_large_job_is_not_gone_through_at_each_arrival(*, backwards: bool) -> None:
    """The job has 4,000 tasks. The work grows with the tasks, not with their square."""
    counted, names = 0, [f"m{n}" for n in range(4000)]

    class Tasks(list[object]):
        def __getitem__(self, at):
            nonlocal counted
            counted += 1
            return super().__getitem__(at)

    record = a_record([None, *names])
    record.tasks = Tasks(record.tasks)
    observations = SimpleNamespace(observation=lambda _: SimpleNamespace(was_listed=True))
    arrivals = StartupBarrier(observations, SimpleNamespace(find=lambda _: record))
    for name in reversed(names) if backwards else names:
        assert arrivals.awaits("web")
        assert arrivals.is_first(name)
        assert not arrivals.is_first(name)
    assert not arrivals.awaits("web")
    assert counted < 5 * len(names)


def test_a_job_without_machines_waits_for_no_report() -> None:
    records = {"new": a_record([None, None]), "gone": None}
    arrivals = StartupBarrier(SimpleNamespace(), SimpleNamespace(find=records.get))
    assert not arrivals.awaits("new")
    assert not arrivals.awaits("gone")
