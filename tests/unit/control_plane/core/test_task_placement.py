"""Reasons and choices of placement, and how a task's specification is filled in."""

from agent.api import Location, MachineFacts
from control_plane.api.jobs import JobProbe, JobSpec, Placement
from control_plane.core.capacity import Held, Need, plan_capacity
from control_plane.core.placement import (
    FIRST_PORT,
    LAST_PORT,
    Demand,
    Host,
    Load,
    explain,
    place,
    usable_memory,
)
from control_plane.core.task_spec import task_spec, unknown_templates

MIB = 1 << 20


def a_host(name: str, msb: str = "msb1", dc: str = "dc1", **changes) -> Host:
    values = {"machine_type": "small", "memory_bytes": 896 * MIB, "cpu_cores": 2.0}
    return Host(name, Location(datacenter=dc, msb=msb), **(values | changes))


def facts(memory_mib: int) -> MachineFacts:
    return MachineFacts(
        machine_id="m",
        boot_id="b",
        kernel="",
        cpu_model="",
        cpus=1,
        sockets=1,
        numa_nodes=1,
        memory_bytes=memory_mib * MIB,
        disk_bytes=0,
        disk_free_bytes=0,
        agent_version="",
    )


def test_a_reserve_stays_with_the_host():
    assert usable_memory(facts(1024)) == 896 * MIB
    assert usable_memory(facts(10_240)) == 9216 * MIB
    assert usable_memory(facts(64)) == 0


def test_reasons_are_counted_per_group_of_machines():  # trust F-58: all of them
    demand = Demand(512 * MIB, cpu_cores=1.5, machine_types=("small", "gpu"))
    hosts = [
        a_host("a", load=Load(memory_bytes=500 * MIB)),
        a_host("b", load=Load(memory_bytes=600 * MIB, cpu_cores=1.0)),
        a_host("c", blocked="is down"),
        a_host("d", machine_type="large"),
    ]
    assert explain(demand, hosts) == (
        "2 machines: memory: 512 MiB wanted, at most 396 MiB free",
        "1 machine: CPU: 1.5 cores wanted, at most 1 free",
        "1 machine: is down",
        "1 machine: not of type small or gpu",
    )
    assert explain(demand, []) == ("the entitlement holds no machine yet",)


def test_between_equal_msbs_the_emptier_data_center_wins():  # AL8
    hosts = [a_host("a", "msb1"), a_host("b", "msb2"), a_host("c", "msb3", "dc2")]
    plan = place(Demand(MIB), range(4), hosts, {"a": 1})
    assert [p.machine for p in plan.placements.values()] == ["c", "b", "c", "a"]


def test_the_least_loaded_machine_of_an_msb_is_taken():
    hosts = [a_host("a", load=Load(memory_bytes=100 * MIB)), a_host("b")]
    assert place(Demand(MIB), [0], hosts, {}).placements[0].machine == "b"


def test_ports_go_round_and_skip_those_in_use():
    host = a_host("a", next_port=LAST_PORT, load=Load(ports=frozenset({FIRST_PORT})))
    plan = place(Demand(MIB, ports=("x", "y")), [0], [host], {})
    assert plan.placements[0].ports == {"x": LAST_PORT, "y": FIRST_PORT + 1}


def a_need(tasks: int, memory_mib: int = 128) -> Need:
    return Need("web", Demand(memory_mib * MIB), tasks, unplaced=tasks, mine={})


def test_an_entitlement_takes_one_machine_per_msb_first():  # AL8 AL10
    free = [a_host(f"m{i}{j}", f"msb{i}") for i in (1, 2, 3) for j in (1, 2)]
    assert plan_capacity(3, [], free, [a_need(6)]).take == ("m11", "m21", "m31")
    assert plan_capacity(2, [], free, [a_need(6)]).take == ("m11", "m21")
    assert plan_capacity(6, [], free, [a_need(2)]).take == ("m11", "m21")
    assert len(plan_capacity(9, [], free, [a_need(6, 800)]).take) == 6


def test_what_is_missing_is_said():
    plan = plan_capacity(1, [], [a_host("m1")], [a_need(3, 800)])
    assert plan.reasons == ("web: 2 tasks lack room and the quota of 1 machines is used up",)
    plan = plan_capacity(9, [], [a_host("m1")], [a_need(1, 1000)])
    assert "memory: 1000 MiB wanted, at most 896 MiB free" in plan.reasons[0]
    assert "it is empty" in plan_capacity(9, [], [], [a_need(1)]).reasons[0]


def test_a_broken_machine_makes_way_when_the_quota_is_used_up():
    held = [Held(a_host("m1", blocked="is down"), empty=True)]
    plan = plan_capacity(1, held, [a_host("m2")], [a_need(1)])
    assert plan.give_back == ("m1",)


def test_idle_machines_go_back_but_not_the_last_of_a_needed_msb():  # AL10
    held = [
        Held(a_host("m1", "msb1"), empty=False),
        Held(a_host("m2", "msb1"), empty=True, idle=True),
        Held(a_host("m3", "msb2"), empty=True, idle=True),
        Held(a_host("m4", "msb3"), empty=True, idle=True),
    ]
    need = Need("web", Demand(MIB), 2, unplaced=0, mine={"m1": 2})
    assert plan_capacity(9, held, [], [need]).give_back == ("m2", "m3")
    assert plan_capacity(9, held[1:], [], []).give_back == ("m2", "m3", "m4")


def test_a_smaller_quota_is_enforced_as_machines_become_empty():
    held = [Held(a_host(f"m{i}", f"msb{i}"), empty=i > 1) for i in (1, 2, 3)]
    need = Need("web", Demand(MIB), 3, unplaced=0, mine={"m1": 3})
    assert plan_capacity(1, held, [], [need]).give_back == ("m2", "m3")


def test_templates_are_filled_and_dollars_escaped():
    spec = JobSpec(
        name="web",
        entitlement="e",
        tasks=1,
        image="sha256:" + "1" * 64,
        command=["/x", "-p${port:http}", "$${HOME} $HOME", "${task}@${machine}"],
        environment={"A": "${port:http}"},
        ports=["http"],
        probe=JobProbe(port="http", path="/ok"),
    )
    placement = Placement(machine="m1", ports={"http": 20_007})
    made = task_spec(spec, 3, placement, generation=7, epoch=2)
    assert made.command == ["/x", "-p20007", "${HOME} $HOME", "web-3@m1"]
    assert made.environment == {
        "A": "20007",
        "TWINE_JOB": "web",
        "TWINE_TASK": "web-3",
        "TWINE_MACHINE": "m1",
        "TWINE_PORT_HTTP": "20007",
    }
    assert (made.probe.port, made.probe.path) == (20_007, "/ok")
    assert (made.generation, made.epoch, made.job) == (7, 2, "web")
    assert unknown_templates("${port:admin} $${x} ${task} ${}", ["http"]) == ["port:admin", ""]
