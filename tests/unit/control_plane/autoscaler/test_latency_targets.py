"""A size by latency: the autoscaler learns from the job's own history which load a task carries."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import pytest

from control_plane.api.autoscale import Autoscale, LatencyTarget, LoadSignal, SpeedLimit
from control_plane.autoscaler import stored_jobs
from control_plane.autoscaler.core.latency import (
    BINS_MAX,
    LearntLatency,
    load_at_limit,
    load_of_task,
    with_latency,
)
from control_plane.autoscaler.core.recommendation import SETTLE_S, STALE_S, JobSizing
from control_plane.autoscaler.stored_jobs import AutoscaledJob
from control_plane.store.memory import MemoryStore
from tests.unit.control_plane.autoscaler.sizing_builders import NOON, a_policy, seen

pytestmark = pytest.mark.behaviour("AS1")

DAY, START = 1440, 5
"""In minutes. A new task serves after `START`."""
PEAK, WORKERS, SERVICE_S = 2000.0, 4, 0.02
"""Requests per second at noon, and the capacity of a task: 200 requests per second use it fully."""
TARGET = LatencyTarget(query="latency", limit_s=0.1)


def by_latency(limit_s: float = 0.1, target: float | None = None) -> Autoscale:
    return a_policy(
        maximum=200,
        target=target,
        signal=LoadSignal.QUERY,
        query="requests",
        latency=LatencyTarget(query="latency", limit_s=limit_s),
        up=SpeedLimit(share=1.0, per_s=300.0),
        down=SpeedLimit(share=0.1, per_s=600.0),
    )


def queued(load: float, workers: int, service_s: float) -> float:
    """Return the latency of a task with workers and one queue (Erlang C; three mean waits)."""
    busy = load * service_s / workers
    if busy >= 0.99:
        return 5.0
    term, total = 1.0, 0.0
    for k in range(workers):
        total += term
        term *= busy * workers / (k + 1)
    waits = term / (1 - busy) / (total + term / (1 - busy))
    return service_s * (1 + 3 * waits / (workers * (1 - busy)))


def limit_load(limit_s: float, workers: int, service_s: float) -> float:
    """Return the load at which the latency reaches a limit."""
    low, high = 0.0, workers / service_s
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if queued(middle, workers, service_s) < limit_s else (low, middle)
        )
    return low


@dataclass
class Minute:
    load: float
    latency_s: float
    size: int


def course(
    days: float,
    tasks: int,
    policy: Autoscale,
    workers: int = WORKERS,
    slower: Callable[[int], float] = lambda _: 1.0,
    service_s: float = SERVICE_S,
) -> tuple[JobSizing, list[Minute]]:
    """Follow a daily load with noise in the load and the latency. Return all minutes."""
    chance, sizing, sizes, found = random.Random(1), JobSizing(), [tasks], list[Minute]()
    for minute in range(int(days * DAY)):
        day = 0.675 - 0.325 * math.cos(2 * math.pi * minute / DAY)
        load = PEAK * day * math.exp(0.03 * chance.gauss(0, 1))
        healthy = min(sizes[-START - 1 :])
        latency_s = queued(load / healthy, workers, service_s * slower(minute))
        latency_s *= math.exp(0.08 * chance.gauss(0, 1))
        at = NOON + minute * 60.0
        observed = seen(load, sizes[-1], at, healthy=healthy, capacity=1.0)
        observed = msgspec.structs.replace(observed, latency=latency_s, latency_at=at)
        sizes.append(sizing.advance(policy, observed).tasks)
        found.append(Minute(load, latency_s, sizes[-1]))
    return sizing, found


def turns(minutes: list[Minute]) -> int:
    """Return how often the size changed direction."""
    steps = [b.size - a.size for a, b in pairwise(minutes) if a.size != b.size]
    return sum(1 for a, b in pairwise(steps) if a * b < 0)


@pytest.mark.parametrize(
    ("workers", "tasks", "limit_s"), [(1, 8, 0.025), (4, 40, 0.1), (16, 8, 0.2)]
)
def test_a_job_grows_before_its_latency_limit_and_shrinks_after(
    workers: int, tasks: int, limit_s: float
) -> None:
    """With one server, several and many; with too few tasks and too many at first. One day to
    learn, then two days."""
    service_s = 0.005 * workers
    sizing, minutes = course(3, tasks, by_latency(limit_s), workers, service_s=service_s)
    true, later = limit_load(limit_s, workers, service_s), minutes[DAY:]
    learnt = load_at_limit(sizing.state.latency, limit_s)
    assert learnt == pytest.approx(true, rel=0.25)
    assert [m for m in later if m.latency_s > limit_s] == []
    last = minutes[2 * DAY :]
    assert sum(m.size for m in last) <= 1.7 * sum(m.load for m in last) / true
    assert min(m.size for m in later) <= 0.5 * max(m.size for m in later)
    assert turns(later) <= 2 * 30  # of 2,880 evaluations, with noise of 3 % and 8 %


def test_nothing_is_assumed_before_it_is_learnt() -> None:
    """The autoscaler holds the size and gives the reason. It uses the result of a load test if
    there is one."""
    sizing, minutes = course(20 / DAY, 20, by_latency())
    assert {m.size for m in minutes} == {20}
    held = sizing.advance(by_latency(), seen(900.0, 20, NOON + 1200, capacity=1.0))
    assert held.tasks == 20
    assert "is not learnt yet: 18 min of 30" in held.held
    assert "a target says what to assume" in held.reason
    given = JobSizing().advance(by_latency(target=30.0), seen(900.0, 20, capacity=1.0))
    plain = a_policy(target=30.0, maximum=200, signal=LoadSignal.QUERY, query="requests")
    assert given.tasks == JobSizing().advance(plain, seen(900.0, 20, capacity=1.0)).tasks
    assert "target 30 until the load that keeps 0.1 s is learnt" in given.reason


def test_too_long_a_latency_adds_tasks_before_anything_is_learnt() -> None:
    observed = seen(900.0, 5, capacity=1.0, latency=0.4, latency_at=NOON)
    found = JobSizing().advance(by_latency(), observed)
    assert found.tasks == 7  # 180 per task is too much: 144
    assert "latency is 0.4 s, over 0.1 s, at 180 a task" in found.reason


def test_the_learnt_load_follows_a_slower_version() -> None:
    """Loads that were within the limit exceed it now. The autoscaler drops what it learnt about
    larger loads."""
    sizing, minutes = course(4, 10, by_latency(), slower=lambda m: 1.5 if m > 2 * DAY else 1.0)
    over = [sum(m.latency_s > 0.1 for m in minutes[d * DAY : (d + 1) * DAY]) for d in range(4)]
    assert over[1] == 0
    assert 0 < over[2] < 60
    assert over[3] < 15
    true = limit_load(0.1, WORKERS, 1.5 * SERVICE_S)
    assert load_at_limit(sizing.state.latency, 0.1) == pytest.approx(true, rel=0.25)


def test_an_incident_elsewhere_adds_few_tasks_and_is_forgotten() -> None:
    """A database is slow for two hours at night, and more tasks do not help. The learnt load halves
    at most."""
    incident = range(2 * DAY, 2 * DAY + 120)
    _, minutes = course(6, 10, by_latency(), slower=lambda m: 6.0 if m in incident else 1.0)
    most = [max(m.size for m in minutes[d * DAY : (d + 1) * DAY]) for d in range(6)]
    assert most[2] <= 3.5 * most[1]
    assert most[5] <= 1.3 * most[1]
    assert [m for m in minutes[2 * DAY + 130 :] if m.latency_s > 0.1] == []


def test_latency_that_half_of_the_load_does_not_change_is_not_chased() -> None:
    """More tasks do not help if the limit is below the latency of an idle task."""
    state, at = LearntLatency(), NOON
    for load in (45.0, 45.0, 20.0, 20.0):
        for _ in range(15):
            at += 60
            state = with_latency(state, TARGET, at, load, 0.5)
    found = load_at_limit(state, TARGET.limit_s)
    assert found == pytest.approx(45.0, rel=0.06)
    target, _, why = load_of_task(TARGET, None, state, (20.0, 0.5))
    assert target == pytest.approx(0.8 * found)
    assert why.startswith("a task carries")


@pytest.mark.parametrize(
    "trouble",
    [
        {"latency": None, "latency_missing": "Prometheus: the query returns nan"},
        {"latency": math.nan},
        {"latency": -1.0},
        {"latency_at": NOON - STALE_S - 1},
    ],
)
def test_without_a_latency_the_size_is_not_reduced(trouble: dict[str, object]) -> None:
    """With a missing, invalid, negative or stale latency no task is removed, and a rise adds
    some."""
    given = {"capacity": 1.0, "latency": 0.05, "latency_at": NOON} | trouble
    found = JobSizing().advance(by_latency(target=50.0), seen(100.0, 20, **given))
    assert found.tasks == 20
    assert "not reduced: the latency is not measured" in found.held
    assert JobSizing().advance(by_latency(target=50.0), seen(2000.0, 20, **given)).tasks == 40


def test_no_requests_have_no_latency_and_that_is_no_trouble() -> None:
    found = JobSizing().advance(by_latency(target=50.0), seen(0.0, 20, capacity=1.0))
    assert found.tasks < 20


@pytest.mark.behaviour("AS10")
def test_nothing_is_learnt_while_tasks_are_replaced() -> None:
    """Caches fill after a start, so answers are slow for a reason other than load."""
    sizing = JobSizing()
    for minute in range(60):
        at = NOON + minute * 60.0
        observed = seen(900.0, 20, at, capacity=1.0, latency=0.05, latency_at=at)
        push_reason = "the update to version 2 is in progress" if minute < 30 else ""
        sizing.advance(by_latency(), msgspec.structs.replace(observed, push_reason=push_reason))
    minutes = sum(b.minutes for b in sizing.state.latency.bins)
    assert minutes == pytest.approx(60 - 30 - SETTLE_S / 60 + 1, abs=1.5)
    slow = seen(900.0, 20, NOON + 3600, capacity=1.0, latency=9.0, latency_at=NOON + 3600)
    slow = msgspec.structs.replace(slow, push_reason="the update to version 3 is in progress")
    assert sizing.advance(by_latency(), slow).tasks == 20


def test_the_history_of_a_job_is_bounded_at_any_clock() -> None:
    chance, state = random.Random(3), LearntLatency()
    for _ in range(3000):
        at = NOON + chance.choice([60.0, -1e6, 0.0, 1e7, 3600.0]) * chance.random()
        load, latency_s = 10 ** chance.uniform(-9, 12), chance.choice([0.0, 1e-300, 1e300, 0.1])
        state = with_latency(state, TARGET, at, load, latency_s * chance.random())
        target, most, _ = load_of_task(TARGET, None, state, (load, latency_s))
        assert target is None or (most is not None and 0 < target < most < math.inf)
    assert len(state.bins) == BINS_MAX
    assert len(msgspec.msgpack.encode(state)) < 1200
    assert all(math.isfinite(b.minutes) and b.latency_s > 0 for b in state.bins)
    assert load_at_limit(state, 0.1) is None or load_at_limit(state, 0.1) > 0  # type: ignore[operator]
    other = LatencyTarget(query="another", limit_s=0.1)
    assert len(with_latency(state, other, NOON, 5.0, 0.1).bins) == 1


async def test_the_learnt_state_is_stored() -> None:
    sizing, _ = course(0.5, 10, by_latency())
    learnt = load_at_limit(sizing.state.latency, 0.1)
    assert learnt is not None
    async with MemoryStore() as store:
        await stored_jobs.save(store, {"web": AutoscaledJob(sizing=sizing)})
        assert len(stored_jobs.encoded(AutoscaledJob(sizing=sizing))) < 14_000
        again = (await stored_jobs.load(store))["web"].sizing
    assert load_at_limit(again.state.latency, 0.1) == learnt
