"""The table fault × outcome of `docs/faults.md`: made by running the scenarios, never by hand."""

from __future__ import annotations

from collections.abc import Callable

from vm_lab.region import scenario
from vm_lab.region.kinds import KINDS
from vm_lab.region.run import Job, run_many
from vm_lab.region.scenario import Scenario
from vm_lab.region.seed import Outcome

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
    "F-57": "several data centers with stores of their own, one of which fails",
    "F-58": "machines go away until there is no room for all tasks, and come back",
    "F-60": "the control plane is killed in the middle of rolling updates",
    "F-63": "clocks of hosts differ by five minutes",
}
"""The faults that a simulated region can show."""
_HEAD = """# Faults and what comes of them

Made by `twine-lab region faults --write docs/faults.md`; do not edit. Each row is a scenario of
the simulated region (`vm_lab/region/scenarios/`): the production control plane on virtual time,
modelled machines, seeded faults, and a witness that checks after every event that no rule is
broken. "At rest" is when every job runs as it was granted, on the machines that the records say,
and nothing else is left anywhere.

| fault | what happens | scenario | seeds | events | rules broken | at rest after | least copies |
|---|---|---|---|---|---|---|---|
"""


def faults_page(seeds: range, processes: int, done: Callable[[Outcome], None] | None) -> str:
    """Return the document."""
    shown = [s for s in map(scenario.load, scenario.names()) if s.shows]
    jobs = [Job(one, seed) for one in shown for seed in seeds]
    found = run_many(jobs, processes, done)
    rows = []
    for one in shown:
        own = [outcome for outcome in found if outcome.scenario == one.name]
        rows += [(fault, _row(fault, one, own)) for fault in one.shows]
    return _HEAD + "".join(row for _, row in sorted(rows))


def _row(fault: str, one: Scenario, outcomes: list[Outcome]) -> str:
    events = sum(n for o in outcomes for kind, n in o.figures.items() if kind in KINDS)
    broken = sorted({v.rule for o in outcomes for v in o.violations})
    settled = max(o.settle_s for o in outcomes)
    return (
        f"| {fault} | {FAULTS[fault]} | `{one.name}` | {len(outcomes)} | {events} |"
        f" {', '.join(broken) or 'none'} | {settled:.0f} s | {_least(outcomes):.0%} |\n"
    )


def _least(outcomes: list[Outcome]) -> float:
    """Return the smallest share of the wanted tasks that ran at any time of the stories."""
    shares = [
        sample.copies / sample.wanted
        for outcome in outcomes
        for sample in outcome.samples
        if sample.wanted and sample.at >= outcome.story_at
    ]
    return min(shares, default=0.0)
