"""The resources of a task: as properties, as kernel values, and whether they are available."""

from __future__ import annotations

import pytest
from builders import a_record, a_spec, a_unit, seen
from msgspec.structs import replace

from agent.api import IoLimit, Limits, Resize, Resources, TaskState
from agent.api.resources import contradiction
from agent.lease.core.lease import LeaseMoment
from agent.machine.unit_properties import encode
from agent.resources.core.limits import (
    hardware_refusal,
    kernel_values,
    limit_properties,
    live_properties,
    memory_protection_refusal,
    missing_files,
    not_in_force,
    on_devices,
    resized,
    resources_refusal,
)
from agent.runtime.core.records import key_of
from agent.tasks.core.lifecycle import Action, decide

MIB = 1 << 20
DISKS = {"vda": "vda", "vdb": "vdb", "disk/by-id/a": "vda", "disk/by-id/b": "vdb"}
ALL_LIMITS = Resources(
    memory_min_bytes=MIB,
    memory_low_bytes=2 * MIB,
    memory_high_bytes=8 * MIB,
    swap_max_bytes=3 * MIB,
    io_weight=50,
    io=[IoLimit(device="/dev/vda", read_bytes_per_s=MIB, write_ops_per_s=10)],
    cpus=[1, 3],
    numa_nodes=[0],
)


def test_every_resource_is_a_property_that_systemd_takes() -> None:
    found = limit_properties(a_spec(resources=ALL_LIMITS))

    assert found["MemoryMin"] == MIB
    assert found["MemoryHigh"] == 8 * MIB
    assert found["MemorySwapMax"] == 3 * MIB
    assert found["AllowedCPUs"] == (1, 3)
    assert found["IOReadBandwidthMax"] == {"/dev/vda": MIB}
    assert found["IOWriteIOPSMax"] == {"/dev/vda": 10}
    assert "IOWriteBandwidthMax" not in found
    assert encode(found)


def test_a_task_that_asks_for_nothing_more_has_no_more_properties() -> None:
    assert set(limit_properties(a_spec())) == {
        "CPUWeight",
        "CPUQuotaPerSecUSec",
        "MemoryMax",
        "MemorySwapMax",
        "TasksMax",
    }


def test_a_removed_property_is_lifted_from_a_running_unit() -> None:
    found = live_properties(a_spec(), ALL_LIMITS)

    assert found["MemoryMin"] == 0
    assert found["MemoryHigh"] == 2**64 - 1
    assert found["AllowedCPUs"] == ()
    assert found["IOReadBandwidthMax"] == {"/dev/vda": 2**64 - 1}
    assert encode(found)
    assert live_properties(a_spec(), None) == limit_properties(a_spec())


@pytest.mark.behaviour("BUG-AG53")
@pytest.mark.parametrize("cores", [0.01, 0.6666667, 1 / 3, 1.5, 2.00001, 63.999999])
def test_a_cpu_limit_is_rounded_as_systemd_rounds_it(cores: float) -> None:
    """systemd sets whole microseconds for each second, then for each period."""
    spec = a_spec(limits=Limits(cpu_max_cores=cores))
    quota_usec = limit_properties(spec)["CPUQuotaPerSecUSec"]
    assert isinstance(quota_usec, int)
    assert kernel_values(spec, 4096)["cpu.max"] == f"{quota_usec * 100_000 // 1_000_000} 100000"


def test_limits_count_once_the_kernel_reports_them() -> None:
    spec = a_spec(limits=Limits(memory_max_bytes=16 * MIB + 5, cpu_max_cores=1.5))
    right = kernel_values(spec, 4096)

    assert right["memory.max"] == str(16 * MIB)  # whole pages
    assert right["cpu.max"] == "150000 100000"
    assert right["memory.high"] == "max"
    assert not_in_force(right, right) == ""
    assert not_in_force(right, {}) == ""
    wrong = not_in_force(right, right | {"pids.max": "max"})
    assert missing_files({"cpuset.cpus.effective": "1"}, right).startswith(
        "cpuset.cpus.effective does not exist"
    )
    assert missing_files(right, right) == ""
    assert wrong == "pids.max is 'max' instead of '512'"


