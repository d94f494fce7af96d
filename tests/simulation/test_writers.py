"""Five writers of intents of the same jobs while machines and processes fail.

A fixed slice must hold, and must find earlier ways of composing that replace the present one.
`twine-lab region run writers --seeds 1..300` runs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from control_plane.job_control.core import compose as composing
from control_plane.job_control.core import intents
from control_plane.job_control.core.compose import (
    Infrastructure,
    JobWants,
    Pushed,
    TaskSeen,
    UnifiedSpec,
    compose,
    part_of,
)
from control_plane.scheduler.core import assignment, job_change
from vm_lab.region import scenario
from vm_lab.region.results import as_story
from vm_lab.region.run import Job, run_one
from vm_lab.region.seed import SimulatedRegion, run_seed
from vm_lab.region.story import draw

SLICE = range(1, 21)
MOST = 20
"""Number of seeds within which each planted bug is found."""


def broken_by(rule: str) -> int:
    """Return the first seed that breaks the rule."""
    writers = scenario.load("writers")
    for seed in range(1, MOST + 1):
        outcome = run_one(Job(writers, seed))
        if rule in {violation.rule for violation in outcome.violations}:
            return seed
    raise AssertionError(f"none of {MOST} seeds breaks {rule}")


@pytest.mark.behaviour("JC5", "JC6", "JC8", "JC9", "JC15")
def test_the_share_is_exact_or_an_operation_is_under_way() -> None:
    """The writers are owner, autoscaler, conveyor, tester and operators, all at once."""
    outcomes = [run_one(Job(scenario.load("writers"), seed)) for seed in SLICE]
    broken = [outcome for outcome in outcomes if not outcome.ok]
    assert not broken, "\n".join(as_story(outcome) for outcome in broken)
    assert [outcome.refused for outcome in outcomes if outcome.refused] == []


def test_the_checker_runs_during_operations_and_after() -> None:
    writers = scenario.load("writers")
    region = SimulatedRegion(writers, 1)
    region.run(draw(writers, 1))
    assert region.intent_checker.checks["exact"] > 50
    assert region.intent_checker.checks["under way"] > 50


@pytest.mark.behaviour("JC5")
def test_a_share_of_the_tasks_instead_of_the_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The article's figure 4: a smaller size then extends the push to other tasks."""

    def of_the_tasks(
        wanted: JobWants, tasks: Sequence[TaskSeen], infrastructure: Infrastructure, now: float
    ) -> UnifiedSpec:
        size = wanted.size.wanted
        share = min(1.0, part_of(wanted.push.share, len(tasks)) / size) if size else 0.0
        return compose(
            replace(wanted, push=replace(wanted.push, share=share)), tasks, infrastructure, now
        )

    monkeypatch.setattr(assignment, "compose", of_the_tasks)
    assert broken_by("share") <= MOST


@pytest.mark.behaviour("JC6")
def test_a_canary_that_counts_as_progress_of_the_push_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = composing._assign_versions

    def counted(
        push: Pushed,
        tasks: Sequence[TaskSeen],
        new: Sequence[int],
        canaries: frozenset[int],
        size: int,
    ) -> object:
        share = max(0.0, (part_of(push.share, size) - len(canaries)) / size) if size else 0.0
        return versions(replace(push, share=share), tasks, new, canaries, size)

    monkeypatch.setattr(composing, "_assign_versions", counted)
    assert broken_by("share") <= MOST


@pytest.mark.behaviour("JC15")
def test_a_stale_writer_that_wins_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is based on a value that was replaced meanwhile."""
    for module in (intents, job_change):
        monkeypatch.setattr(module, "check_writer", lambda *_: None)
    assert broken_by("last-write") <= MOST


@pytest.mark.behaviour("JC10")
def test_a_canary_without_an_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intents, "_ends", lambda _: [])
    assert broken_by("last-write") <= MOST


@pytest.mark.behaviour("JC9")
def test_a_runtime_that_enters_in_the_middle_of_a_push_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The article's figure 7."""
    changed = job_change._with_spec

    def entering(record, spec):  # type: ignore[no-untyped-def]
        after = changed(record, spec)
        newest = job_change._with_runtime(after, after.spec)
        return job_change.replace(after, spec=newest, specs=after.specs | {after.version: newest})

    monkeypatch.setattr(job_change, "_with_spec", entering)
    assert broken_by("runtime") <= MOST


@pytest.mark.behaviour("JC8")
def test_a_hold_that_holds_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:

    def unheld(
        wanted: JobWants, tasks: Sequence[TaskSeen], infrastructure: Infrastructure, now: float
    ) -> UnifiedSpec:
        return compose(replace(wanted, held_until=None), tasks, infrastructure, now)

    monkeypatch.setattr(assignment, "compose", unheld)
    assert broken_by("hold") <= MOST


def test_a_seed_gives_the_same_result_at_any_time() -> None:
    writers = scenario.load("writers")
    assert run_seed(writers, 3).digest == run_seed(writers, 3).digest
