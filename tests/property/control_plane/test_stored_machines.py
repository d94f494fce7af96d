"""A machine record is stored without default values, and reads back unchanged."""

import enum
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from control_plane.api.machines import MachineRecord
from control_plane.broker.reader import MachineReader
from control_plane.store import Entry
from control_plane.store.records import SCHEMAS, decode, encode
from wire.errors import ConfigError

KEY = "machines/dc1/m1"
PLAIN = {
    str: st.text(max_size=4),
    int: st.integers(-1, 1 << 40),
    float: st.sampled_from([0.0, -0.0, 1.0, 1e9]) | st.floats(0, 1e9),
    bool: st.booleans(),
    type(None): st.none(),
}
IN_RANGE = {int: st.integers(0, 1 << 16), float: st.sampled_from([0.0, 0.5, 1.0, 1e9])}
"""Bounds of fields whose type states them."""


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of one of the types of record fields."""
    inside = typing.get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if typing.get_origin(kind) is typing.Annotated:
        if inside[0] is str:
            return st.sampled_from(["a", "dc1", "msb-2"])  # a name
        return values(inside[0]) if inside[0] not in PLAIN else IN_RANGE[inside[0]]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return st.one_of(*map(values, inside))
    if typing.get_origin(kind) is tuple:
        return st.lists(values(inside[0]), max_size=2).map(tuple)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(values(inside[0]), values(inside[1]), max_size=2)
    if typing.get_origin(kind) is list:
        return st.lists(values(inside[0]), max_size=2)
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return structs(kind)


def structs(kind: type) -> st.SearchStrategy[Any]:
    """Return structs; any field may have its default or another value."""
    required, others = {}, {}
    for field in msgspec.structs.fields(kind):
        if field.name != "schema":
            (required if field.required else others)[field.name] = values(field.type)
    fields = st.fixed_dictionaries(required, optional=others)
    return fields.map(lambda given: kind(**given))


RECORDS = structs(MachineRecord).map(lambda record: replace(record, machine="m1"))


def read(data: bytes) -> MachineRecord:
    return MachineReader().read("m1", Entry(KEY, data, 1))


@given(RECORDS)
def test_any_record_reads_back_as_it_was(record: MachineRecord) -> None:
    data = encode(record)
    assert decode(data, MachineRecord, KEY) == record == read(data)
    assert read(encode(read(data))) == record


@given(RECORDS)
def test_a_record_with_all_fields_as_earlier_builds_wrote_it_reads_the_same(
    record: MachineRecord,
) -> None:
    full = msgspec.json.encode(record)
    assert set(msgspec.json.decode(full)) == set(MachineRecord.__struct_fields__)
    assert read(full) == read(encode(record)) == record


@given(RECORDS, st.sampled_from(MachineRecord.__struct_fields__))
def test_stored_records_have_their_schema_and_no_defaults(record: MachineRecord, name: str) -> None:
    stored = msgspec.json.decode(encode(record))
    assert stored["schema"] == 1
    default = {f.name: f.default for f in msgspec.structs.fields(MachineRecord)}[name]
    if name not in stored:
        assert getattr(record, name) == default
    elif name != "schema" and not isinstance(default, float):
        assert getattr(record, name) != default


@given(RECORDS, st.sampled_from(["schema", "location", "machine_type", "state", "hardware"]))
def test_the_reader_refuses_the_same_input_as_decode(record: MachineRecord, name: str) -> None:
    stored = msgspec.json.decode(encode(record))
    newer = {**stored, "schema": SCHEMAS[MachineRecord] + 1, name: 2}
    for changed in (newer, {**stored, name: [1]}):
        data = msgspec.json.encode(changed)
        with pytest.raises(ConfigError) as same_error:
            decode(data, MachineRecord, KEY)
        with pytest.raises(ConfigError) as refused:
            read(data)
        assert str(refused.value) == str(same_error.value)
    missing = {k: v for k, v in stored.items() if k not in ("location", "machine_type")}
    with pytest.raises(ConfigError, match="machines/dc1/m1: the stored record is damaged"):
        read(msgspec.json.encode(missing))


@given(RECORDS)
def test_unknown_fields_of_the_same_schema_are_ignored(record: MachineRecord) -> None:
    stored = msgspec.json.decode(encode(record))
    assert read(msgspec.json.encode({**stored, "colour": {"blue": 1}})) == record


def test_equal_parts_of_machines_are_one_object() -> None:
    reader = MachineReader()
    text = b'"location":{"region":"r","datacenter":"dc1","msb":"m","row":"w","rack":"k"}'
    text += b',"machine_type":"web","hardware":{"cpus":4},"cluster":"c 1","joined_at":0.0}'
    full = b'{"schema":1,"machine":"m","profile":"","entitlement":"",' + text
    lean = b'{"schema":1,"machine":"m",' + text
    one, two = (
        reader.read(name, Entry(name, data, 1)) for name, data in (("a", full), ("b", lean))
    )
    for name, value in asdict(one).items():
        assert name in ("machine", "schema") or value is getattr(two, name), name
    words = ("machine_id", "boot_id", "kernel", "cpu_model", "agent_version")
    numbers = ("cpus", "sockets", "numa_nodes", "memory_bytes", "disk_bytes", "disk_free_bytes")
    facts = dict.fromkeys(words, "x") | dict.fromkeys(numbers, 1) | {"profiles": ["base"]}
    joined = msgspec.json.encode({**msgspec.json.decode(lean), "facts": facts})
    four, five = (reader.read(name, Entry(name, joined, 1)) for name in "de")
    assert four.facts is not None
    assert five.facts is not None
    assert four.facts.profiles is five.facts.profiles
    reader.forget_text()
    three = reader.read("c", Entry("c", lean, 1))
    assert three.location is one.location
    assert three.hardware is one.hardware
