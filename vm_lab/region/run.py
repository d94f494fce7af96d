"""Runs many seeds, in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vm_lab.region.scenario import Scenario
from vm_lab.region.seed import SeedOutcome, run_seed


@dataclass(frozen=True, slots=True)
class Job:
    """One seed of one scenario."""

    scenario: Scenario
    seed: int


def run_one(job: Job) -> SeedOutcome:
    """Run one seed."""
    return run_seed(job.scenario, job.seed)


def run_many(
    jobs: Sequence[Job], processes: int = 1, done: Callable[[SeedOutcome], None] | None = None
) -> list[SeedOutcome]:
    """Run all seeds and return their outcomes, in the order of the seeds."""
    outcomes = []
    for outcome in _outcomes(jobs, processes):
        outcomes.append(outcome)
        if done is not None:
            done(outcome)
    order = {(job.scenario.name, job.seed): number for number, job in enumerate(jobs)}
    return sorted(outcomes, key=lambda o: order[(o.scenario, o.seed)])


def _outcomes(jobs: Sequence[Job], processes: int) -> Iterator[SeedOutcome]:
    if processes <= 1 or len(jobs) <= 1:
        yield from map(run_one, jobs)
        return
    # fresh interpreters: patches that a test has made in this process must not matter
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        yield from pool.imap_unordered(run_one, jobs, chunksize=1)


def seeds_of(text: str) -> range:
    """Return the seeds of `7` or `1..300`, both ends included."""
    first, dots, last = text.partition("..")
    if not first.isdigit() or (dots and not last.isdigit()):
        raise ValueError(f"{text!r} names no seeds: for instance 7 or 1..300")
    seeds = range(int(first), int(last if dots else first) + 1)
    if not seeds:
        raise ValueError(f"{text!r} names no seeds: {last} is less than {first}")
    return seeds
