"""Whether a machine has room for a task, and every reason if it has not."""

from dataclasses import replace

import pytest
from inventory import some_facts
from msgspec import structs
from regions import GIB, TASK, a_capacity, add

from agent.api import Limits, Location
from control_plane.allocator.core.demand import Demand, demand_of
from control_plane.allocator.core.feasibility import (
    FIRST_PORT,
    PORTS,
    SHARED,
    Lack,
    Tally,
    admits,
    admits_any_of,
    bin_of,
    judge,
    names,
)
from control_plane.allocator.core.machine_pools import Machine, Ports
from control_plane.allocator.core.planned_room import PlannedRoom
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.api.jobs import JobSpec
from control_plane.api.machines import Hardware, MachineRecord
from control_plane.api.policy import Overcommit, Property, Requirement
from control_plane.broker.core.capacity import Capacity, capacity_of

MIB = 1 << 20


def a_machine(name: str = "m1", **fields) -> Machine:
    room = {"gpus": 2, "disk_bytes": 10 * GIB, "network_mbps": 1000}
    defaults = room | {"gpu_type": "h100", "generation": "skylake"}
    return add(
        RegionIndex(),
        name,
        "msb3",
        "dc1",
        rack="rack7",
        row="row2",
        **(defaults | {"sku": "web-1s"} | fields),
    )[0]


def requiring(property_: Property, *values: str) -> Demand:
    return Demand(requires=((property_, frozenset(values)),))


ALL_PORTS = tuple(f"p{i}" for i in range(PORTS + 1))


@pytest.mark.parametrize(
    ("demand", "lack", "message"),
    [
        (
            requiring(Property.SKU, "db", "ai"),
            Lack.EXCLUDED,
            "1 machine: requirement not met: sku in (ai, db)",
        ),
        (
            Demand(memory_bytes=5 * GIB),
            Lack.MEMORY,
            "1 machine: memory: 5120 MiB wanted, at most 4096 MiB free",
        ),
        (Demand(cpus=4.5), Lack.CPU, "1 machine: CPU: 4.5 cores wanted, at most 4 cores free"),
        (Demand(rru=4.5), Lack.CPU, "1 machine: CPU: 4.5 RRU wanted, at most 4 RRU free"),
        (Demand(gpus=3), Lack.GPUS, "1 machine: GPUs: 3 wanted, at most 2 free"),
        (
            Demand(network_mbps=1001),
            Lack.NETWORK,
            "1 machine: network: 1001 Mbit/s wanted, at most 1000 free",
        ),
        (
            Demand(gpus=0.5, disk_bytes=11 * GIB),
            Lack.DISK,
            "1 machine: disk: 11264 MiB wanted, at most 10240 MiB free",
        ),
        (Demand(ports=ALL_PORTS), Lack.PORTS, "1 machine: no free ports"),
    ],
)
def test_each_lack_has_its_message(demand, lack, message):
    machine = a_machine()
    tally = Tally(demand)
    tally.add(machine, machine)
    assert judge(demand, machine, machine) == lack
    assert tally.reasons() == (message,)
    assert (tally.machines, tally.fitting) == (1, 0)


def test_all_lacks_of_a_machine_are_found_at_once():
    machine = a_machine(blocked="is in maintenance")
    demand = Demand(
        5 * GIB,
        cpus=5,
        gpus=3,
        network_mbps=2000,
        disk_bytes=11 * GIB,
        ports=ALL_PORTS,
        requires=((Property.DATACENTER, frozenset({"dc2"})),),
    )
    assert judge(demand, machine, machine) == sum(Lack)
    tally = Tally(demand)
    tally.add(machine, machine)
    assert len(tally.reasons()) == 8
    assert "1 machine: is in maintenance" in tally.reasons()
    assert tally.lacks() >= {"excluded", "memory", "cpu", "gpus", "network", "ports", "disk"}


def test_reasons_are_counted_over_machines_the_most_frequent_first():
    index = RegionIndex()
    add(index, "a b", memory_bytes=GIB)
    add(index, "c", memory_bytes=2 * GIB, blocked="is down")
    add(index, "d", machine_type="large", memory_bytes=9 * GIB)
    add(index, "e", memory_bytes=9 * GIB)
    demand = Demand(3 * GIB, requires=((Property.MACHINE_TYPE, frozenset({"small", "gpu"})),))
    tally = Tally(demand)
    for machine in index.machines.values():
        tally.add(machine, machine)
    assert tally.reasons() == (
        "3 machines: memory: 3072 MiB wanted, at most 2048 MiB free",
        "1 machine: requirement not met: machine_type in (gpu, small)",
        "1 machine: is down",
    )
    assert tally.fitting == 1


