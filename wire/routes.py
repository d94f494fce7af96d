"""A row of the route table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import quote

import msgspec

from wire.errors import FieldError, InvalidInput
from wire.unique_keys import DuplicateKeyError, json_with_unique_keys
from wire.violations import MAX_ERRORS, violations

Relations = Callable[[Any], list[FieldError]]
"""Returns the violations of a document, which is passed as plain values, not yet checked."""
_PARAMETER = re.compile(r"\{(\w+)\}")
_MAX_EXPONENTS = 256
_EXPONENT = re.compile(rb"\d[eE][-+]?\d")
_STRING_OR_EXPONENT = re.compile(rb'"(?:[^"\\]|\\.)*+"|(?P<exponent>\d[eE])', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Route:
    """One call of an API: its name, address, request and response.

    `request` is decoded strictly from the body before the handler gets it. A `stream_in` route
    passes the body on unread, a `stream_out` route answers in chunks. `query` lists the optional
    parameters; others are refused. `roles` lists the certificate roles that may call it (empty:
    the program's default), `needs` adds users.
    """

    name: str
    method: str
    path: str
    request: Any = None
    response: Any = None
    query: tuple[str, ...] = ()
    stream_in: bool = False
    stream_out: bool = False
    duplex: bool = False
    """Whether it opens a websocket; its handler returns a `Talk`."""
    summary: str = ""
    roles: tuple[str, ...] = ()
    needs: str = ""
    """The right that a user needs to call it, as the program defines it; empty: no user may."""
    changes: bool = True
    """Whether a call other than GET changes something; then its caller is recorded."""
    body_bytes: int = 0
    """The largest body; 0: the limit of the caller's class (`wire.fairness`)."""
    is_costly: bool = False
    """Whether it takes much computing time: the server answers one per caller at a time."""
    waits: bool = False
    """Whether its request can ask to wait for news."""
    relations: Relations | None = None
    """Rules between the fields of the request that its types cannot express."""

    @property
    def is_change(self) -> bool:
        """Return whether a call may change something."""
        return self.duplex or (self.changes and self.method != "GET")

    @property
    def is_waiting(self) -> bool:
        """Return whether a call may stay open for long: to wait for news, or as a stream."""
        return self.stream_out or self.duplex or self.waits or "wait_s" in self.query

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the path parameters, in order."""
        return tuple(_PARAMETER.findall(self.path))

    def url(self, **values: object) -> str:
        """Return path and query for these values; None means "not given"."""
        path = self.path
        for name in self.parameters:
            value = str(values.pop(name))
            if value in ("", ".", ".."):  # a client would drop it from the path
                raise InvalidInput(f"{value!r} cannot be used as {name.replace('_', ' ')}")
            path = path.replace(f"{{{name}}}", quote(value, safe=""))
        given = {k: v for k, v in values.items() if v is not None}
        if unknown := set(given) - set(self.query):
            raise InvalidInput(f"{self.name} has no parameter {', '.join(sorted(unknown))}")
        query = "&".join(f"{k}={quote(str(v), safe='')}" for k, v in given.items())
        return f"{path}?{query}" if query else path


def decode_json(
    data: bytes, kind: Any, what: str, relations: Relations | None = None, *, numbers: bool = True
) -> Any:
    """Return `data` as `kind`, or raise `InvalidInput` with every violation.

    Without `numbers` its author can write `30s` for 30, and the errors suggest that.
    """
    _refuse_slow_numbers(data, what)
    errors: list[FieldError] = []
    value = plain = None
    try:
        try:
            value = msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            plain = msgspec.json.decode(data)
            errors = violations(plain, kind, numbers=numbers)
        if relations is not None:
            errors += relations(msgspec.json.decode(data) if plain is None else plain)
        if not errors:
            _refuse_duplicate_keys(data, what)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise InvalidInput(f"{what} is not JSON: {e}") from e
    if errors:
        raise invalid(errors, what)
    return value


def _refuse_duplicate_keys(data: bytes, what: str) -> None:
    """Raise for a valid document in which an object has a key twice: the decoder hides one."""
    try:
        json_with_unique_keys(data)
    except DuplicateKeyError as e:
        raise InvalidInput(f"{what} is not valid: {e}") from e
    except ValueError:
        return  # an integer that is too long for Python's decoder


def _refuse_slow_numbers(data: bytes, what: str) -> None:
    """Raise for many numbers such as `1e300`: each takes the decoder 12 us instead of 0.05."""
    if len(_EXPONENT.findall(data)) <= _MAX_EXPONENTS:
        return
    found = (match for match in _STRING_OR_EXPONENT.finditer(data) if match.lastgroup)
    if next(islice(found, _MAX_EXPONENTS, None), None) is not None:
        raise InvalidInput(f"{what} has over {_MAX_EXPONENTS} numbers with an exponent")


def invalid(errors: list[FieldError], what: str) -> InvalidInput:
    """Return the error of a document with these violations."""
    first = errors[0] if errors else FieldError(field="(whole)", reason="not valid")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return InvalidInput(
        f"{what} is not valid: {first.field}: {first.reason}{more}",
        errors=tuple(errors[:MAX_ERRORS]),
    )
