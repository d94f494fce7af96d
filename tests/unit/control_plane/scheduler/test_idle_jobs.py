"""Idle jobs cost no rounds, and no round that a job needs is skipped."""

import asyncio
from collections import Counter

import pytest
from world import World, a_job, scenario

from agent.api import Health
from control_plane.api.intent_changes import HoldChange, SizeChange
from control_plane.api.inventory import Drain
from control_plane.job_control.core.intents import is_composed
from control_plane.runtime import runtime
from control_plane.scheduler import idle_jobs as calm_jobs
from control_plane.scheduler import scheduler


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the jobs about which the scheduler decided, one entry for each full round."""
    seen, real = list[str](), scheduler.decide

    def decide(record, what):
        seen.append(record.name)
        return real(record, what)

    monkeypatch.setattr(scheduler, "decide", decide)
    return seen


def test_reports_of_machines_cause_no_round_of_an_idle_job(rounds: list[str]) -> None:
    """Three quarters of all rounds found no work."""

    @scenario()
    async def story(w: World) -> None:
        await idle_machine(w)
        rounds.clear()
        for _ in range(20):
            for machine in w.region.machines:
                w.cp._observations.changed(machine)
            await asyncio.sleep(1.0)
        assert rounds == []

    story()


def test_the_clock_alone_checks_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20,000 jobs, periodic checks of every task used a quarter of a core for nothing."""
    compared, real = list[int](), calm_jobs.serves_unchanged

    def serves_unchanged(job, task, there):
        compared.append(task.index)
        return real(job, task, there)

    monkeypatch.setattr(calm_jobs, "serves_unchanged", serves_unchanged)

    @scenario()
    async def story(w: World) -> None:
        machine = await idle_machine(w)
        compared.clear()
        await asyncio.sleep(5 * w.settings.resync_s)
        assert compared == []
        w.cp._observations.changed(machine)
        await asyncio.sleep(1.0)
        assert sorted(compared) == [0, 1, 2]

    story()


def test_an_idle_job_gets_a_full_round_at_intervals(rounds: list[str]) -> None:
    @scenario()
    async def story(w: World) -> None:
        await idle_machine(w)
        rounds.clear()
        await asyncio.sleep(40 * w.settings.resync_s)
        assert 3 <= len(rounds) <= 5

    story()


@pytest.mark.behaviour("FE7")
def test_decision_and_summary_of_a_large_job_are_computed_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds and pages of a large job blocked the loop for 70 ms."""
    monkeypatch.setattr(runtime, "LARGE", 3)
    offloaded, real = Counter[str](), runtime.SteppedRuntime.offload

    async def offload(self, work, *given):
        offloaded[work.__name__] += 1
        return await real(self, work, *given)

    monkeypatch.setattr(runtime.SteppedRuntime, "offload", offload)

    @scenario()
    async def story(w: World) -> None:
        await w.deployed(a_job(3))
        await w.deployed(a_job(2, name="small"))
        assert offloaded["decide"] > 0
        assert offloaded["summarize"] > 0
        offloaded.clear()
        await w.cp.get_job("small")
        assert not offloaded
        await w.cp.get_job("web")
        assert offloaded == {"summarize": 1}

    story()


async def idle_machine(w: World) -> str:
    """Deploy a job, wait until it is idle, and return a machine that has one of its tasks."""
    await w.deployed(a_job(3))
    await asyncio.sleep(3 * w.settings.resync_s + w.settings.repair_after_s)
    assert "web" in w.cp.shards.all[0].scheduler._idle_jobs._known
    return next(machine for machine, tasks in w.region.where().items() if tasks)


def listed(w: World) -> int:
    return sum(task.listed for task in w.cp._jobs.get("web").tasks)


@scenario()
async def test_a_task_of_an_idle_job_that_becomes_unhealthy_is_unlisted_at_once(w: World) -> None:
    name = await idle_machine(w)
    task = w.region.where()[name][0]
    w.region.machines[name].report(task, health=Health.UNHEALTHY)
    await asyncio.sleep(1.0)
    assert listed(w) == 2
    w.region.machines[name].report(task, health=Health.HEALTHY)
    await asyncio.sleep(1.0)
    assert listed(w) == 3


@scenario()
async def test_an_idle_job_leaves_a_drained_machine_at_once(w: World) -> None:
    name = await idle_machine(w)
    await w.cp.inventory.drain(Drain(machines=[name], reason="new fans"))
    await asyncio.sleep(1.0)
    assert any(task.operation for task in w.cp._jobs.get("web").tasks)


def test_sizes_that_confirm_the_one_in_force_cost_an_idle_job_no_round(rounds: list[str]) -> None:
    """Nine of ten autoscaler writes change nothing. Each caused a round, and another 30 s later."""

    @scenario()
    async def story(w: World) -> None:
        await idle_machine(w)
        before = w.cp._jobs.get("web").intents["size"].version
        rounds.clear()
        for number in range(20):
            await w.cp.intents.size("web", SizeChange(tasks=3, reason=f"look {number}"), "user:as")
            await asyncio.sleep(5.0)
        assert rounds == []
        assert w.cp._jobs.get("web").intents["size"].version == before + 20
        await w.cp.intents.size("web", SizeChange(tasks=4), "user:as")
        await w.stable()
        tasks = w.cp._jobs.get("web").tasks
        assert len(tasks) == 4
        assert w.cp.counters.tasks == Counter(task.phase for task in tasks)
        assert listed(w) == 4

    story()


def test_the_size_of_a_held_job_or_a_trial_is_checked_even_if_it_is_unchanged(
    rounds: list[str],
) -> None:
    """The intents of such a job are composed again after each write."""

    @scenario()
    async def story(w: World) -> None:
        await idle_machine(w)
        await w.cp.intents.hold("web", HoldChange(lasts_s=3600.0), "user:sre")
        await asyncio.sleep(3 * w.settings.resync_s)
        rounds.clear()
        await w.cp.intents.size("web", SizeChange(tasks=3), "user:as")
        await asyncio.sleep(1.0)
        assert rounds
        assert is_composed(w.cp._jobs.get("web"))

    story()


@scenario()
async def test_an_idle_job_is_changed_at_once(w: World) -> None:
    await idle_machine(w)
    await w.cp.apply_job(a_job(2))
    await asyncio.sleep(1.0)
    assert any(task.operation for task in w.cp._jobs.get("web").tasks)
