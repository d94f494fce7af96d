"""How an allocator updates promises, neighbours and pins between two recomputations."""

import pytest
from regions import FREE, RegionIndex, a_request, add, plan

from control_plane.allocator.affinity import JobAffinity
from control_plane.allocator.core.demand import demand_for
from control_plane.allocator.core.ledger import PromiseLedger
from control_plane.allocator.core.request import Allowance, NeighbourJobs
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import Neighbour, Preference, Property, Strategy
from control_plane.api.requirements import In
from control_plane.portal.core.grants import Shares

KIND = ("small", "dc1", 4_000_000)


@pytest.mark.behaviour("CP7")
def test_a_pool_may_take_the_last_machine_that_is_promised_to_no_other():
    """With no machine left to spare the ledger is valid; with one too many taken it is not."""
    ledger = PromiseLedger(Shares(groups={}, flows={}, rest={KIND: 2}))
    for left in (1, 0):
        ledger.record_moves({("e1", KIND): 1, (FREE, KIND): -1})
        assert ledger.is_valid
        assert ledger.limits("e2") == {KIND: left}
    ledger.record_moves({("e1", KIND): 1, (FREE, KIND): -1})
    assert not ledger.is_valid


@pytest.mark.parametrize(
    "near",
    [
        NeighbourJobs(apart_from=(Neighbour(job="b"),)),
        NeighbourJobs(together_with=(Neighbour(job="b"),)),
    ],
    ids=["apart", "together"],
)
def test_a_job_is_alone_unless_it_names_another_or_is_named(near):
    affinity = JobAffinity(RegionIndex())
    affinity.note("a", near)
    assert [affinity.begin_alone(job) for job in "abc"] == [False, False, True]
    affinity.note("a", None)
    assert [affinity.begin_alone(job) for job in "ab"] == [True, True]


def test_a_task_goes_where_its_entitlement_is_pinned_to():
    spec = JobSpec(name="web", entitlement="e1", image="sha256:" + "1" * 64, tasks=1)
    assert demand_for(spec, None).requires == ()
    pinned = EntitlementSpec(machines=1, datacenter="dc2")
    assert demand_for(spec, pinned).requires == (In(Property.DATACENTER, frozenset({"dc2"})),)


@pytest.mark.parametrize(("avoided", "other"), [("msb1", "msb2"), ("msb2", "msb1")])
def test_a_bin_to_be_avoided_comes_last_although_each_has_a_limit(avoided, other):
    index = RegionIndex()
    for msb in ("msb1", "msb2"):
        add(index, [f"{msb}-{n}" for n in range(3)], msb)
    shy = Preference(property=Property.MSB, strategy=Strategy.AVOID, values=[avoided], at_most=2)
    made = plan(index, a_request(3, preferences=(shy,)), Allowance(machines=0))
    bins = [claim.machine.name[:4] for claim in made.change.claims]
    assert bins == [other, other, avoided]
