"""Answers to commands and events come on different connections, so either may be late."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "services"))

from fake_agents import Region
from virtual_time import RUNTIME, run

from agent.api import Health, TaskState, TaskStatus
from control_plane.agents.sights import UNSEEN, Sight, Sights
from control_plane.broker.brokers import Brokers
from control_plane.store.memory import MemoryStore


def a_status(generation: int, state: TaskState, health: Health = Health.UNKNOWN) -> TaskStatus:
    return TaskStatus(
        task_id="web-0", generation=generation, epoch=1, state=state, health=health, image="x"
    )


@asynccontextmanager
async def looking() -> AsyncIterator[Sights]:
    """Sights of a region with one machine."""
    async with MemoryStore() as store:
        broker = Brokers(store, RUNTIME)
        await broker.load()
        await broker.join(Region().add("m1", "dc1", "msb1").join())
        yield Sights(broker, RUNTIME)


def test_the_late_answer_to_a_start_does_not_hide_that_the_task_is_healthy() -> None:
    """F-48: it stayed unlisted until something else happened to it."""

    async def body() -> None:
        async with looking() as sights:
            healthy = a_status(2, TaskState.RUNNING, Health.HEALTHY)
            sights.saw_task("m1", healthy)
            sights.answered("m1", a_status(2, TaskState.STARTING))
            assert sights.sight("m1").tasks["web-0"] == healthy

    run(body())


def test_the_late_answer_to_a_stop_does_not_bring_back_a_task_that_is_gone() -> None:
    async def body() -> None:
        async with looking() as sights:
            sights.saw_tasks("m1", [])
            sights.answered("m1", a_status(3, TaskState.STOPPING), removed=True)
            assert sights.sight("m1").tasks == {}

    run(body())


def test_an_answer_that_nothing_overtook_is_taken_in() -> None:
    async def body() -> None:
        async with looking() as sights:
            sights.answered("m1", a_status(1, TaskState.STARTING))
            sights.answered("m1", a_status(2, TaskState.STOPPING), removed=True)
            assert sights.sight("m1").tasks["web-0"].generation == 2

    run(body())


def test_a_look_at_a_machine_that_nobody_asked_makes_nothing_of_it() -> None:
    """An index of a million machines kept as many blank sights."""

    async def body() -> None:
        async with looking() as sights:
            blank = sights.look("m1")
            assert (blank, sights.look("nowhere")) == (UNSEEN, UNSEEN)
            assert len(sights._sights) == 0
            sights.asked("m1")
            sights.saw_task("m1", a_status(1, TaskState.RUNNING))
            assert sights.look("m1") is sights.sight("m1")
            assert blank == Sight()

    run(body())