def test_a_change_of_resources_alone_is_made_without_a_restart() -> None:
    old, new = a_spec(), a_spec(generation=2, resources=ALL_LIMITS)
    task = a_record(spec=new, limits=old.limits, state=TaskState.RUNNING, invocation_id="i1")
    now = LeaseMoment(wall=100.0, boot_s=100.0)

    decision = decide(task, seen(a_unit(task)), now)

    assert key_of(old) == key_of(new)
    assert decision.action is Action.LIMIT
    done = replace(decision.task, resources=ALL_LIMITS)
    assert decide(done, seen(a_unit(task)), now).action is Action.WAIT


@pytest.mark.behaviour("F-05")
def test_a_unit_of_an_earlier_agent_is_left_alone() -> None:
    task = a_record(limits=Limits(), state=TaskState.RUNNING, invocation_id="i1")

    assert decide(task, seen(a_unit(task)), LeaseMoment(wall=1.0, boot_s=1.0)).action is Action.WAIT


def test_a_resize_changes_only_named_fields_and_has_a_generation() -> None:
    spec = a_spec(generation=7, resources=Resources(io_weight=5))
    found = resized(spec, Resize(memory_max_bytes=32 * MIB, memory_low_bytes=MIB))

    assert found.generation == 8
    assert found.limits == replace(spec.limits, memory_max_bytes=32 * MIB)
    assert found.resources == Resources(io_weight=5, memory_low_bytes=MIB)
    assert resized(spec, Resize(tasks_max=3, generation=20, epoch=2)).epoch == 2


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        (Resources(memory_min_bytes=1 << 40), "resources.memory_min_bytes 1099511627776 exceeds"),
        (Resources(memory_high_bytes=1 << 40), "resources.memory_high_bytes 1099511627776 exceeds"),
        (Resources(cpus=[0, 4]), "there is no CPU 4; the machine has 4"),
        (Resources(cpus=[2, 3]), "CPU 2 is exclusive to another task"),
        (
            Resources(memory_min_bytes=200 * MIB),
            ("and 104857600 of them are reserved for other tasks"),
        ),
    ],
)
def test_missing_resources_are_refused_with_the_numbers(resources: Resources, why: str) -> None:
    other = a_spec(resources=Resources(cpus=[2], memory_min_bytes=100 * MIB))

    spec = a_spec(resources=resources)
    assert why in (
        resources_refusal(spec, 4, [other]) or memory_protection_refusal(spec, [other], 256 * MIB)
    )
    fits = a_spec(resources=Resources(cpus=[3], memory_min_bytes=156 * MIB))
    assert (
        resources_refusal(fits, 4, [other])
        == memory_protection_refusal(fits, [other], 256 * MIB)
        == ""
    )


