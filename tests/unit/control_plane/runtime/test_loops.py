"""Loops of a process: none ends silently, and some start again."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import RUNTIME, run
from world import World, a_region

from control_plane.runtime.loops import AfterFailure, Loops
from wire.errors import Busy


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_a_loop_that_fails_is_named_and_ends_the_process():
    async def main() -> str:
        async def breaks() -> None:
            await RUNTIME.sleep(5)
            raise KeyError("web")

        loops = Loops(RUNTIME)
        loops.start("scheduler", breaks)
        loops.start("health", forever)
        assert loops.failures() == ""
        with pytest.raises(KeyError):
            await loops.wait_failed()
        failures = loops.failures()
        await loops.close()
        return failures

    assert run(main()) == "scheduler failed: KeyError: 'web'"


def test_a_restarting_loop_is_named_while_it_is_down():
    async def main() -> list[float]:
        began: list[float] = []

        async def breaks() -> None:
            began.append(RUNTIME.now())
            if len(began) < 4:
                raise Busy("the store is full")
            await forever()

        loops = Loops(RUNTIME)
        loops.start("profiles", breaks, AfterFailure.RESTARTS)
        await RUNTIME.sleep(0.5)
        assert loops.failures() == "profiles failed: the store is full"
        await RUNTIME.sleep(100)
        assert loops.failures() == ""
        await loops.close()
        return began

    assert run(main()) == [0, 1, 3, 7]


def test_spawned_work_that_is_not_awaited_is_covered():
    async def main() -> str:
        loops = Loops(RUNTIME)
        loops.start("health", forever)

        async def breaks() -> None:
            raise ValueError("no such thing")

        RUNTIME.spawn("aside", breaks())
        with pytest.raises(ValueError, match="no such thing"):
            await loops.wait_failed()
        failures = loops.failures()
        await loops.close()
        return failures

    assert run(main()) == "aside failed: ValueError: no such thing"


@pytest.mark.parametrize(
    ("role", "name"),
    [
        (lambda control_plane: control_plane.shards.all[0].scheduler, "scheduler"),
        (lambda control_plane: control_plane._checker, "health"),
    ],
)
def test_readiness_names_the_failed_loop_of_the_control_plane(role, name):
    async def main() -> None:
        world = World(a_region())
        async with world.store:
            control_plane = world.control_plane()

            async def breaks(*_: object) -> None:
                await RUNTIME.sleep(5)
                raise IndexError("of nothing")

            role(control_plane).run = breaks
            async with control_plane:
                assert (await control_plane.ready()).ok
                with pytest.raises(IndexError):
                    await control_plane.wait_failed()
                ready = await control_plane.ready()
                assert not ready.ok
                assert ready.detail == f"{name} failed: IndexError: of nothing"

    run(main())
