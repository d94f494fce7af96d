"""Stored records: round trips, older and newer schemas, damage."""

import msgspec
import pytest

from control_plane.api.allocations import AllocationRecord
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.store.bounds import VALUE_MAX
from control_plane.store.records import DamagedRecord, decode, encode, schema_of
from wire.errors import ConfigError

RECORD = EntitlementRecord(name="web", spec=EntitlementSpec(machines=3))


def test_a_record_comes_back_as_it_was():
    assert decode(encode(RECORD), EntitlementRecord, "entitlements/web") == RECORD


def test_fields_that_a_later_release_added_are_ignored():
    raw = msgspec.json.decode(encode(RECORD)) | {"colour": "blue"}
    assert decode(msgspec.json.encode(raw), EntitlementRecord, "entitlements/web") == RECORD


def test_a_newer_schema_is_refused():
    data = encode(msgspec.structs.replace(RECORD, schema=9))
    with pytest.raises(ConfigError, match=r"entitlements/web: schema 9 is newer than 1"):
        decode(data, EntitlementRecord, "entitlements/web")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": 1}', b'{"schema": "x"}'])
def test_damage_is_reported_without_guessing(data):
    with pytest.raises(ConfigError, match="entitlements/web"):
        decode(data, EntitlementRecord, "entitlements/web")


@pytest.mark.behaviour("SH9")
def test_the_largest_job_is_one_value_that_every_engine_takes():
    """15,000 tasks, each on its own machine and with two ports."""
    names = [f"prn{n % 7}-{(n * 7919) % 1_000_000:07d}" for n in range(15_000)]
    record = AllocationRecord(
        schema=1,
        job="web",
        pool="front",
        machines=names,
        demands=[],
        ports={n: {"http": 20_000 + n % 97, "admin": 30_000 + n % 89} for n in range(15_000)},
    )
    data = encode(record)
    assert len(data) <= VALUE_MAX
    assert decode(data, AllocationRecord, "allocations/web") == record
    with pytest.raises(ConfigError, match="allocations/web"):
        decode(data[:-9], AllocationRecord, "allocations/web")


@pytest.mark.behaviour("BUG-CP103")
def test_a_damaged_packed_record_is_named() -> None:
    with pytest.raises(DamagedRecord, match=r"cannot read jobs/web: .* is damaged"):
        schema_of(b"zz", "jobs/web")
