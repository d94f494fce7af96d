"""`twinectl shard`: the work of each shard, and moves between shards."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from control_plane.cli import main

from .conftest import CannedShards, Region

pytestmark = pytest.mark.behaviour("SH4")


def ctl(region: Region, *arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}"})


@pytest.mark.behaviour("BUG-UX91")
def test_shards_are_listed_with_their_pending_work(region: Region) -> None:
    lines = ctl(region, "shard", "list").stdout.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["0", "global", "7", "9", "2", "3", "9", "-", "-"],
        ["1", "global", "0", "0", "0", "0", "0", "ads", "-"],
    ]
    shown = ctl(region, "shard", "show", "0").stdout.splitlines()
    assert shown[0] == "shard 0: global"
    assert [line.split() for line in shown[1:]] == [
        ["ENTITLEMENT", "REGION"],
        ["ads", "(any)"],
        ["front", "(any)"],
    ]
    wrong = ctl(region, "shard", "show", "2")
    assert wrong.exit_code == 3, "BUG-UX91: it was called a wrong use, 64"
    assert "there is no shard 2" in wrong.output


def test_a_move_is_planned_and_done_and_kept_in_the_audit_log(region: Region) -> None:
    shards = region.control_plane.shards
    assert isinstance(shards, CannedShards)
    planned = ctl(region, "shard", "move", "front", "--to", "1", "--plan")
    assert planned.stdout == (
        "entitlement front would move from shard 0 to 1, with 3 machines and 1 jobs\n"
    )
    assert "move_entitlement" not in ctl(region, "audit", "-o", "json").stdout
    done = ctl(region, "shard", "move", "front", "--to", "1")
    assert done.stdout == "entitlement front moved from shard 0 to 1, with 3 machines and 1 jobs\n"
    assert shards.moves == [("front", 1, True), ("front", 1, False)]
    assert "entitlement/front" in ctl(region, "audit", "-o", "json").stdout
    same = ctl(region, "shard", "move", "front", "--to", "0")
    assert same.stdout == "entitlement front is already in shard 0\n"


def test_a_shard_is_drained_into_those_with_the_fewest_machines(region: Region) -> None:
    shards = region.control_plane.shards
    assert isinstance(shards, CannedShards)
    planned = ctl(region, "shard", "drain", "0", "--plan")
    assert planned.stdout.splitlines() == [
        "entitlement ads would move from shard 0 to 1, with 3 machines and 1 jobs",
        "entitlement front would move from shard 0 to 1, with 3 machines and 1 jobs",
        "2 entitlements",
    ]
    assert ctl(region, "shard", "drain", "0").exit_code == 0
    moves = [("ads", 1), ("front", 1)]
    assert shards.moves == [(*m, True) for m in moves] + [(*m, False) for m in moves]
    assert ctl(region, "shard", "drain", "1").stdout == "0 entitlements\n"
    wrong = ctl(region, "shard", "drain", "2")
    assert wrong.exit_code != 0
    assert "there is no shard 2" in wrong.output


def test_status_is_one_screen_and_its_exit_code_reports_health(region: Region) -> None:
    well = ctl(region, "status")
    assert well.exit_code == 0, well.output
    lines = [line.split() for line in well.stdout.splitlines()]
    assert lines[0] == ["the", "region", "is", "well"]
    assert ["machines", "3", "up"] in lines
    assert ["all", "ready", "h1", "-", "0", "0", "0.0/250.0", *["0.0", "0", "0", "0", "0"]] in lines
    assert lines[-1] == ["0", "9", "0", "7"]
    region.control_plane.is_ready = False
    wrong = ctl(region, "status")
    assert wrong.exit_code == 1
    assert wrong.stdout.splitlines()[:2] == ["not well:", "  all: the store is full"]


def test_a_shard_that_does_not_start_is_awaited_and_named(region: Region) -> None:
    found = ctl(region, "shard", "add", "--timeout", "1s")
    assert found.exit_code == 69
    assert "shard 2 is not ready after 1s: no process of it has ever led" in found.output
    assert "shard-credential 2" in found.output
