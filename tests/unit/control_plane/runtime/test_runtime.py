"""The process as actors see it: pauses, clock steps, failures, turns, and the meter."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from types import SimpleNamespace

import pytest
from virtual_time import RUNTIME, VirtualLoop, run

from control_plane.runtime.runtime import TURN_S, Runtime, SteppedRuntime


class Clocks:
    """The host's clocks in addition to the loop's clock. Tests set them."""

    def __init__(self) -> None:
        self.suspended_s = self.stepped_s = 0.0

    def boot(self) -> float:
        return asyncio.get_running_loop().time() + self.suspended_s

    def wall(self) -> float:
        return 1_800_000_000.0 + self.boot() + self.stepped_s


async def watched(clocks: Clocks, happens) -> list[float]:
    """Return the pauses that a runtime reports while its clocks change."""
    runtime, reported = Runtime(clocks.wall, 0, clocks.boot), list[float]()
    runtime.on_pause(reported.append)
    watching = asyncio.create_task(runtime.watch_clocks())
    await asyncio.sleep(10)
    happens(runtime)
    await asyncio.sleep(10)
    watching.cancel()
    await asyncio.wait([watching])
    return reported


def stop(seconds: float) -> None:
    """Let time pass while the process is stopped, as between SIGSTOP and SIGCONT."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._virtual.now += seconds


@pytest.mark.behaviour("BUG-CP3")
@pytest.mark.parametrize(("stopped_s", "reported"), [(299.0, 1), (3.0, 1), (1.0, 0)])
def test_a_stopped_process_detects_its_pause(stopped_s, reported):
    """A process knows its own pauses, so it can distinguish them from the silence of others."""
    pauses = run(watched(Clocks(), lambda _: stop(stopped_s)))
    assert len(pauses) == reported
    assert all(stopped_s <= pause <= stopped_s + 1.0 for pause in pauses)


@pytest.mark.behaviour("BUG-CP3")
def test_a_suspended_host_is_detected_although_the_loop_clock_stopped():
    """CLOCK_MONOTONIC does not count a suspend, CLOCK_BOOTTIME does."""
    clocks = Clocks()

    def suspend(_: Runtime) -> None:
        clocks.suspended_s += 400.0

    pauses = run(watched(clocks, suspend))
    assert [round(pause) for pause in pauses] == [400]


@pytest.mark.behaviour("BUG-CP3")
def test_the_first_check_of_the_clocks_learns_of_a_pause():
    """After a pause all timers are due at once, in any order."""
    seen = []

    def happens(runtime: Runtime) -> None:
        runtime.on_pause(lambda _: seen.append("reported"))
        stop(60.0)
        runtime.check_clocks()
        seen.append("concluded")

    assert len(run(watched(Clocks(), happens))) == 1
    assert seen == ["reported", "concluded"]


@pytest.mark.behaviour("BUG-CP9")
@pytest.mark.parametrize("step_s", [-3_600.0, 7_200.0])
def test_a_step_of_the_wall_clock_is_no_pause_and_is_logged(step_s, caplog):
    """Durations come from a clock that does not step."""
    clocks = Clocks()

    def step(_: Runtime) -> None:
        clocks.stepped_s += step_s

    with caplog.at_level(logging.WARNING):
        assert run(watched(clocks, step)) == []
    assert [record.message for record in caplog.records] == ["the wall clock stepped"]
    assert caplog.records[0].seconds == step_s


def test_failed_work_is_logged_with_its_name_and_reported(caplog):
    async def main() -> list[tuple[str, str]]:
        reported: list[tuple[str, str]] = []
        end = RUNTIME.on_failure(lambda name, error: reported.append((name, str(error))))

        async def fails() -> None:
            await RUNTIME.sleep(1)
            raise ValueError("no such thing")

        RUNTIME.spawn("keeper", fails())
        cancelled = RUNTIME.spawn("other", asyncio.sleep(100))
        await RUNTIME.sleep(2)
        cancelled.cancel()
        end()
        await RUNTIME.sleep(1)
        return reported

    assert run(main()) == [("keeper", "no such thing")]
    assert [(r.message, r.actor) for r in caplog.records] == [("work failed", "keeper")]


