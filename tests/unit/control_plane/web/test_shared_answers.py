"""Answers that all viewers of a page share."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.web import calls
from control_plane.web.calls import COST_SHARE, FRESH_S, SHARED_MAX, STALE_S, SharedAnswers


class Source:
    """Counts how often an answer is computed. The test sets its clock."""

    def __init__(self) -> None:
        self.now, self.loads = 100.0, 0
        self.answers = SharedAnswers(lambda: self.now)
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def load(self) -> dict[str, int]:
        self.loads += 1
        number = self.loads
        await self.may_end.wait()
        return {"number": number}

    async def get(self, key: str = "region") -> int:
        return (await self.answers.get(key, self.load))["number"]


@pytest.mark.behaviour("FE1")
def test_viewers_at_the_same_time_share_one_computation() -> None:
    async def run() -> None:
        source = Source()
        source.may_end.clear()
        viewers = [asyncio.create_task(source.get()) for _ in range(20)]
        await asyncio.sleep(0)
        source.may_end.set()
        assert await asyncio.gather(*viewers) == [1] * 20
        source.now += FRESH_S * 0.9
        assert await source.get() == 1

    asyncio.run(run())


@pytest.mark.behaviour("FE1")
def test_an_older_answer_is_given_while_the_next_is_computed() -> None:
    async def run() -> None:
        source = Source()
        assert await source.get() == 1
        source.now += FRESH_S * 1.1
        source.may_end.clear()
        assert await source.get() == 1
        await asyncio.sleep(0)
        assert await source.get() == 1
        assert source.loads == 2
        source.now += STALE_S
        waiting = asyncio.create_task(source.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        source.may_end.set()
        assert await waiting == 2

    asyncio.run(run())


@pytest.mark.behaviour("FE1")
def test_a_failure_is_raised_and_the_next_viewer_tries_again() -> None:
    async def run() -> None:
        source = Source()

        async def fail() -> dict[str, int]:
            raise ValueError("away")

        with pytest.raises(ValueError, match="away"):
            await source.answers.get("region", fail)
        assert await source.get() == 1

    asyncio.run(run())


@pytest.mark.behaviour("FE1")
def test_a_viewer_that_leaves_does_not_stop_the_computation_for_others() -> None:
    async def run() -> None:
        source = Source()
        source.may_end.clear()
        leaves, stays = asyncio.create_task(source.get()), asyncio.create_task(source.get())
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.sleep(0)
        source.may_end.set()
        assert await stays == 1

    asyncio.run(run())


@pytest.mark.behaviour("FE1")
def test_the_number_of_answers_is_bounded() -> None:
    async def run() -> None:
        source = Source()
        for number in range(2 * SHARED_MAX):
            await source.get(str(number))
        assert len(source.answers._answers) == SHARED_MAX

    asyncio.run(run())


@pytest.mark.behaviour("FE1")
def test_an_answer_that_takes_long_is_fresh_for_longer() -> None:
    async def run() -> None:
        source = Source()

        async def slow() -> int:
            source.now += 0.5
            source.loads += 1
            return source.loads

        assert await source.answers.get("capacity", slow) == 1
        source.now += 0.5 / COST_SHARE - 0.6
        assert await source.answers.get("capacity", slow) == 1
        assert source.loads == 1
        source.now += 0.2
        assert await source.answers.get("capacity", slow) == 1, "stale while the next comes"
        await asyncio.sleep(0)
        assert source.loads == 2

    asyncio.run(run())


@pytest.mark.behaviour("FE1")
def test_a_slow_part_is_left_out_and_present_on_the_next_request(monkeypatch) -> None:
    monkeypatch.setattr(calls, "OPTIONAL_S", 0.001)

    async def run() -> None:
        source = Source()
        source.may_end.clear()
        assert await source.answers.get_if_quick("region", source.load) is None
        source.may_end.set()
        assert await source.get() == 1
        assert await source.answers.get_if_quick("region", source.load) == {"number": 1}
        assert source.loads == 1

    asyncio.run(run())


@pytest.mark.behaviour("FE1")
def test_the_first_long_answer_is_begun_once_the_page_was_sent(monkeypatch) -> None:
    """The first requests get no answer. Later ones get the answer that viewers share."""
    monkeypatch.setattr(calls, "LONG_DELAY_S", 0.001)

    async def run() -> None:
        source = Source()
        assert await source.answers.get_if_quick("region", source.load, is_long=True) is None
        assert await source.answers.get_if_quick("region", source.load, is_long=True) is None
        assert source.loads == 0
        while not source.loads:
            await asyncio.sleep(0.001)
        assert await source.answers.get_if_quick("region", source.load, is_long=True) == {
            "number": 1
        }
        await asyncio.sleep(0.01)
        assert source.loads == 1, "the second timer finds it computed"

    asyncio.run(run())