@pytest.mark.behaviour("BUG-CP147")
def test_a_reason_never_reads_as_if_the_room_sufficed():
    """A machine that lacks one byte had `512 MiB wanted, at most 512 MiB free`."""
    room = a_machine(memory_bytes=512 * MIB, disk_bytes=100 * MIB)
    tally = Tally(Demand(memory_bytes=512 * MIB + 1, disk_bytes=100 * MIB + 1))
    tally.add(room, room)
    less = a_machine(memory_bytes=512 * MIB - 1)
    exact = Tally(Demand(memory_bytes=512 * MIB))
    exact.add(less, less)
    assert tally.reasons() == (
        "1 machine: disk: 101 MiB wanted, at most 100 MiB free",
        "1 machine: memory: 513 MiB wanted, at most 512 MiB free",
    )
    assert exact.reasons() == ("1 machine: memory: 512 MiB wanted, at most 511 MiB free",)


def test_a_task_may_want_all_of_a_machine():
    machine = a_machine()
    everything = Demand(4 * GIB, cpus=4, gpus=2, network_mbps=1000)
    assert judge(everything, machine, machine) == Lack.NOTHING
    full = PlannedRoom(machine)
    full.take(everything, machine.capacity)
    assert judge(Demand(), machine, full) == Lack.NOTHING
    lacks = Lack.MEMORY | Lack.CPU | Lack.GPUS | Lack.NETWORK
    assert judge(everything, machine, full) == lacks


@pytest.mark.behaviour("MO6")
def test_rru_are_the_same_everywhere_and_cores_are_not():
    fast = a_capacity(rru=8.0, cpus=4.0)
    assert fast.rru_of(Demand(cpus=1).cpu_on(fast)) == 2.0
    assert fast.rru_of(Demand(rru=1).cpu_on(fast)) == 1.0
    assert fast.cpus_of(Demand(rru=1).cpu_on(fast)) == 0.5
    assert a_capacity().rru_of(Demand(cpus=1).cpu_on(a_capacity())) == 1.0


def test_taking_and_returning_leaves_nothing_behind():
    machine = a_machine(rru=24.1, cpus=36.0)
    room = PlannedRoom(machine)
    demands = [Demand(cpus=0.1), Demand(cpus=1 / 3), Demand(rru=0.7), Demand(cpus=2.3)]
    for demand in demands:
        room.take(demand, machine.capacity)
    for demand in demands:
        room.take(demand, machine.capacity, -1)
    assert room.free_cpu == machine.free_cpu


PROPERTIES = [
    (Property.REGION, "local", "local"),
    (Property.DATACENTER, "dc1", "dc1"),
    (Property.MSB, "dc1/msb3", "msb3"),
    (Property.ROW, "dc1/msb3/row2", "row2"),
    (Property.RACK, "dc1/msb3/row2/rack7", "rack7"),
    (Property.MACHINE, "m1", "m1"),
    (Property.MACHINE_TYPE, "small", "small"),
    (Property.GENERATION, "skylake", "skylake"),
    (Property.SKU, "web-1s", "web-1s"),
    (Property.GPU_TYPE, "h100", "h100"),
]


@pytest.mark.behaviour("AL5", "AL23")
@pytest.mark.parametrize(("property_", "bin_", "value"), PROPERTIES)
def test_a_requirement_can_be_made_on_every_property(property_, bin_, value):
    machine = a_machine()
    assert bin_of(property_, machine) == bin_
    assert admits(requiring(property_, value), machine)
    assert admits(requiring(property_, "other", bin_), machine)
    assert not admits(requiring(property_, "other"), machine)
    assert not admits(requiring(property_, value[1:]), machine)


def test_every_property_is_known():
    assert {p for p, _, _ in PROPERTIES} == set(Property)


def test_a_place_may_be_named_by_any_end_of_its_path():
    machine = a_machine()
    for value in ("msb3", "dc1/msb3"):
        assert admits(requiring(Property.MSB, value), machine)
    for value in ("rack7", "row2/rack7", "msb3/row2/rack7", "dc1/msb3/row2/rack7"):
        assert admits(requiring(Property.RACK, value), machine)
        assert names("dc1/msb3/row2/rack7", value)
    for value in ("dc2/msb3", "sb3", "msb3/", "dc1"):
        assert not admits(requiring(Property.MSB, value), machine)
    assert Requirement(property=Property.MSB, values=["dc1/msb3"]).values == ["dc1/msb3"]


def test_a_bucket_is_excluded_only_by_what_its_machines_share():
    bucket = a_machine().bucket
    for property_, _, value in PROPERTIES:
        assert admits_any_of(requiring(property_, value), bucket)
        assert admits_any_of(requiring(property_, "other"), bucket) == (property_ not in SHARED)


