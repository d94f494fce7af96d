"""Sizes, durations and CPUs as people write them, read and written."""

from __future__ import annotations

import contextlib
import time
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import InvalidInput
from wire.units import (
    about_size,
    cores,
    cores_text,
    quantity_of,
    seconds,
    seconds_text,
    shown,
    size,
    size_text,
)


@pytest.mark.behaviour("BUG-AG17")
@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("48MiB", 48 << 20),
        ("48 MiB", 48 << 20),
        ("48M", 48 << 20),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("0.1KiB", 102),
        ("50331648", 48 << 20),
        ("512B", 512),
        ("0", 0),
    ],
)
def test_a_size_has_a_unit_or_is_in_bytes(text: str, count: int) -> None:
    """People write 48MiB, not 50331648."""
    assert size(text) == count


@pytest.mark.behaviour("BUG-AG17")
@pytest.mark.parametrize("text", ["", "48 megs", "MiB", "-1MiB", "1e3", "1,5GiB", "4 8MiB", "٣MiB"])
def test_the_error_for_a_bad_size_lists_accepted_forms(text: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        size(text)
    assert str(refusal.value) == f"{text!r} is not a size; write bytes or 48MiB, 1.5GiB, …"


def test_a_unit_that_means_two_things_is_not_guessed() -> None:
    with pytest.raises(InvalidInput, match=r"is ambiguous \(1000 or 1024\): write bytes or 48MiB"):
        size("48MB")


@pytest.mark.parametrize(
    ("text", "value"),
    [("90s", 90), ("10m", 600), ("1.5h", 5400), ("1h30m", 5400), ("250ms", 0.25), ("30d", 2592e3)],
)
def test_a_duration_has_a_unit(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "10", "10 m", "-1s", "1w", "1e3s", "1m1h", "1s1s", "s"])
def test_invalid_durations_are_refused_with_the_accepted_form(text: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        seconds(text)
    assert str(refusal.value) == f"{text!r} is not a duration; write 90s, 10m, 1h30m, 8h or 30d"


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("2", 2), ("500m", 0.5), ("1.25", 1.25)])
def test_cpus_are_a_number_or_thousandths(text: str, value: float) -> None:
    assert cores(text) == value


@pytest.mark.parametrize("text", ["", "half", "1c", "-1", "0,5"])
def test_the_error_for_a_bad_number_of_cpus_lists_accepted_forms(text: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        cores(text)
    assert str(refusal.value) == f"{text!r} is not a number of CPUs; write 0.5, 2 or 500m"


@pytest.mark.parametrize(
    ("count", "text", "about"),
    [
        (48 << 20, "48MiB", "48MiB"),
        (3 << 29, "1.5GiB", "1.5GiB"),
        (12_345_678, "12345678B", "11.8MiB"),
        (1000, "1000B", "1000B"),
        (0, "0B", "0B"),
        (5 << 40, "5TiB", "5TiB"),
    ],
)
def test_writing_and_reading_a_size_gives_the_same_size(count: int, text: str, about: str) -> None:
    assert (size_text(count), about_size(count)) == (text, about)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (30.0, "30s"),
        (600.0, "10m"),
        (5400.0, "1h30m"),
        (0.25, "0.25s"),
        (90.5, "1m30.5s"),
        (0, "0s"),
    ],
)
def test_writing_and_reading_a_duration_gives_the_same_duration(value: float, text: str) -> None:
    assert seconds_text(value) == text


@given(st.integers(0, 1 << 62))
def test_every_size_is_read_back_as_it_was(count: int) -> None:
    assert size(size_text(count)) == count
    about = size(about_size(count))
    assert abs(about - count) <= max(1, count) * 0.05 + 1


@given(st.floats(0, 1e12))
def test_every_duration_is_read_back_as_it_was(value: float) -> None:
    assert seconds(seconds_text(value)) == value


@given(st.floats(0, 1e6))
def test_every_number_of_cpus_is_read_back_as_it_was(value: float) -> None:
    assert cores(cores_text(value)) == value


@given(st.text(max_size=30))
def test_any_other_text_is_a_number_or_invalid_input(text: str) -> None:
    for read in (size, seconds, cores):
        with contextlib.suppress(InvalidInput):
            assert read(text) >= 0


@pytest.mark.behaviour("BUG-HT3")
@pytest.mark.parametrize("read", [size, seconds, cores])
@pytest.mark.parametrize("text", ["1" * 100_000, "1h" * 50_000, " " * 100_000, "1." * 50_000])
def test_a_long_text_is_refused_without_work(read: object, text: str) -> None:
    """No text of a user keeps the program busy."""
    before = time.process_time()
    with pytest.raises(InvalidInput) as refusal:
        read(text)  # type: ignore[operator]
    assert len(str(refusal.value)) < 200
    assert time.process_time() - before < 1


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("memory_max_bytes", "a size"),
        ("interval_s", "a duration"),
        ("read_bytes_per_s", "a size"),
        ("cpu_max_cores", "a number of CPUs"),
    ],
)
def test_the_name_of_a_field_gives_its_unit(field: str, name: str) -> None:
    found = quantity_of(field)
    assert found is not None
    assert found.name == name


def test_other_fields_hold_no_quantity() -> None:
    assert quantity_of("tasks") is None
    assert quantity_of("read_ops_per_s") is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**500, "a number of 1661 bits"),
        ([1, 2], "a list of 2"),
        ({}, "a table of 0"),
        (None, "nothing"),
        (True, "true"),
        ("x" * 100, "'" + "x" * 39 + "…"),
    ],
)
def test_a_refused_value_is_shown_shortly(value: object, text: str) -> None:
    assert shown(value) == text


@given(st.floats(min_value=0, max_value=1e18, exclude_max=True))
def test_a_size_written_with_a_point_keeps_its_form(count: float) -> None:
    """Formerly a request with `1.7e13` where bytes are expected made the server fail."""
    text = size_text(count)
    if count.is_integer():
        assert text == size_text(int(count))
        assert size(text) == count
    assert text.startswith(tuple("0123456789"))


def test_an_error_shows_a_refused_fractional_size_as_a_size() -> None:
    assert size_text(17592186044416.0) == "16TiB"
    assert size_text(0.5) == "0.5B"


@pytest.mark.behaviour("BUG-UX74")
def test_a_refused_date_is_shown_as_its_author_wrote_it() -> None:
    """Formerly `name = 2026-01-01` was shown as datetime.date(2026, 1, 1)."""
    written = tomllib.loads("day = 2026-01-01\nat = 2026-01-01T10:00:00Z\nhour = 07:30:00")
    assert [shown(value) for value in written.values()] == [
        *("2026-01-01", "2026-01-01 10:00:00+00:00", "07:30:00")
    ]
