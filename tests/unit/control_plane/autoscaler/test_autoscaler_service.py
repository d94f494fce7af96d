"""The loop of the autoscaler over days of virtual time, with load, faults and restarts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace
from virtual_time import EPOCH_S, clock, run

from control_plane.api.autoscale import Autoscale, AutoscaleMode, Headroom, LoadSignal
from control_plane.api.intents import StoredIntent
from control_plane.api.inventory import MachineScope
from control_plane.api.jobs import JobBrief, JobBriefs, JobStatus
from control_plane.api.machines import Machines
from control_plane.autoscaler import stored_jobs
from control_plane.autoscaler.core.observing import LoadReading
from control_plane.autoscaler.service import Autoscaler
from control_plane.autoscaler.signals import TaskUsageSource
from control_plane.autoscaler.sizes import SizeIntents
from control_plane.autoscaler.stored_jobs import AutoscaledJob
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.store.memory import MemoryStore
from tests.unit.control_plane.autoscaler.model_region import MSBS, Killed, ModelRegion
from tests.unit.control_plane.autoscaler.sizing_builders import a_policy
from wire.errors import Busy, NotFound

HOUR_S, DAY_S = 3600.0, 86_400.0


def diurnal(at: float) -> float:
    """Return a load of 20 to 60 cores, highest at noon."""
    return 40.0 - 20.0 * math.cos(((EPOCH_S + at) % DAY_S) / DAY_S * 2 * math.pi)


class Writer(SizeIntents):
    """Writes sizes to the model, which is no HTTP client."""


def autoscaler_of(region: ModelRegion, store: MemoryStore) -> Autoscaler:
    runtime = SteppedRuntime(clock, seed=0)
    usage = TaskUsageSource(runtime, region.describe_task)
    return Autoscaler(
        runtime,
        region,
        store,
        {LoadSignal.CPU: usage, LoadSignal.MEMORY: usage, LoadSignal.NETWORK: usage},
        Writer(region),  # type: ignore[arg-type]
    )


async def lasts(autoscaler: Autoscaler, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await autoscaler.run()


def course(
    body: Callable[[ModelRegion, Autoscaler, MemoryStore], Coroutine[Any, Any, None]],
    load: Callable[[float], float] = diurnal,
    tasks: int = 60,
    policy: Autoscale | None = None,
) -> None:
    async def main() -> None:
        region = ModelRegion(policy or a_policy(minimum=4, maximum=200), tasks, load)
        async with MemoryStore() as store:
            await body(region, autoscaler_of(region, store), store)

    run(main())


@pytest.mark.behaviour("AS1", "AS4")
def test_the_size_follows_two_days_of_load_and_no_minute_is_short() -> None:

    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        short: list[float] = []

        async def watch() -> None:
            while True:
                await asyncio.sleep(60)
                if region.load(region.now()) > 2.0 * len(region.healthy()):
                    short.append(region.now())

        watching = asyncio.create_task(watch())
        await lasts(autoscaler, 2 * DAY_S)
        watching.cancel()
        sizes = [tasks for _, tasks in region.sizes]
        assert short == []
        assert min(sizes[len(sizes) // 2 :]) < 30  # 20 cores at night need 20 tasks at 50 %
        assert 60 <= max(sizes) <= 75
        assert autoscaler.counts["failed rounds"] == 0

    course(body)


@pytest.mark.behaviour("AS1")
def test_the_size_follows_the_bytes_of_the_network() -> None:
    """In the model 30 cores are 30 MB per second, and each task should get one MB per second."""

    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        await lasts(autoscaler, 6 * HOUR_S)
        found = autoscaler.view("web").recommendation
        assert found is not None
        assert found.load == pytest.approx(30e6, rel=0.01)
        assert "B/s" in found.reason
        assert 30 <= region.record.spec.tasks <= 34

    policy = a_policy(minimum=4, maximum=200, signal=LoadSignal.NETWORK, target=1e6)
    course(body, lambda _: 30.0, policy=policy)


def test_the_first_round_measures_and_changes_nothing() -> None:
    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        await autoscaler.try_round()
        [view] = autoscaler.views().sizings
        assert view.recommendation is not None
        assert view.recommendation.reason.startswith("kept at 60: 0 of 16 tasks were read")
        assert region.sizes == []

    course(body)


def test_it_only_recommends_unless_it_is_to_apply() -> None:
    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        await lasts(autoscaler, HOUR_S)
        assert region.sizes == []
        found = autoscaler.view("web").recommendation
        assert found is not None
        assert found.tasks == 54

    course(
        body, lambda _: 30.0, policy=a_policy(mode=AutoscaleMode.RECOMMEND, minimum=4, maximum=200)
    )


@pytest.mark.behaviour("AS1")
@pytest.mark.parametrize("trouble", ["front end", "agents"])
def test_silence_holds_the_size_and_is_reported(trouble: str) -> None:
    """While the front end or the agents are away, the size is held and never reduced."""

    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        await lasts(autoscaler, 2 * HOUR_S)
        region.failing = "it is down" if trouble == "front end" else ""
        region.silent = trouble == "agents"
        before = len(region.sizes)
        region.load = lambda _: 1.0
        await lasts(autoscaler, 12 * HOUR_S)
        later = [tasks for _, tasks in region.sizes[before:]]
        held = region.sizes[before - 1][1]
        assert all(tasks >= held for tasks in later)
        if trouble == "front end":
            assert autoscaler.views().failing == "it is down"
        else:
            note = autoscaler.view("web").recommendation
            assert note is not None
            assert "0 of 16 tasks were read: the agent does not answer" in note.held
        region.failing, region.silent = "", False
        await lasts(autoscaler, 6 * HOUR_S)
        assert region.record.spec.tasks == 4

    course(body)


@pytest.mark.behaviour("AS1")
def test_the_size_allows_for_the_loss_of_an_msb() -> None:
    """The size never falls below what the loss of an MSB requires."""

    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        await lasts(autoscaler, 6 * HOUR_S)
        tasks = region.record.spec.tasks
        left = tasks - math.ceil(tasks / MSBS)
        assert left * 2.0 * 0.5 >= 30.0
        assert "for the loss of 1 of 4 MSBs" in autoscaler.view("web").recommendation.reason  # type: ignore[union-attr]

    course(body, lambda _: 30.0, policy=a_policy(headroom=Headroom.MSB, minimum=4, maximum=200))


@pytest.mark.behaviour("AS1")
def test_two_instances_at_once_keep_the_speed_limit() -> None:
    """Each of the two instances has its own store, as after an operator's mistake."""

    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        async with MemoryStore() as second:
            other = autoscaler_of(region, second)
            both = [asyncio.create_task(lasts(autoscaler, 3 * HOUR_S))]
            await asyncio.sleep(17.0)
            both.append(asyncio.create_task(lasts(other, 3 * HOUR_S)))
            await asyncio.gather(*both)
        sizes = [(-1e9, 10), *region.sizes]
        assert sizes[-1][1] >= 100
        for at, tasks in region.sizes:
            last = [size for when, size in sizes if when <= at - 300][-1:]
            window = last + [size for when, size in sizes if at - 300 < when < at]
            assert tasks <= 2 * min(window)

    course(body, lambda at: 10.0 if at < HOUR_S else 100.0, tasks=10)


