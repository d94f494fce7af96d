"""One file of a host profile: read, its expressions evaluated, its tables checked and decoded.

All errors of a file are recorded at once, each with its line; its parents are not read here.
"""

from __future__ import annotations

import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from sidekick.expression import ExpressionError, Facts, parse
from sidekick.report import ProfileText
from sidekick.template import SUFFIX, TemplateLines, render_template
from sidekick.toml_lines import TomlLines
from wire.errors import ConfigError, FieldError
from wire.toml_limits import find_excess

MAX_BYTES = 64 * 1024
"""A larger file is refused: it is most likely not a profile."""

Table = dict[str, Any]
Place = tuple[str | int, ...]
"""Where in a file: `("when", 0, "sysctl", "vm.swappiness")`."""


class Section(Protocol):
    """The part of a kind of setting that profiles need; each kind has one table."""

    @property
    def section(self) -> Any:
        """The type of the table; every field has a default, because a file may set only some."""

    def merge(self, parent: Table, child: Table) -> Table:
        """Return a child's table merged over its parent's, both undecoded."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a file other than the tables of its settings."""

    description: str
    extends: str | None = None
    version: Annotated[int, Meta(ge=1)] = 1
    """Raised with every change that machines are to be brought to."""
    owner: str = ""
    """The team that may change the file. Where it inherits from a file with `allow`, it may set
    only what that file allows this owner."""
    unset: list[str] = []
    """Settings of its parents that it does not set: `sysctl.vm.swappiness`, a member of a list such
    as `modules.br_netfilter`, or a whole table such as `thp`."""
    fits: str = ""
    """An expression of facts: which hosts it was made for. Only `recommend` uses it."""
    allow: dict[str, list[str]] = {}
    """By owner, which settings their profiles may set: `web-team = ["sysctl.net.*"]`."""


class FileBlock(msgspec.Struct, frozen=True):
    """Tables of settings that hold together: a file's own, or those of one `[[when]]`."""

    at: Place
    """Where in the file: () or ("when", 0)."""
    tables: Table
    applies: bool = True


class ProfileFile(msgspec.Struct):
    """One file, with its errors."""

    name: str
    path: str
    lines: TomlLines
    origin: TemplateLines | None = None
    """For a template: the line of the template that each line of the TOML comes from."""
    header: Header | None = None
    fits: bool | None = None
    blocks: list[FileBlock] = msgspec.field(default_factory=list)
    errors: list[FieldError] = msgspec.field(default_factory=list)

    def source_of(self, at: Sequence[str | int]) -> str:
        """Return `web:12`: file and line of a place in the TOML, or in its template."""
        line = self.lines.find(at)
        return f"{self.name}:{self.origin.find(line) if self.origin else line}"

    def add_error(self, at: Sequence[str | int], reason: str) -> None:
        """Record an error at a place in the TOML."""
        names = at[2:] if at[:1] == ("when",) and len(at) > 2 else at
        dotted = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in names).lstrip(".")
        self.errors.append(FieldError(field=dotted, reason=f"{reason} ({self.source_of(at)})"))


_NOT_EVALUATED = object()
"""Value of an expression that cannot be evaluated, in tables whose condition is false."""


def read_file(file_text: ProfileText, kinds: Mapping[str, Section], facts: Facts) -> ProfileFile:
    """Return one file, its expressions evaluated and its tables checked, without its parents."""
    name, path, text = file_text.name, file_text.path, file_text.text
    check_size(path, text.encode())
    origin: TemplateLines | None = None
    if path.endswith(SUFFIX):
        text, origin = render_template(path, text, facts)
    raw = _parse_toml(path, text, origin)
    file = ProfileFile(name, path, TomlLines(text), origin)
    _ProfileReader(file, kinds, facts).read(raw)
    return file


