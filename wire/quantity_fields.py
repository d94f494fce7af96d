"""Converts quantities in files that people write to numbers: `"48MiB"` becomes 50331648.

The ending of a field's name (`_bytes`, `_s`, `_cores`) shows whether it is a size, a duration or a
number of CPUs. The field's type must be a number. The wire itself carries only plain numbers.
"""

from __future__ import annotations

from typing import Any, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from wire.errors import InvalidInput
from wire.type_shapes import is_number, is_struct, union_member, without_annotations
from wire.units import Quantity, quantity_of

MAX_DEPTH = 32
TEXT_ENCODING = "utf-8-sig"
"""Encoding of the files that people write: UTF-8; some editors put a byte-order mark before it."""


def parse_quantities(document: Any, kind: Any) -> Any:
    """Return a document of `kind` with numbers for quantities that are written as text.

    Text that is no quantity stays unchanged: `violations` refuses it and lists what is accepted.
    """
    return _parse(document, kind, None, 0)


def _parse(value: Any, kind: Any, quantity: Quantity | None, depth: int) -> Any:
    if isinstance(value, str):
        return _parse_number(value, kind, quantity)
    if depth >= MAX_DEPTH or not isinstance(value, dict | list):
        return value
    bare, _ = without_annotations(union_member(value, kind))
    if isinstance(value, dict) and is_struct(bare):
        fields = {f.encode_name: f for f in msgspec.structs.fields(bare)}
        return {key: _parse_field(item, fields.get(key), depth) for key, item in value.items()}
    if isinstance(value, dict) and get_origin(bare) is dict:
        item_kind = get_args(bare)[1]
        return {k: _parse(item, item_kind, quantity, depth + 1) for k, item in value.items()}
    if isinstance(value, list) and get_origin(bare) is list:
        (item_kind,) = get_args(bare)
        return [_parse(item, item_kind, quantity, depth + 1) for item in value]
    return value


def _parse_field(value: Any, field: FieldInfo | None, depth: int) -> Any:
    """Return one field. Its attribute name, not its encoded name, determines the quantity."""
    if field is None:
        return value
    return _parse(value, field.type, quantity_of(field.name), depth + 1)


def _parse_number(text: str, kind: Any, quantity: Quantity | None) -> Any:
    if quantity is None or not is_number(kind):
        return text
    try:
        return quantity.read(text)
    except InvalidInput:
        return text
