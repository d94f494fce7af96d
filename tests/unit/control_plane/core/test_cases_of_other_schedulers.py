"""Cases that users of kube-scheduler and Nomad know, and the behaviour of Twine in them.

The cases are facts about their documented behaviour, in our words; docs/allocation.md explains each
difference.
"""

import pytest
from regions import GIB, a_capacity, a_region, a_request, add, allocate, per, where

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import judge
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Group, Request
from control_plane.api.policy import Fit, Preference, Property, Strategy
from control_plane.api.requirement_parser import parse
from control_plane.api.requirements import Because, In
from control_plane.broker.core.matching import holds

LABELS = (("cores", "16"), ("disk", "ssd"), ("word", "many"))


@pytest.mark.parametrize(
    ("theirs", "ours", "suits"),
    [
        ("kube In", "label.disk in (ssd, hdd)", True),
        ("kube In, no such value", "label.disk in (hdd)", False),
        ("kube In, no such label", "label.zone in (a)", False),
        ("kube NotIn", "label.disk not in (hdd)", True),
        ("kube NotIn, no such label: it suits", "label.zone not in (a)", True),
        ("kube Exists", "label.disk exists", True),
        ("kube Exists, no such label", "label.zone exists", False),
        ("kube DoesNotExist", "label.zone not exists", True),
        ("kube DoesNotExist, there is one", "label.disk not exists", False),
        ("kube Gt", "label.cores > 15", True),
        ("kube Gt, equal is not greater", "label.cores > 16", False),
        ("kube Lt", "label.cores < 17", True),
        ("kube Gt, not a number: it does not suit", "label.word > 1", False),
        ("kube Lt, no such label: it does not suit", "label.zone < 1", False),
        ("kube expressions of one term: all", "label.disk = ssd and label.cores > 20", False),
        ("kube terms: any", "label.disk = hdd or label.cores > 8", True),
        ("Nomad =", "machine_type = small", True),
        ("Nomad !=, not set: it suits", "label.zone != a", True),
        ("Nomad is_set", "generation exists", False),
        ("Nomad is_not_set", "generation not exists", True),
        ("Nomad set_contains_any", "label.disk in (nvme, ssd)", True),
        ("Nomad >=", "label.cores >= 16", True),
    ],
)
def test_a_requirement_means_what_theirs_does(theirs, ours, suits):
    (machine,) = add(RegionIndex(), "m1", labels=LABELS)
    assert holds(parse(ours), machine) is suits, theirs


@pytest.mark.parametrize(
    ("theirs", "task", "fits"),
    [
        ("kube: all that is left is enough", Demand(2 * GIB, cpus=2), True),
        ("kube: one resource too many", Demand(2 * GIB, cpus=2.001), False),
        ("kube: the other one", Demand(2 * GIB + 1, cpus=2), False),
        ("kube: a task without demands fits", Demand(), True),
        ("kube: what the node does not have", Demand(gpus=1), False),
    ],
)
def test_fit_counts_claims_and_not_usage(theirs, task, fits):
    index = a_region(msbs=1, machines=1)
    allocate(index, a_request(2, "there", demand=Demand(GIB, cpus=1)))
    (machine,) = index.machines.values()
    assert (not judge(task, machine, machine)) is fits, theirs


@pytest.mark.parametrize(
    ("theirs", "task", "machine", "fits"),
    [
        ("kube ephemeral storage: what is left", Demand(disk_bytes=GIB), {"disk_bytes": GIB}, True),
        ("kube ephemeral storage: too much", Demand(disk_bytes=2), {"disk_bytes": 1}, False),
        ("kube extended resource: whole ones", Demand(gpus=2), {"gpus": 2}, True),
        ("kube extended resource: one too many", Demand(gpus=3), {"gpus": 2}, False),
        ("kube: what a node does not have is none of it", Demand(gpus=1), {}, False),
        ("Nomad network mbits", Demand(network_mbps=100), {"network_mbps": 99}, False),
        (
            "Nomad device constraint by model",
            Demand(gpus=1, requires=(parse("gpu_type = a100"),)),
            {"gpus": 1, "gpu_type": "l4"},
            False,
        ),
        (
            "Nomad device constraint by an attribute",
            Demand(gpus=1, requires=(parse("label.gpu-memory >= 40"),)),
            {"gpus": 1, "labels": (("gpu-memory", "80"),)},
            True,
        ),
        (
            "kube nodeSelector of two labels: both",
            Demand(requires=(parse("label.a = 1"), parse("label.b = 2"))),
            {"labels": (("a", "1"), ("b", "3"))},
            False,
        ),
    ],
)
def test_the_resources_of_a_machine_decide_whether_a_task_fits(theirs, task, machine, fits):
    (there,) = add(RegionIndex(), "m1", **machine)
    assert (not judge(task, there, there)) is fits, theirs


