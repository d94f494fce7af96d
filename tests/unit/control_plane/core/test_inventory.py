"""A list of machines is read completely, or refused with every error and its line."""

import msgspec
import pytest

from agent.api import Location
from control_plane.api.inventory import MachineScope
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.broker.core.capacity import capacity_of
from control_plane.broker.core.inventory import (
    COLUMNS,
    NOT_JOINED,
    InventoryMachine,
    conflict_with,
    new_record,
    parse_csv,
    parse_json,
    scope_test,
    size_of,
    with_values,
)
from control_plane.broker.core.unavailability import blocking

HEADER = ",".join(COLUMNS)
ROW = (
    "m1,prn,prn1,msb1,row1,rack1,web,skylake,web-1s-64g,1.5,36,64G,0,,25000,300,c1,"
    "m1.example:7443,disk=nvme zone=a,500G"
)


@pytest.mark.behaviour("MO18")
def test_every_column_reaches_the_record() -> None:
    (machine,) = parse_csv(f"{HEADER}\n{ROW}\n").machines
    assert machine.machine == "m1"
    assert machine.location == Location(
        region="prn", datacenter="prn1", msb="msb1", row="row1", rack="rack1"
    )
    hardware = machine.hardware
    assert (hardware.generation, hardware.sku, hardware.rru) == ("skylake", "web-1s-64g", 1.5)
    assert (hardware.cpus, hardware.memory_bytes) == (36, 64 << 30)
    assert hardware.disk_bytes == 500 << 30
    assert capacity_of(new_record(machine, 10.0, simulated=True)).disk_bytes == 400 << 30
    assert (hardware.network_mbps, hardware.power_w) == (25000, 300)
    assert (machine.machine_type, machine.cluster) == ("web", "c1")
    assert new_record(machine, 10.0, simulated=True).labels == {"disk": "nvme", "zone": "a"}
    record = new_record(machine, 10.0, simulated=False)
    assert (record.hardware, record.address) == (hardware, "m1.example:7443")
    assert record.state is MachineState.DOWN
    assert record.unavailability[0].reason == NOT_JOINED
    assert new_record(machine, 10.0, simulated=True).state is MachineState.UP


def test_json_is_equivalent_to_csv() -> None:
    row = dict(zip(COLUMNS, ROW.split(","), strict=True)) | {"cpus": 36, "gpu_type": None}
    assert parse_json(msgspec.json.encode([row])) == parse_csv(f"{HEADER}\n{ROW}\n")
    assert parse_json(msgspec.json.encode({"machines": [row]})).errors == ()


def test_columns_come_in_any_order_and_most_may_be_left_out() -> None:
    text = "rack,row,msb,datacenter,machine_type,machine\nr1,w1,b1,dc1,web,m1\n\n"
    (machine,) = parse_csv(text).machines
    assert machine.location == Location(datacenter="dc1", msb="b1", row="w1", rack="r1")
    assert machine.hardware.memory_bytes == 0


def test_equal_places_and_hardware_are_one_object() -> None:
    rows = [ROW, ROW.replace("m1,", "m2,", 1), ROW.replace("m1,", "m3,", 1)]
    machines = parse_csv("\n".join([HEADER, *rows])).machines
    assert len({id(m.location) for m in machines}) == 1
    assert len({id(m.hardware) for m in machines}) == 1


def test_all_errors_are_reported_at_once_with_their_lines() -> None:
    rows = [
        ROW,
        ROW,
        ROW.replace("m1,prn,prn1", "M_2,prn,"),
        ROW.replace("64G", "lots").replace("m1,", "m3,", 1),
        "m4,prn",
        ROW.replace(",36,", ",-1,").replace("m1,", "m5,", 1),
    ]
    inventory = parse_csv("\n".join([HEADER, *rows]))
    assert [(e.field, e.reason.split(",")[0]) for e in inventory.errors] == [
        ("line 3: machine", "'m1' is already listed at line 2"),
        ("line 4: machine", "must be 1 to 63 of a-z"),
        ("line 4: datacenter", "is missing"),
        ("line 5: memory", "must be a size such as 64G"),
        ("line 6", "has 2 values for 20 columns"),
        ("line 7: cpus", "must be a whole number from 0 to 65536"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "columns are missing: machine, datacenter, msb, row, rack, machine_type"),
        (HEADER, "lists no machines"),
        (HEADER + ",colour\n", "'colour' is not a column"),
        (HEADER + ",sku\n", "column 'sku' occurs twice"),
        (HEADER + '\n"m1', "unexpected end of data"),
    ],
)
def test_a_list_that_cannot_be_read_reports_why(text: str, reason: str) -> None:
    inventory = parse_csv(text)
    assert inventory.machines == ()
    assert reason in inventory.errors[0].reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "is not JSON"),
        (b"3", "must be a list of machines"),
        (b"[]", "lists no machines"),
        (b"[3]", "must be an object"),
        (b'[{"machine": 3}]', "must be 1 to 63 of a-z"),
        (b'[{"cpus": 1.5}]', "must be a whole number from 0 to"),
        (b'[{"rru": true}]', "must be a number from 0 to 1e9"),
        (b"\xff", "is not JSON"),
    ],
)
def test_json_that_cannot_be_read_reports_why(data: bytes, reason: str) -> None:
    assert reason in parse_json(data).errors[0].reason


def test_sizes_are_understood_as_people_write_them() -> None:
    assert size_of("64G") == size_of("64GiB") == size_of("64 gb") == 64 << 30
    assert size_of("1.5T") == 3 << 39
    assert size_of("68719476736") == 64 << 30
    for text in ("", "G", "-1G", "64X", "64GG", "1e9"):
        with pytest.raises(ValueError, match="must be a size"):
            size_of(text)


def a_row(**place: str) -> InventoryMachine:
    location = {"datacenter": "dc1", "msb": "b1", "row": "w1", "rack": "r1"} | place
    (machine,) = parse_json(
        msgspec.json.encode([{"machine": "m1", "machine_type": "web", "sku": "s", **location}])
    ).machines
    return machine


def test_the_place_of_a_machine_in_use_does_not_change() -> None:
    record = new_record(a_row(), 0.0, simulated=True)
    used = msgspec.structs.replace(record, entitlement="front")
    assert conflict_with(record, a_row(rack="r2")) == ""
    assert conflict_with(used, a_row()) == ""
    assert conflict_with(used, a_row(rack="r2")).startswith("is in entitlement 'front': its place")
    assert with_values(record, a_row(rack="r2")).location.rack == "r2"


@pytest.mark.behaviour("MO2")
def test_a_scope_covers_every_level_and_events() -> None:
    record = new_record(a_row(), 0.0, simulated=False)
    for level, value in {"datacenter": "dc1", "msb": "b1", "row": "w1", "rack": "r1"}.items():
        assert scope_test(MachineScope(**{level: value}))(record)
        assert not scope_test(MachineScope(**{level: "other"}))(record)
    assert scope_test(MachineScope(unavailable=True))(record)
    assert not scope_test(MachineScope(unavailable=False))(record)
    assert not scope_test(MachineScope(state=MachineState.UP))(record)
    assert scope_test(MachineScope(entitlement="", machine_type="web", region="local"))(record)


def test_a_failure_is_no_plan() -> None:
    record: MachineRecord = new_record(a_row(), 0.0, simulated=False)
    assert blocking(record, 10.0) == ""
