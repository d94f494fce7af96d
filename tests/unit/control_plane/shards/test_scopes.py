"""Which shards may own which entitlements, and the order in which shards are chosen."""

from __future__ import annotations

import pytest

from control_plane.api.ownership import ShardLoad
from control_plane.config import load
from control_plane.shards.core.scopes import (
    best_of_each_scope,
    check_move,
    check_owners,
    check_pin,
    least_loaded_first,
    may_own,
    scope_text,
    unmovable,
)
from wire.errors import ConfigError, Conflict

pytestmark = pytest.mark.behaviour("SH13")

SHARDS = [
    ShardLoad(shard=0, load=1),
    ShardLoad(shard=1, load=9, region="west"),
    ShardLoad(shard=2, load=5, region="east"),
    ShardLoad(shard=3, load=7, region="west"),
    ShardLoad(shard=4, load=3),
]
"""Two global shards, two for the region west and one for east."""
SCOPES = {load.shard: load.region for load in SHARDS}


@pytest.mark.behaviour("SH13")
@pytest.mark.parametrize(
    ("scope", "region", "may"),
    [
        ("", None, True),
        ("", "west", True),
        ("west", "west", True),
        ("west", "east", False),
        ("west", None, False),
    ],
)
def test_a_regional_shard_owns_entitlements_of_its_region_and_a_global_shard_any(
    scope: str, region: str | None, may: bool
) -> None:
    assert may_own(scope, region) is may


@pytest.mark.behaviour("SH13")
@pytest.mark.parametrize(
    ("region", "order"),
    [("west", [3, 1, 0, 4]), ("east", [2, 0, 4]), ("north", [0, 4]), (None, [0, 4])],
)
def test_shards_of_the_region_come_before_global_ones_and_the_least_loaded_first(
    region: str | None, order: list[int]
) -> None:
    """The load of the global shards does not matter for this order."""
    assert least_loaded_first(SHARDS, region) == order


@pytest.mark.behaviour("SH13")
def test_the_best_shard_of_each_scope_is_tried_when_a_shard_is_drained() -> None:
    """A global shard takes the entitlements that still have machines of another region."""
    assert best_of_each_scope(SHARDS, "west") == [3, 0]
    assert best_of_each_scope(SHARDS[1:], None) == [4]
    assert best_of_each_scope(SHARDS[1:3], "east") == [2]


@pytest.mark.behaviour("SH13")
def test_a_move_out_of_scope_reports_what_where_why_and_what_to_try() -> None:
    check_move("pay", "west", 1, "west", {"m1": "west"})
    check_move("pay", None, 0, "", {"m1": "west"})
    with pytest.raises(Conflict) as refused:
        check_move("pay", "east", 1, "west", {})
    assert str(refused.value) == (
        "cannot give entitlement 'pay' to shard 1: that shard is for region west, and the"
        " entitlement is pinned to region east"
    )
    assert "twinectl entitlement update pay --region west" in refused.value.hint
    with pytest.raises(Conflict, match="the entitlement is not pinned to a region"):
        check_move("pay", None, 1, "west", {})


@pytest.mark.behaviour("SH13")
def test_an_entitlement_with_machines_elsewhere_does_not_get_into_a_regional_shard() -> None:
    """Tasks stay on their machines when a pin changes."""
    held = {"m1": "west", "m2": "east", "m3": "north"}
    with pytest.raises(Conflict, match="still holds 2 machines elsewhere: m2, m3"):
        check_move("pay", "west", 1, "west", held)


@pytest.mark.behaviour("SH13")
def test_a_pin_that_the_shard_excludes_is_refused_with_the_way_there() -> None:
    check_pin("pay", "west", 1, "west")
    with pytest.raises(Conflict) as found:
        check_pin("pay", "east", 1, "west")
    assert str(found.value) == (
        "cannot pin entitlement 'pay' to region east: shard 1 owns it, which is for region west"
    )
    assert found.value.hint == "twinectl shard move pay --to 0; then change its region"
    with pytest.raises(Conflict, match="cannot leave entitlement 'pay' without a region") as found:
        check_pin("pay", None, 1, "west", may_move=False)
    assert found.value.hint.startswith("give it its own machines with --region west; then ")


@pytest.mark.behaviour("SH13")
def test_a_map_that_contradicts_the_settings_is_named_with_an_example() -> None:
    pins = {"pay": "west", "ads": None, "web": "east"}
    check_owners({"pay": 1, "ads": 0, "web": 2}, pins, SCOPES.__getitem__)
    with pytest.raises(ConfigError) as refused:
        check_owners({"pay": 2, "ads": 1, "web": 4}, pins, SCOPES.__getitem__)
    assert str(refused.value) == (
        "cannot run with these scheduler.shard_regions: 2 entitlements are in a shard of another"
        " region; 'ads' in shard 1 is not pinned to a region, and the shard is for region west"
    )
    assert "twinectl shard move ads --to 0" in refused.value.hint


@pytest.mark.behaviour("SH13")
def test_entitlements_without_another_possible_shard_are_found_before_a_drain() -> None:
    full = ShardLoad(shard=0, entitlements=["ads", "pay", "web"], pinned={"pay": "west"})
    assert unmovable(full, SHARDS[1:4]) == ["ads", "web"]
    assert unmovable(full, SHARDS[1:]) == []


def test_a_scope_is_shown_as_text() -> None:
    assert (scope_text(""), scope_text("west")) == ("global", "region west")


@pytest.mark.behaviour("SH13")
@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ({"0": "west"}, "shard 0 has what no other shard has, so it is global"),
        ({"64": "west"}, "a shard from 1 to 63"),
        ({"3": "west"}, "scheduler.shard_regions.3: there is no such shard: shards = 3"),
        ({"1": ""}, "shard_regions"),
        (["west"], "shard_regions"),
    ],
)
def test_regions_of_shards_that_cannot_be_are_refused(
    regions: dict[str, str] | list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match="scheduler") as refused:
        load(None, {"scheduler": {"shards": 3, "shard_regions": regions}})
    assert message in str(refused.value)


@pytest.mark.behaviour("SH13")
def test_a_shard_that_is_a_process_may_have_a_region_before_it_starts() -> None:
    """With shard processes, `shards` is only the least number of shards."""
    core = {"role": "core", "etcd": {"endpoints": ["http://e:2379"]}}
    assert load(None, core | {"scheduler": {"shard_regions": {"9": "west"}}})
