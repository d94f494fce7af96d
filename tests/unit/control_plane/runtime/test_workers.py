"""Keyed workers: the cost of an idle key, how failures are reported, and what remains at the
end."""

from __future__ import annotations

import asyncio
import itertools

from virtual_time import RUNTIME, run

from control_plane.runtime.workers import Pace, Workers
from wire.errors import Busy


def test_a_million_idle_keys_have_no_task_and_one_timer():
    async def main() -> None:
        rounds = 0

        async def work(_: str) -> float:
            nonlocal rounds
            rounds += 1
            return 30.0

        workers = Workers(RUNTIME, "jobs", work)
        running = asyncio.create_task(workers.run())
        for number in range(20_000):
            workers.wake(str(number))
        await RUNTIME.sleep(1.0)
        assert rounds == 20_000
        assert len(asyncio.all_tasks()) == 2  # this test and `run`
        assert len(asyncio.get_running_loop()._scheduled) <= 1
        await RUNTIME.sleep(30.0)
        assert rounds == 40_000
        running.cancel()
        await asyncio.wait([running])

    run(main())


def test_keys_that_are_due_at_once_are_woken_a_few_at_a_time():
    async def main() -> None:
        seen: list[int] = []
        woken = 0

        async def work(_: str) -> None:
            nonlocal woken
            woken += 1

        async def other() -> None:
            await RUNTIME.sleep(5.0)
            while woken < 1_000:
                seen.append(len(workers._ready))
                await asyncio.sleep(0)

        workers = Workers(RUNTIME, "machines", work)
        running = asyncio.create_task(workers.run())
        for number in range(1_000):
            workers.wake_at(str(number), RUNTIME.now() + 5.0)
        await other()
        assert woken == 1_000
        assert 0 < max(seen) <= 400  # the keys of one ring of timers and of the ring before
        running.cancel()
        await asyncio.wait([running])

    run(main())


def test_a_failing_key_is_tried_less_and_less_often_and_reports_why():
    async def main() -> None:
        times: list[float] = []

        async def work(key: str) -> float | None:
            if key == "other":
                return None
            times.append(RUNTIME.now())
            if len(times) < 5:
                raise Busy("the store is full")
            return None

        workers = Workers(RUNTIME, "jobs", work, Pace(retry_s=2.0))
        running = asyncio.create_task(workers.run())
        workers.wake("web")
        await RUNTIME.sleep(1.0)
        assert workers.failed == {"web": "the store is full"}
        workers.wake("other")  # this key is not delayed
        workers.wake("web")  # and a wake does not make a loop without pauses
        await RUNTIME.sleep(100.0)
        assert workers.failed == {}
        running.cancel()
        await asyncio.wait([running])
        gaps = [round(b - a) for a, b in itertools.pairwise(times)]
        assert gaps == [2, 4, 8, 16]

    run(main())


def test_a_key_that_is_forgotten_in_the_queue_has_no_round():
    async def main() -> list[str]:
        seen: list[str] = []

        async def work(key: str) -> None:
            seen.append(key)
            await RUNTIME.sleep(1.0)

        workers = Workers(RUNTIME, "jobs", work, Pace(limit=1))
        running = asyncio.create_task(workers.run())
        for key in ("a", "b", "c"):
            workers.wake(key)
        workers.wake_at("d", 5.0)
        await RUNTIME.sleep(0.5)
        workers.forget("b")
        workers.forget("d")
        await RUNTIME.sleep(10.0)
        running.cancel()
        await asyncio.wait([running])
        return seen

    assert run(main()) == ["a", "c"]


def test_changes_after_the_end_begin_nothing():
    async def main() -> None:
        async def work(key: str) -> None:
            raise AssertionError(key)

        workers = Workers(RUNTIME, "jobs", work)
        running = asyncio.create_task(workers.run())
        await RUNTIME.sleep(0.0)
        running.cancel()
        await asyncio.wait([running])
        workers.wake("a")
        workers.wake_at("b", 1.0)
        await RUNTIME.sleep(10.0)

    run(main())


def test_a_key_with_slower_rounds_collects_changes_for_longer():
    async def main() -> dict[str, list[float]]:
        times: dict[str, list[float]] = {"large": [], "small": []}

        async def work(key: str) -> None:
            times[key].append(round(RUNTIME.now() - began, 3))

        rests = {"large": 1.0, "small": 0.1}
        workers = Workers(RUNTIME, "jobs", work, gather_s=rests.__getitem__)
        running = asyncio.create_task(workers.run())
        began = RUNTIME.now()
        for _ in range(19):
            for key in times:
                workers.wake(key)
            await RUNTIME.sleep(0.1)
        running.cancel()
        await asyncio.wait([running])
        return times

    times = run(main())
    assert times["large"] == [0.0, 1.0]
    assert len(times["small"]) == 19
