"""Request bodies that the route tables allow: the smallest one, and those with one large field."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

Place = tuple[str, ...]
KNOWN: dict[str, Any] = {
    "entitlement": "front",
    "name": "web",
    "machines": ["m0"],
    "set": {"a": "b"},
    "machine": "m0",
    "reason": "because",
    "address": "127.0.0.1:1",
    "path": "/v1/images/x/stream",
    "url": "https://c.example:1",
    "csr_pem": "x",
    "token": "x",
    "device": "/dev/vda",
}
"""Field → a value that the called program knows."""
ALSO = ("set", "machines")
"""Optional fields without which a request does nothing."""
FILLERS = ("a", "a.b-", "/", "${port:a} ", "rack = r1 or ", "not (", "9")
KEY, SIGNATURE = (base64.b64encode(bytes(size)).decode() for size in (32, 64))
TEXTS = (
    "web",
    "user:ann",
    "A1",
    "/a",
    "https://c.example",
    "1.5",
    "",
    f"ed25519:{KEY}",
    SIGNATURE,
    "07:30",
)


class Maker:
    """Makes bodies for one program; `known` holds the objects of the program."""

    def __init__(self, known: dict[str, Any], numbers: Iterator[int]) -> None:
        """Record the program's objects, and a source of generations, each newer than the last."""
        self._known = KNOWN | known
        self._numbers = numbers

    def least(self, info: inspect.Type, name: str = "") -> Any:
        """Return the smallest value of a type."""
        known = self._known.get(name)
        match info:
            case inspect.Metadata(type=inner):
                return self.least(inner, name)
            case inspect.StructType(fields=fields, tag_field=field, tag=tag):
                wanted = [f for f in fields if f.required or f.encode_name in ALSO]
                made = {f.encode_name: self.least(f.type, f.encode_name) for f in wanted}
                return made | ({} if field is None else {field: tag})
            case inspect.UnionType(types=types):
                return self.least(types[0], name)
            case inspect.StrType():
                return next(t for t in (known, *TEXTS) if isinstance(t, str) and fits(info, t))
            case inspect.IntType() if name == "generation":
                return next(self._numbers)
            case inspect.IntType() | inspect.FloatType():
                least = max(info.ge or 0, int(name == "machines"))
                return least + 1 if info.gt is not None else least
            case inspect.BoolType():
                return False
            case inspect.EnumType(cls=cls):
                return next(iter(cls)).value
            case inspect.LiteralType(values=values):
                return values[0]
            case inspect.DictType():
                return known if isinstance(known, dict) else {}
            case inspect.ListType(item_type=item, min_length=least):
                return known if isinstance(known, list) else [self.least(item, name)] * (least or 0)
        return None

    def places(self, info: inspect.Type, at: Place = ()) -> Iterator[tuple[Place, inspect.Type]]:
        """Yield each field that can have a large value, and its type."""
        match info:
            case inspect.Metadata(type=inner):
                yield from self.places(inner, at)
            case inspect.UnionType(types=types):
                for one in types:
                    yield from self.places(one, at)
            case inspect.StructType(fields=fields) if len(at) < 3:
                for field in fields:
                    yield from self.places(field.type, (*at, field.encode_name))
            case inspect.StrType() | inspect.IntType() | inspect.ListType() | inspect.DictType():
                yield at, info

    def large(self, info: inspect.Type, name: str, size: int) -> Iterator[Any]:
        """Yield values of about this number of parts, as far as the type allows."""
        match info:
            case inspect.StrType(max_length=most):
                length = min(size, most or size)
                for filler in FILLERS:
                    for text in ((filler * length)[:length], ("/" + filler * length)[:length]):
                        if fits(info, text):
                            yield text
            case inspect.IntType(le=most) if most is not None and most <= 1 << 20:
                yield max(most * size // LARGE, info.ge or 0)
            case inspect.ListType(item_type=item, max_length=most):
                yield [self._item(item, name, n) for n in range(_part(most, size))]
            case inspect.DictType(value_type=value, max_length=most):
                least = self.least(value, name)
                yield {f"k{n}": least for n in range(_part(most, size))}

    def _item(self, info: inspect.Type, name: str, number: int) -> Any:
        if name == "machines":
            return f"m{number}"
        match info:
            case inspect.Metadata(type=inner):
                return self._item(inner, name, number)
            case inspect.UnionType(types=types):
                return self._item(types[0], name, number)
            case inspect.StrType():
                key = f"ed25519:{base64.b64encode(number.to_bytes(32)).decode()}"
                texts = (
                    f"n{number}",
                    f"user:n{number}",
                    f"rack != n{number}",
                    f"10.0.{number}.0",
                    key,
                )
                return next((t for t in texts if fits(info, t)), self.least(info, name))
        return self.least(info, name)

    def bodies(self, kind: Any, size: int) -> Iterator[tuple[str, Any]]:
        """Yield bodies with one large field each, and the name of that field."""
        info = inspect.type_info(kind)
        for at, field in self.places(info):
            for number, value in enumerate(self.large(field, at[-1], size)):
                body = self.least(info)
                inside = body
                for name in at[:-1]:
                    inside = inside.setdefault(name, self.least(_of(info, at, name)))
                if isinstance(inside, dict):
                    inside[at[-1]] = value
                    yield f"{'.'.join(at)} {number}", body


LARGE = 8192
"""Number of parts of the larger value, where its type allows them."""


def _part(most: int | None, size: int) -> int:
    """Return a number of items: the share of the allowed number that `size` is of the largest."""
    return max(1, min(most or LARGE, LARGE) * size // LARGE)


def _of(info: inspect.Type, at: Place, name: str) -> inspect.Type:
    """Return the type of a field on the path to a place."""
    for part in at:
        found = _fields(info)[part]
        if part == name:
            return found
        info = found
    raise AssertionError(name)


def _fields(info: inspect.Type) -> dict[str, inspect.Type]:
    match info:
        case inspect.Metadata(type=inner):
            return _fields(inner)
        case inspect.UnionType(types=types):
            return {name: kind for one in types for name, kind in _fields(one).items()}
        case inspect.StructType(fields=fields):
            return {f.encode_name: f.type for f in fields}
    return {}


def fits(info: inspect.StrType, text: str) -> bool:
    """Return whether a text is a valid value of this type."""
    if info.pattern is not None and re.search(info.pattern, text) is None:
        return False
    return (
        (info.min_length or 0)
        <= len(text)
        <= (len(text) if info.max_length is None else info.max_length)
    )
