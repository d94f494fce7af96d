"""The ReBalancer in simulated regions, with churn, failures and restarts.

Every rule of the checker holds with it (one copy, budgets, profiles, capacity). Over time fewer
machines are hot than without it. A run is the same for the same seed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from control_plane.api.rebalancing import MoveState
from vm_lab.region import scenario
from vm_lab.region.scenario import FaultRate, Scenario
from vm_lab.region.seed import SimulatedRegion, draw, scenario_of_seed

pytestmark = pytest.mark.behaviour("RE1", "RE2", "RE5")

REBALANCE = scenario.load("rebalance")
HOT = 0.6
"""The limit in the scenario's settings."""
WARM_UP_S = 600.0


@dataclass
class Run:
    """The results of one run for a test."""

    violations: list[str] = field(default_factory=list)
    hot: list[int] = field(default_factory=list)
    """Number of machines above `HOT` of CPU or memory, every five seconds."""
    moved: dict[str, set[float]] = field(default_factory=dict)
    """Task → when its moves by the ReBalancer were completed."""
    digest: str = ""


@contextmanager
def silent() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run(what: Scenario, seed: int) -> Run:
    """Run one seed; the index of the control plane provides the utilization of machines."""
    made = Run()

    def passed(now: float) -> None:
        serving = region.plane.serving
        if serving is None or now < WARM_UP_S:
            return
        made.hot.append(0)
        for machine in serving._allocator.index.machines.values():
            room = machine.free_cpu / machine.capacity.cpu_room
            room = min(room, machine.free_memory / machine.capacity.memory_bytes)
            made.hot[-1] += bool(machine.jobs) and 1 - room > HOT
        for move in serving.rebalancer.history().moves:
            if move.state is MoveState.DONE:
                made.moved.setdefault(f"{move.job}-{move.task}", set()).add(move.at)

    what = scenario_of_seed(what, seed)
    region = SimulatedRegion(what, seed, passed)
    with silent():
        region.run(list(draw(what, seed)))
    made.violations = list(map(str, region.checker.violations))
    made.digest = region.history.digest()
    return made


@pytest.mark.parametrize("seed", range(1, 7))
def test_no_rule_is_broken_and_fewer_machines_are_hot(seed: int) -> None:
    with_it, without = run(REBALANCE, seed), run(replace(REBALANCE, settings={}), seed)

    assert with_it.violations == []
    assert without.violations == []
    assert not without.moved
    assert sum(with_it.hot) / len(with_it.hot) < 0.8 * sum(without.hot) / len(without.hot)


@pytest.mark.behaviour("RE7", "RE5")
@pytest.mark.parametrize("kind", ["plane-kill-at-step", "plane-kill-at-write"])
def test_no_rule_is_broken_if_it_is_killed_at_any_await(kind: str) -> None:
    """The control plane dies at a random step, or at a write, thirty times an hour."""
    kills = FaultRate(kind=kind, per_hour=30, seconds=(2.0, 20.0), value=(1.0, 2_000.0))
    if kind == "plane-kill-at-write":
        kills = replace(kills, value=(1.0, 12.0))
    killed = run(replace(REBALANCE, faults=[*REBALANCE.faults, kills], minutes=20.0), 11)

    assert killed.violations == []
    assert killed.moved


def test_a_task_moves_once_in_its_rest_and_the_same_seed_does_the_same() -> None:
    # a job that is stopped and created again has new tasks with the old names
    faults = [fault for fault in REBALANCE.faults if fault.kind != "stop-job"]
    lasting = replace(REBALANCE, faults=faults)
    one, two = run(lasting, 7), run(lasting, 7)

    assert one.digest == two.digest
    assert one.moved
    rest_s = REBALANCE.settings["rebalance"]["rest_s"]  # type: ignore[index]
    for times in one.moved.values():
        pairs = zip(sorted(times), sorted(times)[1:], strict=False)
        assert all(later - earlier >= rest_s for earlier, later in pairs)
