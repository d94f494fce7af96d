"""Composed seeds: every kind of event meets every other in regions that each seed draws.

A fixed slice must hold (BUG-CP30, BUG-CP31, BUG-CP32), and must find earlier rules that are
substituted. `make composed` runs a thousand seeds.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from control_plane.agents.core.observed import ObservedMachine
from control_plane.api.jobs import JobRecord, JobSpec, TaskPhase, TaskRecord, spec_of
from control_plane.scheduler.core import reconcile, rollout, sizing, task_versions
from control_plane.scheduler.core.operations import is_being_removed, is_offered
from vm_lab.region import scenario
from vm_lab.region.results import as_story
from vm_lab.region.run import Job, run_one

pytestmark = pytest.mark.behaviour("BUG-CP30", "BUG-CP31", "BUG-CP32")

SLICE = range(1, 23)
"""Seeds that have to hold."""
FOUND = {
    70: "an update was done before one of its tasks served",
    111: "a task that its host ended in a cut was blamed on its version",
    231: "an extra task was removed in the round in which a deadline forced others out",
    25: "a profile that no machine had proved kept every machine out",
    38: "after a rollback the checker knew only the image of the version",
    23: "the checker waited for a profile that a version which never starts delays",
}
"""Seeds that once broke a rule → why."""
MOST = 50


def broken_by(rules: set[str]) -> int:
    """Return the first seed of the composed scenario that breaks one of the rules."""
    composed = scenario.load("composed")
    for seed in range(1, MOST + 1):
        outcome = run_one(Job(composed, seed))
        if rules & {violation.rule for violation in outcome.violations}:
            return seed
    raise AssertionError(f"none of {MOST} seeds breaks {' or '.join(sorted(rules))}")


@pytest.mark.behaviour("BUG-CP30", "BUG-CP31", "BUG-CP32")
def test_combined_kinds_of_events_break_no_rule() -> None:
    """Covers releases, moves, resizes and policies during cuts."""
    composed = scenario.load("composed")
    outcomes = [run_one(Job(composed, seed)) for seed in SLICE]
    broken = [outcome for outcome in outcomes if not outcome.ok]
    assert not broken, "\n".join(as_story(outcome) for outcome in broken)


@pytest.mark.behaviour("BUG-CP32")
@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_a_seed_that_once_broke_a_rule_breaks_none(seed: int) -> None:
    """The seeds check that the bugs they once found stay fixed."""
    outcome = run_one(Job(scenario.load("composed"), seed))
    assert outcome.ok, f"{FOUND[seed]}: {as_story(outcome)}"


@pytest.mark.behaviour("BUG-CP30")
def test_the_time_of_the_newest_version_for_a_lost_copy_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier rule: the newest version decides when an old copy has ended."""

    def newest(record: JobRecord, _: TaskRecord) -> JobSpec:
        return record.spec

    for module in (reconcile, rollout):
        monkeypatch.setattr(module, "spec_of", newest)
    assert broken_by({"one-copy"}) <= MOST


@pytest.mark.behaviour("BUG-CP30")
def test_a_stop_version_next_to_a_keep_version_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier rule: a change from keep to stop waits for no earlier copy."""
    for module in (reconcile, rollout, sizing, task_versions):
        monkeypatch.setattr(module, "reason_to_wait", lambda *_: "")
    assert broken_by({"one-copy"}) <= MOST


@pytest.mark.behaviour("BUG-CP31")
def test_a_lost_task_that_moves_with_its_job_before_it_is_placed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier rules: a lost task got the newest version at once, and it could use a machine of any
    of the job's entitlements.
    """

    def newest(record: JobRecord) -> JobRecord:
        if task_versions.is_held_back(record):
            return record
        tasks, generation = list[TaskRecord](), record.generation
        for task in record.tasks:
            same = spec_of(record, task).disconnect == record.spec.disconnect
            is_lost = task.phase is TaskPhase.LOST and task.reason and same
            is_due = task.phase is TaskPhase.PENDING or (is_lost and not is_offered(task))
            if is_due and task.version != record.version and not is_being_removed(task):
                generation += 1
                changed = {"version": record.version, "generation": generation}
                task = replace(task, reason="", attempts=0, **changed)
            tasks.append(task)
        return replace(record, tasks=tasks, generation=generation)

    monkeypatch.setattr(sizing, "_with_newest", newest)
    monkeypatch.setattr(ObservedMachine, "held_by", lambda seen, _: seen.homes != frozenset())
    assert broken_by({"assignment", "profile"}) <= MOST
