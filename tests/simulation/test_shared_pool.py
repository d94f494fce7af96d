"""A slice of tests/bench/shared_pool.py: many shards take machines from one free pool."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from control_plane.broker.holds import Take
from tests.bench.shared_pool import Shard, figure_13, share


@pytest.mark.behaviour("SH1", "SH14")
def test_twenty_shards_share_one_pool_and_no_machine_has_two_owners() -> None:
    """Each shard knows less than the brokers, and is refused the machines that others took."""
    found = share(machines=6000, shards=20, tasks=100)
    assert found["tasks_placed"] == 2000
    assert found["tasks_unplaced"] == 0
    assert found["refused_by_brokers"] > 0
    assert found["machines_per_shard_min"] > 0


@pytest.mark.behaviour("SH14")
def test_brokers_that_compare_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines are assigned twice if only the shards' own knowledge counts."""

    async def prepare(shard: Shard, transaction: str, takes: Mapping[str, Take]) -> None:
        shard.owners.held[transaction] = takes
        await asyncio.sleep(0)

    monkeypatch.setattr(Shard, "prepare", prepare)
    with pytest.raises(AssertionError, match="has two owners"):
        share(machines=6000, shards=3, tasks=100)


@pytest.mark.behaviour("SH12", "WH5")
def test_a_federation_splits_a_job_that_grows_and_shards_keep_it_whole() -> None:
    """Compares with Figure 13 of the paper."""
    found = figure_13(machines=6000, shards=20)
    assert found["federation_clusters_of_b"] == 2
    assert found["federation_tasks_in_second_cluster"] > 0
    assert found["sharding_tasks_unplaced"] == 0