@pytest.mark.behaviour("AG8")
@pytest.mark.parametrize(
    ("resources", "why"),
    [
        (Resources(io=[IoLimit(device="/dev/nope", read_bytes_per_s=1)]), "block device /dev/nope"),
        (
            Resources(io=[IoLimit(device="/dev/null", read_bytes_per_s=1)]),
            "the machine has /dev/vda",
        ),
        (Resources(numa_nodes=[0, 1]), "there is no node 1; the machine has 1 (from 0 on)"),
        (Resources(numa_nodes=[0], io=[IoLimit(device="/dev/vda", read_bytes_per_s=1)]), ""),
        (Resources(io=[IoLimit(device="/dev/disk/by-id/a", read_bytes_per_s=1)]), ""),
        (
            Resources(io=[IoLimit(device="/dev/mapper/a", read_bytes_per_s=1)]),
            "has /dev/vda, /dev/vdb",
        ),
        (
            Resources(io=[IoLimit(device="/dev/disk/by-id/c", read_bytes_per_s=1)]),
            "device /dev/disk/by-id/c; the machine has /dev/disk/by-id/a, /dev/disk/by-id/b",
        ),
        (
            Resources(
                io=[
                    IoLimit(device="/dev/vdb", read_bytes_per_s=1),
                    IoLimit(device="/dev/disk/by-id/a", write_bytes_per_s=1),
                    IoLimit(device="/dev/disk/by-id/b", write_bytes_per_s=1),
                ]
            ),
            "resources.io: /dev/vdb and /dev/disk/by-id/b are both /dev/vdb: put all its limits",
        ),
    ],
)
def test_a_device_or_node_that_is_not_there_is_refused(resources: Resources, why: str) -> None:
    """systemd would start the task without the requested limit."""
    found = hardware_refusal(a_spec(resources=resources), 1, DISKS)
    assert why in found if why else found == ""


@pytest.mark.behaviour("AG8")
def test_systemd_gets_the_kernels_name_of_each_device() -> None:
    """systemd writes limits by name one after the other.

    A removed limit hid another name's limit.
    """

    def reads(*devices: str, rate: int = 1) -> Resources:
        return Resources(io=[IoLimit(device=d, read_bytes_per_s=rate) for d in devices])

    def live(before: Resources, now: Resources) -> list[tuple[str, int]]:
        found = on_devices(live_properties(a_spec(resources=now), before), DISKS)
        rates = found["IOReadBandwidthMax"]
        assert isinstance(rates, dict)
        return list(rates.items())

    most = 2**64 - 1
    link, gone = "/dev/disk/by-id/a", "/dev/disk/by-id/gone"
    at_start = on_devices(limit_properties(a_spec(resources=reads(link, "/dev/vdb"))), DISKS)
    assert at_start["IOReadBandwidthMax"] == {"/dev/vda": 1, "/dev/vdb": 1}
    assert "IOWriteBandwidthMax" not in at_start
    assert live(reads(link), reads("/dev/vda", rate=2)) == [("/dev/vda", 2)]
    assert live(reads("/dev/vda"), reads(link, rate=2)) == [("/dev/vda", 2)]
    assert live(reads(link), Resources()) == [("/dev/vda", most)]
    assert live(reads(gone), reads(link)) == [(gone, most), ("/dev/vda", 1)]


@pytest.mark.parametrize(
    ("io", "why"),
    [
        ([{"read_bytes_per_s": 1}, {"write_bytes_per_s": 1}], "/dev/vda is named twice"),
        ([{}], "/dev/vda has no limit"),
    ],
)
def test_limits_of_a_device_are_given_once_and_are_not_empty(
    io: list[dict[str, int]], why: str
) -> None:
    found = contradiction(
        Resources(io=[IoLimit(device="/dev/vda", **limits) for limits in io]), None
    )
    assert found is not None
    assert found[0] == "resources.io"
    assert why in found[1]


def test_no_more_devices_than_a_specification_may_have_come_by_resizes() -> None:
    """The record could not be read again."""

    def some(start: int, count: int) -> list[IoLimit]:
        names = range(start, start + count)
        return [IoLimit(device=f"/dev/d{n}", read_bytes_per_s=1) for n in names]

    spec = a_spec(resources=Resources(io=some(0, 10)))
    most = resized(spec, Resize(io=some(8, 8)))
    assert contradiction(most.resources, None) is None
    assert [io.device for io in most.resources.io] == [f"/dev/d{n}" for n in range(16)]
    more = resized(spec, Resize(io=some(10, 7)))
    assert contradiction(more.resources, None) == (
        "resources.io",
        "17 devices have a limit; the maximum is 16",
    )
    assert resized(spec, Resize(tasks_max=9)).resources == spec.resources
