"""The same region gives the same plans with every hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import control_plane

pytestmark = pytest.mark.behaviour("BUG-CP10")

STORY = """
import random
from regions import POOL, TASK, a_region, a_request, add, where
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.allocator.task_directory import TaskDirectory
from control_plane.api.policy import Preference, Property, Strategy
from control_plane.portal.core.grants import MachineClass, Promises
from control_plane.portal.core.pools import Quota

rng = random.Random(7)
index = a_region(datacenters=2, msbs=4, machines=6)
for n in range(40):
    add(index, f"free{n}", f"msb{n % 5}", f"dc{n % 2}", pool="")
names = sorted(index.machines)
for turn in range(120):
    if turn % 3 == 0:
        for name in rng.sample(names, 5):
            index.block(name, rng.choice(["", "", "is down"]))
    job = f"job{rng.randrange(12)}"
    request = rng.choice([
        (), (Preference(property=Property.RACK, strategy=Strategy.EVEN),),
        (Preference(property=Property.MACHINE, strategy=Strategy.PACK),),
    ])
    leave = frozenset(rng.sample(names, 3))
    tasks = tuple(range(rng.randrange(9)))
    groups = (Group(TASK, tasks, leave),) if tasks else ()
    request = Request(job, POOL, groups, request) if request else Request(job, POOL, groups)
    allowance = Allowance(machines=rng.randrange(3))
    made = plan(index, request, allowance)
    print(turn, made.unplaced, made.reasons, [m.name for m in made.change.takes])
    assert index.reserve(made.change) == ()
    print([m.name for m in index.settle(made.change)], where(index, job))
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskRecord
spec = JobSpec(name="w", entitlement="e", tasks=9, image="sha256:" + "0" * 64, command=["a"])
places = [Placement(machine=name) for name in names[:9]]
tasks = [TaskRecord(index=n, version=1, generation=1, placement=places[n]) for n in range(9)]
record = JobRecord(name="w", spec=spec, version=1, tasks=tasks)
print(list(TaskDirectory().settle("w", None, record)))
quotas = {f"p{n}": Quota(machines=2, types=frozenset(rng.sample("abcd", 2))) for n in range(9)}
supply = {MachineClass(t, dc, 4): 3 for t in "abcd" for dc in ("x", "y")}
sums = Promises(quotas, supply)
print([(pool, list(sums.spare(pool).items()), str(sums.shortage(pool))) for pool in quotas])
print(sums.shares())
"""


def printed(seed: str) -> str:
    """Return the output of the story in a process with this seed."""
    root = Path(control_plane.__file__).parents[1]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    environment["PYTHONPATH"] = f"{root}{os.pathsep}{root / 'tests'}"
    command = [sys.executable, "-c", STORY]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.behaviour("BUG-CP10")
def test_plans_do_not_depend_on_the_order_of_sets():
    """Regression: with another hash seed a region got other commands."""
    stories = {printed(seed) for seed in ("0", "1", "77")}
    assert len(stories) == 1
