"""Extra tasks that the jobs of an entitlement share."""

import asyncio

import pytest
from world import World, a_job, scenario

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, TaskRecord
from control_plane.api.updates import UpdatePolicy
from control_plane.runtime import runtime
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decision import Decision
from control_plane.scheduler.core.operations import OperationLedger
from control_plane.scheduler.surge_buffer import SurgeBuffer

pytestmark = pytest.mark.behaviour("SC21", "JC12")

ALWAYS = UpdatePolicy(max_unavailable=0, surge=1, drain_s=0.0)
WAITS = "it waits for its turn: other jobs use all extra tasks of the entitlement"
NAMES = [f"model{number}" for number in range(5)]


def extras(w: World) -> int:
    return sum(task.extra for name in NAMES for task in w.cp._jobs.get(name).tasks)


async def of_models(w: World, surge_tasks: int | None) -> None:
    await w.set_up(quota=3, surge_tasks=surge_tasks)
    for name in NAMES:
        await w.cp.apply_job(a_job(1, name=name, update=ALWAYS))
    for name in NAMES:
        await w.stable(name)


async def most_at_once(w: World) -> tuple[int, set[str]]:
    """Push to all jobs; return the largest number of extra tasks, and details of waiting jobs."""
    for name in NAMES:
        await w.cp.apply_job(a_job(1, name=name, update=ALWAYS, command=["/bin/other"]))
    most, details = 0, set[str]()
    for _ in range(3000):
        most = max(most, extras(w))
        details |= {(await w.cp.get_job(name)).detail for name in NAMES}
        assert all([(await w.cp.endpoints(name)).endpoints for name in NAMES])
        if all(t.version == 2 for n in NAMES for t in w.cp._jobs.get(n).tasks) and not extras(w):
            return most, details
        await asyncio.sleep(0.1)
    raise AssertionError("the push does not end")


@pytest.mark.behaviour("JC12")
@scenario()
async def test_at_most_as_many_extra_tasks_run_at_once_as_the_entitlement_allows(w: World):
    """Five jobs share two extra tasks in turns. Each waiting job reports the reason."""
    await of_models(w, 2)
    most, details = await most_at_once(w)
    assert most == 2
    assert WAITS in details


@scenario()
async def test_without_a_shared_number_each_job_has_its_own(w: World):
    await of_models(w, None)
    most, details = await most_at_once(w)
    assert most > 2
    assert WAITS not in details


def test_decisions_that_are_made_at_the_same_time_share_it_too(monkeypatch: pytest.MonkeyPatch):
    """Decisions about large jobs run outside the loop, and each saw the same number left."""
    monkeypatch.setattr(runtime, "LARGE", 0)

    @scenario()
    async def story(w: World) -> None:
        await of_models(w, 2)
        most, _ = await most_at_once(w)
        assert most == 2

    story()


class Listeners:
    """Stands for the table of jobs: it reports the changes that the test makes."""

    def listen(self, on_change) -> None:
        self.report = on_change


def a_task(index: int, *, extra: bool = False) -> TaskRecord:
    return TaskRecord(index=index, version=1, generation=1, since=0.0, extra=extra)


def a_decision(name: str, *, extras: int, waits: bool = False) -> Decision:
    tasks = [a_task(0), *(a_task(1 + n, extra=True) for n in range(extras))]
    spec = a_job(1, name=name, update=ALWAYS)
    record = JobRecord(name=name, spec=spec, version=1, specs={1: spec}, tasks=tasks)
    ledger = OperationLedger(record, Moment(0.0, 0.0))
    return Decision(record, ledger, waits_for_surge=waits)


@pytest.mark.behaviour("BUG-CP144")
def test_an_extra_task_that_was_not_stored_does_not_count():
    """The store failed, and the owner took the update back before the next round."""
    jobs, woken = Listeners(), list[str]()
    buffer, entitlement = SurgeBuffer(jobs, woken.append), EntitlementSpec(surge_tasks=1)
    first, other = a_decision("a", extras=0), a_decision("b", extras=0, waits=True)
    buffer.reserve(first.record, a_decision("a", extras=1), entitlement, 1)
    assert buffer.left(other.record, entitlement) == 0
    buffer.reserve(other.record, other, entitlement, 0)
    buffer.reserve(first.record, a_decision("a", extras=0), entitlement, 1)
    assert buffer.left(other.record, entitlement) == 1
    assert woken == ["b"]
