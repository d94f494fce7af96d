"""Regions drawn by a seed, with stories that combine every kind of event with every other.

The pairs of kinds are dealt to the seeds in turn, so that a series of seeds has all of them. In
each pair the second event begins during the first one, or soon after it. Every seed adds a few
pairs of a user's request and a cut of machines: the effects of the request show after the cut.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace as replaced
from itertools import combinations_with_replacement
from math import ceil

from msgspec.structs import replace

from vm_lab.region.kinds import ON_JOBS, ON_MACHINES
from vm_lab.region.scenario import FaultRate, Scenario, ScenarioWork, Shape
from vm_lab.region.story import Fault, draw_event
from vm_lab.region.topology import MachinePlace, places

MEET_S = 60.0
"""Most seconds between the starts of a pair's events, unless the first event lasts longer."""
_REQUESTS = (
    *("patience", "move-job", "release", "bad-release", "resize", "move-task", "restart"),
    *("stop-job", "drain", "propose-profile"),
)
_CUTS = ("cut", "cut-in", "cut-out")
_MACHINES_EACH = 7
"""Fewest machines of an entitlement, so that each has room for a job."""


def scenario_of_seed(scenario: Scenario, seed: int) -> Scenario:
    """Return the scenario of one seed: unchanged, unless its seeds draw their regions."""
    if not scenario.pairs:
        return scenario
    chance = random.Random(f"{scenario.name} {seed} composed")
    work = _work(scenario.work, chance)
    shape = _shape(scenario.shape, work, chance)
    jobs = chance.randint(2, max(2, shape.machines // 5))
    made = replace(scenario, shape=shape, work=replace(work, jobs=jobs))
    story = _story(made, seed, chance)
    lines = [str(fault) for fault in sorted(story, key=lambda fault: (fault.at, str(fault)))]
    return replace(made, faults=[], pairs=0, story=lines)


def pairs_of(kinds: Sequence[str], seed: int, count: int) -> list[tuple[str, str]]:
    """Return the pairs of kinds of a seed, each in the order of its two events."""
    every = list(combinations_with_replacement(sorted(kinds), 2))
    turn, place = divmod(seed - 1, seeds_per_cycle(kinds, count))
    chance = random.Random(f"pairs {turn}")
    chance.shuffle(every)
    chosen = every[place * count : (place + 1) * count]
    return [pair if chance.random() < 0.5 else pair[::-1] for pair in chosen]


def seeds_per_cycle(kinds: Sequence[str], count: int) -> int:
    """Return how many consecutive seeds have all pairs, counted from seed 1."""
    return ceil(len(kinds) * (len(kinds) + 1) / 2 / count)


def _work(work: ScenarioWork, chance: random.Random) -> ScenarioWork:
    return replace(
        work,
        entitlements=chance.randint(2, 4),
        tasks=(chance.randint(1, 3), chance.randint(4, 8)),
        stop_jobs=chance.choice([0.0, 0.3, 0.6]),
        slow_to_stop=chance.choice([0.0, 0.4, 0.8]),
        controlled=chance.choice([0.0, 0.25, 0.5]),
        paced=chance.choice([0.0, 0.4, 0.8]),
        reboot_profiles=chance.choice([0.0, 0.3]),
    )


def _shape(shape: Shape, work: ScenarioWork, chance: random.Random) -> Shape:
    datacenters = chance.randint(1, 3)
    msbs = datacenters * chance.randint(1, 2)
    fewest = work.entitlements * _MACHINES_EACH
    return replace(
        shape,
        datacenters=datacenters,
        msbs=msbs,
        racks=msbs * chance.randint(1, 3),
        machines=chance.randint(fewest, fewest + 10),
        own_stores=chance.randint(0, datacenters),
    )


def _story(scenario: Scenario, seed: int, chance: random.Random) -> list[Fault]:
    rates = {rate.kind: rate for rate in scenario.faults}
    machines, story = places(scenario.shape), list[Fault]()
    step = scenario.minutes * 60 / (scenario.pairs + scenario.requests)
    requests = [(chance.choice(_REQUESTS), chance.choice(_CUTS)) for _ in range(scenario.requests)]
    pairs = [
        *pairs_of(list(rates), seed, scenario.pairs),
        *(pair if chance.random() < 0.5 else pair[::-1] for pair in requests),
    ]
    chance.shuffle(pairs)
    for number, (first_kind, second_kind) in enumerate(pairs):
        at = round(number * step + chance.uniform(0, step / 2), 1)
        first = draw_event(rates[first_kind], scenario, machines, chance, at)
        if first_kind in ON_MACHINES and second_kind in ON_JOBS and chance.random() < 0.75:
            other = draw_event(rates[second_kind], scenario, machines, chance, at)
            first = replaced(first, target=other.target)
        at = round(at + chance.uniform(0, max(first.seconds, MEET_S)), 1)
        second = _draw_second_event(rates[second_kind], first, scenario, machines, chance, at)
        story += [first, second]
    return story


def _draw_second_event(
    rate: FaultRate,
    first: Fault,
    scenario: Scenario,
    machines: list[MachinePlace],
    chance: random.Random,
    at: float,
) -> Fault:
    """Return the second event of a pair; in three of four cases it has the target of the first.

    If one event is about a job and the other about machines, both have the job as their target.
    """
    second = draw_event(rate, scenario, machines, chance, at)
    if chance.random() < 0.25:
        return second
    alike = second.target.partition(":")[0] == first.target.partition(":")[0]
    if alike or (first.kind in ON_JOBS and second.kind in ON_MACHINES):
        return replaced(second, target=first.target)
    return second
