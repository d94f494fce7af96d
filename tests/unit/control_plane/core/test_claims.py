"""Claims of a job, now and after a change."""

from regions import GIB, a_capacity, a_place

from control_plane.allocator.core.allocation_record import claims_of, record_after
from control_plane.allocator.core.claims import Change, Claim, Claims
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.machine_pools import Machine

SMALL, LARGE, GPU = Demand(GIB), Demand(2 * GIB), Demand(GIB, gpus=1)
MACHINES = {name: Machine(name, a_capacity(), a_place(), "") for name in ("m0", "m1", "m2")}
M0, M1, M2 = MACHINES.values()


def the_claims(*claims: Claim) -> Claims:
    made = Claims("web", "e1")
    made.set(claims)
    return made


def test_a_preview_changes_nothing():
    claims = the_claims(Claim(0, M0, SMALL), Claim(1, M1, LARGE, {"http": 1}))
    before = list(claims)
    change = Change("web", "e2", [Claim(0, M2, GPU), Claim(3, M0, SMALL)], before)
    after = claims.after(change)
    assert (after.pool, list(after)) == ("e2", change.claims)
    assert (claims.pool, list(claims)) == ("e1", before)
    assert claims.get(1) == before[1]


def test_a_record_has_only_the_demands_that_tasks_have():
    claims = the_claims(Claim(0, M0, SMALL), Claim(1, M1, SMALL))
    all_changed = [Claim(0, M0, LARGE), Claim(1, M1, Demand(2 * GIB))]
    record = record_after(Change("web", "e1", all_changed, list(claims)), claims)
    assert record is not None
    assert [d.memory_bytes for d in record.demands] == [2 * GIB]
    assert record.demand_of == []
    one_changed = [Claim(2, M2, LARGE, {"http": 20_000})]
    record = record_after(Change("web", "e1", one_changed, [Claim(0, M0, SMALL)]), claims)
    assert record is not None
    assert record.machines == ["", "m1", "m2"]
    assert [record.demands[n].memory_bytes for n in record.demand_of[1:]] == [GIB, 2 * GIB]
    assert claims_of(record, MACHINES) == [Claim(1, M1, SMALL), *one_changed]


def test_a_task_that_claims_nothing_can_be_freed():
    """The machine of the task left the region during the change."""
    claims = the_claims(Claim(0, M0, SMALL))
    change = Change("web", "e1", [], [Claim(0, M0, SMALL), Claim(5, M1, SMALL)])
    assert record_after(change, claims) is None
    assert record_after(Change("web", "e1"), None) is None