def test_requirements_hold_together():
    machine = a_machine()
    both = (
        (Property.GENERATION, frozenset({"skylake"})),
        (Property.DATACENTER, frozenset({"dc2"})),
    )
    assert not admits(Demand(requires=both), machine)
    assert admits(Demand(requires=both[:1]), machine)


@pytest.mark.behaviour("AL22")
def test_power_is_not_a_constraint():
    for power_w in (0, 1, 100_000):
        machine = a_machine(power_w=power_w)
        assert judge(TASK, machine, machine) == Lack.NOTHING


def a_job(**fields) -> JobSpec:
    return JobSpec(
        **{
            "name": "web",
            "entitlement": "e1",
            "tasks": 3,
            "image": "sha256:" + "1" * 64,
            "command": ["/bin/server"],
            "limits": Limits(memory_max_bytes=3 * GIB, cpu_max_cores=1.5),
            **fields,
        }
    )


def test_a_task_claims_its_limits():
    demand = demand_of(a_job(ports=["http"], gpus=1, network_mbps=10))
    assert demand == Demand(3 * GIB, cpus=1.5, gpus=1, network_mbps=10, ports=("http",))
    assert demand_of(a_job(rru=2.5)) == Demand(3 * GIB, rru=2.5)


@pytest.mark.behaviour("AL21", "EL5")
def test_overcommit_is_by_opt_in_only():
    assert demand_of(a_job()).memory_bytes == 3 * GIB
    over = demand_of(a_job(overcommit=Overcommit(cpu=3.0, memory=2.0)))
    assert over == Demand(3 * GIB // 2, cpus=0.5)
    assert demand_of(a_job(rru=3.0, overcommit=Overcommit(cpu=2.0))).rru == 1.5


@pytest.mark.behaviour("CP10", "AL23")
def test_types_requirements_and_the_pinned_data_center_all_hold():
    spec = a_job(
        machine_types=["small"],
        requires=[Requirement(property=Property.GENERATION, values=["skylake"])],
    )
    assert demand_of(spec, "dc1").requires == (
        (Property.MACHINE_TYPE, frozenset({"small"})),
        (Property.GENERATION, frozenset({"skylake"})),
        (Property.DATACENTER, frozenset({"dc1"})),
    )


FACTS = some_facts("m", cpus=8, memory_bytes=20 * GIB)


def a_record(**fields) -> MachineRecord:
    return MachineRecord(
        machine="m1", location=Location(datacenter="dc1"), machine_type="small", **fields
    )


def test_a_reserve_stays_with_the_host():
    assert capacity_of(a_record(facts=FACTS)).memory_bytes == 18 * GIB
    little = structs.replace(FACTS, memory_bytes=1024 * MIB)
    assert capacity_of(a_record(facts=little)).memory_bytes == 896 * MIB
    none = structs.replace(FACTS, memory_bytes=64 * MIB)
    assert capacity_of(a_record(facts=none)).memory_bytes == 0


@pytest.mark.behaviour("BUG-AG4")
def test_memory_taken_as_huge_pages_is_promised_to_no_task():
    facts = structs.replace(FACTS, hugepages_bytes=10 * GIB)
    assert capacity_of(a_record(facts=facts)).memory_bytes == 8 * GIB
    greedy = structs.replace(FACTS, hugepages_bytes=19 * GIB)
    assert capacity_of(a_record(facts=greedy)).memory_bytes == 0


def test_the_agent_is_believed_before_the_inventory():
    hardware = Hardware(
        generation="skylake", sku="web", rru=4.0, cpus=4, memory_bytes=GIB, gpus=1, power_w=300
    )
    capacity = capacity_of(a_record(facts=FACTS, hardware=hardware))
    assert (capacity.cpus, capacity.memory_bytes) == (8, 18 * GIB)
    assert (capacity.rru, capacity.per_cpu / capacity.per_rru) == (4.0, 0.5)
    assert (capacity.generation, capacity.sku, capacity.gpus) == ("skylake", "web", 1)


def test_a_machine_of_unknown_power_has_one_rru_per_cpu_and_an_unknown_one_nothing():
    assert capacity_of(a_record(facts=FACTS)).rru == 8.0
    assert capacity_of(a_record()) == Capacity("small", 0.0, 0.0, 0)


def test_ports_go_round_and_skip_those_in_use():
    ports = Ports({FIRST_PORT, FIRST_PORT + 2}, FIRST_PORT + PORTS - 1)
    picked = ports.pick(["x", "y", "z"])
    assert picked == {"x": FIRST_PORT + PORTS - 1, "y": FIRST_PORT + 1, "z": FIRST_PORT + 3}


def test_the_size_of_a_demand_leaves_out_the_names_of_ports():
    assert Demand(1, ports=("a",)).size == Demand(1, ports=("b",)).size
    assert Demand(1, ports=("a",)).size != Demand(1).size
    assert replace(TASK, gpus=1).size != TASK.size