def test_the_learnt_state_survives_a_restart() -> None:
    async def body(region: ModelRegion, autoscaler: Autoscaler, store: MemoryStore) -> None:
        await lasts(autoscaler, DAY_S)
        before = autoscaler.view("web")
        after = autoscaler_of(region, store)
        await lasts(after, 200.0)
        view = after.view("web")
        assert view.history_from == before.history_from
        assert view.forecasts_held == pytest.approx(before.forecasts_held, abs=0.01)
        assert view.recommendation.forecast is not None  # type: ignore[union-attr]

    course(body)


@pytest.mark.behaviour("AS1")
def test_a_kill_at_any_step_harms_nothing() -> None:
    """The process is killed at each call in turn, and restarted on the same store."""

    async def body(region: ModelRegion, autoscaler: Autoscaler, store: MemoryStore) -> None:
        await lasts(autoscaler, HOUR_S)
        for step in range(40):
            calls = iter(range(1000))

            def fatal(name: str, left: int = step, calls: Any = calls) -> Any:
                inner = getattr(region, name)

                async def called(*args: Any, **named: Any) -> Any:
                    if next(calls) == left:
                        raise Killed
                    return await inner(*args, **named)

                return called

            life = autoscaler_of(region, store)
            life._api = _Calls(fatal)  # type: ignore[assignment]
            life._writer = Writer(life._api)  # type: ignore[arg-type]
            life._sources = {LoadSignal.CPU: TaskUsageSource(life.runtime, fatal("describe_task"))}
            with suppress(Killed):
                await _killed(life)
            assert 4 <= region.record.spec.tasks <= 200
        last = autoscaler_of(region, store)
        await lasts(last, 3 * HOUR_S)
        assert last.failing == ""
        assert region.record.spec.tasks >= region.load(region.now())

    course(body)


class _Calls:
    """The front end, for a process that is killed at one of its calls."""

    def __init__(self, fatal: Callable[[str], Any]) -> None:
        self.put_sizes = fatal("put_sizes")
        self.list_job_briefs = fatal("list_job_briefs")
        self.get_job = fatal("get_job")
        self.list_machines = fatal("list_machines")


