"""Jobs in which commands of gates run do not outlive their run, whatever happens at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from control_plane.api.jobs import JobSpec
from conveyor.command_checks import CommandChecks
from conveyor.core.evaluation import Measurement
from conveyor.core.transitions import LATE_REQUEST_S
from conveyor.runs import GateOutcome, JobProgress, PipelineRun, StepTime
from tests.unit.conveyor.delivery_model import Killed, World, a_pipeline, digest
from wire.errors import Conflict, NotFound, TwineError, Unreachable

pytestmark = pytest.mark.behaviour("CV5", "BUG-CP123")

CHECKED = a_pipeline(
    stages=[{"kind": "all", "gates": ["smoke"]}],
    gates={"smoke": {"command": {"run": ["/smoke"]}}},
)


async def _ended(error: BaseException | None) -> tuple[World, list[int]]:
    """Return a service whose first clean-up after its run ended in this error."""
    world, cleaned = await World(CHECKED).begin(), list[int]()
    world.meter.default = Measurement(GateOutcome.PASS, "the command ended: 0", {})

    async def end(run: PipelineRun) -> None:
        nonlocal error
        if error is not None:
            failed, error = error, None
            raise failed
        cleaned.append(run.number)

    world.meter.end = end  # type: ignore[method-assign]
    world.plane.images["web"] = digest(2)
    return world, cleaned


@pytest.mark.parametrize("error", [Killed(), Unreachable("the front end does not answer")])
async def test_checks_are_ended_although_the_clean_up_failed(error: BaseException):
    world, cleaned = await _ended(error)
    try:
        await world.until("done")
    except Killed:
        world.restart()
        await world.service.load()
    await world.rounds(1)
    assert cleaned == [1]


async def test_a_check_that_begins_late_is_ended_too_and_then_nothing_is_asked():
    """Its request had no answer when the run ended, and was carried out afterwards."""
    world, cleaned = await _ended(None)
    await world.until("done")
    await world.rounds(10)
    assert len(cleaned) > 5
    await world.rounds(1, LATE_REQUEST_S)
    assert (await world.service.view("web")).record.unchecked == ()
    known = len(cleaned)
    await world.rounds(5)
    assert len(cleaned) == known


async def test_a_pipeline_is_not_removed_before_its_checks_are_ended():
    world, cleaned = await _ended(Unreachable("the front end does not answer"))
    await world.until("done")

    async def away(run: PipelineRun) -> None:
        raise Unreachable("the front end does not answer")

    again, world.meter.end = world.meter.end, away  # type: ignore[method-assign]
    with pytest.raises(Unreachable):
        await world.service.remove("web")
    world.meter.end = again  # type: ignore[method-assign]
    await world.service.remove("web")
    assert cleaned == [1]
    with pytest.raises(NotFound):
        await world.service.view("web")


class Jobs:
    """A front end on which a user creates a job between a look and a write."""

    def __init__(self, base: JobSpec) -> None:
        self.base, self.applied = base, list[str]()

    async def get_job(self, name: str) -> Any:
        if name != "web":
            raise NotFound(f"there is no job {name!r}")
        return SimpleNamespace(record=SimpleNamespace(spec=self.base))

    async def apply_job(self, spec: JobSpec, *, is_new: bool = False) -> None:
        if is_new:
            raise Conflict(f"there is a job {spec.name} already")
        self.applied.append(spec.name)


async def test_a_check_never_replaces_a_job_that_a_user_made_meanwhile():
    jobs = Jobs(JobSpec(name="web", entitlement="front", tasks=1, image=digest(1)))
    checks = CommandChecks(jobs)  # type: ignore[arg-type]
    step = StepTime(name="all", began=0.0, reached=0.0)
    run = PipelineRun(
        number=1, image=digest(2), trigger="hand", by="ann", created=0.0, spec=CHECKED
    )
    with pytest.raises(TwineError, match="there is a job web-check-smoke already"):
        await checks.measure("smoke", replace(run, steps=(step,)), [JobProgress(job="web")], 1.0)
    assert jobs.applied == []
