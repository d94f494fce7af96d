"""Host profiles: found by name, inherited, bent to the host's facts, decoded strictly.

A profile is a TOML file, or a template of one (`sidekick/template.py`). `extends` names one
parent; `[[when]]` tables hold where their `if` is true of the host; a text that begins with `=` is
an expression of facts (`sidekick/expression.py`).
Every kind of setting has one table, whose type and way of inheriting its module knows. All errors
of all files of a lineage are told at once, each with its file and line.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from sidekick.expression import ExpressionError, Facts, parse
from sidekick.report import ProfileText
from sidekick.template import SUFFIX, TemplateLines, render_template
from sidekick.toml_lines import TomlLines, find_excess
from wire.errors import ConfigError, FieldError, NotFound

MAX_BYTES = 64 * 1024
"""No profile is larger; a file that is was not meant to be one."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_FILE_NAME = re.compile(r"(.+)\.toml(\.j2)?")

Table = dict[str, Any]


class Section(Protocol):
    """What a profile must know of a kind of setting: it has one table."""

    @property
    def kind(self) -> str:
        """The name of its table, and the first part of its settings' names."""

    @property
    def section(self) -> Any:
        """What the table is decoded as; every field has a default, since files say only some."""

    def merge(self, parent: Table, child: Table) -> Table:
        """Return a child's table laid over its parent's, both as the files have them."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says about itself, beside the tables of its settings."""

    description: str
    extends: str | None = None
    version: Annotated[int, Meta(ge=1)] = 1
    """Raised with every change that machines are to be brought to."""
    owner: str = ""
    """Who may change the file. One that inherits from a file with `allow` says only what that
    lets this owner say."""
    unset: list[str] = []
    """What of its parents it leaves as the host has it: `sysctl.vm.swappiness`, a member of a list
    such as `modules.br_netfilter`, or a whole table such as `thp`."""
    fits: str = ""
    """An expression of facts: which hosts it was made for. `recommend` goes by it; nothing else."""
    allow: dict[str, list[str]] = {}
    """By owner, which settings their profiles may set: `web-team = ["sysctl.net.*"]`."""


class Profile(msgspec.Struct, frozen=True):
    """A profile with its parents merged in, as it is on one host."""

    name: str
    description: str = ""
    version: int = 1
    owner: str = ""
    fits: bool | None = None
    """Whether it was made for hosts like this one, None where it does not say."""
    lineage: tuple[str, ...] = ()
    """Its own name, its parent's, and so on."""
    sections: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The decoded table of each kind that a file speaks of."""
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Where it is said, as `web:12` (file and line): by `sysctl.NAME`, `hugepages`, …"""
    texts: tuple[ProfileText, ...] = ()
    """Its own file, its parent's, and so on."""

    def section(self, kind: str) -> Any:
        """Return the decoded table of a kind of setting, None where no file speaks of it."""
        return self.sections.get(kind)

    def source_of(self, setting: str) -> str:
        """Return the file and line that say so, or say the most of it; else the name."""
        parts = setting.split(".")
        names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((self.sources[n] for n in names if n in self.sources), self.name)


class _Block(msgspec.Struct, frozen=True):
    """Tables of settings that hold together: a file's own, or those of one `[[when]]`."""

    at: tuple[str | int, ...]
    """Where in the file: () or ("when", 0)."""
    tables: Table
    holds: bool = True


class _File(msgspec.Struct):
    """One file as it was read, and what is wrong with it."""

    name: str
    path: str
    lines: TomlLines
    origin: TemplateLines | None = None
    """Of a template: from which of its lines each line of the TOML is."""
    header: Header | None = None
    fits: bool | None = None
    blocks: list[_Block] = msgspec.field(default_factory=list)
    errors: list[FieldError] = msgspec.field(default_factory=list)

    def where(self, at: Sequence[str | int]) -> str:
        line = self.lines.find(at)
        return f"{self.name}:{self.origin.find(line) if self.origin else line}"

    def wrong(self, at: Sequence[str | int], reason: str) -> None:
        names = at[2:] if at[:1] == ("when",) and len(at) > 2 else at
        dotted = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in names).lstrip(".")
        self.errors.append(FieldError(field=dotted, reason=f"{reason} ({self.where(at)})"))


