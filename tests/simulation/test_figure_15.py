"""The paper's Figure 15 on the real control plane: the web tier follows its load for days.

Small: 16 machines at the peak; `python -m tests.bench.figure_15 --out FOLDER` draws it.
"""

from __future__ import annotations

import pytest

from control_plane.api.autoscale import Autoscale, AutoscaleMode, Headroom, SpeedLimit
from tests.bench.figure_15 import DAY_S, TARGET, Course, replayed, svg_of
from tests.loaded_jobs import LoadedJobs
from vm_lab.region.scenario import Scenario, ScenarioWork, Shape
from vm_lab.region.seed import SimulatedRegion
from vm_lab.region.story import read

TASKS = 16


@pytest.fixture(scope="module")
def ordinary() -> Course:
    return replayed(3, TASKS)


@pytest.fixture(scope="module")
def sudden() -> Course:
    return replayed(3, TASKS, sudden=True)


@pytest.mark.behaviour("AS3", "AS4")
def test_a_quarter_of_the_machines_is_freed_off_peak(ordinary: Course) -> None:
    """Whole machines are freed each day, and no rule of the region is broken."""
    assert ordinary.violations == []
    for day in (1, 2):
        machines = [s.machines for s in ordinary.samples if day <= s.at / DAY_S < day + 1]
        assert min(machines) <= 0.75 * max(machines)
        assert sum(machines) / len(machines) <= 0.85 * max(machines)


@pytest.mark.behaviour("AS1", "AS4")
def test_real_size_and_cpu_follow_the_recommendation(ordinary: Course) -> None:
    """The size is within one task, and CPU stays around its target although the load doubles."""
    found = ordinary.quiet(DAY_S, 4 * DAY_S)
    assert max(abs(s.serving - s.recommended) for s in found) <= 1
    assert max(s.load for s in found) > 2 * min(s.load for s in found)
    # a task more or fewer is 1/7 at night
    assert all(TARGET / (1 + 1.5 / 7) <= s.cpu <= TARGET * 1.05 for s in found)


@pytest.mark.behaviour("AS5")
def test_in_the_sudden_week_the_real_size_stays_below_the_recommendation(sudden: Course) -> None:
    """At the peak there is no capacity left; the recommendation shows what is missing."""
    assert sudden.violations == []
    before, after = sudden.quiet(DAY_S, 2 * DAY_S), sudden.quiet(2 * DAY_S, 4 * DAY_S)
    assert max(s.recommended - s.serving for s in before) <= 1
    assert max(s.recommended - s.serving for s in after) >= 3
    assert max(s.serving for s in after) == sudden.machines
    assert max(s.cpu for s in after) > 1.15 * max(s.cpu for s in before)
    assert min(s.machines for s in after) < sudden.machines  # at night it still frees some


@pytest.mark.behaviour("AS5", "TC14")
def test_releases_slow_down_when_capacity_is_short(ordinary: Course, sudden: Course) -> None:
    """Compares the same two evening peaks, without human action."""
    assert sudden.release_s(1) >= 1.5 * ordinary.release_s(1)
    assert sudden.release_s(0) == pytest.approx(ordinary.release_s(0), abs=60.0)


def test_the_picture_has_the_three_curves(ordinary: Course) -> None:
    picture = svg_of(ordinary)
    assert picture.count("<polyline") == 3
    assert "recommended size" in picture


@pytest.mark.behaviour("AS1")
def test_no_rule_is_broken_by_kills_and_cuts_while_sizes_change() -> None:
    """The control plane and the autoscaler are killed, and machines are cut off."""
    scenario = Scenario(
        name="autoscaled",
        says="Sizes change in an hour of trouble",
        settle_minutes=40.0,
        shape=Shape(machines=24, msbs=4, racks=8),
        work=ScenarioWork(entitlements=1, jobs=3, tasks=(4, 6), spare=3.0, stop_jobs=0.0),
    )
    policy = Autoscale(
        minimum=2,
        maximum=12,
        target=0.5,
        mode=AutoscaleMode.APPLY,
        headroom=Headroom.MSB,
        up=SpeedLimit(share=1.0, per_s=120.0),
        down=SpeedLimit(share=0.3, per_s=300.0),
    )
    story = read(
        "300.0s plane-kill plane: 5.0s\n600.0s cut msb:b1 90.0s\n900.0s release job:job0\n"
        "1000.0s plane-kill plane: 30.0s\n1500.0s power-off machine:m03 200.0s\n"
        "1502.0s plane-kill-at-step plane: 5.0s value=20\n"
        "2400.0s plane-kill-after-write plane: 5.0s value=3\n3000.0s release job:job1 600.0s\n"
    )
    region = SimulatedRegion(scenario, 7)
    loads = {f"job{n}": lambda now: 1.5 if now % 1800 < 900 else 4.0 for n in range(3)}
    jobs = LoadedJobs(region, dict.fromkeys(loads, policy), loads)
    region.run(story)
    assert region.checker.violations == []
    assert region.plane.lives >= 5
    up = [r for r in jobs.resizes if r[3] > r[2]]
    assert len(up) >= 3
    assert len(jobs.resizes) > len(up)
    assert all(2 <= after <= 12 for *_, after in jobs.resizes)
