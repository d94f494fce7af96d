"""Describes for people what a type accepts, without regular expressions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from msgspec import inspect

from wire.errors import InvalidInput
from wire.units import Quantity, quantity_of, shown

_MAX_CHOICES = 40
_LEAST, _MOST = 1e-9, 1e18


def refusal(value: Any, kind: Any, field: str, *, numbers: bool = False) -> str:
    """Return why a value is not accepted in this field, and what is expected.

    With `numbers` the document can have quantities only as numbers, not such as `30s`.
    """
    quantity = quantity_of(field)
    if quantity is not None and isinstance(value, str):
        try:
            number = quantity.read(value)
        except InvalidInput as e:
            if not numbers:
                return str(e)
        else:
            return f"{shown(value)} must be written as a number here: {number:.15g}"
    text = shown(value)
    if quantity is not None and not numbers and _is_amount(value):
        text = quantity.write(value)
    return f"{text} is not valid; expected {expected(kind, quantity, numbers=numbers)}"


def _is_amount(value: Any) -> bool:
    """Return whether a value can be written as a quantity in a few digits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (value == 0 or _LEAST <= value < _MOST)


@lru_cache(maxsize=1024)
def expected(kind: Any, quantity: Quantity | None = None, *, numbers: bool = False) -> str:
    """Return a description of what a type accepts. A large type takes milliseconds at first."""
    return _expected(inspect.type_info(kind), quantity, numbers=numbers)


def _expected(info: inspect.Type, quantity: Quantity | None, *, numbers: bool) -> str:
    match info:
        case inspect.Metadata(type=inner, extra_json_schema=schema):
            return str(
                (schema or {}).get("description") or _expected(inner, quantity, numbers=numbers)
            )
        case inspect.UnionType(types=types):
            given = [t for t in types if not isinstance(t, inspect.NoneType)]
            return " or ".join(
                dict.fromkeys(_expected(t, quantity, numbers=numbers) for t in given)
            )
        case inspect.IntType() | inspect.FloatType():
            if quantity is not None and numbers:
                return f"{_number_text(info, None)}, in {quantity.unit}"
            return _number_text(info, quantity)
        case inspect.StrType():
            return _string_text(info)
        case inspect.EnumType(cls=cls):
            return f"one of {_choices_text([str(member.value) for member in cls])}"
        case inspect.LiteralType(values=values):
            return f"one of {_choices_text([str(v) for v in values])}"
        case inspect.ListType(min_length=least, max_length=most):
            return "a list" + _length_text(least, most, " of {} entries")
        case inspect.DictType(min_length=least, max_length=most):
            return "a table" + _length_text(least, most, " of {} entries")
        case inspect.StructType():
            return "a table"
        case inspect.BoolType():
            return "true or false"
    return "another kind of value"


def _number_text(info: inspect.IntType | inspect.FloatType, quantity: Quantity | None) -> str:
    name = "a whole number" if isinstance(info, inspect.IntType) else "a number"
    write: Callable[[Any], str] = _plain_number
    if quantity is not None:
        name, write = f"{quantity.name} such as {quantity.examples}", quantity.write
    least, most = info.ge, info.le
    words = []
    if least is not None and most is not None:
        words.append(f"from {write(least)} to {write(most)}")
    elif least is not None:
        words.append(f"of at least {write(least)}")
    elif most is not None:
        words.append(f"of at most {write(most)}")
    if info.gt is not None:
        words.append(f"above {write(info.gt)}")
    if info.lt is not None:
        words.append(f"below {write(info.lt)}")
    joined = " and ".join(words)
    if quantity is not None:
        return f"{name}, {joined}" if joined else name
    return f"{name} {joined}".rstrip()


def _plain_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _string_text(info: inspect.StrType) -> str:
    text = "text" + _length_text(info.min_length, info.max_length, " of {} characters")
    return f"{text} in another form" if info.pattern else text


def _length_text(least: int | None, most: int | None, words: str) -> str:
    if least and most:
        return words.format(f"{least} to {most}")
    if least:
        return words.format(f"at least {least}")
    return words.format(f"at most {most}") if most else ""


def _choices_text(values: list[str]) -> str:
    more = ", …" if len(values) > _MAX_CHOICES else ""
    return ", ".join(sorted(values)[:_MAX_CHOICES]) + more
