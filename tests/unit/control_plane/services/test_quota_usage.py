"""Which machines count against a quota, so that an entitlement never holds too many."""

from dataclasses import dataclass, field

import pytest
from inventory import a_machine
from regions import add

from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.quota_usage import QuotaUsage
from control_plane.api.machines import EventKind, MachineRecord, UnavailabilityEvent
from control_plane.broker.core.assignment import lent, returned
from control_plane.broker.core.unavailability import began
from control_plane.portal.core.pools import Quota

pytestmark = pytest.mark.behaviour("CP3")

NOW = 1000.0


@dataclass
class Region:
    """A few machines, as the allocator sees them."""

    index: RegionIndex = field(default_factory=RegionIndex)

    def __post_init__(self) -> None:
        self.counted = QuotaUsage(self.index, lambda: NOW)

    def put(self, record: MachineRecord) -> MachineRecord:
        add(self.index, record.machine, pool=record.entitlement, rru=4.0)
        self.counted.note(record)
        return record

    def machines(self, pool: str, quota: Quota) -> int:
        return self.counted.held(pool, quota).machines


def drained(record: MachineRecord, start: float = NOW) -> MachineRecord:
    event = UnavailabilityEvent(
        event_id="e", kind=EventKind.MAINTENANCE, reason="fans", start=start
    )
    return began(record, event)


@pytest.mark.behaviour("BUG-CP19", "EL4")
def test_a_lent_machine_counts_for_its_lender():
    """The donor took another machine for it, and held one too many when it came back."""
    region, quota = Region(), Quota(machines=2)
    region.put(a_machine("m1", entitlement="front"))
    two = region.put(a_machine("m2", entitlement="front"))
    assert region.machines("front", quota) == 2
    two = region.put(lent(two, "batch", "plain", NOW))
    assert region.machines("front", quota) == 2
    assert region.counted.held("front", quota).micro_rru == 8_000_000
    assert region.machines("batch", Quota(machines=0)) == 0  # its lender answers for it
    region.put(returned(two, "plain", NOW))
    assert region.machines("front", quota) == 2
    assert region.counted.special() == []


def test_a_machine_lent_by_the_free_pool_counts_for_no_entitlement():
    region = Region()
    region.put(lent(a_machine("m1"), "batch", "plain", NOW))
    assert region.machines("batch", Quota(machines=1)) == 0
    assert region.machines("", Quota()) == 0


@pytest.mark.behaviour("BUG-CP19")
def test_machines_that_are_drained_make_room_for_as_many_but_not_for_more():
    """Drained machines did not count at all, even after repeated drains."""
    region, quota = Region(), Quota(machines=2)
    for name in ("m1", "m2"):
        region.put(drained(a_machine(name, entitlement="front")))
    assert region.machines("front", quota) == 0  # successors may be taken
    for name in ("m3", "m4"):
        region.put(a_machine(name, entitlement="front"))
    assert region.machines("front", quota) == 2
    for name in ("m3", "m4"):
        region.put(drained(a_machine(name, entitlement="front")))
    assert region.machines("front", quota) == 2  # 4 are held; no more until some are empty


@pytest.mark.behaviour("BUG-CP19")
def test_the_same_bound_holds_for_quotas_in_rru():
    """For RRU too, drained machines count as soon as they exceed the quota again."""
    region, quota = Region(), Quota(rru=8.0)
    for name in ("m1", "m2", "m3"):
        region.put(drained(a_machine(name, entitlement="front")))
    assert region.counted.held("front", quota).micro_rru == 4_000_000


def test_a_drain_that_begins_later_changes_nothing_yet():
    region = Region()
    region.put(drained(a_machine("m1", entitlement="front"), start=NOW + 60))
    assert region.machines("front", Quota(machines=1)) == 1
    assert region.counted.special() == ["m1"]
    assert not region.counted.leaves("m1")


def test_it_reports_when_something_else_counts():
    region, record = Region(), a_machine("m1", entitlement="front")
    add(region.index, "m1", pool="front")
    assert not region.counted.note(record)
    assert region.counted.note(drained(record))
    assert not region.counted.note(drained(record))
    assert region.counted.forget("m1")
    assert not region.counted.forget("m1")