async def _killed(life: Autoscaler) -> None:
    """Run three rounds, or up to the call that kills the process."""
    life._jobs = await stored_jobs.load(life._store)
    for _ in range(3):
        await life.round()
        await asyncio.sleep(60)


def test_a_damaged_history_begins_again_and_harms_no_other() -> None:
    async def body(region: ModelRegion, autoscaler: Autoscaler, store: MemoryStore) -> None:
        await lasts(autoscaler, HOUR_S)
        good = await store.get("sizings/web")
        assert good is not None
        from control_plane.store import Put

        for name, value in (("cut", good.value[:-9]), ("text", b"{}"), ("web2", good.value)):
            await store.txn({}, [Put(f"sizings/{name}", value)])
        assert sorted(await stored_jobs.load(store)) == ["web", "web2"]

    course(body)


def test_a_stored_job_has_at_most_12_kb() -> None:
    async def body(region: ModelRegion, autoscaler: Autoscaler, store: MemoryStore) -> None:
        await lasts(autoscaler, DAY_S)
        entry = await store.get("sizings/web")
        assert entry is not None
        assert len(entry.value) <= 12_000

    course(body, policy=a_policy(horizon_s=7200.0, minimum=4, maximum=200))


def test_a_refused_size_is_shown_and_requested_again() -> None:
    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        await lasts(autoscaler, 10 * 60)
        region.record = _with_version(region, 2)
        seen = await region.get_job("web")
        region.record = _with_version(region, 3)
        found = autoscaler.view("web").recommendation
        assert found is not None
        await autoscaler._write([(seen, found)])
        assert "was refused: it is at version" in autoscaler.view("web").written
        assert autoscaler.counts["refused"] == 1

    course(body)


def _with_version(region: ModelRegion, version: int) -> Any:
    """Return the record with a size that another writer has set, at a version."""
    from msgspec.structs import replace

    return replace(region.record, intents={"size": StoredIntent(version=version)})


@pytest.mark.behaviour("BUG-UX153")
def test_the_view_of_one_job_has_its_loads_and_the_list_of_jobs_has_none() -> None:
    async def body(_: ModelRegion, autoscaler: Autoscaler, __: MemoryStore) -> None:
        await lasts(autoscaler, 2 * DAY_S)
        view = autoscaler.view("web")
        assert len(view.loads) == pytest.approx(2 * DAY_S / 300, abs=2)
        largest = max(load for _, load in view.day_peaks)
        assert largest == max(load for _, load in view.loads)
        assert not autoscaler.views().sizings[0].loads
        assert not autoscaler.views().sizings[0].day_peaks

    course(body)


def test_a_simulation_compares_policies_on_the_jobs_own_history() -> None:
    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        await lasts(autoscaler, 2 * DAY_S)
        before = region.record.spec.tasks
        eager = a_policy(minimum=4, maximum=200, target=0.8)
        found = await autoscaler.simulation("web", eager)
        assert found.days == pytest.approx(2.0, abs=0.1)
        assert found.other.mean_size < found.own.mean_size < found.fixed.mean_size
        assert found.fixed.missing == 0
        assert found.own.missing < found.other.missing
        assert region.record.spec.tasks == before
        with pytest.raises(NotFound, match="job 'nope' is not autoscaled"):
            await autoscaler.simulation("nope", eager)

    course(body)


class OneUnreachable(ModelRegion):
    """A region with a second job, whose shard may be away."""

    async def list_job_briefs(self) -> JobBriefs:
        briefs = await super().list_job_briefs()
        return JobBriefs(jobs=[*briefs.jobs, replace(briefs.jobs[0], name="away")])

    async def get_job(self, name: str) -> JobStatus:
        if name == "away":
            raise Busy("shard 2 is away")
        return await super().get_job(name)


@pytest.mark.behaviour("BUG-CP70")
def test_a_shard_that_is_away_holds_the_sizes_of_its_jobs_only() -> None:
    """Formerly no size of any job changed until the shard was back."""

    async def main() -> None:
        region = OneUnreachable(a_policy(minimum=4, maximum=200), 60, diurnal)
        async with MemoryStore() as store:
            autoscaler = autoscaler_of(region, store)
            await lasts(autoscaler, 3 * HOUR_S)
            assert autoscaler.views().failing == (
                "could not read 1 jobs, such as away: shard 2 is away"
            )
            assert [view.job for view in autoscaler.views().sizings] == ["web"]
            assert autoscaler.counts["failed rounds"] == 0
            assert region.sizes

    run(main())


