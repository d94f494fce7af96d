"""What readings of agents say about loads and power, and how long they count."""

from __future__ import annotations

import pytest

from agent.usage import TaskUsage, Usages
from control_plane.broker.core.capacity import Capacity
from control_plane.rebalancer.core.loads import Loads, modelled_w, watts_per_rru

pytestmark = pytest.mark.behaviour("RE2", "RE6")

TYPE = Capacity(machine_type="web", rru=2.0, cpus=4.0, memory_bytes=1 << 30, power_w=400)


def read(at: float, cpu_s: float, *, network: int | None = None, energy: float | None = None):
    task = TaskUsage(task_id="web-0", cpu_s=cpu_s, memory_bytes=1 << 20, network_bytes=network)
    return Usages(at_boot_s=at, tasks=[task], energy_j=energy)


def test_two_readings_give_rates_in_the_units_of_the_model() -> None:
    loads = Loads(smooth_s=60.0)
    loads.read("m1", TYPE, read(100.0, 50.0, network=0), now=0.0)
    assert loads.of_tasks("web", [0], since=-60.0) == [None]

    loads.read("m1", TYPE, read(110.0, 70.0, network=10_000_000), now=10.0)
    found, other = loads.of_tasks("web", [0, 1], since=-50.0)

    assert found is not None
    assert other is None
    assert (found.rru, found.network_mbps) == (1.0, 8.0)  # 2 cores of 4 are half of 2 RRU


def test_a_new_level_has_63_percent_of_the_weight_after_the_smoothing_time() -> None:
    loads = Loads(smooth_s=60.0)
    for at, cpu_s in ((0.0, 0.0), (60.0, 0.0), (120.0, 120.0)):
        loads.read("m1", TYPE, read(at, cpu_s), now=at)

    assert loads.tasks["web"][0].rru == pytest.approx(0.632, abs=0.001)


def test_a_restart_of_a_task_or_of_its_host_gives_no_rate() -> None:
    loads = Loads(smooth_s=60.0)
    loads.read("m1", TYPE, read(100.0, 50.0), now=0.0)
    loads.read("m1", TYPE, read(160.0, 1.0), now=60.0)
    assert loads.tasks == {}

    loads.read("m1", TYPE, read(5.0, 2.0), now=120.0)
    assert loads.tasks == {}


def test_a_value_that_was_not_read_for_long_is_unknown() -> None:
    loads = Loads(smooth_s=60.0)
    loads.read("m1", TYPE, read(0.0, 0.0), now=0.0)
    loads.read("m1", TYPE, read(10.0, 1.0), now=10.0)

    assert loads.of_tasks("web", [0], since=10.0) != [None]
    assert loads.of_tasks("web", [0], since=10.1) == [None]
    assert loads.oldest_s(370.0, 360.0) == 360.0
    assert loads.oldest_s(370.1, 360.0) is None
    list(loads.forget(["m2"], 400.0, 360.0))
    assert (loads.tasks, loads.machines) == ({}, {})


def test_power_is_measured_over_a_counter_that_begins_again() -> None:
    loads = Loads(smooth_s=1e-9)
    seen = []
    for at, energy in ((0.0, 1000.0), (10.0, 2500.0), (20.0, 100.0), (30.0, 2100.0)):
        loads.read("m1", TYPE, read(at, 0.0, energy=energy), now=at)
        seen.append(loads.watts_of("m1", at, 60.0))

    assert seen == [None, 150.0, 150.0, 200.0]


def test_where_the_host_reports_no_power_it_follows_type_and_use() -> None:
    assert [modelled_w(400, share) for share in (0.0, 0.5, 1.0, 1.5)] == [200, 300, 400, 400]
    assert watts_per_rru(TYPE) == 100.0
