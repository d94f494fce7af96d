"""The problems that `twinectl status` reports from the states of the processes."""

from __future__ import annotations

from control_plane.api.limits import LimitName, LimitView
from control_plane.api.ownership import RoleProcess, ShardLoad
from control_plane.api.region_status import ProcessStatus
from control_plane.shards.status import problems_of, unavailable_status, with_lag
from control_plane.store.write_times import WriteTimes

CORE = ProcessStatus(role="core", revision=50)
SHARDS = [ShardLoad(shard=0), ShardLoad(shard=1, entitlements=["e1"]), ShardLoad(shard=2)]


def limit(reason: str) -> LimitView:
    return LimitView(
        name=LimitName.STOPS,
        what="stops",
        per_s=1.0,
        burst=1,
        passed=0,
        held=0,
        refused=0,
        reason=reason,
        lifted_for_s=None,
        lifted_by="",
        lifted_why="",
    )


def test_a_region_without_troubles_has_none() -> None:
    assert problems_of([CORE], SHARDS, {"up": 4, "down": 0}, [limit("")], 0) == []


def test_an_unavailable_shard_is_named_first_and_a_drained_one_is_not() -> None:
    known = RoleProcess(role="shard-1", epoch=7, life="x", host="h1", since=3.0)
    away = [
        unavailable_status(1, "no answer", known, SHARDS[1]),
        unavailable_status(2, "gone", None, SHARDS[2]),
    ]
    assert (away[0].host, away[0].term, away[0].since) == ("h1", 7, 3.0)
    problems = problems_of([CORE, *away], SHARDS, {"up": 4, "down": 2}, [limit("too fast")], 3)
    assert problems == [
        "shard-1: no answer",
        "2 machines are down",
        "3 machines are silent and their state is not decided yet",
        "limit stops: too fast",
    ]


def test_held_back_work_a_slow_store_and_a_late_follower_are_named() -> None:
    slow = ProcessStatus(role="shard-1", detail="a store was restored", write_p50_s=0.7, lag=5000)
    problems = problems_of([CORE, slow], [ShardLoad(shard=1, moving=["e1"])], {}, [], 0)
    assert problems == [
        "shard-1: a store was restored",
        "shard-1: the store takes 0.7 s for a write (P50)",
        "shard-1: is 5000 revisions behind the store",
        "entitlement e1 is moving to another shard",
    ]


def test_lag_is_counted_from_the_newest_revision_that_any_process_knows() -> None:
    shard = ProcessStatus(role="shard-1", revision=70)
    away = ProcessStatus(role="shard-2", ok=False)
    assert [of.lag for of in with_lag([CORE, shard, away], 60)] == [20, 0, 0]


def test_times_of_writes_are_those_of_the_last_thousand() -> None:
    times = WriteTimes()
    assert times.percentile(0.5) == 0.0
    for _ in range(1500):
        with times.measured():
            pass
    assert times.count == 1500
    assert 0.0 < times.percentile(0.5) <= times.percentile(0.99) < 1.0
