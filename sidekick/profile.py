"""Host profiles: found by name, inherited, evaluated with the host's facts, decoded strictly.

A profile is a TOML file, or a template of one (`sidekick/template.py`). `extends` names one
parent; `[[when]]` tables hold where their `if` is true of the host; a text that begins with `=` is
an expression of facts (`sidekick/expression.py`). `sidekick/profile_file.py` reads one file.
Every kind of setting has one table; its module has the type and the rule of inheritance. All errors
of all files of a lineage are reported at once, each with its file and line.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sidekick.expression import Facts
from sidekick.profile_file import (
    MAX_BYTES,
    ProfileFile,
    Section,
    Table,
    check_size,
    read_file,
)
from sidekick.report import ProfileText
from sidekick.template import SUFFIX
from wire.errors import ConfigError, NotFound

PROFILES = (
    Path("/etc/twine/profiles"),
    Path(sys.prefix, "share/twine/profiles"),
    Path(__file__).resolve().parent.parent / "profiles",
)
"""Folders of profiles: of the operator, of the installed package, of the source tree."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_FILE_NAME = re.compile(r"(.+)\.toml(\.j2)?")


class Profile(msgspec.Struct, frozen=True):
    """A profile with its parents merged in, evaluated for one host."""

    name: str
    description: str = ""
    version: int = 1
    owner: str = ""
    fits: bool | None = None
    """Whether it was made for hosts like this one; None if the profile has no `fits`."""
    lineage: tuple[str, ...] = ()
    """Its own name, its parent's, and so on."""
    sections: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The decoded table of each kind that a file has."""
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)
    """File and line of each setting, as `web:12`: by `sysctl.NAME`, `hugepages`, …"""
    texts: tuple[ProfileText, ...] = ()
    """Its own file, its parent's, and so on."""

    def section(self, kind: str) -> Any:
        """Return the decoded table of a kind of setting, None if no file has it."""
        return self.sections.get(kind)

    def source_of(self, setting: str) -> str:
        """Return the file and line of a setting or its nearest table; else the profile's name."""
        parts = setting.split(".")
        names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((self.sources[n] for n in names if n in self.sources), self.name)