@pytest.mark.parametrize(
    ("theirs", "blocked", "only", "host"),
    [
        ("kube nodeName", "", "m2", "m2"),
        ("kube cordon, Nomad ineligible: no new tasks", "m1", "", "m2"),
        ("kube nodeName of a cordoned node: here it waits", "m2", "m2", None),
    ],
)
def test_a_machine_by_name_and_one_that_takes_no_tasks(theirs, blocked, only, host):
    index = RegionIndex()
    for name in ("m1", "m2"):
        add(index, name, blocked="is drained" if name == blocked else "")
    requires = (In("machine", frozenset({only})),) if only else ()
    made = allocate(index, a_request(1, demand=Demand(GIB, cpus=1, requires=requires)))
    assert where(index).get(0) == host, theirs
    assert any("is drained" in reason for reason in made.reasons) is (host is None)


def test_a_task_that_failed_goes_to_another_machine_if_there_is_one():
    """Nomad penalizes a node on which an allocation failed; Kubernetes has no such rule."""
    index = RegionIndex()
    add(index, "m1")
    allocate(index, a_request(1))
    allocate(index, a_request(1, avoid="m1"))
    assert where(index) == {0: "m1"}, "there is no other"
    add(index, "m2")
    allocate(index, a_request(1, avoid="m1"))
    assert where(index) == {0: "m2"}


@pytest.mark.parametrize(
    ("fit", "name"), [(Fit.TIGHT, "full"), (Fit.EVEN, "empty")], ids=["binpack", "spread"]
)
def test_nomads_two_algorithms_are_fit_tight_and_even(fit, name):
    index = RegionIndex()
    add(index, "full empty")
    at_full = Demand(GIB, cpus=1, requires=(In("machine", frozenset({"full"})),))
    allocate(index, a_request(1, "other", demand=at_full))
    allocate(index, a_request(1, fit=fit))
    assert where(index) == {0: name}


@pytest.mark.parametrize(
    ("theirs", "machines", "tasks", "zones"),
    [
        ("kube maxSkew 1: one more comes to the emptiest", (2, 2, 2), 7, [2, 2, 3]),
        ("kube maxSkew 1, fewer tasks than zones", (2, 2, 2), 2, [0, 1, 1]),
        ("kube ScheduleAnyway: a full zone does not hold up the others", (1, 2, 2), 20, [4, 8, 8]),
    ],
)
def test_tasks_are_spread_as_evenly_as_there_is_room(theirs, machines, tasks, zones):
    index = RegionIndex()
    for zone, count in enumerate(machines):
        add(index, [f"z{zone}-{i}" for i in range(count)], f"msb{zone}")
    allocate(index, a_request(tasks))
    assert per(index, "msb") == zones, theirs


def test_those_that_are_there_count_for_the_spread():
    """Kubernetes counts the matching pods; Twine counts the tasks of the job."""
    index = a_region(msbs=3, machines=2)
    there = Demand(GIB, cpus=1, requires=(In("msb", frozenset({"dc1/msb1"})),))
    groups = (Group(there, (0, 1)),)
    allocate(index, Request("web", "e1", groups))
    allocate(index, Request("web", "e1", (*groups, Group(Demand(GIB, cpus=1), (2, 3, 4, 5)))))
    assert per(index, "msb") == [2, 2, 2]


@pytest.mark.parametrize(
    ("theirs", "limit", "level", "placed"),
    [
        ("Nomad distinct_hosts", 1, Property.MACHINE, 6),
        ("Nomad distinct_property with value 2", 2, Property.MSB, 6),
        ("kube anti-affinity to itself over zones", 1, Property.MSB, 3),
    ],
)
def test_a_limit_per_bin_is_hard(theirs, limit, level, placed):
    index = a_region(msbs=3, machines=2)
    only = (Preference(property=level, at_most=limit),)
    made = allocate(index, a_request(10, preferences=only))
    assert len(where(index)) == placed, theirs
    assert len(made.unplaced) == 10 - placed


