"""All errors of a document at once, with the decoder as the only judge."""

from __future__ import annotations

import difflib
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from agent.api import TaskSpec
from wire.errors import InvalidInput
from wire.routes import decode_json
from wire.violations import MAX_ERRORS, violations

pytestmark = pytest.mark.behaviour("FE4")

GOOD = {"image": "sha256:" + "a" * 64, "command": ["/bin/true"]}


def fields(value: Any, kind: Any = TaskSpec) -> dict[str, str]:
    return {e.field: e.reason for e in violations(value, kind)}


def test_a_good_document_has_no_violations() -> None:
    assert violations(GOOD, TaskSpec) == []


@pytest.mark.behaviour("F-24")
def test_an_error_escapes_a_name_that_is_not_valid_utf8() -> None:
    """The name has half of a surrogate pair, as JSON and YAML files may have."""
    found = violations(GOOD | {"\ud800x": 1, "environment": {"A\udc00": "b"}}, TaskSpec)

    assert [e.field for e in found] == ["\\ud800x", "environment.A\\udc00"]
    assert msgspec.json.encode(found)


def test_every_violation_is_listed_with_its_field() -> None:
    bad = {
        "command": "ls",
        "environment": {"1BAD": "x", "OK": 3},
        "limits": {"cpu_weight": 0, "colour": "red", "memory_max_bytes": "big"},
        "probe": {"path": "no-slash"},
        "stop_timeout_s": -1,
    }
    found = fields(bad)
    assert set(found) == {
        "image",
        "command",
        "environment.1BAD",
        "environment.OK",
        "limits.cpu_weight",
        "limits.colour",
        "limits.memory_max_bytes",
        "probe.path",
        "stop_timeout_s",
    }
    assert found["image"] == "missing"
    assert "cpu_weight" in found["limits.colour"]


def test_the_error_for_a_misspelt_name_suggests_the_right_one() -> None:
    found = fields({**GOOD, "comand": [], "life": {"max_run": 5}, "colour": "red"})
    assert found["comand"] == "unknown; did you mean command?"
    assert found["life.max_run"] == "unknown; did you mean max_run_s?"
    assert found["colour"].startswith("unknown; known: generation, epoch, image, command, ")


def test_the_bounds_of_a_number_are_written_with_all_their_digits() -> None:
    found = fields({**GOOD, "generation": 0})
    assert found["generation"].endswith("a whole number from 1 to 9007199254740992")


@pytest.mark.behaviour("BUG-UX133")
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (
            "stop_timeout_s",
            0,
            "0 is not valid; expected a number of at most 86400 and above 0, in seconds",
        ),
        ("stop_timeout_s", "soon", "'soon' is not valid; expected a number of at most"),
        ("stop_timeout_s", "90s", "'90s' must be written as a number here: 90"),
        ("stop_timeout_s", True, "true is not valid; expected a number of at most"),
    ],
)
def test_the_errors_of_a_body_ask_for_numbers_where_files_may_have_units(
    field: str, value: Any, reason: str
) -> None:
    body = msgspec.json.encode(GOOD | {field: value})
    with pytest.raises(InvalidInput) as refusal:
        decode_json(body, TaskSpec, "the body")
    (error,) = refusal.value.errors
    assert error.reason.startswith(reason)
    assert "30s" not in error.reason


@pytest.mark.behaviour("BUG-UX134")
@pytest.mark.parametrize(
    "body",
    [
        b'{"image": "sha256:%s", "image": "sha256:%s", "command": ["/bin/true"]}',
        b'{"image": "sha256:%s", "command": ["/bin/true"], "limits": {"image": 1, "image": 2}}',
    ],
)
def test_a_body_with_a_key_twice_is_refused(body: bytes) -> None:
    kind = TaskSpec if b"limits" not in body else dict[str, Any]
    with pytest.raises(InvalidInput, match="the body is not valid: 'image' is written twice"):
        decode_json(body.replace(b"%s", b"a" * 64), kind, "the body")


def test_the_same_key_in_two_objects_of_a_body_is_accepted() -> None:
    body = b'[{"a": 1}, {"a": 1, "b": {"a": 1}}]'
    assert decode_json(body, list[dict[str, Any]], "the body")[1]["b"] == {"a": 1}


@pytest.mark.parametrize("body", [b"9" * 5000, b"[" * 600 + b"]" * 600])
def test_a_body_that_only_one_decoder_accepts_is_no_internal_error(body: bytes) -> None:
    with suppress(InvalidInput):
        assert decode_json(b'{"a": %s}' % body, dict[str, Any], "the body").keys() == {"a"}


def test_errors_of_relations_between_fields_name_the_fields() -> None:
    found = fields({**GOOD, "probe": {"path": "/"}, "life": {"liveness": {"kind": "exec"}}})
    assert found == {
        "probe": "a probe of kind http needs a port and cannot have a command",
        "life.liveness": "a probe of kind exec needs a command and cannot have a port",
    }


