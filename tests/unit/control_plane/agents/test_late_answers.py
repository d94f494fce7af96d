"""Answers to commands and events arrive on different connections, so either may be late."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_agents import Region
from virtual_time import RUNTIME, run

from agent.api import Health, TaskState, TaskStatus
from control_plane.agents.observations import UNSEEN, Observation, Observations
from control_plane.broker.brokers import Brokers
from control_plane.store.memory import MemoryStore


def a_status(generation: int, state: TaskState, health: Health = Health.UNKNOWN) -> TaskStatus:
    return TaskStatus(
        task_id="web-0", generation=generation, epoch=1, state=state, health=health, image="x"
    )


@asynccontextmanager
async def one_machine_observed() -> AsyncIterator[Observations]:
    """Yield the observations of a region with one machine."""
    async with MemoryStore() as store:
        broker = Brokers(store, RUNTIME)
        await broker.load()
        await broker.join(Region().add("m1", "dc1", "msb1").join())
        yield Observations(broker, RUNTIME)


@pytest.mark.behaviour("F-48")
def test_the_late_answer_to_a_start_does_not_hide_that_the_task_is_healthy() -> None:
    """Formerly the task stayed unlisted until its next event."""

    async def body() -> None:
        async with one_machine_observed() as observations:
            healthy = a_status(2, TaskState.RUNNING, Health.HEALTHY)
            observations.saw_task("m1", healthy)
            observations.answered("m1", a_status(2, TaskState.STARTING))
            assert observations.observation("m1").tasks["web-0"] == healthy

    run(body())


def test_the_late_answer_to_a_stop_does_not_bring_back_a_task_that_is_gone() -> None:
    async def body() -> None:
        async with one_machine_observed() as observations:
            observations.saw_tasks("m1", [])
            observations.answered("m1", a_status(3, TaskState.STOPPING), removed=True)
            assert observations.observation("m1").tasks == {}

    run(body())


def test_an_answer_that_nothing_overtook_is_taken_in() -> None:
    async def body() -> None:
        async with one_machine_observed() as observations:
            observations.answered("m1", a_status(1, TaskState.STARTING))
            observations.answered("m1", a_status(2, TaskState.STOPPING), removed=True)
            assert observations.observation("m1").tasks["web-0"].generation == 2

    run(body())


def test_reading_an_idle_machine_concludes_nothing() -> None:
    """Formerly an index of a million machines kept a million blank observations."""

    async def body() -> None:
        async with one_machine_observed() as observations:
            blank = observations.peek("m1")
            assert (blank, observations.peek("nowhere")) == (UNSEEN, UNSEEN)
            assert len(observations._observations) == 0
            observations.asked("m1")
            observations.saw_task("m1", a_status(1, TaskState.RUNNING))
            assert observations.peek("m1") is observations.observation("m1")
            assert blank == Observation()

    run(body())


@pytest.mark.behaviour("BUG-CP148")
def test_stops_and_refusals_of_a_machine_do_not_add_up() -> None:
    """A machine may be observed for years, and run other tasks each day."""

    async def body() -> None:
        async with one_machine_observed() as observations:
            observation = observations.observation("m1")
            for number in range(3000):
                observations.stop_confirmed("m1", f"web-{number}", 1, gone=True)
                observations.refused("m1", f"job-{number}", "no", doubtful=False)
            assert len(observation.stopped) == len(observation.refused) == 1000
            assert observation.stopped["web-2999"] == 1
            assert observation.refused["job-2999"] == "no"

    run(body())


@pytest.mark.behaviour("BUG-CP148")
def test_a_refused_image_is_not_refused_any_more_once_it_came() -> None:
    async def body() -> None:
        async with one_machine_observed() as observations:
            observations.refused("m1", "sha256:1", "the registry is down", doubtful=False)
            observations.image_came("m1", "sha256:1")
            assert "sha256:1" not in observations.observation("m1").refused

    run(body())