@pytest.mark.parametrize(
    ("theirs", "weights", "tasks", "zones"),
    [
        ("Nomad spread with targets 70 and 30", {"msb0": 70, "msb1": 30}, 10, [0, 3, 7]),
        ("Nomad spread without targets: evenly", {}, 9, [3, 3, 3]),
        ("Nomad spread, targets for all", {"msb0": 50, "msb1": 25, "msb2": 25}, 8, [2, 2, 4]),
    ],
)
def test_tasks_are_spread_by_targets(theirs, weights, tasks, zones):
    """In Nomad, values without a target share the rest of 100. Here each has weight 1."""
    index = RegionIndex()
    for zone in range(3):
        add(index, [f"z{zone}-{i}" for i in range(4)], f"msb{zone}")
    preference = Preference(property=Property.MSB, weights=weights)
    allocate(index, a_request(tasks, preferences=(preference,)))
    assert per(index, "msb") == zones, theirs


@pytest.mark.parametrize(
    ("theirs", "strategy", "values", "name"),
    [
        ("kube preferred affinity by a label", Strategy.PREFER, ["ssd"], "ssd"),
        (
            "kube preferred, no machine has it: it is scheduled nevertheless",
            Strategy.PREFER,
            ["x"],
            "",
        ),
        ("Nomad affinity with a negative weight", Strategy.AVOID, ["hdd"], "ssd"),
        ("kube PreferNoSchedule taint", Strategy.AVOID, ["ssd"], "hdd"),
    ],
)
def test_labels_attract_and_repel(theirs, strategy, values, name):
    index = RegionIndex()
    for label in ("hdd", "ssd"):
        add(index, label, labels=(("disk", label),))
    preference = Preference(property="label.disk", strategy=strategy, values=values)
    allocate(index, a_request(1, preferences=(preference,)))
    assert where(index)[0] in ((name,) if name else ("hdd", "ssd")), theirs


@pytest.mark.parametrize(
    ("theirs", "near", "hosts"),
    [
        ("kube affinity: where the others are", In("msb", frozenset({"dc1/msb2"})), 2),
        ("kube affinity to no machine: it waits", In("msb", frozenset()), 0),
    ],
)
def test_nearness_to_another_job_is_hard(theirs, near, hosts):
    index = a_region(msbs=3, machines=2)
    group = Group(Demand(GIB, cpus=1), (0, 1), among=(Because(near, "not near"),))
    made = allocate(index, Request("web", "e1", (group,)))
    assert len(set(where(index).values())) == hosts, theirs
    assert any("not near" in reason for reason in made.reasons) is (hosts == 0)


def test_the_first_preference_outweighs_all_others():
    """Kubernetes and Nomad add weighted scores; here a preference only decides between bins that
    the earlier preferences rank equal. By weight, two racks of the wanted type would win; here the
    better MSB wins.
    """
    index = RegionIndex()
    add(index, "right", "msb1", capacity=a_capacity("small"))
    add(index, "wanted", "msb2", capacity=a_capacity("gpu", generation="new", sku="good"))
    order = (
        Preference(property=Property.MSB, strategy=Strategy.PREFER, values=["msb1"]),
        Preference(property=Property.MACHINE_TYPE, strategy=Strategy.PREFER, values=["gpu"]),
        Preference(property=Property.GENERATION, strategy=Strategy.PREFER, values=["new"]),
        Preference(property=Property.SKU, strategy=Strategy.PREFER, values=["good"]),
    )
    allocate(index, a_request(1, preferences=order))
    assert where(index) == {0: "right"}


def test_a_task_stays_when_its_machine_changes():
    """Kubernetes ignores scheduling requirements during execution; Twine does the same."""
    index = RegionIndex()
    add(index, "m1 m2", labels=LABELS)
    fast = Demand(GIB, cpus=1, requires=(parse("label.disk = ssd"),))
    allocate(index, a_request(1, demand=fast))
    (host,) = where(index).values()
    add(index, host)
    allocate(index, a_request(2, demand=fast))
    assert where(index)[0] == host
    assert where(index)[1] != host
