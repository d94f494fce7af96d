"""The same seed gives the same run, byte for byte, with every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vm_lab.region import scenario
from vm_lab.region.run import Job, run_one

LOG = """
import sys, logging
from vm_lab.region import scenario
from vm_lab.region.delivery import DeliveredJobs
from vm_lab.region.seed import SimulatedRegion
from vm_lab.region.story import draw
logging.disable(logging.CRITICAL)
chosen = scenario.load(sys.argv[1])
for seed in map(int, sys.argv[2:]):
    region = SimulatedRegion(chosen, seed)
    if chosen.work.delivered:
        DeliveredJobs(region, chosen.work.delivered)
    region.run(draw(chosen, seed))
    print(*region.history.lines(), sep="\\n")
"""


def log(name: str, seeds: tuple[int, ...], hash_seed: str) -> list[str]:
    """Return the event log of some seeds, from a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", LOG, name, *map(str, seeds)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(("name", "seeds"), [("everything", (1, 2, 3, 4, 5)), ("hundred", (2, 3))])
def test_the_event_log_is_independent_of_the_hash_seed(name: str, seeds: tuple[int, ...]):
    one, other = log(name, seeds, "1"), log(name, seeds, "0")
    assert len(one) > 1000
    first = next((pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]), None)
    assert first is None
    assert len(one) == len(other)


@pytest.mark.behaviour("BUG-CP132")
def test_a_region_with_deliveries_is_independent_of_the_hash_seed() -> None:
    """The conveyor began its pipelines in the order of a set: 0 and 5 gave different orders."""
    one, other = log("delivery", (1,), "0"), log("delivery", (1,), "5")
    assert len(one) > 300
    assert one == other


def test_a_seed_gives_the_same_result_after_other_seeds() -> None:
    jobs = [Job(scenario.load("everything"), seed) for seed in (7, 8, 7)]
    first, _, again = map(run_one, jobs)
    assert (first.digest, first.events) == (again.digest, again.events)