def test_a_type_that_describes_its_pattern_is_quoted_with_it() -> None:
    kind = Annotated[str, Meta(pattern="^[a-z]+$", description="small letters")]
    assert fields("A", kind) == {"(whole)": "'A' is not valid; expected small letters"}
    assert fields(3, kind) == {"(whole)": "3 is not valid; expected small letters"}
    named = fields({"A": 1}, dict[kind, int])  # type: ignore[valid-type]
    assert named == {"A": "as a name: 'A' is not valid; expected small letters"}


def test_the_length_of_a_list_and_its_items_are_both_reported() -> None:
    kind = Annotated[list[Annotated[int, Meta(ge=1)]], Meta(max_length=2)]
    assert set(fields([0, 1, 2], kind)) == {"(whole)", "[0]"}


@pytest.mark.parametrize("value", [None, 3, "x", [], [GOOD]])
def test_a_document_that_is_no_object_is_one_violation(value: Any) -> None:
    assert list(fields(value)) == ["(whole)"]


def test_a_thousand_errors_are_cut_to_a_readable_number() -> None:
    assert len(violations([0] * 1000, list[str])) == MAX_ERRORS


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*TaskSpec.__struct_fields__, "cpu_weight", "port", "x"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(VALUES)
def test_there_are_violations_exactly_where_the_decoder_refuses(value: Any) -> None:
    try:
        msgspec.convert(value, TaskSpec)
        refused = False
    except msgspec.ValidationError:
        refused = True
    assert bool(violations(value, TaskSpec)) is refused


@given(st.binary(max_size=200))
def test_bytes_decode_or_are_refused_as_invalid_input(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_json(data, TaskSpec, "the body")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"NaN",
        b"[" * 100_000,
        b'{"command":' * 50_000,
        b'{"image":1e999}',
        b'{"image":"\\ud800"}',
        b"\xff\xfe{\x00}\x00",
        b'{"generation":1' + b"0" * 5000 + b"}",
        b'{"image":3} trailing',
    ],
)
def test_hostile_json_is_invalid_input(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_json(data, TaskSpec, "the body")


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A table inside a hostile document."""

    number: int = 0


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    """A document with every kind of container."""

    names: dict[Annotated[str, Meta(pattern="^[a-z]+$")], Part] = {}
    parts: list[Part] = []
    few: Annotated[list[int], Meta(max_length=3)] = []


MANY = 50_000
HOSTILE: dict[str, Any] = {
    "unknown fields": {f"W{i}": 0 for i in range(MANY)},
    "wrong names": {"names": {f"W{i}": {} for i in range(MANY)}},
    "wrong parts by name": {"names": {"a" * i: {"x": 1} for i in range(1, 500)}},
    "wrong parts": {"parts": [{"numbre": 1}] * MANY},
    "one wrong part at the end": {"parts": [{}] * MANY + [1]},
    "too many": {"few": ["x"] * MANY},
}


@pytest.mark.behaviour("BUG-HT20")
@pytest.mark.parametrize("what", HOSTILE)
def test_the_search_for_violations_ends_with_the_last_one_that_is_listed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly 70,000 wrong names took a second of a control plane, although the list is cut at
    100."""
    calls = {"convert": 0, "near": 0}
    convert, near = msgspec.convert, difflib.get_close_matches

    def counted_convert(*args: Any, **named: Any) -> Any:
        calls["convert"] += 1
        return convert(*args, **named)

    def counted_near(*args: Any, **named: Any) -> Any:
        calls["near"] += 1
        return near(*args, **named)

    monkeypatch.setattr(msgspec, "convert", counted_convert)
    monkeypatch.setattr(difflib, "get_close_matches", counted_near)

    found = violations(HOSTILE[what], Whole)

    assert 0 < len(found) <= MAX_ERRORS
    assert calls["convert"] < 1500
    assert calls["near"] <= 8


@pytest.mark.behaviour("BUG-HT20")
def test_names_in_a_refusal_are_short() -> None:
    """Formerly a hundred errors below a name of a megabyte made an answer of a hundred
    megabytes."""
    found = violations({"x" * MANY: 1, "names": {"a" * MANY: {"y" * MANY: 1}}}, Whole)
    assert max(len(e.field) + len(e.reason) for e in found) < 400


@pytest.mark.behaviour("BUG-HT20")
@pytest.mark.parametrize("number", ["1e300", "5e-324", "1.7976931348623157e308"])
def test_many_numbers_that_are_slow_to_read_are_refused_unread(number: str) -> None:
    """msgspec takes 12 us for each of them, 0.6 s for 300 KB."""
    with pytest.raises(InvalidInput, match="numbers with an exponent"):
        decode_json(f"[{','.join([number] * 1000)}]".encode(), list[float], "the body")
    text = f'"{",".join([number] * 1000)}"'
    assert decode_json(text.encode(), str, "the body")
    assert decode_json(f"[{number}]".encode(), list[float], "the body") == [float(number)]
