"""Host profiles: found by name, rendered, inherited, decoded strictly.

A profile is a TOML file that jinja2 renders first; the host's facts (`host`) are the only
context, and an unknown name is an error. `extends` inherits from one parent: sysctls by
name, command line arguments by key, hugepages as a whole. All errors are collected.
"""

from __future__ import annotations

import re
import tomllib
import traceback
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from agent.errors import ConfigError, FieldError, NotFound
from agent.machine import Hardware

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BYTES = 64 * 1024
"""No profile is larger; a file that is was not meant to be one."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

Value = int | str | bool | list[int]


class SysctlValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sysctl in its long form."""

    value: Value
    required: bool = True
    """False: a kernel without it reports `unsupported` and runs the profile all the same."""


class Hugepages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Explicit huge pages, taken out of general use."""

    pages_2m: Annotated[int, Meta(ge=0)] | dict[str, Annotated[int, Meta(ge=0)]] | None = None
    """In all, spread evenly over the NUMA nodes; or by node: `{ node0 = 16, node1 = 0 }`."""
    percent_of_memory: Annotated[float, Meta(ge=0, le=80)] | None = None
    """Instead: this share of the memory, rounded down to whole pages."""
    required: bool = True


class Kernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only a boot can bring."""

    cmdline: list[str] = []
    """Arguments that the profile owns; others on the command line are left alone."""


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file, as a person writes it."""

    description: str
    extends: str | None = None
    sysctl: dict[str, Value | SysctlValue] = {}
    hugepages: Hugepages | None = None
    kernel: Kernel = Kernel()


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a template may ask: `{{ host.memory_mib // 32 }}`."""

    hostname: str
    kernel: str
    cpu_model: str
    cpus: int
    sockets: int
    numa_nodes: int
    memory_bytes: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile with its parents merged in."""

    name: str
    description: str = ""
    lineage: tuple[str, ...] = ()
    """Its own name, its parent's, and so on."""
    sysctl: dict[str, SysctlValue] = field(default_factory=dict)
    hugepages: Hugepages | None = None
    cmdline: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    """Which file of the lineage says it: by `sysctl.NAME`, `hugepages`, `kernel.ARGUMENT`."""


def facts_of(hardware: Hardware) -> HostFacts:
    """Return the facts that templates see."""
    return HostFacts(
        hostname=hardware.hostname,
        kernel=hardware.kernel,
        cpu_model=hardware.cpu.model,
        cpus=hardware.cpu.online,
        sockets=hardware.cpu.sockets,
        numa_nodes=hardware.cpu.numa_nodes,
        memory_bytes=hardware.memory_bytes,
        memory_mib=hardware.memory_bytes >> 20,
    )


@dataclass(frozen=True, slots=True)
class Library:
    """The profiles of this host: folders, the first that has a name wins."""

    folders: Sequence[Path]

    def names(self) -> list[str]:
        """Return the names of all profiles, sorted."""
        found = {
            p.stem for folder in self.folders if folder.is_dir() for p in folder.glob("*.toml")
        }
        return sorted(name for name in found if _NAME.fullmatch(name))

    def load(self, name: str, facts: HostFacts) -> Profile:
        """Return a profile with its parents merged in.

        Raises `NotFound` where there is none of that name, and `ConfigError` with every
        error of the first file of its lineage that has one.
        """
        chain: list[tuple[str, ProfileFile]] = []
        parent: str | None = name
        while parent is not None:
            if parent in (seen for seen, _ in chain):
                path = " -> ".join([seen for seen, _ in chain] + [parent])
                raise ConfigError(f"profile {name} inherits from itself: {path}")
            found = self._find(parent)
            if found is None:
                raise self._missing(parent, chain[-1][0] if chain else None)
            chain.append((parent, read_file(found, facts)))
            parent = chain[-1][1].extends
        return merge(chain)

    def _find(self, name: str) -> Path | None:
        if not _NAME.fullmatch(name):
            return None
        paths = (folder / f"{name}.toml" for folder in self.folders)
        return next((path for path in paths if path.is_file()), None)

    def _missing(self, name: str, child: str | None) -> ConfigError | NotFound:
        known = ", ".join(self.names()) or "none"
        searched = ", ".join(str(folder) for folder in self.folders)
        hint = f"known: {known} (searched {searched})"
        if child is None:
            return NotFound(f"no profile {name!r}", hint=hint)
        return ConfigError(f"profile {child} extends {name!r}, which does not exist", hint=hint)


