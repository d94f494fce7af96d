"""Reads and writes sizes, durations and numbers of CPUs for people: `48MiB`, `30s`, `0.5`.

In programs and on the wire they are numbers: bytes, seconds, CPUs. These functions read what they
write: `size(size_text(n)) == n`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, time
from fractions import Fraction
from typing import Any

from wire.errors import InvalidInput

_SIZES = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "PiB": 50, "EiB": 60}
_LETTERS = {"K": 10, "M": 20, "G": 30, "T": 40, "P": 50, "E": 60}
"""As systemd reads them, to the base of 1024 (systemd.resource-control(5), MemoryMax=)."""
_DECIMAL = ("kB", "KB", "MB", "GB", "TB", "PB", "EB")
_SPANS = {
    "d": Fraction(86_400),
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 1000),
}
_NUMBER = r"\d{1,400}(?:\.\d{1,400})?"
_SIZE = re.compile(rf"({_NUMBER}) ?([A-Za-z]{{0,3}})", re.ASCII)
_CORES = re.compile(rf"({_NUMBER})(m?)", re.ASCII)
_SPAN = re.compile(rf"({_NUMBER})(ms|[dhms])", re.ASCII)
_PLACES = 3
"""Decimals of a size that is written exactly; with more of them bytes are easier to read."""
_MAX_CHARS = 1000
_SHOWN_CHARS = 40
_LONG_BITS = 128
"""Longer numbers are not printed: Python refuses those of many thousand digits."""


def size(text: str) -> int:
    """Return bytes; parts of a byte are rounded. Raises `InvalidInput` with the accepted forms."""
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    unit = match[2] if match else ""
    if match is None or (unit and unit not in _SIZES and unit not in _LETTERS):
        raise InvalidInput(f"{shown(text)} is not a size; {_accepted_sizes(unit)}")
    shift = _SIZES.get(unit, _LETTERS.get(unit, 0))
    return round(Fraction(match[1]) * (1 << shift))


def _accepted_sizes(unit: str) -> str:
    if unit in _DECIMAL:
        return f"{unit} is ambiguous (1000 or 1024): write bytes or 48MiB"
    return "write bytes or 48MiB, 1.5GiB, …"


def seconds(text: str) -> float:
    """Return seconds of `30s`, `10m`, `1h30m`, `250ms`; only 0 needs no unit."""
    rest, total = text.strip(), Fraction(0)
    if len(text) > _MAX_CHARS or not rest:
        raise _duration_error(text)
    if rest == "0":
        return 0.0
    largest = Fraction(10**9)
    while rest:
        match = _SPAN.match(rest)
        if match is None or _SPANS[match[2]] >= largest:
            raise _duration_error(text)
        largest = _SPANS[match[2]]
        total += Fraction(match[1]) * largest
        rest = rest[match.end() :]
    try:
        return float(total)
    except OverflowError:
        raise _duration_error(text) from None


def _duration_error(text: str) -> InvalidInput:
    return InvalidInput(f"{shown(text)} is not a duration; write 90s, 10m, 1h30m, 8h or 30d")


def cores(text: str) -> float:
    """Return CPUs of `0.5`, `2` or, in thousandths, `500m`."""
    match = _CORES.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    try:
        if match is not None:
            return float(Fraction(match[1]) / (1000 if match[2] else 1))
    except OverflowError:
        pass
    raise InvalidInput(f"{shown(text)} is not a number of CPUs; write 0.5, 2 or 500m")


def size_text(count: float) -> str:
    """Return a size exactly, in the largest unit that is short to write: `48MiB`, `1.5GiB`.

    The size may be a refused value: not a whole number, or a float (`1e15`).
    """
    exact = Fraction(count)
    for unit, shift in reversed(_SIZES.items()):
        if shift and exact >= 1 << shift:
            thousandths = exact * 10**_PLACES / (1 << shift)
            if thousandths.denominator == 1:
                return f"{_decimal(thousandths / 10**_PLACES)}{unit}"
    return f"{int(exact) if exact.denominator == 1 else count}B"


def about_size(count: int) -> str:
    """Return a size rounded to a tenth of its unit, for tables: `48MiB`, `11.8MiB`."""
    for unit, shift in reversed(_SIZES.items()):
        if shift and count >= 1 << shift:
            return f"{_decimal(round(Fraction(count, 1 << shift), 1))}{unit}"
    return f"{count}B"


def seconds_text(value: float) -> str:
    """Return a duration exactly: `90s` is `1m30s`, a quarter of a second is `0.25s`."""
    exact = Fraction(repr(value))
    left, parts = exact, []
    for unit in ("d", "h", "m"):
        count, left = divmod(left, _SPANS[unit])
        if count:
            parts.append(f"{count}{unit}")
    if left or not parts:
        parts.append(f"{_decimal(left)}s")
    return "".join(parts)


def cores_text(value: float) -> str:
    """Return CPUs: `0.5`, `2`."""
    return _decimal(Fraction(repr(value)))


def shown(value: Any) -> str:
    """Return a refused value as its author wrote it; a long one is shortened."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case int() if value.bit_length() > _LONG_BITS:
            return f"a number of {value.bit_length()} bits"
        case dict():
            return f"a table of {len(value)}"
        case list():
            return f"a list of {len(value)}"
        case date() | time():
            return str(value)
    cut = isinstance(value, str) and len(value) > _SHOWN_CHARS
    text = repr(value[: _SHOWN_CHARS + 1] if cut else value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _decimal(value: Fraction) -> str:
    """Return a number without exponent; its denominator has no factors but 2 and 5."""
    whole, rest = divmod(value, 1)
    digits = []
    while rest:
        digit, rest = divmod(rest * 10, 1)
        digits.append(str(digit))
    return f"{whole}.{''.join(digits)}" if digits else str(whole)


@dataclass(frozen=True, slots=True)
class Quantity:
    """One kind of quantity: its name, its reader and its writer."""

    name: str
    read: Callable[[str], float]
    write: Callable[[Any], str]
    examples: str
    unit: str
    """The unit of its numbers in programs and on the wire."""


SIZE = Quantity("a size", size, size_text, "48MiB or 1.5GiB", "bytes")
DURATION = Quantity("a duration", seconds, seconds_text, "30s, 10m or 8h", "seconds")
CORES = Quantity("a number of CPUs", cores, cores_text, "0.5, 2 or 500m", "CPUs")
_BY_ENDING = {
    "_bytes_per_s": SIZE,
    "_per_s": None,  # a rate is no duration
    "_bytes": SIZE,
    "_s": DURATION,
    "_cores": CORES,
    "cpus": CORES,
}


def quantity_of(field: str) -> Quantity | None:
    """Return the quantity of a field, by the ending of its name; None for other fields."""
    return next((q for end, q in _BY_ENDING.items() if field.endswith(end)), None)