@pytest.mark.behaviour("BUG-CP10")
def test_a_turn_is_that_of_the_whole_process():
    """Formerly forty actors that computed 5 ms each in one turn of the loop stopped it for 200
    ms."""

    async def main() -> int:
        runtime, turns = Runtime(seed=0), 0

        async def computes() -> None:
            for _ in range(2):
                await runtime.checkpoint()
                end = time.perf_counter() + 0.005
                while time.perf_counter() < end:
                    pass

        async def counts_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(counts_turns())
        await asyncio.gather(*(runtime.spawn("computing", computes()) for _ in range(40)))
        counting.cancel()
        return turns

    assert asyncio.run(main()) >= 80  # one turn for each 5 ms of work


def test_a_cancelled_waiter_blocks_no_other():
    async def main() -> list[int]:
        runtime, done = Runtime(seed=0), list[int]()

        async def computes(number: int) -> None:
            await runtime.checkpoint()
            end = time.perf_counter() + 0.005
            while time.perf_counter() < end:
                pass
            done.append(number)

        tasks = [asyncio.create_task(computes(number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.wait(tasks)
        await runtime.checkpoint()
        return done

    assert asyncio.run(main()) == [0, 1, 3, 4]


def test_in_simulation_turns_are_counted_and_nothing_runs_in_a_thread():
    async def main() -> list[int]:
        runtime, order = SteppedRuntime(lambda: 0.0, seed=1), list[int]()

        async def computes(number: int) -> None:
            for _ in range(runtime.STEPS):
                order.append(number)
                await runtime.checkpoint()

        await asyncio.gather(computes(1), computes(2))
        assert await runtime.offload(lambda: sys.modules["threading"].get_ident()) == (
            sys.modules["threading"].get_ident()
        )
        return order

    assert run(main()) == run(main())


def test_the_meter_counts_each_actors_steps():
    async def main() -> Runtime:
        runtime = Runtime(seed=0)

        async def works() -> int:
            for _ in range(3):
                await asyncio.sleep(0)
            return 7

        assert await runtime.spawn("worker", works()) == 7
        return runtime

    meter = asyncio.run(main()).meter
    assert meter.busy_s.keys() == meter.longest_s.keys() == {"worker"}
    assert 0 < meter.longest_s["worker"] <= meter.busy_s["worker"]


async def test_only_as_many_waiting_calls_continue_as_a_turn_has_time_for():
    """Formerly 64 waiters were released at once after light turns, and their heavy steps made one
    long turn."""
    runtime, turns = Runtime(seed=1), list[int]()
    number = 0

    async def count_turns() -> None:
        nonlocal number
        while True:
            number += 1
            await asyncio.sleep(0)

    async def work(seconds: float) -> None:
        await runtime.checkpoint()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        if seconds:
            turns.append(number)

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(
        work(0.005), *(work(0.0) for _ in range(500)), *(work(0.005) for _ in range(30))
    )
    counting.cancel()
    assert len(turns) == len(set(turns)) == 31


@pytest.mark.behaviour("BUG-CP114")
async def test_answers_to_clients_share_every_second_turn(monkeypatch: pytest.MonkeyPatch):
    """A list of 1,000 jobs waited for hundreds of rounds of jobs at each of its checkpoints."""
    runtime, clock, rounds = Runtime(seed=1), 0.0, 0
    monkeypatch.setattr(
        "control_plane.runtime.runtime.time", SimpleNamespace(perf_counter=lambda: clock)
    )

    async def round_of_a_job() -> None:
        nonlocal clock, rounds
        while True:
            await runtime.checkpoint()
            clock, rounds = clock + TURN_S, rounds + 1

    async def answer(steps: int) -> None:
        nonlocal clock
        for _ in range(steps):
            await runtime.checkpoint(answers=True)
            clock += TURN_S

    background = [asyncio.create_task(round_of_a_job()) for _ in range(200)]
    await asyncio.sleep(0)
    before = rounds
    await asyncio.gather(answer(20), answer(20))
    assert 40 <= rounds - before <= 45
    cancelled, other = asyncio.create_task(answer(9)), asyncio.create_task(answer(9))
    await asyncio.sleep(0)
    cancelled.cancel()
    await other
    for task in background:
        task.cancel()
    await answer(3)
