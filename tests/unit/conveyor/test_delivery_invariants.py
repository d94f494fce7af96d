"""Invariants of runs under random events, and under a kill at every await."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conveyor.api import ControlRequest, ControlVerb, StageKind
from conveyor.core.acts import is_pushed
from conveyor.core.evaluation import Measurement
from conveyor.core.stages import wanted
from conveyor.runs import ENDED, GateOutcome, PipelineRun, RunState
from tests.unit.conveyor.delivery_model import (
    NO_DATA,
    Killed,
    World,
    a_pipeline,
    digest,
)
from wire.errors import TwineError

pytestmark = pytest.mark.behaviour("CV1", "CV2")

PASSES = Measurement(GateOutcome.PASS, "0.01 errors", {"max": 0.01})
FAILS = Measurement(GateOutcome.FAIL, "0.4 errors", {"max": 0.4})
SPEC = a_pipeline(
    gates={"errors": {"query": {"promql": "errors", "at_most": 0.1}, "deadline_s": "20m"}},
)


class Deliveries(RuleBasedStateMachine):
    """Users, triggers, failures and kills in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World(SPEC)
        self.do(self.world.begin())
        self.images = 1
        self.ended: dict[int, PipelineRun] = {}
        self.images_pushed: dict[str, list[str]] = {}
        self.calls_seen = 0

    def do(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        """Once users and failures stop, every run ends and no job is left unfinished."""
        try:
            self.comes_to_rest()
        finally:
            self.loop.close()

    def comes_to_rest(self) -> None:
        world = self.world
        world.plane.is_away, world.plane.kill_in, world.meter.default = False, None, PASSES
        record = self.do(world.service.view("web")).record
        if record.active is not None and record.active.paused:
            self.control(ControlVerb.RESUME)
        for _ in range(600):
            self.do(world.rounds(1))
            record = self.do(world.service.view("web")).record
            if record.active is None and record.waiting is None:
                break
        assert (record.active, record.waiting) == (None, None), world.plane.jobs["web"]
        job = world.plane.jobs["web"]
        if not record.frozen:
            assert job.owner == ""
            assert not job.paused

    # -- events

    @rule()
    def a_new_image_comes(self) -> None:
        self.images += 1
        self.world.plane.images["web"] = digest(self.images)

    @rule(count=st.integers(1, 30))
    def time_passes(self, count: int) -> None:
        for _ in range(count):
            try:
                self.do(self.world.rounds(1))
            except TwineError:
                continue
            self.every_act_is_right()

    @rule(outcome=st.sampled_from([PASSES, FAILS, NO_DATA]))
    def the_gate_changes(self, outcome: Measurement) -> None:
        self.world.meter.default = outcome

    @rule(away=st.booleans())
    def the_front_end_goes_or_comes(self, away: bool) -> None:
        self.world.plane.is_away = away

    @rule(size=st.integers(0, 30))
    def the_owner_resizes(self, size: int) -> None:
        self.world.plane.jobs["web"].resize(size)

    @rule(verb=st.sampled_from([v for v in ControlVerb if v is not ControlVerb.APPROVE]))
    def control(self, verb: ControlVerb) -> None:
        request = ControlRequest(verb=verb, reason="test")
        with suppress(TwineError):
            self.do(self.world.service.control("web", request, "user:ann"))

    @rule(after=st.integers(0, 12), count=st.integers(1, 5))
    def the_process_is_killed(self, after: int, count: int) -> None:
        self.world.store.plane, self.world.plane.kill_in = self.world.plane, after
        with suppress(Killed, TwineError):
            self.do(self.world.rounds(count))
        self.world.plane.kill_in = None
        self.world.restart()
        self.do(self.world.service.load())
        self.every_act_is_right()

    # -- invariants

    def every_act_is_right(self) -> None:
        """No image is pushed while another run has the job, and no stage is skipped."""
        new, self.calls_seen = (
            self.world.plane.calls[self.calls_seen :],
            len(self.world.plane.calls),
        )
        history = self.do(self.world.service.history("web", 1000, None))
        images = {run.image for run in history.runs if run.steps}
        for call in new:
            if call[0] == "push":
                assert call[2] in images, "only a run that began pushes"

    @invariant()
    def a_job_is_never_ahead_of_its_run(self) -> None:
        record = self.do(self.world.service.view("web")).record
        run, job = record.active, self.world.plane.jobs["web"]
        if run is None or run.state is not RunState.RUNNING or job.image != run.image:
            return
        if run.step >= len(SPEC.stages):
            return
        seen = job.seen("web", run.image)
        written = [i for i, s in enumerate(SPEC.stages) if is_pushed(seen, run.image, s)]
        assert written[0] <= run.step

    @invariant()
    def an_ended_run_never_changes(self) -> None:
        for run in self.do(self.world.service.history("web", 1000, None)).runs:
            if run.state in ENDED:
                assert self.ended.setdefault(run.number, run) == run

    @invariant()
    def what_is_done_passed_every_step_in_order_and_what_was_superseded_began_none(self) -> None:
        for run in self.ended.values():
            if run.state is RunState.DONE and run.steps:
                ends = [e.what for e in run.log if e.what.endswith((" passed", " skipped"))]
                names = [e.removesuffix(" passed").removesuffix(" skipped") for e in ends]
                assert names == ["canary 1", "50 %", "all"]
            if run.state is RunState.SUPERSEDED:
                assert (run.steps, run.pushed) == ((), ())

    @invariant()
    def a_step_that_passed_had_its_soak_and_a_passing_gate(self) -> None:
        for run in self.ended.values():
            if run.state is not RunState.DONE or not run.steps:
                continue
            verdicts = self.do(self.world.service.history("web", 1, run.number)).verdicts[
                run.number
            ]
            assert len(verdicts) == run.measured
            for number, name in enumerate(("canary 1", "50 %", "all")):
                if f"{name} skipped" in [e.what for e in run.log]:
                    continue
                last = [v for v in verdicts if v.step == number][-1]
                assert (last.outcome, last.after_soak) == (GateOutcome.PASS, True)

    @precondition(lambda self: self.world.plane.jobs["web"].paused)
    @rule(count=st.integers(1, 5))
    def nothing_is_updated_while_paused(self, count: int) -> None:
        job = self.world.plane.jobs["web"]
        record = self.do(self.world.service.view("web")).record
        if record.active is None or not record.active.paused or self.world.plane.is_away:
            return
        tasks = list(job.tasks)
        self.do(self.world.rounds(count))
        assert job.tasks == tasks


Deliveries.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestDeliveries = Deliveries.TestCase


def _story(run: PipelineRun) -> list[Any]:
    """Return the parts of a run that must not depend on kills of the process."""
    return [run.number, run.image, run.state, [s.name for s in run.steps], run.reason]


async def _play(world: World, kill_in: int | None) -> tuple[int, list[Any]]:
    """Deliver a good image, then a bad one. Return the number of kill points, and the runs."""
    await world.begin()
    world.store.plane = world.plane
    far = 1_000_000
    world.plane.kill_in = far if kill_in is None else kill_in
    world.meter.bad = {digest(3)}
    ended: list[PipelineRun] = []
    for number, state in ((2, RunState.DONE), (3, RunState.ROLLED_BACK)):
        world.plane.images["web"] = digest(number)
        while len(ended) < number - 1:
            try:
                await world.rounds(1)
            except Killed:
                world.restart()
                await world.service.load()
            left = world.plane.kill_in
            world.plane.kill_in = None
            runs = (await world.service.history("web", 10, None)).runs
            world.plane.kill_in = left
            ended = [run for run in reversed(runs) if run.state in ENDED]
        assert ended[-1].state is state
    used = far - (world.plane.kill_in if world.plane.kill_in is not None else far)
    return used, [_story(run) for run in ended]


async def test_a_process_killed_at_any_await_continues_exactly_there():
    points, expected = await _play(World(), None)
    assert points > 50
    for point in range(points):
        world = World()
        _, story = await _play(world, point)
        assert story == expected, f"killed at await {point}"
        job = world.plane.jobs["web"]
        assert (job.tasks, job.owner, job.paused) == ([digest(2)] * 10, "", False)
        pushes = [c for c in world.plane.calls if c[0] == "push"]
        kinds = list(dict.fromkeys((c[2], c[3]) for c in pushes))
        assert kinds == [
            (digest(2), StageKind.CANARY),
            (digest(2), StageKind.PERCENT),
            (digest(2), StageKind.ALL),
            (digest(3), StageKind.CANARY),
        ]


@pytest.mark.parametrize("size", [0, 1, 2, 15_000])
async def test_a_job_of_any_size_is_accepted(size: int):
    counts = [wanted(stage, size) for stage in SPEC.stages]
    assert counts == sorted(counts)
    assert counts[-1] == size
