"""Stories: the events of a region, drawn from a scenario and a seed.

Pure: the same scenario and seed give the same story. A story is stored and replayed as text, with
one line per event:

    12.5s cut machine:m07 40.0s
    80.0s resize job:job2 value=0.41
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vm_lab.region.kinds import INSTANT, KINDS, ON_JOBS, ON_ROLES
from vm_lab.region.scenario import FaultRate, Scenario
from vm_lab.region.topology import MachinePlace, places
from wire.errors import InvalidInput

_STANDBYS = 0.15
"""Share of the faults of roles that hit a standby."""
_LINE = re.compile(
    r"(?P<at>\d+(?:\.\d+)?)s (?P<kind>[a-z-]+) (?P<target>[a-z-]+:[^\s]*)"
    r"(?: (?P<seconds>\d+(?:\.\d+)?)s)?(?: value=(?P<value>-?\d+(?:\.\d+)?))?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One event of a story."""

    at: float
    kind: str
    target: str
    """`machine:m03`, `rack:r1`, `msb:b2`, `datacenter:dc1`, `region:`, `job:job2`,
    `store:main`, `plane:`, `role:shard-1`, `standby:core`. For events of machines, a job stands
    for the machine of its first task."""
    seconds: float = 0.0
    value: float = 0.0

    @property
    def name(self) -> str:
        """Return the name of the target, without its kind."""
        return self.target.partition(":")[2]

    def __str__(self) -> str:
        """Return the line of the event."""
        line = f"{self.at:.1f}s {self.kind} {self.target}"
        if self.seconds:
            line += f" {self.seconds:.1f}s"
        return f"{line} value={self.value:.3f}" if self.value else line


def write(story: list[Fault]) -> str:
    """Return a story as text."""
    return "".join(f"{fault}\n" for fault in story)


def read(text: str) -> list[Fault]:
    """Return the story of a text; blank lines and those that begin with # are skipped."""
    story = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match["kind"] not in KINDS:
            raise InvalidInput(
                f"line {number} is no event of a story: {line!r}",
                hint="for instance: 12.5s cut machine:m07 40.0s",
            )
        seconds, value = float(match["seconds"] or 0), float(match["value"] or 0)
        story.append(Fault(float(match["at"]), match["kind"], match["target"], seconds, value))
    return story


def check_targets(story: Sequence[Fault], scenario: Scenario) -> list[Fault]:
    """Return a story; raise `InvalidInput` if the region lacks the target of an event."""
    for fault in story:
        if fault.target not in (known := _targets(fault.kind, scenario)):
            raise InvalidInput(
                f"event {str(fault)!r} has a target that the region lacks",
                hint=f"targets of {fault.kind}: {', '.join(known) or 'none in this scenario'}",
            )
    return list(story)


def _targets(kind: str, scenario: Scenario) -> list[str]:
    """Return the possible targets of a kind of events."""
    machines = places(scenario.shape)
    if kind.startswith("plane-"):
        return ["plane:"]
    if kind.startswith("store-"):
        return [f"store:{name}" for name in _stores(scenario, machines)]
    if kind in ON_ROLES:
        names = _roles(scenario)
        return [f"{domain}:{name}" for domain in ("role", "standby") for name in names]
    jobs = [f"job:job{number}" for number in range(scenario.work.jobs)]
    if kind in ON_JOBS:
        return jobs
    domains = ("region", "datacenter", "msb", "rack", "machine")
    of_machines = [f"{domain}:{m.name_of(domain)}" for domain in domains for m in machines]
    return [*dict.fromkeys(of_machines), *jobs]


def _stores(scenario: Scenario, machines: Sequence[MachinePlace]) -> list[str]:
    """Return the names of the stores: the main one, and those of data centers."""
    return ["main", *sorted({m.datacenter for m in machines})[: scenario.shape.own_stores]]


def _roles(scenario: Scenario) -> list[str]:
    """Return the names of the roles, if the control plane runs as several processes."""
    if scenario.roles is None:
        return []
    return ["core", *(f"shard-{n}" for n in range(1, scenario.roles.shards + 1))]


def draw(scenario: Scenario, seed: int) -> list[Fault]:
    """Return the story of a seed, in the order of time, with times of a tenth of a second."""
    chance = random.Random(f"{scenario.name} {seed} story")
    machines = places(scenario.shape)
    story = check_targets(read("\n".join(scenario.story)), scenario)
    for rate in scenario.faults:
        expected = rate.per_hour * scenario.minutes / 60
        count = int(expected) + (chance.random() < expected % 1)
        for _ in range(count):
            at = round(chance.uniform(0, scenario.minutes * 60), 1)
            story.append(draw_event(rate, scenario, machines, chance, at))
    return sorted(story, key=lambda fault: (fault.at, str(fault)))


def draw_event(
    rate: FaultRate,
    scenario: Scenario,
    machines: list[MachinePlace],
    chance: random.Random,
    at: float,
) -> Fault:
    """Return an event of a kind at a time, with drawn target, duration and value."""
    longest = scenario.minutes * 60 - at
    seconds = round(min(chance.uniform(*rate.seconds), max(1.0, longest)), 1)
    value = round(chance.uniform(*rate.value), 3)
    if rate.kind in INSTANT:
        seconds = 0.0
    return Fault(at, rate.kind, _target(rate, scenario, machines, chance), seconds, value)


def _target(
    rate: FaultRate, scenario: Scenario, machines: list[MachinePlace], chance: random.Random
) -> str:
    if rate.kind.startswith("plane-"):
        return "plane:"
    if rate.kind in ON_ROLES and scenario.roles is not None:
        domain = "standby" if chance.random() < _STANDBYS else "role"
        return f"{domain}:{chance.choice(_roles(scenario))}"
    if rate.kind.startswith("store-"):
        return f"store:{chance.choice(_stores(scenario, machines))}"
    domain = "job" if rate.kind in ON_JOBS else chance.choice(rate.where)
    if domain == "job":
        return f"job:job{chance.randrange(scenario.work.jobs)}"
    if domain == "region":
        return "region:"
    return f"{domain}:{chance.choice(machines).name_of(domain)}"


def changed_event(fault: Fault, **changes: float) -> Fault:
    """Return the event with another time, duration or value."""
    return replace(fault, **changes)  # type: ignore[arg-type]
