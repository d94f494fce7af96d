"""The paper's Figure 14 on the real control plane: no shard loses two replicas by an update.

Small: 60 tasks and 900 shards; `python -m tests.bench.figure_14` runs it in the paper's size.
"""

from __future__ import annotations

import pytest

from tests.bench.figure_14 import AWAY_S, BACK_S, FAILS_S, Replay, Sample, csv_of, replayed, svg_of


@pytest.fixture(scope="module")
def controlled() -> Replay:
    return replayed(60, 900, controlled=True)


@pytest.fixture(scope="module")
def by_domain() -> Replay:
    return replayed(60, 900, controlled=False)


@pytest.mark.behaviour("EX1", "EX2")
def test_the_first_batch_stops_at_most_one_replica_of_each_shard(controlled: Replay) -> None:
    """About a quarter of the tasks are acknowledged, and the others are refused."""
    before = [s for s in controlled.samples if s.at < FAILS_S]
    assert 12 <= controlled.batches[0] <= 20
    assert max(s.one_down for s in before) == controlled.batches[0] * 45
    assert max(s.two_down for s in before) == 0


@pytest.mark.behaviour("EX3", "HC12")
def test_second_replicas_are_lost_only_by_the_power_cut(controlled: Replay) -> None:
    """Only shards whose first replica was being updated just then lose a second one."""
    during = [s for s in controlled.samples if FAILS_S <= s.at <= BACK_S]
    assert max(s.two_down for s in during) > 0
    assert max(s.else_two_down for s in controlled.samples) == 0


@pytest.mark.behaviour("EX4", "EX5", "WH2")
def test_once_the_first_batch_is_back_nothing_misses_two_replicas_again(controlled: Replay) -> None:
    """The MSB is still down, and the second batch has no shard in common with it."""
    after = [s for s in controlled.samples if s.at >= AWAY_S + 30]
    assert any(s.at < BACK_S for s in after)
    assert max(s.two_down for s in after) == 0
    assert 0 < controlled.batches[1] < controlled.batches[0]
    assert controlled.samples[-1].one_down == 0  # and the update ended


@pytest.mark.behaviour("WH7")
def test_fixed_update_domains_lose_shards_and_the_controller_loses_none(
    controlled: Replay, by_domain: Replay
) -> None:
    """Each domain alone is safe, but not together with a failure in another domain."""
    before = [s for s in by_domain.samples if s.at < FAILS_S]
    assert max(s.two_down for s in before) == 0
    assert max(s.else_two_down for s in by_domain.samples) > 0
    assert max(s.else_two_down for s in controlled.samples) == 0


@pytest.mark.behaviour("BUG-AU6")
def test_shards_lost_by_the_power_cut_are_counted_for_both_controllers() -> None:
    """Regression: the figure of fixed domains was a constant 0."""
    for controlled in (True, False):
        replay = Replay(60, 900, controlled)
        replay.samples = [
            Sample(0.0, 0, 0, 0, 0, 0),
            Sample(130.0, 0, 0, two_down=5, else_two_down=2, three_down=0),
        ]
        assert replay.figures()["failed_two_down"] == 3


def test_the_curves_can_be_read(controlled: Replay) -> None:
    rows = csv_of(controlled.samples).splitlines()
    assert rows[0] == "seconds,updating,one_down,two_down,else_two_down"
    assert len(rows) == len(controlled.samples) + 1
    picture = svg_of("With TaskControl", controlled.samples)
    assert picture.count("<polyline") == 2
    assert picture.startswith("<svg ")
