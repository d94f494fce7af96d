"""Composed seeds: every kind of event meets every other in regions that each seed draws.

A fixed slice must hold (BUG-CP30, BUG-CP31, BUG-CP32), and finds earlier rules that are put back.
`make composed` runs a thousand seeds.
"""

from __future__ import annotations

import pytest

from control_plane.api.jobs import JobRecord, JobSpec, TaskRecord
from control_plane.scheduler.core import reconcile, release, rollout, sizing
from vm_lab.region import scenario
from vm_lab.region.results import told
from vm_lab.region.run import Job, run_one

SLICE = range(1, 23)
"""Seeds that hold."""
MOST = 50


def broken_by(rules: set[str]) -> int:
    """Return the first seed of the composed scenario that breaks one of the rules."""
    composed = scenario.load("composed")
    for seed in range(1, MOST + 1):
        outcome = run_one(Job(composed, seed))
        if rules & {violation.rule for violation in outcome.violations}:
            return seed
    raise AssertionError(f"none of {MOST} seeds breaks {' or '.join(sorted(rules))}")


def test_no_rule_is_broken_where_kinds_of_events_meet() -> None:
    """BUG-CP30, BUG-CP31, BUG-CP32: releases, moves, resizes and policies during cuts."""
    composed = scenario.load("composed")
    outcomes = [run_one(Job(composed, seed)) for seed in SLICE]
    broken = [outcome for outcome in outcomes if not outcome.ok]
    assert not broken, "\n".join(told(outcome) for outcome in broken)


def test_the_time_of_the_newest_version_for_a_lost_copy_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BUG-CP30: the rule before: the newest version says when an old copy has ended."""

    def newest(record: JobRecord, _: TaskRecord) -> JobSpec:
        return record.spec

    for module in (reconcile, rollout):
        monkeypatch.setattr(module, "spec_of", newest)
    assert broken_by({"one-copy"}) <= MOST


def test_a_stop_version_beside_the_copy_of_a_keep_version_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BUG-CP30: the rule before: a change from keep to stop waits for no earlier copy."""
    for module in (reconcile, release, rollout, sizing):
        monkeypatch.setattr(module, "waits_for", lambda *_: "")
    assert broken_by({"one-copy"}) <= MOST