def check_size(path: str, data: bytes) -> None:
    """Raise `ConfigError` if the file has more than `MAX_BYTES`."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"profile {path} is larger than {MAX_BYTES} bytes")


def _parse_toml(path: str, text: str, origin: TemplateLines | None) -> Table:
    mapped = origin.mapped if origin else str
    excess = find_excess(text)
    if excess is not None:
        raise ConfigError(f"profile {path} is not valid for sidekick: {mapped(excess)}")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as e:
        kind = "does not render to TOML" if origin else "is not TOML"
        raise ConfigError(f"profile {path} {kind}: {mapped(str(e))}") from e


class _ProfileReader:
    """Evaluates and decodes the tables of one file, and records its errors."""

    def __init__(self, file: ProfileFile, kinds: Mapping[str, Section], facts: Facts) -> None:
        self._file = file
        self._kinds = kinds
        self._facts = facts

    def read(self, raw: Table) -> None:
        """Fill the file with the content of its tables."""
        file = self._file
        own = {kind: raw.pop(kind) for kind in list(raw) if kind in self._kinds}
        whens = raw.pop("when", [])
        file.header = self._header(raw)
        if file.header and file.header.fits:
            file.fits = self._condition(("fits",), file.header.fits)
        file.blocks.append(self._block((), own, applies=True))
        if not isinstance(whens, list):
            file.add_error(("when",), "is written [[when]], with an `if`")
            whens = []
        for number, when in enumerate(whens):
            if isinstance(when, dict):
                file.blocks.append(self._when(("when", number), when))
            else:
                file.add_error(("when", number), "is not a table")

    def _header(self, raw: Table) -> Header | None:
        fields = [f.encode_name for f in msgspec.structs.fields(Header)]
        for key in raw.keys() - set(fields):
            known = ", ".join([*fields, "when", *self._kinds])
            self._file.add_error((key,), f"unknown; known are {known}")
        given = {key: value for key, value in raw.items() if key in fields}
        decoded: Header | None = self._decode(given, Header, ())
        return decoded

    def _when(self, at: Place, raw: Table) -> FileBlock:
        tables = {key: value for key, value in raw.items() if key != "if"}
        for key in tables.keys() - self._kinds.keys():
            self._file.add_error((*at, key), f"unknown; known are if, {', '.join(self._kinds)}")
        condition, applies = raw.get("if"), False
        if isinstance(condition, str):
            applies = self._condition((*at, "if"), condition)
        else:
            self._file.add_error((*at, "if"), "is required: an expression of facts, as text")
        tables = {key: value for key, value in tables.items() if key in self._kinds}
        return self._block(at, tables, applies=applies)

    def _condition(self, at: Place, text: str) -> bool:
        value = self._evaluate_text(at, text)
        if value is not None and not isinstance(value, bool):
            self._file.add_error(at, f"{text!r} is neither true nor false")
        return value is True

    def _block(self, at: Place, tables: Table, *, applies: bool) -> FileBlock:
        """Return evaluated tables; tables whose condition is false are checked too."""
        evaluated: Table = {}
        for kind, table in tables.items():
            if not isinstance(table, dict):
                self._file.add_error((*at, kind), "is not a table")
                continue
            before = len(self._file.errors)
            value = self._evaluate_table((*at, kind), table, applies=applies)
            if len(self._file.errors) == before and _is_evaluated(value):
                self._decode(value, self._kinds[kind].section, (*at, kind))
            evaluated[kind] = value
        return FileBlock(at, evaluated, applies)

    def _evaluate_table(self, at: Place, value: Any, *, applies: bool) -> Any:
        if isinstance(value, dict):
            return {k: self._evaluate_table((*at, k), v, applies=applies) for k, v in value.items()}
        if isinstance(value, list):
            return [self._evaluate_table((*at, n), v, applies=applies) for n, v in enumerate(value)]
        if isinstance(value, str) and value.startswith("="):
            result = self._evaluate_text(at, value[1:], is_required=applies)
            return _NOT_EVALUATED if result is None else result
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            self._file.add_error(at, "a number is beyond 64 bits")
            return _NOT_EVALUATED
        return value

    def _evaluate_text(self, at: Place, text: str, *, is_required: bool = True) -> Any:
        """Return the value of an expression, or None. With `is_required` None is an error.

        Its grammar and the names of its facts are checked in any case.
        """
        known = False
        try:
            expression = parse(text.strip())
            known = expression.facts <= self._facts.keys()
            return expression.evaluate(self._facts)
        except ExpressionError as e:
            if is_required or not known:
                self._file.add_error(at, f"{e}; {e.hint}" if e.hint else str(e))
            return None

    def _decode(self, raw: Any, kind: Any, at: Place) -> Any:
        """Return `raw` as `kind`; on errors note all of them, each with its field."""
        kind = _without_none(kind)
        if isinstance(raw, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._decode_struct(raw, kind, at)
        if isinstance(raw, dict) and typing.get_origin(kind) is dict:
            inner = typing.get_args(kind)[1]
            return {k: self._decode(v, inner, (*at, k)) for k, v in raw.items()}
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError as e:
            reason, _, inside = str(e).partition(" - at `$")
            names = re.findall(r"\[(\d+)\]|\.(\w+)", inside)
            self._file.add_error((*at, *(int(n) if n else name for n, name in names)), reason)
            return None

    def _decode_struct(self, raw: Table, kind: type[msgspec.Struct], at: Place) -> Any:
        fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
        before = len(self._file.errors)
        for name in raw.keys() - fields.keys():
            self._file.add_error((*at, name), f"unknown; known are {', '.join(fields)}")
        values = {}
        for name, about in fields.items():
            if name in raw:
                values[name] = self._decode(raw[name], about.type, (*at, name))
            elif about.required:
                self._file.add_error((*at, name), "is required")
        return kind(**values) if len(self._file.errors) == before else None


def _is_evaluated(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_evaluated(v) for v in value.values())
    if isinstance(value, list):
        return all(_is_evaluated(v) for v in value)
    return value is not _NOT_EVALUATED


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        rest = [k for k in typing.get_args(kind) if k is not types.NoneType]
        if len(rest) == 1:
            return rest[0]
    return kind
