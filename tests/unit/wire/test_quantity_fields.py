"""Documents that people write: sizes as text become numbers, and errors become sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from agent.api import Location, ProfileSpec, TaskSpec
from agent.config import AgentConfig
from control_plane.api.capacity import EntitlementChange, EntitlementSpec
from control_plane.api.inventory import Drain, Lend, MachineScope, Revoke, Undrain
from control_plane.api.jobs import JobSpec
from control_plane.autoscaler.daemon import AutoscalerConfig
from control_plane.config import Config
from control_plane.optimus.daemon import optimus_config
from wire.config_file import read_config
from wire.quantity_fields import parse_quantities
from wire.units import quantity_of
from wire.violations import violations

WRITTEN = (
    *(TaskSpec, ProfileSpec, Location, AgentConfig, JobSpec, EntitlementSpec, EntitlementChange),
    *(Drain, Undrain, Lend, Revoke, MachineScope, Config),
)
"""Types of documents that people write, in files or through commands."""
JOB: dict[str, Any] = {
    "name": "web",
    "entitlement": "front",
    "tasks": 6,
    "image": "sha256:" + "a" * 64,
    "command": ["/bin/true"],
    "ports": ["http"],
}


@pytest.mark.behaviour("BUG-AG17")
def test_sizes_as_text_become_numbers_at_any_depth() -> None:
    written = JOB | {
        "limits": {"memory_max_bytes": "48MiB", "cpu_max_cores": "500m"},
        "probe": {"port": "http", "interval_s": "2s", "timeout_s": 1},
        "restart": {"backoff_s": "250ms", "backoff_max_s": "5m"},
        "stop_timeout_s": "1m30s",
        "environment": {"CACHE": "48MiB"},
        "resources": {"io": [{"device": "/dev/vda", "read_bytes_per_s": "10MiB"}]},
    }
    job = msgspec.convert(parse_quantities(written, JobSpec), JobSpec)
    assert (job.limits.memory_max_bytes, job.limits.cpu_max_cores) == (48 << 20, 0.5)
    assert job.probe is not None
    assert (job.probe.interval_s, job.probe.timeout_s) == (2.0, 1.0)
    assert (job.restart.backoff_s, job.restart.backoff_max_s) == (0.25, 300.0)
    assert job.stop_timeout_s == 90.0
    assert [io.read_bytes_per_s for io in job.resources.io] == [10 << 20]
    assert job.environment == {"CACHE": "48MiB"}


@pytest.mark.behaviour("BUG-AG17")
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("memory_max_bytes", "48 megs", "'48 megs' is not a size; write bytes or 48MiB, 1.5GiB, …"),
        (
            "memory_max_bytes",
            "1MiB",
            "1MiB is not valid; expected a size such as 48MiB or 1.5GiB, from 4MiB to 8PiB",
        ),
        ("cpu_max_cores", "half", "'half' is not a number of CPUs; write 0.5, 2 or 500m"),
        ("cpu_weight", "2", "'2' is not valid; expected a whole number from 1 to 10000"),
        ("tasks_max", 0.5, "0.5 is not valid; expected a whole number from 1 to 4194304"),
        ("memory_max_bytes", None, "nothing is not valid; expected a size such as 48MiB or 1.5GiB"),
    ],
)
def test_the_error_for_a_bad_value_lists_accepted_forms(
    field: str, value: Any, reason: str
) -> None:
    (error,) = violations(parse_quantities(JOB | {"limits": {field: value}}, JobSpec), JobSpec)
    assert error.field == f"limits.{field}"
    assert error.reason.startswith(reason)


@pytest.mark.behaviour("BUG-AG17")
@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"name": "Web!"}, "expected 1 to 56 of a-z, 0-9 and -, with no dash at the start or end"),
        ({"image": "x"}, "expected sha256: and 64 hexadecimal digits"),
        (
            {"life": {"pre_stop": {"command": []}}},
            "a list of 0 is not valid; expected a list",
        ),
        ({"command": ["a\0b"]}, "expected text without NUL characters"),
        ({"restart": {"when": "often"}}, "expected one of always, never, on-failure"),
        ({"probe": {"port": "http", "path": "x y"}}, "expected a path that starts with /"),
        ({"limits": 3}, "3 is not valid; expected a table"),
        ({"stop_timeout_s": 0}, "0s is not valid; expected a duration such as 30s, 10m or 8h"),
        ({"stop_timeout_s": True}, "true is not valid; expected a duration"),
        (
            {"tasks": 10**500},
            "a number of 1661 bits is not valid; expected a whole",
        ),
    ],
)
def test_no_error_is_in_the_words_of_the_library(document: dict[str, Any], reason: str) -> None:
    """A job file's error shows no regular expression."""
    (error,) = violations(parse_quantities(JOB | document, JobSpec), JobSpec)
    assert reason in error.reason
    assert "regex" not in error.reason
    assert "`" not in error.reason


