"""Stored records: round trip, older and newer schemas, damage."""

import msgspec
import pytest

from agent.errors import ConfigError
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.store.records import decode, encode, entitlement_key

RECORD = EntitlementRecord(name="web", spec=EntitlementSpec(machines=3))


def test_a_record_comes_back_as_it_was():
    assert decode(encode(RECORD), EntitlementRecord, entitlement_key("web")) == RECORD


def test_fields_that_a_later_release_added_are_ignored():
    raw = msgspec.json.decode(encode(RECORD)) | {"colour": "blue"}
    assert decode(msgspec.json.encode(raw), EntitlementRecord, "entitlements/web") == RECORD


def test_a_newer_schema_is_refused():
    data = encode(msgspec.structs.replace(RECORD, schema=9))
    with pytest.raises(ConfigError, match=r"entitlements/web: schema 9 is newer than 1"):
        decode(data, EntitlementRecord, "entitlements/web")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": 1}', b'{"schema": "x"}'])
def test_damage_is_said_and_not_guessed_around(data):
    with pytest.raises(ConfigError, match="entitlements/web"):
        decode(data, EntitlementRecord, "entitlements/web")