class Library(msgspec.Struct, frozen=True):
    """The profiles of this host. The first folder that has a profile provides it."""

    folders: Sequence[Path]
    settings: Mapping[str, Section]
    """By kind, in the order in which errors list them."""

    def names(self) -> list[str]:
        """Return the names of all profiles, sorted."""
        known: set[str] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):  # missing, or not readable by this user
                names = (_FILE_NAME.fullmatch(n) for n in os.listdir(folder))
                known |= {match[1] for match in names if match}
        return sorted(name for name in known if _NAME.fullmatch(name))

    def load(self, name: str, facts: Facts) -> Profile:
        """Return a profile with its parents merged in, evaluated with these facts.

        Raises `NotFound` for an unknown name, and `ConfigError` with every error of every file of
        its lineage.
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
                    f"profile {name} exists twice: {found[0]} and {found[1]}", hint="remove one"
                )
            if found:
                return found[0]
        return None

    def _text_of(self, name: str, child: str | None) -> ProfileText:
        path = self.find(name)
        if path is None:
            raise self._missing_profile(name, child)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            check_size(str(path), data)
            # the encoding of `wire.quantity_fields.TEXT_ENCODING`, without its import at each start
            return ProfileText(name, str(path), data.decode("utf-8-sig"))
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read profile {path}: {e}") from e

    def _missing_profile(self, name: str, child: str | None) -> ConfigError | NotFound:
        known = ", ".join(self.names()) or "none"
        searched = ", ".join(str(folder) for folder in self.folders)
        hint = f"known: {known} (searched {searched})"
        if child is None:
            return NotFound(f"there is no profile {name!r}", hint=hint)
        return ConfigError(f"profile {child} extends {name!r}, which does not exist", hint=hint)


def render(
    name: str,
    text_of: Callable[[str, str | None], ProfileText],
    kinds: Mapping[str, Section],
    facts: Facts,
) -> Profile:
    """Return a profile with its parents merged in, evaluated with these facts.

    `text_of` returns the file of a profile, or raises if there is none. Its second argument is the
    child that extends the profile, or None. Raises `ConfigError` with every error of every file of
    the lineage.
    """
    files: list[ProfileFile] = []
    texts: list[ProfileText] = []
    parent: str | None = name
    while parent is not None:
        if parent in (file.name for file in files):
            path = " -> ".join([file.name for file in files] + [parent])
            raise ConfigError(f"profile {name} inherits from itself: {path}")
        texts.append(text_of(parent, files[-1].name if files else None))
        files.append(read_file(texts[-1], kinds, facts))
        header = files[-1].header
        parent = header.extends if header else None
    _check_owners(files)
    _check_unset(files)
    errors = tuple(error for file in files for error in file.errors)
    if errors:
        many = f"{len(errors)} error{'s' if errors[1:] else ''}"
        raise ConfigError(f"profile {files[0].path} has {many}", errors=errors)
    return msgspec.structs.replace(_merge(files, kinds), texts=tuple(texts))


def _check_owners(files: Sequence[ProfileFile]) -> None:
    """Report every setting that the owner of a file may not set; the nearest `allow` applies."""
    for number, file in enumerate(files):
        allow = next(
            (f.header.allow for f in files[number + 1 :] if f.header and f.header.allow), {}
        )
        if not file.header or not file.header.owner or not allow:
            continue
        owner = file.header.owner
        patterns = allow.get(owner, [])
        if file.header.allow:
            file.add_error(("allow",), f"may not be changed by {owner}")
        changed = [
            ((*block.at, kind, key), f"{kind}.{key}")
            for block in file.blocks
            for kind, table in block.tables.items()
            for key in table
        ]
        changed += [(("unset", at), name) for at, name in enumerate(file.header.unset)]
        for place, name in changed:
            if not any(fnmatch.fnmatchcase(name, p) for p in patterns):
                file.add_error(place, f"{owner} may set {', '.join(patterns) or 'nothing'}")


def _check_unset(files: Sequence[ProfileFile]) -> None:
    """Report every name in `unset` that no parent sets on any host: probably a typing error."""
    for number, file in enumerate(files):
        tables = [block.tables for parent in files[number + 1 :] for block in parent.blocks]
        for at, name in enumerate(file.header.unset if file.header else ()):
            if not any(_without(one, name) != one for one in tables):
                file.add_error(("unset", at), f"no parent of {file.name} sets {name}")


def _without(table: Table, name: str) -> Table:
    """Return a table without the key, or the member of a list, with this dotted name."""
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


def _merge(files: Sequence[ProfileFile], kinds: Mapping[str, Section]) -> Profile:
    """Return the profile of a lineage (own file first); the nearest file takes precedence."""
    raw: dict[str, Table] = {}
    sources: dict[str, str] = {}
    for file in reversed(files):
        for name in file.header.unset if file.header else ():
            raw = _without(raw, name)
        for block in (b for b in file.blocks if b.applies):
            for kind, table in block.tables.items():
                raw[kind] = kinds[kind].merge(raw[kind], table) if kind in raw else table
                sources[kind] = file.source_of((*block.at, kind))
                sources |= _sources_of(file, (*block.at, kind), kind, table)
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


def _sources_of(
    file: ProfileFile, at: tuple[str | int, ...], kind: str, table: Table
) -> dict[str, str]:
    sources: dict[str, str] = {}
    for key, value in table.items():
        sources[f"{kind}.{key}"] = file.source_of((*at, key))
        if isinstance(value, dict):
            inner = _sources_of(file, (*at, key), f"{kind}.{key}", value)
            sources |= inner
        if isinstance(value, list):
            texts = [(n, v) for n, v in enumerate(value) if isinstance(v, str)]
            sources |= {f"{kind}.{text}": file.source_of((*at, key, n)) for n, text in texts}
    return sources
