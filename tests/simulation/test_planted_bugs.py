"""Bugs that are planted by substitution: the seeds find each of them soon.

No product code is edited; one of its functions is replaced while a test runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from control_plane.agents.core.observed import View
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.health.checker import HealthChecker
from control_plane.health.watch import Watch
from control_plane.ops_planner import planner
from control_plane.scheduler.core import approval as consulting
from control_plane.scheduler.core import (
    decide,
    needed_operations,
    reconcile,
    release,
    rollout,
    sizing,
)
from control_plane.scheduler.core.decision import Decision, DecisionInput
from vm_lab.region import scenario
from vm_lab.region.run import Job, run_one
from vm_lab.region.seed import SeedOutcome

MOST = 200


def found(name: str, rules: set[str]) -> SeedOutcome:
    """Return the first seed of a scenario that breaks one of the rules."""
    chosen = scenario.load(name)
    for seed in range(1, MOST + 1):
        outcome = run_one(Job(chosen, seed))
        if rules & {violation.rule for violation in outcome.violations}:
            return outcome
    raise AssertionError(f"none of {MOST} seeds of {name} breaks {' or '.join(sorted(rules))}")


def test_a_budget_that_ignores_failures_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 4: failures count against the availability budget."""

    def serves(task: TaskRecord, _: View) -> bool:
        return task.phase is not TaskPhase.DRAINING and task.phase is not TaskPhase.STOPPING

    monkeypatch.setattr(needed_operations, "available", serves)
    assert found("everything", {"budget"}).seed <= MOST


@pytest.mark.behaviour("BUG-CP1")
def test_marking_up_at_an_edge_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is declared down while it answers stays down forever."""
    level: Callable[[HealthChecker, Watch, float], None] = HealthChecker._check_down

    def edge(self: HealthChecker, watch: Watch, now: float) -> None:
        if watch.back_at == now:
            level(self, watch, now)
        else:
            self._schedule(watch, now + 1.0)

    monkeypatch.setattr(HealthChecker, "_check_down", edge)
    assert found("f53-slow-agents", {"rest", "one-copy-after-healing"}).seed <= MOST


def test_a_second_copy_before_the_certain_end_of_the_first_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 3: a task of a job with the policy `stop` runs once, however long its machine is
    silent.
    """
    for module in (reconcile, rollout):
        monkeypatch.setattr(module, "ended_in_s", lambda *_: 0.0)
    assert found("everything", {"one-copy"}).seed <= MOST


@pytest.mark.behaviour("TC5")
def test_an_operation_without_acknowledgement_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offered operation may begin only after the controller's acknowledgement."""
    for module in (decide, sizing):
        monkeypatch.setattr(module, "is_acknowledged", lambda _: True)
    assert found("f55-controllers", {"acknowledged"}).seed <= MOST


@pytest.mark.behaviour("SC21")
def test_more_extra_tasks_than_allowed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`update.surge` is the largest number of extra tasks."""
    surged = decide.with_extra_tasks

    def more(made: Decision, seen: DecisionInput) -> JobRecord:
        spec = made.record.spec
        larger = replace(spec.update, surge=spec.update.surge + 3)
        made.record = replace(made.record, spec=replace(spec, update=larger))
        return replace(surged(made, seen), spec=spec)

    monkeypatch.setattr(decide, "with_extra_tasks", more)
    assert found("updates", {"surge"}).seed <= MOST


@pytest.mark.behaviour("SC6")
def test_a_version_that_fails_and_is_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with automatic rollback leaves a version whose tasks never get healthy."""
    monkeypatch.setattr(release, "_is_failed", lambda *_: False)
    monkeypatch.setattr(release, "_is_stuck", lambda *_: False)
    assert found("updates", {"rest"}).seed <= MOST


@pytest.mark.behaviour("TC15")
def test_a_controller_with_falsely_healthy_tasks_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller does not count tasks that are down, and so releases a second replica."""
    monkeypatch.setattr(consulting, "is_down", lambda *_: False)
    monkeypatch.setattr(consulting, "_is_answer_current", lambda *_: True)
    assert found("f55-controllers", {"second-replica"}).seed <= MOST


@pytest.mark.behaviour("HC5")
def test_waves_of_one_plan_at_the_same_time_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next wave must wait until the machines of the wave before are back."""
    monkeypatch.setattr(planner, "is_sequential", lambda _: False)
    assert found("maintenance", {"waves"}).seed <= MOST


@pytest.mark.behaviour("WH2", "TC6")
def test_a_maintenance_without_approval_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moves of a plan need an acknowledgement like all others."""
    monkeypatch.setattr(decide, "is_acknowledged", lambda _: True)
    assert found("maintenance", {"acknowledged"}).seed <= MOST
