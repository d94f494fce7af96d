"""A bad entitlement gets all its errors at once, each with field and reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.capacity import EntitlementChange, EntitlementSpec
from control_plane.api.entitlement_rules import change_relations, entitlement_relations
from wire.errors import InvalidInput
from wire.routes import decode_json


@pytest.mark.behaviour("MO7", "MO13", "MO6")
@pytest.mark.parametrize(
    ("document", "fields"),
    [
        ({"machines": 30_000, "business_unit": "ads/ranking"}, set()),
        ({"rru": 2.5}, set()),
        ({"per_type": {"skylake": 2000}, "machine_types": ["skylake", "milan"]}, set()),
        ({}, {"machines"}),
        ({"per_type": {}}, {"machines"}),
        ({"per_type": {"a": 1}, "machine_types": ["b"]}, {"per_type"}),
        ({"per_type": {"a": 1, "b": 2}, "machines": 4}, {"machines"}),
        ({"machines": 1, "business_unit": "/ads"}, {"business_unit"}),
        ({"machines": 1, "business_unit": "ads//x"}, {"business_unit"}),
        ({"machines": 1, "business_unit": "ads/\x1b[31m"}, {"business_unit"}),
        ({"machines": 1, "business_unit": "/".join("a" * 11)}, {"business_unit"}),
        (
            {"business_unit": "/", "preferences": [{"strategy": "avoid"}, {"values": ["x"]}]},
            {"machines", "business_unit", "preferences[0].values", "preferences[1].values"},
        ),
    ],
)
def test_violated_relations_between_fields_are_reported(
    document: dict[str, Any], fields: set[str]
) -> None:
    assert {e.field for e in entitlement_relations(document)} == fields
    inner = {e.field for e in change_relations({"spec": document})}
    assert inner == {f"spec.{field}" for field in fields}


def test_errors_of_types_and_relations_come_together() -> None:
    body = msgspec.json.encode({"spec": {"priority": 9999, "business_unit": "/"}, "color": 1})
    with pytest.raises(InvalidInput) as refusal:
        decode_json(body, EntitlementChange, "it", change_relations)
    assert {e.field for e in refusal.value.errors} == {
        "spec.priority",
        "spec.machines",
        "spec.business_unit",
        "color",
    }


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*EntitlementSpec.__struct_fields__, "x"]), ANY))
def test_no_document_breaks_the_rules(document: dict[str, Any]) -> None:
    for error in entitlement_relations(document):
        assert error.field
        assert error.reason
    entitlement_relations(document.get("x"))