def merge(chain: Sequence[tuple[str, ProfileFile]]) -> Profile:
    """Return the profile of a lineage, own file first: the nearest file wins."""
    sysctl: dict[str, SysctlValue] = {}
    arguments: dict[str, str] = {}
    hugepages: Hugepages | None = None
    sources: dict[str, str] = {}
    for name, file in reversed(chain):
        for key, value in file.sysctl.items():
            sysctl[key] = value if isinstance(value, SysctlValue) else SysctlValue(value=value)
            sources[f"sysctl.{key}"] = name
        for argument in file.kernel.cmdline:
            arguments[argument.partition("=")[0]] = argument
            sources[f"kernel.{argument}"] = name
        if file.hugepages is not None:
            hugepages = file.hugepages
            sources["hugepages"] = name
    return Profile(
        name=chain[0][0],
        description=chain[0][1].description,
        lineage=tuple(name for name, _ in chain),
        sysctl=sysctl,
        hugepages=hugepages,
        cmdline=tuple(arguments.values()),
        sources=sources,
    )


def read_file(path: Path, facts: HostFacts) -> ProfileFile:
    """Return one rendered and decoded file, parents not looked at."""
    try:
        text = path.read_bytes()[: MAX_BYTES + 1].decode()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read profile {path}: {e}") from e
    if len(text) > MAX_BYTES:
        raise ConfigError(f"profile {path} is larger than {MAX_BYTES} bytes")
    try:
        raw = tomllib.loads(_render(path, text, facts))
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"profile {path} is not TOML once rendered: {e}") from e
    errors: list[FieldError] = []
    decoded = _decode(raw, ProfileFile, "", errors)
    if errors:
        raise ConfigError(
            f"profile {path} has {len(errors)} error{'s' if errors[1:] else ''}",
            errors=tuple(errors),
        )
    assert isinstance(decoded, ProfileFile)
    return decoded


def _environment() -> ImmutableSandboxedEnvironment:
    # Imported here: what runs at every boot (`resume`) renders nothing and starts faster.
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    # The same host must always render the same profile, from its facts alone.
    environment.globals.clear()
    environment.filters.pop("random", None)
    return environment


def _render(path: Path, text: str, facts: HostFacts) -> str:
    from jinja2 import Template, TemplateError, TemplateSyntaxError

    environment = _environment()
    try:
        code = environment.compile(text, filename=str(path))
        return Template.from_code(environment, code, {}).render(host=facts)
    except TemplateSyntaxError as e:
        raise ConfigError(f"cannot render profile {path}, line {e.lineno}: {e.message}") from e
    # An expression of the file can raise what its operators and filters raise.
    except (TemplateError, ArithmeticError, TypeError, ValueError, LookupError) as e:
        frames = traceback.extract_tb(e.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = f", line {lines[-1]}" if lines else ""
        known = ", ".join(f"host.{f}" for f in HostFacts.__dataclass_fields__)
        raise ConfigError(
            f"cannot render profile {path}{line}: {e}", hint=f"templates see {known}"
        ) from e


def _decode(raw: Any, kind: Any, where: str, errors: list[FieldError]) -> Any:
    """Return `raw` as `kind`; on errors note all of them, each with its field."""
    kind = _without_none(kind)
    if isinstance(raw, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _decode_struct(raw, kind, where, errors)
    if isinstance(raw, dict) and typing.get_origin(kind) is dict:
        inner = typing.get_args(kind)[1]
        return {k: _decode(v, inner, _join(where, k), errors) for k, v in raw.items()}
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        reason, _, at = str(e).partition(" - at `$")
        errors.append(FieldError(field=where + at.rstrip("`"), reason=reason))
        return None


def _decode_struct(
    raw: dict[str, Any], kind: type[msgspec.Struct], where: str, errors: list[FieldError]
) -> Any:
    fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
    before = len(errors)
    for name in raw.keys() - fields.keys():
        known = ", ".join(fields)
        errors.append(FieldError(field=_join(where, name), reason=f"unknown; known are {known}"))
    values = {}
    for name, about in fields.items():
        if name in raw:
            values[name] = _decode(raw[name], about.type, _join(where, name), errors)
        elif about.required:
            errors.append(FieldError(field=_join(where, name), reason="is required"))
    return kind(**values) if len(errors) == before else None


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        rest = [k for k in typing.get_args(kind) if k is not types.NoneType]
        if len(rest) == 1:
            return rest[0]
    return kind


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
