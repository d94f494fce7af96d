"""Virtual time: the world always continues, the process only in its turn."""

from __future__ import annotations

import asyncio

import pytest

from vm_lab.region.loop import Killed, Stuck, Timeline, VirtualLoop


def test_hours_pass_at_once_and_in_order() -> None:
    timeline, seen = Timeline(), list[tuple[float, str]]()
    loop = VirtualLoop(timeline)
    timeline.at(1800.0, lambda: seen.append((timeline.now, "world")))

    async def main() -> None:
        await asyncio.sleep(3600)
        seen.append((loop.time(), "process"))

    loop.run_until_complete(main())
    loop.close()
    assert seen == [(1800.0, "world"), (3600.0, "process")]


def test_events_of_one_moment_happen_in_the_order_they_were_announced() -> None:
    timeline, seen = Timeline(), list[int]()
    for number in range(5):
        timeline.at(1.0, seen.append, number)
    timeline.run_until(2.0)
    assert seen == [0, 1, 2, 3, 4]
    assert timeline.now == 2.0


@pytest.mark.behaviour("F-43")
def test_a_stopped_process_does_nothing_while_time_passes() -> None:
    """Timers that were due meanwhile are late, and the clock shows the time that passed."""
    timeline, woken, world = Timeline(), list[float](), list[float]()
    loop = VirtualLoop(timeline)
    timeline.at(0.5, loop.freeze, 100.0)
    timeline.at(50.0, lambda: world.append(timeline.now))

    async def main() -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            woken.append(loop.time())

    loop.run_until_complete(main())
    loop.close()
    assert world == [50.0]
    assert woken == [100.0, 101.0, 102.0]


def test_a_stopped_process_finds_due_timers_when_it_continues() -> None:
    timeline = Timeline()
    loop = VirtualLoop(timeline)

    async def main() -> None:
        loop.freeze(100.0)
        await asyncio.sleep(1.0)
        assert loop.time() == 100.0

    loop.run_until_complete(main())
    loop.close()


def test_a_killed_process_runs_no_visible_cleanup() -> None:
    timeline, alive, reached = Timeline(), [True], list[str]()
    loop = VirtualLoop(timeline)

    def kill() -> None:
        alive[0] = False
        loop.kill()

    timeline.at(5.0, kill)

    async def main() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            if alive[0]:
                reached.append("cleaned up")

    with pytest.raises(Killed):
        loop.run_until_complete(main())
    assert timeline.now == 5.0
    loop.free()
    assert timeline.now == 5.0
    assert reached == []


def test_a_process_can_be_killed_at_any_of_its_turns() -> None:
    for turn in range(1, 6):
        timeline = Timeline()
        loop = VirtualLoop(timeline)
        loop.kill_at_step(turn)

        async def main() -> None:
            for _ in range(10):
                await asyncio.sleep(1.0)

        with pytest.raises(Killed):
            loop.run_until_complete(main())
        assert loop.steps == turn
        loop.free()


def test_a_process_without_future_events_is_detected() -> None:
    loop = VirtualLoop(Timeline())

    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match="every task waits"):
        loop.run_until_complete(main())
    loop.free()


def test_work_for_a_thread_runs_immediately() -> None:
    loop = VirtualLoop(Timeline())
    assert loop.run_until_complete(asyncio.to_thread(sum, [1, 2])) == 3

    async def main() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        loop.run_until_complete(main())
    loop.free()