class Library(msgspec.Struct, frozen=True):
    """The profiles of this host: folders, the first that has a name wins."""

    folders: Sequence[Path]
    settings: Mapping[str, Section]
    """By kind, in the order in which they are named to people."""

    def names(self) -> list[str]:
        """Return the names of all profiles, sorted."""
        found: set[str] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):  # not there, or not for this user to see
                names = (_FILE_NAME.fullmatch(n) for n in os.listdir(folder))
                found |= {match[1] for match in names if match}
        return sorted(name for name in found if _NAME.fullmatch(name))

    def load(self, name: str, facts: Facts) -> Profile:
        """Return a profile with its parents merged in, as it is on a host with these facts.

        Raises `NotFound` where there is none of that name, and `ConfigError` with every error of
        every file of its lineage.
        """
        return render(name, self._text_of, self.settings, facts)

    def find(self, name: str) -> Path | None:
        """Return the file of a profile, without its parents.

        Raises `ConfigError` where a folder has it both as TOML and as a template.
        """
        if not _NAME.fullmatch(name):
            return None
        for folder in self.folders:
            paths = [folder / f"{name}{suffix}" for suffix in (".toml", SUFFIX)]
            found = [path for path in paths if os.path.isfile(path)]
            if len(found) > 1:
                raise ConfigError(
                    f"profile {name} is there twice: {found[0]} and {found[1]}", hint="remove one"
                )
            if found:
                return found[0]
        return None

    def _text_of(self, name: str, child: str | None) -> ProfileText:
        path = self.find(name)
        if path is None:
            raise self._missing(name, child)
        try:
            text = path.read_bytes()[: MAX_BYTES + 1].decode()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read profile {path}: {e}") from e
        return ProfileText(name, str(path), text)

    def _missing(self, name: str, child: str | None) -> ConfigError | NotFound:
        known = ", ".join(self.names()) or "none"
        searched = ", ".join(str(folder) for folder in self.folders)
        hint = f"known: {known} (searched {searched})"
        if child is None:
            return NotFound(f"no profile {name!r}", hint=hint)
        return ConfigError(f"profile {child} extends {name!r}, which does not exist", hint=hint)


def render(
    name: str,
    text_of: Callable[[str, str | None], ProfileText],
    kinds: Mapping[str, Section],
    facts: Facts,
) -> Profile:
    """Return a profile with its parents merged in, as it is on a host with these facts.

    `text_of` returns the file of a profile; it is given the name of the child that extends it, or
    None, and raises where there is no such file. Raises `ConfigError` with every error of every
    file of the lineage.
    """
    files: list[_File] = []
    texts: list[ProfileText] = []
    parent: str | None = name
    while parent is not None:
        if parent in (file.name for file in files):
            path = " -> ".join([file.name for file in files] + [parent])
            raise ConfigError(f"profile {name} inherits from itself: {path}")
        texts.append(text_of(parent, files[-1].name if files else None))
        files.append(_read(texts[-1], kinds, facts))
        header = files[-1].header
        parent = header.extends if header else None
    _check_owners(files)
    _check_unset(files)
    errors = tuple(error for file in files for error in file.errors)
    if errors:
        many = f"{len(errors)} error{'s' if errors[1:] else ''}"
        raise ConfigError(f"profile {files[0].path} has {many}", errors=errors)
    return msgspec.structs.replace(_merge(files, kinds), texts=tuple(texts))


def _read(file_text: ProfileText, kinds: Mapping[str, Section], facts: Facts) -> _File:
    """Return one file, its expressions evaluated and its tables checked; parents not looked at."""
    name, path, text = file_text.name, file_text.path, file_text.text
    if len(text) > MAX_BYTES:
        raise ConfigError(f"profile {path} is larger than {MAX_BYTES} bytes")
    origin: TemplateLines | None = None
    if path.endswith(SUFFIX):
        text, origin = render_template(path, text, facts)
    raw = _parsed(path, text, origin)
    file = _File(name, path, TomlLines(text), origin)
    own = {kind: raw.pop(kind) for kind in list(raw) if kind in kinds}
    whens = raw.pop("when", [])
    known = [*(f.encode_name for f in msgspec.structs.fields(Header)), "when", *kinds]
    file.header = _header(file, raw, known)
    if file.header and file.header.fits:
        file.fits = _condition(file, ("fits",), file.header.fits, facts)
    file.blocks.append(_block(file, (), own, kinds, facts, holds=True))
    if not isinstance(whens, list):
        file.wrong(("when",), "is written [[when]], with an `if`")
        whens = []
    for number, when in enumerate(whens):
        if isinstance(when, dict):
            file.blocks.append(_when(file, ("when", number), when, kinds, facts))
        else:
            file.wrong(("when", number), "is not a table")
    return file


