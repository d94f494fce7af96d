"""Optimus in simulated regions: machines are recalled, and the control plane is killed.

The rules of owners hold as without Optimus. In the end every task has done its work. The seeds find
bugs that are planted by substitution soon.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from control_plane.api.jobs import JobSpec
from control_plane.api.opportunistic import QueuedWork
from control_plane.optimus import service
from control_plane.optimus.core import choosing
from control_plane.scheduler.core import reconcile
from tests.simulation.test_loans import silent
from vm_lab.region import scenario
from vm_lab.region.best_effort import BestEffortWork
from vm_lab.region.run import Job, run_one
from vm_lab.region.seed import SimulatedRegion, draw

pytestmark = pytest.mark.behaviour("EL8")

WORK = scenario.load("best-effort")


def found(rule: str, most: int = 12) -> bool:
    """Return whether one of the first seeds breaks a rule."""
    for seed in range(1, most + 1):
        if any(v.rule == rule for v in run_one(Job(WORK, seed)).violations):
            return True
    return False


@pytest.mark.behaviour("EL8", "AP10")
@pytest.mark.parametrize("seed", range(1, 4))
def test_work_is_done_on_lent_machines_and_hurts_no_owner(seed: int) -> None:
    """Covers queues, revocations, checkpoints and retries elsewhere; no rule of owners breaks."""
    region = SimulatedRegion(WORK, seed)
    work = BestEffortWork(region, WORK.work.best_effort)
    with silent():
        region.run(list(draw(WORK, seed)))
    assert list(map(str, region.checker.violations)) == []
    assert work.counts["done"] == WORK.work.best_effort
    assert work.counts["revoked"] > 0
    assert work.counts["checkpoints"] > 0
    assert work.counts["failures"] > 0
    assert region.checker.loans_revoked > 0


@pytest.mark.behaviour("EL8")
def test_work_on_machines_of_an_owner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guaranteed job must not be hurt; here work runs in an entitlement without machines."""
    job_of: Callable[[QueuedWork, str], JobSpec] = choosing.job_of
    monkeypatch.setattr(
        service, "job_of", lambda work, _: replace(job_of(work, "ent0"), entitlement="ent0")
    )
    assert found("opportunistic")


@pytest.mark.behaviour("BUG-EL8")
def test_a_failed_task_that_is_started_again_against_its_policy_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed task with restart policy `never` is started again, and its failure never counts."""
    monkeypatch.setattr(reconcile, "_BY_ITSELF", ())
    assert found("work-lost")


@pytest.mark.behaviour("EL8")
def test_a_job_that_outlives_its_work_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completed work is stopped, even if the scheduler ended in between."""

    async def forgotten(self: service.Optimus, name: str) -> None:
        self._to_stop.discard(name)

    monkeypatch.setattr(service.Optimus, "_stop", forgotten)
    assert found("rest", 2)