def test_numbers_as_text_are_for_files_and_not_for_the_wire() -> None:
    (error,) = violations(JOB | {"stop_timeout_s": "90s"}, JobSpec)
    assert error.reason == "'90s' must be written as a number here: 90"


@pytest.mark.behaviour("BUG-UX126")
def test_the_files_of_the_services_next_to_the_control_plane_take_durations(tmp_path: Path) -> None:
    """Formerly the error about a number requested a duration, which was refused as well."""
    sizes, work = tmp_path / "autoscaler.toml", tmp_path / "optimus.toml"
    sizes.write_text('every_s = "30s"')
    work.write_text('entitlement = "batch"\nevery_s = "30s"')
    assert read_config(sizes, AutoscalerConfig).every_s == 30.0
    assert optimus_config(work).every_s == 30.0


def test_a_field_that_files_call_by_a_shorter_name_takes_the_same() -> None:
    class Leave(msgspec.Struct):
        after_s: float = msgspec.field(name="after", default=0.0)

    assert parse_quantities({"after": "30s"}, Leave) == {"after": 30.0}


@pytest.mark.behaviour("BUG-AG17")
@pytest.mark.parametrize("kind", WRITTEN)
def test_every_pattern_of_a_field_has_a_description(kind: type) -> None:
    """A new pattern without a description fails here."""
    assert undescribed(inspect.type_info(kind), kind.__name__, frozenset()) == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["48MiB", "2s"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["limits", "memory_max_bytes", "probe", "interval_s", "x"]), inner
            )
        ),
    )
)
def test_any_document_can_be_converted_and_plain_values_do_not_change(document: Any) -> None:
    once = parse_quantities(document, JobSpec)
    assert repr(parse_quantities(once, JobSpec)) == repr(once)


@given(st.integers(4 << 20, 1 << 50), st.floats(1e-3, 86_400), st.floats(0.01, 4096))
def test_a_job_written_as_text_is_the_same_job(memory: int, wait: float, cpus: float) -> None:
    numbers = {
        "limits": {"memory_max_bytes": memory, "cpu_max_cores": cpus},
        "stop_timeout_s": wait,
    }
    assert parse_quantities(JOB | as_text(numbers), JobSpec) == JOB | numbers


def as_text(value: Any) -> Any:
    return {
        k: as_text(v) if isinstance(v, dict) else quantity.write(v) if quantity else v
        for k, v in value.items()
        for quantity in [quantity_of(k)]
    }


def undescribed(info: inspect.Type, where: str, seen: frozenset[type]) -> list[str]:
    """Return the places of a type whose form is a pattern without a description."""
    match info:
        case inspect.Metadata(extra_json_schema={"description": _}):
            return []
        case inspect.Metadata(type=inner):
            return undescribed(inner, where, seen)
        case inspect.StrType(pattern=pattern):
            return [where] if pattern else []
        case inspect.UnionType(types=types):
            return [found for t in types for found in undescribed(t, where, seen)]
        case inspect.ListType(item_type=item):
            return undescribed(item, f"{where}[]", seen)
        case inspect.DictType(key_type=key, value_type=item):
            return undescribed(key, where, seen) + undescribed(item, where, seen)
        case inspect.StructType(cls=cls, fields=fields) if cls not in seen:
            within = seen | {cls}
            return [
                found
                for field in fields
                for found in undescribed(field.type, f"{where}.{field.name}", within)
            ]
    return []