def _parsed(path: str, text: str, origin: TemplateLines | None) -> Table:
    mapped = origin.mapped if origin else str
    excess = find_excess(text)
    if excess is not None:
        raise ConfigError(f"profile {path} is not for sidekick: {mapped(excess)}")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as e:
        kind = "does not render to TOML" if origin else "is not TOML"
        raise ConfigError(f"profile {path} {kind}: {mapped(str(e))}") from e


def _header(file: _File, raw: Table, known: Sequence[str]) -> Header | None:
    fields = {f.encode_name for f in msgspec.structs.fields(Header)}
    for key in raw.keys() - fields:
        file.wrong((key,), f"unknown; known are {', '.join(known)}")
    decoded: Header | None = _decode(
        file, {k: v for k, v in raw.items() if k in fields}, Header, ()
    )
    return decoded


def _when(
    file: _File, at: tuple[str | int, ...], raw: Table, kinds: Mapping[str, Any], facts: Facts
) -> _Block:
    tables = {key: value for key, value in raw.items() if key != "if"}
    for key in tables.keys() - kinds.keys():
        file.wrong((*at, key), f"unknown; known are if, {', '.join(kinds)}")
    condition, holds = raw.get("if"), False
    if isinstance(condition, str):
        holds = _condition(file, (*at, "if"), condition, facts)
    else:
        file.wrong((*at, "if"), "is required: an expression of facts, as text")
    tables = {key: value for key, value in tables.items() if key in kinds}
    return _block(file, at, tables, kinds, facts, holds=holds)


def _condition(file: _File, at: Sequence[str | int], text: str, facts: Facts) -> bool:
    value = _evaluate(file, at, text, facts)
    if value is not None and not isinstance(value, bool):
        file.wrong(at, f"{text!r} is neither true nor false")
    return value is True


def _block(
    file: _File,
    at: tuple[str | int, ...],
    tables: Table,
    kinds: Mapping[str, Section],
    facts: Facts,
    *,
    holds: bool,
) -> _Block:
    """Return evaluated tables; one that does not hold is checked all the same."""
    evaluated: Table = {}
    for kind, table in tables.items():
        if not isinstance(table, dict):
            file.wrong((*at, kind), "is not a table")
            continue
        before = len(file.errors)
        value = _evaluated(file, (*at, kind), table, facts, holds=holds)
        if len(file.errors) == before and _is_whole(value):
            _decode(file, value, kinds[kind].section, (*at, kind))
        evaluated[kind] = value
    return _Block(at, evaluated, holds)


_NO_VALUE = object()
"""Of an expression that has no value here, in tables that do not hold here either."""


def _evaluated(
    file: _File, at: tuple[str | int, ...], value: Any, facts: Facts, *, holds: bool
) -> Any:
    if isinstance(value, dict):
        return {k: _evaluated(file, (*at, k), v, facts, holds=holds) for k, v in value.items()}
    if isinstance(value, list):
        return [_evaluated(file, (*at, n), v, facts, holds=holds) for n, v in enumerate(value)]
    if isinstance(value, str) and value.startswith("="):
        result = _evaluate(file, at, value[1:], facts, must=holds)
        return _NO_VALUE if result is None else result
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        file.wrong(at, "a number is beyond 64 bits")
        return _NO_VALUE
    return value


def _evaluate(
    file: _File, at: Sequence[str | int], text: str, facts: Facts, *, must: bool = True
) -> Any:
    """Return the value of an expression, None where it has none, which is an error if it must.

    Its grammar and the facts that it names are checked in any case.
    """
    known = False
    try:
        expression = parse(text.strip())
        known = expression.facts <= facts.keys()
        return expression.evaluate(facts)
    except ExpressionError as e:
        if must or not known:
            file.wrong(at, f"{e}; {e.hint}" if e.hint else str(e))
        return None


def _is_whole(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_whole(v) for v in value.values())
    if isinstance(value, list):
        return all(_is_whole(v) for v in value)
    return value is not _NO_VALUE


