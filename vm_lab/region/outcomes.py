"""The table fault × outcome of `docs/faults.md`: made by running the scenarios, never by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vm_lab.region import scenario
from vm_lab.region.kinds import KINDS
from vm_lab.region.run import Job, run_many
from vm_lab.region.scenario import Scenario
from vm_lab.region.seed import SeedOutcome

FAULTS: dict[str, str] = {
    "F-43": "the control plane's process is stopped (SIGSTOP, suspend) and goes on",
    "F-44": "the clock of its host steps by an hour, either way",
    "F-46": "the store is down, slow or full",
    "F-47": "a write ends without an answer, made or not",
    "F-48": "requests arrive twice, late, or overtake each other",
    "F-49": "machines are cut off for ten minutes",
    "F-50": "… in one direction only",
    "F-51": "60 % of the machines vanish at once",
    "F-52": "a machine comes and goes every second",
    "F-53": "agents take 20 s for an answer",
    "F-55": "TaskControllers are away, slow, wrong or lying, among all other faults",
    "F-56": "an owner resizes and releases at once",
    "F-57": "several data centers with stores of their own; one fails",
    "F-58": "machines go away until there is no room for all tasks, and come back",
    "F-59": "four hundred tasks; some always come, go and change",
    "F-60": "the control plane is killed in the middle of rolling updates",
    "F-63": "clocks of hosts differ by five minutes",
}
"""The faults that a simulated region can show."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A fault that takes a real disk, several processes or a slow reader, and its test."""

    what: str
    outcome: str
    test: str
    """Below `tests/`, as `path::name`."""


ELSEWHERE: dict[str, Elsewhere] = {
    "F-45": Elsewhere(
        "two hundred would-be owners of a store wake together, again and again",
        "one owns it, each with an epoch of its own; the others are told at once and wrote nothing",
        "contract/test_store_faults.py::test_of_two_hundred_that_wake_together_one_owns_the_store",
    ),
    "F-54": Elsewhere(
        "a mistake asks to stop all tasks of a job",
        "no more stop than the limit lets, until an operator lifts it for a reason",
        "unit/control_plane/scheduler/test_limits.py::"
        "test_stops_beyond_the_limit_wait_until_somebody_lifts_it",
    ),
    "F-57": Elsewhere(
        "two allocators want the same machine at the same time",
        "one gets it, the other plans again; no machine has two owners",
        "unit/control_plane/services/test_allocations.py::"
        "test_two_allocators_with_one_set_of_brokers_never_get_the_same_machine",
    ),
    "F-61": Elsewhere(
        "an upgrade of the store is interrupted at any step",
        "the next start finds all of it, in the old form or the new; a copy is kept",
        "contract/test_store_faults.py::test_an_interrupted_migration_leaves_the_old_or_the_new",
    ),
    "F-62": Elsewhere(
        "a reader of changes falls behind",
        "it is told to list again; what is kept for it has a bound",
        "unit/control_plane/services/test_brokers.py::"
        "test_a_subscriber_too_far_behind_must_list_again",
    ),
}
"""Faults that are shown by a test and not, or not only, by the simulated region."""
_HEAD = """# Faults and what comes of them

Made by `twine-lab region faults --write docs/faults.md`; do not edit. Each row is a scenario of
the simulated region (`vm_lab/region/scenarios/`): the production control plane on virtual time,
modelled machines, seeded faults, and a checker that looks after every event that no rule is
broken. "At rest" is when every job runs as it was granted, on the machines that the records say,
and nothing else is left anywhere.

| fault | what happens | scenario | seeds | events | rules broken | at rest after | least copies |
|---|---|---|---|---|---|---|---|
"""


_TAIL = """
Some faults take a real disk, several processes or several allocators. A test names each of them:

| fault | what happens | outcome | test |
|---|---|---|---|
"""


def faults_page(
    seeds: range, processes: int, done: Callable[[SeedOutcome], None] | None
) -> tuple[str, list[SeedOutcome]]:
    """Return the document, and the outcomes that broke a rule."""
    shown = [s for s in map(scenario.load, scenario.names()) if s.shows]
    jobs = [Job(one, seed) for one in shown for seed in seeds]
    found = run_many(jobs, processes, done)
    rows = []
    for one in shown:
        own = [outcome for outcome in found if outcome.scenario == one.name]
        rows += [(fault, _row(fault, one, own)) for fault in one.shows]
    others = (
        f"| {fault} | {shown.what} | {shown.outcome} | `{shown.test}` |\n"
        for fault, shown in ELSEWHERE.items()
    )
    page = _HEAD + "".join(row for _, row in sorted(rows)) + _TAIL + "".join(others)
    return page, [outcome for outcome in found if not outcome.ok]


def _row(fault: str, one: Scenario, outcomes: list[SeedOutcome]) -> str:
    events = sum(n for o in outcomes for kind, n in o.figures.items() if kind in KINDS)
    broken = sorted({v.rule for o in outcomes for v in o.violations})
    settled = max(o.settle_s for o in outcomes)
    return (
        f"| {fault} | {FAULTS[fault]} | `{one.name}` | {len(outcomes)} | {events} |"
        f" {', '.join(broken) or 'none'} | {settled:.0f} s | {_least(outcomes):.0%} |\n"
    )


def _least(outcomes: list[SeedOutcome]) -> float:
    """Return the smallest share of the wanted tasks that ran at any time of the stories."""
    shares = [
        sample.copies / sample.wanted
        for outcome in outcomes
        for sample in outcome.samples
        if sample.wanted and sample.at >= outcome.story_at
    ]
    return min(shares, default=0.0)
