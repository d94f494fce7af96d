"""Keyed workers under any wakes, durations of rounds and failures."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from virtual_time import RUNTIME, run

from control_plane.runtime.workers import Pace, Workers
from wire.errors import Busy

END_S = 1_000.0
KEYS = st.sampled_from("abcde")
SECONDS = st.sampled_from([0.0, 0.005, 0.02, 0.5, 1.0, 3.0])
ROUND = st.tuples(SECONDS, st.sampled_from([None, None, 0.0, 0.3, 2.0, "fails", "breaks"]))
CALL = st.tuples(SECONDS, st.sampled_from(["wake", "wake", "wake_at"]), KEYS, SECONDS)


@dataclass
class Story:
    """Times of calls and of rounds, and what each round returned."""

    calls: list[tuple[float, str, str, float]]
    rounds: list[tuple[str, float, float, object]]
    most: int = 0


async def replay(calls, plans, pace) -> tuple[Story, Workers]:
    story, at_work, turns = Story([], []), Counter(), defaultdict(int)

    async def work(key: str) -> float | None:
        plan = plans.get(key, [])
        seconds, result = plan[turns[key]] if turns[key] < len(plan) else (0.01, None)
        turns[key] += 1
        began = RUNTIME.now()
        at_work[key] += 1
        assert at_work[key] == 1, "one key is at work twice at once"
        story.most = max(story.most, sum(at_work.values()))
        await RUNTIME.sleep(seconds)
        at_work[key] -= 1
        story.rounds.append((key, began, RUNTIME.now(), result))
        match result:
            case "fails":
                raise Busy("the store is busy")
            case "breaks":
                raise KeyError(key)
        return result

    workers = Workers(RUNTIME, "test", work, pace)
    running = asyncio.create_task(workers.run())
    for pause, what, key, delay in calls:
        await RUNTIME.sleep(pause)
        now = RUNTIME.now()
        if what == "wake":
            workers.wake(key)
            story.calls.append((now, what, key, now))
        else:
            workers.wake_at(key, now + delay)
            story.calls.append((now, what, key, now + delay))
    await RUNTIME.sleep(END_S)
    assert workers.is_idle()
    running.cancel()
    await asyncio.wait([running])
    return story, workers


@pytest.mark.behaviour("BUG-CP94")
@settings(max_examples=150)
@given(
    st.lists(CALL, max_size=25),
    st.dictionaries(KEYS, st.lists(ROUND, max_size=6)),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.01]),
)
@example(  # due in the pause after the round that was running at the call
    [(0.0, "wake", "a", 0.0), (0.005, "wake_at", "a", 0.02)], {"a": [(0.02, None)]}, 1, 0.01
)
def test_no_change_is_lost_and_no_round_is_unnecessary(calls, plans, limit, gather_s):
    """A round follows each wake and each due time, and each round had a cause."""
    pace = Pace(limit=limit, gather_s=gather_s, retry_s=2.0)
    story, workers = run(replay(calls, plans, pace))
    assert story.most <= limit
    by_key = defaultdict(list)
    for key, began, ended, result in story.rounds:
        by_key[key].append((began, ended, result))
    for at, what, key, _ in story.calls:
        # a round that begins after a wake sees the state at the wake; a round that was
        # due later may be replaced by an earlier round that checked everything
        assert any(began >= at for began, _, _ in by_key[key]), (what, key, at)
    causes = Counter(key for _, _, key, _ in story.calls)
    for key, rounds in by_key.items():
        own = sum(result is not None for _, _, result in rounds)
        assert len(rounds) <= causes[key] + own
        for (_, ended, result), (began, _, _) in itertools.pairwise(rounds):
            assert began >= ended + (2.0 if result in ("fails", "breaks") else gather_s) - 1e-9
        assert (key in workers.failed) is (rounds[-1][2] in ("fails", "breaks"))


@given(st.lists(KEYS, min_size=1, max_size=30))
def test_with_one_at_a_time_keys_have_their_turn_in_the_order_they_were_woken(keys):
    story, _ = run(replay([(0.0, "wake", key, 0.0) for key in keys], {}, Pace(limit=1)))
    first = list(dict.fromkeys(key for key, *_ in story.rounds))
    assert first == list(dict.fromkeys(keys))
