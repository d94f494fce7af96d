"""The production control plane in simulated regions: seeds that must hold.

A seed that breaks a rule is shown as a story. `twine-lab region run everything --seed N` shortens
it, and the seed is added to `tests/data/seeds.txt`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vm_lab.region import scenario
from vm_lab.region.results import as_story
from vm_lab.region.run import Job, run_many
from vm_lab.region.seed import SeedOutcome

FIRST = 300
AT_ONCE = 50
DATA = Path(__file__).parents[1] / "data"
PROCESSES = min(2, os.cpu_count() or 1)
NAMED = [name for name in scenario.names() if scenario.load(name).shows]


def listed(name: str) -> set[tuple[str, int]]:
    """Return the seeds that a file lists: scenario and number."""
    lines = [line.split() for line in (DATA / name).read_text().splitlines()]
    return {(line[0], int(line[1])) for line in lines if line and line[0] != "#"}


def hold(jobs: list[Job]) -> list[SeedOutcome]:
    """Run all seeds; none may break a rule."""
    outcomes = run_many(jobs, PROCESSES)
    broken = [outcome for outcome in outcomes if not outcome.ok]
    assert not broken, "\n".join(as_story(outcome) for outcome in broken)
    return outcomes


@pytest.mark.parametrize("first", range(1, FIRST + 1, AT_ONCE))
def test_no_rule_is_broken_in_the_first_seeds(first: int) -> None:
    everything = scenario.load("everything")
    hold([Job(everything, seed) for seed in range(first, first + AT_ONCE)])


@pytest.mark.behaviour("F-55", "WH2")
def test_controllers_of_all_kinds_are_called_and_break_no_rule() -> None:
    """The controllers are good, away, slow, wrong or lying, among all other faults.

    No task is taken down without an acknowledgement, no deadline passes without a notice, and no
    shard loses a second replica to an operation.
    """
    controllers = scenario.load("f55-controllers")
    hold([Job(controllers, seed) for seed in range(3, 15)])


@pytest.mark.behaviour("HC5", "SC2", "SC6", "WH2")
def test_plans_in_waves_overlap_drains_releases_and_failures() -> None:
    """Budgets and controllers hold, and no two waves of a plan are away at once."""
    maintenance = scenario.load("maintenance")
    hold([Job(maintenance, seed) for seed in range(1, 13)])


@pytest.mark.behaviour("SC2", "SC6", "SC21", "HP12")
def test_updates_of_all_kinds_end_and_those_that_fail_go_back() -> None:
    """Covers canaries, gates, extra tasks, bad versions, moves and profiles in use.

    There are never more extra tasks than allowed. No task is taken beyond the budget, and every
    rollback ends.
    """
    updates = scenario.load("updates")
    hold([Job(updates, seed) for seed in range(1, 31)])


@pytest.mark.behaviour("SC11", "SC6")
def test_jobs_move_between_entitlements_among_faults() -> None:
    """Jobs move back and forth within the budget; no task is ever on machines of the other
    entitlement.
    """
    transfers = scenario.load("transfers")
    hold([Job(transfers, seed) for seed in range(1, 13)])


def test_seeds_that_once_broke_a_rule_hold_now() -> None:
    kept = sorted(listed("seeds.txt"))
    hold([Job(scenario.load(name), seed) for name, seed in kept])


@pytest.mark.behaviour(
    "F-43",
    "F-44",
    "F-46",
    "F-47",
    "F-48",
    "F-49",
    "F-50",
    "F-51",
    "F-52",
    "F-53",
    "F-55",
    "F-56",
    "F-57",
    "F-58",
    "F-59",
    "F-60",
    "F-63",
)
@pytest.mark.parametrize("name", NAMED)
def test_no_rule_is_broken_by_the_fault_of_a_scenario(name: str) -> None:
    """Each fault has a scenario with its name, in which tasks run."""
    for outcome in hold([Job(scenario.load(name), seed) for seed in (1, 2)]):
        assert max(sample.copies for sample in outcome.samples) > 0


def test_users_of_every_kind_at_once_under_faults() -> None:
    """Users apply, resize, move, drain, plan, restart and delete, and create jobs of the same name
    again.

    `twine-lab region run people --seeds 1..300` runs the others.
    """
    people = scenario.load("people")
    outcomes = hold([Job(people, seed) for seed in range(1, 13)])
    kinds = {fault.kind for outcome in outcomes for fault in outcome.story}
    assert {"resize", "move-job", "drain", "upgrade", "restart", "stop-job", "twice"} <= kinds
