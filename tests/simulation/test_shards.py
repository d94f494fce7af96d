"""Three shards in the simulated region: their entitlements move, which breaks no rule."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from control_plane import running_shards
from control_plane.shards.ownership import OwnershipMap
from vm_lab.region import scenario
from vm_lab.region.run import Job, run_one
from vm_lab.region.seed import SimulatedRegion, scenario_of_seed
from vm_lab.region.story import draw

MOST = 200
PUT = re.compile(r" put (\S+) generation")


def found(rules: set[str]) -> int:
    """Return the first seed of three shards that breaks one of the rules."""
    shards = scenario.load("shards")
    for seed in range(1, MOST + 1):
        if rules & {violation.rule for violation in run_one(Job(shards, seed)).violations}:
            return seed
    raise AssertionError(f"none of {MOST} seeds breaks {' or '.join(sorted(rules))}")


@pytest.mark.behaviour("SH1", "SH3", "SH4", "SH15", "AV7")
@pytest.mark.parametrize("seed", range(1, 13))
def test_entitlements_move_between_shards_among_faults(seed: int) -> None:
    """There is one owner at a time, and no machine has two; a move ends or did not begin.

    The process is killed before and after writes, and stores leave the outcome of a write open.
    Releases, drains and transfers of jobs continue meanwhile.
    """
    outcome = run_one(Job(scenario.load("shards"), seed))
    assert not outcome.violations, [str(violation) for violation in outcome.violations]


@pytest.mark.behaviour("SH3")
@pytest.mark.parametrize("seed", [1, 2])
def test_no_task_restarts_by_moves_of_its_entitlement(seed: int) -> None:
    """Each task gets one start command, however often its owner changes."""
    chosen = scenario_of_seed(scenario.load("shards-quiet"), seed)
    region = SimulatedRegion(chosen, seed)
    region.run(list(draw(chosen, seed)))
    lines = list(region.history.lines())
    moved = sum(1 for line in lines if "client is granted: move entitlement" in line)
    put_counts = Counter(match[1] for line in lines if (match := PUT.search(line)))
    assert moved >= 20
    assert put_counts
    assert set(put_counts.values()) == {1}, put_counts
    assert not region.checker.violations


@pytest.mark.behaviour("SH4")
def test_two_owners_of_an_entitlement_that_moved_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shard that uses its old ownership continues next to the new owner."""

    def owner(ownership: OwnershipMap, number: int) -> Callable[[str], bool]:
        previous = set[str]()

        def owns(pool: str) -> bool:
            if ownership.shard_of(pool) == number:
                previous.add(pool)
            return pool in previous

        return owns

    monkeypatch.setattr(running_shards, "_owner", owner)
    assert found({"one-owner"}) <= MOST


@pytest.mark.behaviour("SH3")
def test_claims_that_an_old_owner_keeps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new owner has to take over the allocations, or it places every task again."""
    monkeypatch.setattr(running_shards.handover, "adopt", lambda *_: None)
    assert found({"budget", "one-copy", "second-copy", "rest", "capacity"}) <= MOST
