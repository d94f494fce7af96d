"""Finds all errors of a document, where a decoder stops at the first one.

Only the decoder decides. A value is converted to its type; if that fails, its parts are converted
one by one. If all parts are valid, the error is that of the whole. So every constraint is written
once, in the type.

A document may be hostile. So the search ends at the last error that is listed, valid parts are
skipped many at a time, and a container is checked only up to the size that its type allows.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from wire.errors import FieldError
from wire.type_shapes import is_struct, union_member, without_annotations
from wire.type_text import refusal

T = TypeVar("T")

MAX_ERRORS = 100
MAX_DEPTH = 32
_BATCH = 128
"""Parts of a container that are checked together."""
_MAX_GUESSES = 8
"""Number of unknown names of a document for which a similar known name is searched."""
_GUESSED_CHARS = 40
_NAME_CHARS = 80
"""Characters of a name in a document that are repeated where it is reported."""


def violations(value: Any, kind: Any, *, numbers: bool = False) -> list[FieldError]:
    """Return why `value` (plain values from JSON, TOML or YAML) is no valid `kind`.

    Returns at most `MAX_ERRORS` errors. With `numbers` its author cannot write `30s` for 30.
    """
    return list(islice(_Search(numbers).search(value, kind, "", 0), MAX_ERRORS))


class _Search:
    """One search through a document."""

    def __init__(self, numbers: bool) -> None:
        self._guesses = 0
        self._numbers = numbers

    def search(self, value: Any, kind: Any, where: str, depth: int) -> Iterator[FieldError]:
        """Yield the violations of a value, from the outside to the inside."""
        if not _is_refused(value, kind):
            return
        if depth >= MAX_DEPTH:
            yield FieldError(field=where or "(whole)", reason="nested too deeply")
            return
        bare, constraints = without_annotations(kind)
        bare = union_member(value, bare)
        inner: Iterator[FieldError] = iter(())
        if isinstance(value, dict) and is_struct(bare):
            inner = self._search_struct(value, bare, where, depth)
        elif isinstance(value, dict) and get_origin(bare) is dict:
            inner = self._search_dict(value, bare, constraints, where, depth)
        elif isinstance(value, list) and get_origin(bare) is list:
            inner = self._search_list(value, bare, constraints, where, depth)
        is_explained = False
        for error in inner:
            is_explained = True
            yield error
        if not is_explained:
            reason = _error_of_whole(value, bare) or refusal(
                value, kind, _field_at(where), numbers=self._numbers
            )
            yield FieldError(field=where or "(whole)", reason=reason)

    def _search_struct(
        self, value: dict[Any, Any], kind: Any, where: str, depth: int
    ) -> Iterator[FieldError]:
        fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
        if kind.__struct_config__.forbid_unknown_fields:
            for key in value:
                if key not in fields:
                    moved = getattr(kind, "MOVED", {}).get(key)
                    reason = moved or self._unknown(str(key), fields)
                    yield FieldError(field=_join_path(where, key), reason=reason)
        for name, field in fields.items():
            if name in value:
                yield from self.search(value[name], field.type, _join_path(where, name), depth + 1)
            elif field.required:
                yield FieldError(field=_join_path(where, name), reason="missing")

    def _unknown(self, key: str, fields: Iterable[str]) -> str:
        """Return that a name is unknown, with a similar known name, else with all known names."""
        self._guesses += 1
        if self._guesses > _MAX_GUESSES:
            return "unknown"
        import difflib  # here: rarely needed, and a long-running agent saves its memory

        near = len(key) <= _GUESSED_CHARS
        if near and (meant := difflib.get_close_matches(key, fields, n=1, cutoff=0.75)):
            return f"unknown; did you mean {meant[0]}?"
        return f"unknown; known: {', '.join(fields)}"

    def _search_dict(
        self, value: dict[Any, Any], kind: Any, constraints: list[Meta], where: str, depth: int
    ) -> Iterator[FieldError]:
        yield from _container_errors(value, dict[Any, Any], constraints, where)
        key_kind, item_kind = get_args(kind)
        rest = islice(value.items(), _max_parts(constraints))
        while batch := dict(islice(rest, _BATCH)):
            if not _is_refused(batch, kind):
                continue
            for key, item in batch.items():
                place = _join_path(where, key)
                if _is_refused(key, key_kind):
                    reason = refusal(key, key_kind, "")
                    yield FieldError(field=place, reason=f"as a name: {reason}")
                yield from self.search(item, item_kind, place, depth + 1)

    def _search_list(
        self, value: list[Any], kind: Any, constraints: list[Meta], where: str, depth: int
    ) -> Iterator[FieldError]:
        yield from _container_errors(value, list[Any], constraints, where)
        (item_kind,) = get_args(kind)
        end = min(len(value), _max_parts(constraints) or len(value))
        for at in range(0, end, _BATCH):
            batch = value[at : min(at + _BATCH, end)]
            if not _is_refused(batch, kind):
                continue
            for index, item in enumerate(batch, at):
                yield from self.search(item, item_kind, f"{where}[{index}]", depth + 1)


def _max_parts(constraints: list[Meta]) -> int | None:
    """Return how many parts a container may have; None: no limit."""
    return min((c.max_length for c in constraints if c.max_length is not None), default=None)


def _container_errors(
    value: Any, kind: Any, constraints: list[Meta], where: str
) -> list[FieldError]:
    """Return the error of a container's own constraints, its length for instance."""
    if not constraints:
        return []
    whole = typing.Annotated[kind, *constraints]
    if not _is_refused(value, whole):
        return []
    return [FieldError(field=where or "(whole)", reason=refusal(value, whole, ""))]


def _is_refused(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, UnicodeError):
        return True
    return False


def _error_of_whole(value: Any, kind: Any) -> str:
    """Return the error of a table as a whole (`__post_init__`) if each part is valid."""
    if not isinstance(value, dict) or not is_struct(kind):
        return ""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        return str(e) if isinstance(e.__cause__, ValueError) else ""
    return ""


def name_shown(key: Any) -> str:
    """Return a name of a document as valid UTF-8; a long one is shortened."""
    text = str(key)
    text = text if len(text) <= _NAME_CHARS else f"{text[:_NAME_CHARS]}…"
    return text.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair


def _join_path(where: str, key: Any) -> str:
    name = name_shown(key)
    return f"{where}.{name}" if where else name


def _field_at(where: str) -> str:
    """Return the name of the field that a place lies in: `probe.ports[2]` is in `ports`."""
    return where.rpartition(".")[2].partition("[")[0]
