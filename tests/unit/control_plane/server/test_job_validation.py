"""A bad job file gets all its errors at once, with field and reason."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import InvalidInput
from control_plane.api.entitlement_rules import entitlement_relations
from control_plane.api.jobs import JobSpec
from control_plane.api.validate import job_errors, job_spec

GOOD: dict[str, Any] = {
    "name": "web",
    "entitlement": "front",
    "tasks": 6,
    "image": "sha256:" + "a" * 64,
    "command": ["/usr/sbin/nginx", "-p", "${port:http}", "${HOME}"],
    "ports": ["http"],
    "probe": {"port": "http"},
    "environment": {"WHERE": "${machine}:${port:http}"},
}


def test_a_good_job_is_taken_as_it_is() -> None:
    assert job_errors(GOOD) == []
    assert job_spec(GOOD, "web.toml").tasks == 6


def test_errors_of_fields_and_between_fields_come_together() -> None:
    bad = GOOD | {
        "name": "Web!",
        "tasks": -1,
        "ports": ["http", "http"],
        "probe": {"port": "admin", "interval_s": 0},
        "command": ["x", "${port:ssh}"],
        "surprise": 1,
    }
    with pytest.raises(InvalidInput, match=r"web\.toml is not valid: .* more\)") as refusal:
        job_spec(bad, "web.toml")
    assert {e.field for e in refusal.value.errors} == {
        "name",
        "tasks",
        "ports",
        "probe.port",
        "probe.interval_s",
        "command[1]",
        "surprise",
    }


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("kind", "batch", "unknown; known: "),
        ("completions", 6, "unknown; known: "),
        ("deadline_s", 60.0, "unknown; known: "),
        ("restart", {"when": "on-completion"}, "on-completion"),
        ("restart", {"attempts": 3}, "unknown; known: "),
    ],
)
def test_a_job_cannot_ask_to_be_run_to_its_end(field: str, value: Any, reason: str) -> None:
    """AL18: words of batch systems are refused by name, and not ignored."""
    (error,) = job_errors(GOOD | {field: value})
    assert error.field.partition(".")[0] == field
    assert reason in error.reason


@pytest.mark.parametrize("field", sorted(GOOD))
@pytest.mark.parametrize("value", [None, [], {}, "", -1, 1.5, True, [[]], {"a": {}}])
def test_no_value_of_any_field_breaks_the_validator(field: str, value: Any) -> None:
    errors = job_errors(GOOD | {field: value})
    assert all(e.field and e.reason for e in errors)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*JobSpec.__struct_fields__, "x"]), ANY))
def test_a_document_without_errors_is_a_job_and_no_other_is(document: dict[str, Any]) -> None:
    if job_errors(document):
        with pytest.raises(InvalidInput):
            job_spec(document, "it")
    else:
        assert isinstance(job_spec(document, "it"), JobSpec)


@given(st.sampled_from(sorted(GOOD)), ANY)
def test_one_changed_field_is_blamed_and_no_other(field: str, value: Any) -> None:
    related = {"ports": {"ports", "probe", "command", "environment"}, "probe": {"probe"}}
    blamed = {
        e.field.partition(".")[0].partition("[")[0] for e in job_errors(GOOD | {field: value})
    }
    assert blamed <= related.get(field, {field})


@pytest.mark.parametrize(
    "text",
    ["${" * 60_000, "${port:" * 30_000, "$" * 120_000, "${port:a}" * 20_000],
    ids=["open", "ports", "dollars", "unknown"],
)
def test_no_text_of_a_user_keeps_the_validator_busy(text: str) -> None:
    """BUG-HT3: 40 KB of `${` took 22 s; a repeated port made an answer of 246 MB."""
    before = time.process_time()
    errors = job_errors(GOOD | {"command": [text] * 4, "ports": [f"p{i}" for i in range(16)]})
    assert time.process_time() - before < 2
    assert sum(len(e.reason) for e in errors) < 20_000


def test_types_by_the_thousand_are_compared_once() -> None:
    """BUG-HT3: types x types took 10 s."""
    types = [f"type-{i}" for i in range(20_000)]
    document = {"machine_types": types, "per_type": {f"other-{i}": 1 for i in range(20_000)}}
    before = time.process_time()
    (error,) = entitlement_relations(document)
    assert time.process_time() - before < 2
    assert len(error.reason) < 1000
