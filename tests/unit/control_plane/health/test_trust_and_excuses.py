"""When silence is excused, and how long a returning machine is on probation."""

import pytest

from agent.api import Location
from control_plane.agents.observations import Observation
from control_plane.api.machines import EventKind, MachineRecord, UnavailabilityEvent
from control_plane.health.core.excuses import GracePeriods, SilenceSigns, excuse
from control_plane.health.core.parts import Parts
from control_plane.health.core.trust import (
    NO_FAILURES,
    TrustRules,
    counted_failures,
    failures_from_ages,
    probation_s,
    with_failure,
)
from control_plane.health.watch import Watch

PATIENCE = TrustRules(first_s=15, most_s=600, forget_s=3600)
GRACES = GracePeriods(reboot_s=300, agent_s=600, alive_s=9)


@pytest.mark.behaviour("F-52")
def test_probation_doubles_with_each_failure_up_to_a_bound():
    """The first failure causes no probation."""
    failures, seen = NO_FAILURES, []
    for number in range(9):
        failures = with_failure(failures, number * 60.0, PATIENCE)
        seen.append(probation_s(failures, number * 60.0, PATIENCE))
    assert seen == [0, 15, 30, 60, 120, 240, 480, 600, 600]


def test_failures_are_forgotten_one_by_one():
    failures = with_failure(with_failure(NO_FAILURES, 0, PATIENCE), 60, PATIENCE)
    assert [counted_failures(failures, 60 + hours * 3600, PATIENCE) for hours in range(4)] == [
        2,
        1,
        0,
        0,
    ]
    assert with_failure(failures, 60 + 3600, PATIENCE).count == 2


@pytest.mark.behaviour("F-52")
def test_a_record_restores_the_counted_values():
    """This holds for failures hours apart, although some are forgotten meanwhile. No failure counts
    from the future."""
    counted, moments = NO_FAILURES, [0.0, 60.0, 90.0, 4000.0, 9000.0, 9100.0]
    for at in moments:
        counted = with_failure(counted, at, PATIENCE)
    ages = [10_000.0 - at for at in moments]
    assert failures_from_ages(reversed(ages), 10_000.0, PATIENCE) == counted
    assert failures_from_ages([], 10_000.0, PATIENCE) == NO_FAILURES
    assert failures_from_ages([-500.0, 5.0], 100.0, PATIENCE).last_at == 100.0


@pytest.mark.behaviour("BUG-CP21", "HP1")
@pytest.mark.parametrize(
    ("signs", "reason"),
    [
        (SilenceSigns(50, joined_until=130), "just joined"),
        (SilenceSigns(50, away_until=130), "ordered to reboot"),
        (SilenceSigns(299, is_switching=True), "host profile"),
        (SilenceSigns(599, alive_at=95.0), "host is up"),
        (SilenceSigns(50), ""),
        (SilenceSigns(50, joined_until=100, away_until=100), ""),
        (SilenceSigns(300, is_switching=True), ""),
        (SilenceSigns(600, alive_at=95.0), ""),
        (SilenceSigns(50, alive_at=95.0, is_leaving=True), ""),
        (SilenceSigns(50, away_until=130, is_leaving=True), "ordered to reboot"),
        (SilenceSigns(299, is_switching=True, is_leaving=True), "host profile"),
        (SilenceSigns(50, alive_at=91.0), ""),
    ],
)
def test_silence_is_excused_for_as_long_as_its_reason_holds(signs, reason):
    found = excuse(signs, 100.0, GRACES)
    assert (reason in found.reason) if reason else (found is None)


def record(*events: UnavailabilityEvent) -> MachineRecord:
    location = Location()
    return MachineRecord(machine="m1", location=location, machine_type="t", unavailability=events)


def planned(event_id: str, deadline: float | None) -> UnavailabilityEvent:
    return UnavailabilityEvent(
        event_id=event_id, kind=EventKind.PLANNED, reason="", start=1000.0, deadline=deadline
    )


@pytest.mark.behaviour("BUG-CP9")
def test_a_planned_reboot_is_timed_once_on_the_monotonic_clock():
    """Later readings of the wall clock do not change it."""
    location = Location()
    watch = Watch("m1", Parts().rack(location), Observation(asked_since=0.0), 0.0)
    watch.planned(record(planned("a", 1300.0)), now=50.0, wall=1000.0)
    assert watch.away_until == 350.0
    watch.planned(record(planned("a", 1300.0)), now=60.0, wall=9000.0)
    assert watch.away_until == 350.0
    watch.planned(record(planned("b", 1300.0)), now=60.0, wall=-9000.0)
    assert watch.away_until == 360.0  # never longer than the planned time
    watch.planned(record(planned("c", None)), now=60.0, wall=1000.0)
    assert watch.away_until == float("inf")
    watch.planned(record(), now=60.0, wall=1000.0)
    assert watch.away_until == 0.0