def _check_owners(files: Sequence[_File]) -> None:
    """Note every setting that a file sets and its owner may not: the nearest `allow` counts."""
    for number, file in enumerate(files):
        allow = next(
            (f.header.allow for f in files[number + 1 :] if f.header and f.header.allow), {}
        )
        if not file.header or not file.header.owner or not allow:
            continue
        owner = file.header.owner
        patterns = allow.get(owner, [])
        if file.header.allow:
            file.wrong(("allow",), f"may not be changed by {owner}")
        said = [
            ((*block.at, kind, key), f"{kind}.{key}")
            for block in file.blocks
            for kind, table in block.tables.items()
            for key in table
        ]
        said += [(("unset", at), name) for at, name in enumerate(file.header.unset)]
        for place, name in said:
            if not any(fnmatch.fnmatchcase(name, p) for p in patterns):
                file.wrong(place, f"{owner} may set {', '.join(patterns) or 'nothing'}")


def _check_unset(files: Sequence[_File]) -> None:
    """Note every name to unset that no parent sets on any host: most likely it is misspelt."""
    for number, file in enumerate(files):
        tables = [block.tables for parent in files[number + 1 :] for block in parent.blocks]
        for at, name in enumerate(file.header.unset if file.header else ()):
            if not any(_without(one, name) != one for one in tables):
                file.wrong(("unset", at), f"no parent of {file.name} sets {name}")


def _without(table: Table, name: str) -> Table:
    """Return a table without a key, or without a member of a list, that a dotted name leads to."""
    left: Table = {}
    for key, value in table.items():
        rest = name.removeprefix(f"{key}.")
        if isinstance(value, list) and name in value:
            value = [one for one in value if one != name]
        elif rest != name and isinstance(value, dict):
            value = _without(value, rest)
        elif rest != name and isinstance(value, list):
            value = [one for one in value if one != rest]
        if key != name:
            left[key] = value
    return left


def _merge(files: Sequence[_File], kinds: Mapping[str, Section]) -> Profile:
    """Return the profile of a lineage, own file first: the nearest file wins."""
    raw: dict[str, Table] = {}
    sources: dict[str, str] = {}
    for file in reversed(files):
        for name in file.header.unset if file.header else ():
            raw = _without(raw, name)
        for block in (b for b in file.blocks if b.holds):
            for kind, table in block.tables.items():
                raw[kind] = kinds[kind].merge(raw[kind], table) if kind in raw else table
                sources[kind] = file.where((*block.at, kind))
                sources |= _sources(file, (*block.at, kind), kind, table)
    header = files[0].header
    assert header is not None
    tables = {kind: msgspec.convert(table, kinds[kind].section) for kind, table in raw.items()}
    return Profile(
        name=files[0].name,
        description=header.description,
        version=header.version,
        owner=header.owner,
        fits=files[0].fits,
        lineage=tuple(file.name for file in files),
        sections=tables,
        sources=sources,
    )


def _sources(file: _File, at: tuple[str | int, ...], kind: str, table: Table) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in table.items():
        found[f"{kind}.{key}"] = file.where((*at, key))
        if isinstance(value, dict):
            inner = _sources(file, (*at, key), f"{kind}.{key}", value)
            found |= inner
        if isinstance(value, list):
            texts = [(n, v) for n, v in enumerate(value) if isinstance(v, str)]
            found |= {f"{kind}.{text}": file.where((*at, key, n)) for n, text in texts}
    return found


def _decode(file: _File, raw: Any, kind: Any, at: tuple[str | int, ...]) -> Any:
    """Return `raw` as `kind`; on errors note all of them, each with its field."""
    kind = _without_none(kind)
    if isinstance(raw, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _decode_struct(file, raw, kind, at)
    if isinstance(raw, dict) and typing.get_origin(kind) is dict:
        inner = typing.get_args(kind)[1]
        return {k: _decode(file, v, inner, (*at, k)) for k, v in raw.items()}
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        reason, _, inside = str(e).partition(" - at `$")
        names = re.findall(r"\[(\d+)\]|\.(\w+)", inside)
        file.wrong((*at, *(int(n) if n else name for n, name in names)), reason)
        return None


def _decode_struct(
    file: _File, raw: Table, kind: type[msgspec.Struct], at: tuple[str | int, ...]
) -> Any:
    fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
    before = len(file.errors)
    for name in raw.keys() - fields.keys():
        file.wrong((*at, name), f"unknown; known are {', '.join(fields)}")
    values = {}
    for name, about in fields.items():
        if name in raw:
            values[name] = _decode(file, raw[name], about.type, (*at, name))
        elif about.required:
            file.wrong((*at, name), "is required")
    return kind(**values) if len(file.errors) == before else None


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        rest = [k for k in typing.get_args(kind) if k is not types.NoneType]
        if len(rest) == 1:
            return rest[0]
    return kind
