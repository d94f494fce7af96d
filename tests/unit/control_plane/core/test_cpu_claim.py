"""What a task claims of CPU where its job does not say (BUG-CP15)."""

import pytest
from msgspec.structs import replace

from agent.api import Limits
from control_plane.allocator.core.demand import demand_of
from control_plane.api.jobs import JobSpec, UpdatePolicy
from control_plane.scheduler.core.job_check import claiming

PLAIN = JobSpec(
    name="web", entitlement="front", tasks=3, image="sha256:" + "0" * 64, command=["/bin/serve"]
)


def test_a_job_that_says_nothing_of_cpu_claims_the_default():
    """BUG-CP15: such a job claimed nothing, and seven of its tasks landed on two cores."""
    assert demand_of(claiming(PLAIN, None, 0.25)).cpus == 0.25


@pytest.mark.parametrize(
    ("changes", "cpus", "rru"),
    [
        ({"limits": Limits(cpu_max_cores=1.5)}, 1.5, 0.0),
        ({"limits": Limits(cpu_max_cores=1.5), "cpus": 0.5}, 0.5, 0.0),
        ({"cpus": 3.0}, 3.0, 0.0),
        ({"rru": 2.0}, 0.0, 2.0),
    ],
)
def test_what_a_job_says_counts(changes, cpus, rru):
    spec = replace(PLAIN, **changes)
    assert claiming(spec, None, 0.25) == spec
    demand = demand_of(spec)
    assert (demand.cpus, demand.rru) == (cpus, rru)


def test_a_job_of_an_earlier_release_keeps_its_claim_until_its_next_version():
    """BUG-CP15: an upgrade moves no task, nor does applying the same, or resizing."""
    assert claiming(PLAIN, PLAIN, 0.25) == PLAIN
    resized = replace(PLAIN, tasks=9, update=UpdatePolicy(drain_s=1))
    assert claiming(resized, PLAIN, 0.25) == resized
    changed = replace(PLAIN, command=["/bin/serve", "-v"])
    assert claiming(changed, PLAIN, 0.25).cpus == 0.25


def test_another_default_changes_no_job_that_has_one():
    known = claiming(PLAIN, None, 0.25)
    assert claiming(PLAIN, known, 0.5) == known