class UnreadMachines(ModelRegion):
    """A region with a job that keeps headroom for an MSB; its machines cannot be listed."""

    async def list_job_briefs(self) -> JobBriefs:
        briefs = await super().list_job_briefs()
        return JobBriefs(jobs=[replace(briefs.jobs[0], name="spread"), *briefs.jobs])

    async def get_job(self, name: str) -> JobStatus:
        status = await super().get_job(name)
        if name == "web":
            return status
        policy = replace(status.record.spec.autoscale, headroom=Headroom.MSB)
        spec = replace(status.record.spec, name=name, autoscale=policy)
        return replace(status, record=replace(status.record, name=name, spec=spec))

    async def list_machines(self, scope: MachineScope | None = None) -> Machines:
        raise Busy("the list takes too long")


@pytest.mark.behaviour("BUG-CP129")
def test_machines_that_cannot_be_listed_hold_the_sizes_of_their_jobs_only() -> None:

    async def main() -> None:
        region = UnreadMachines(a_policy(minimum=4, maximum=200), 60, diurnal)
        async with MemoryStore() as store:
            autoscaler = autoscaler_of(region, store)
            await lasts(autoscaler, 3 * HOUR_S)
            assert autoscaler.views().failing == (
                "could not read 1 jobs, such as spread: the list takes too long"
            )
            assert autoscaler.counts["failed rounds"] == 0
            assert region.sizes
            assert {view.job for view in autoscaler.views().sizings} == {"spread", "web"}

    run(main())


@pytest.mark.behaviour("BUG-CP70")
def test_a_job_that_cannot_be_read_for_weeks_keeps_its_history() -> None:
    """The job is also shown as before."""

    async def body(region: ModelRegion, autoscaler: Autoscaler, store: MemoryStore) -> None:
        await lasts(autoscaler, HOUR_S)
        region.get_job = _unreachable  # type: ignore[method-assign]
        mode = AutoscaleMode.APPLY
        briefs = JobBrief(name="web", entitlement="front", tasks=60, healthy=60, autoscale=mode)

        async def listed() -> JobBriefs:
            region.reads += 1
            return JobBriefs(jobs=[replace(briefs, revision=region.reads)])

        region.list_job_briefs = listed  # type: ignore[method-assign]
        await lasts(autoscaler, 8 * DAY_S)
        assert [view.job for view in autoscaler.views().sizings] == ["web"]
        assert "web" in await stored_jobs.load(store)

    course(body)


async def _unreachable(_: str) -> JobStatus:
    raise Busy("shard 2 is away")


class Late(TaskUsageSource):
    """A source of past loads that answers only from a given time."""

    def __init__(self, from_s: float, region: ModelRegion) -> None:
        super().__init__(SteppedRuntime(clock, seed=0), region.describe_task)
        self.from_s = from_s

    async def past(self, status: JobStatus, policy: Autoscale) -> list[tuple[float, float]] | None:
        now = self.runtime.date()
        if now - EPOCH_S < self.from_s:
            return None
        return [(now - 3600.0 * hours, 20.0) for hours in range(48, 0, -1)]

    async def measure(self, status: JobStatus, policy: Autoscale) -> LoadReading:
        if self.runtime.date() - EPOCH_S < self.from_s:
            return LoadReading(missing="it is down")
        return LoadReading(load=20.0, at=self.runtime.date())


@pytest.mark.behaviour("BUG-CP71")
def test_the_past_is_read_once_its_source_answers() -> None:
    """Formerly, if the server was down at the first read, the job stayed without its history."""

    async def body(region: ModelRegion, autoscaler: Autoscaler, _: MemoryStore) -> None:
        autoscaler._sources[LoadSignal.CPU] = Late(HOUR_S, region)
        await lasts(autoscaler, 2 * HOUR_S)
        assert autoscaler.view("web").history_from == pytest.approx(
            EPOCH_S + HOUR_S - 2 * DAY_S, abs=HOUR_S
        )

    course(body)


@pytest.mark.behaviour("BUG-CP104")
async def test_thousands_of_jobs_are_stored_in_bounded_transactions() -> None:
    """Formerly one transaction had all of them: 14 MB for 1,000 jobs every five minutes."""
    jobs = {f"job-{number}": AutoscaledJob(seen_at=float(number)) for number in range(250)}
    async with MemoryStore(strict=True) as store:
        await stored_jobs.save(store, jobs)
        found = await stored_jobs.load(store)
        assert {name: job.seen_at for name, job in found.items()} == {
            name: job.seen_at for name, job in jobs.items()
        }
        await stored_jobs.save(store, {}, jobs)
        assert await stored_jobs.load(store) == {}
