"""Reads TuneD's files: their lines, and the instances of plugins with their conditions.

Source of the format: TuneD, tuned.conf(5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True)
class TunedLine:
    """One `key = value` of a file."""

    number: int
    section: str
    key: str
    value: str


@dataclass(slots=True)
class TunedInstance:
    """One section: its kind, and its condition."""

    kind: str
    condition: str = ""
    """An expression of facts; empty for every host."""
    refused: str = ""
    """Why no line of it can be converted."""
    disabled: bool = False


class CannotConvertError(Exception):
    """A line has no counterpart; the message explains why."""


def read_lines(text: str) -> list[TunedLine]:
    """Return the `key = value` lines of a file; those before any section belong to "main"."""
    section, lines = "main", []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif line and line[0] not in "#;" and "=" in line:
            key, _, value = line.partition("=")
            lines.append(TunedLine(number, section, key.strip(), value.strip()))
    return lines


_DEVICES = frozenset({"devices", "devices_udev_regex"})
_CONDITIONS = frozenset({"uname_regex", "cpuinfo_regex"})


def instances_of(lines: list[TunedLine], variables: dict[str, str]) -> dict[str, TunedInstance]:
    """Return the instances by the names of their sections, each with its condition."""
    instances: dict[str, TunedInstance] = {}
    for line in lines:
        instance = instances.setdefault(line.section, TunedInstance(line.section))
        if line.section in ("main", "variables"):
            continue
        if line.key == "type":
            instance.kind = line.value
        elif line.key == "enabled":
            instance.disabled = line.value.lower() in ("0", "false", "no", "off", "n")
        elif line.key in _DEVICES and line.value.strip("\"'") not in ("", "*"):
            instance.refused = f"holds for {line.key}={line.value} only: name devices by hand"
        elif line.key in _CONDITIONS:
            try:
                condition = _condition_of(line.key, substituted(line.value, variables))
                both = filter(None, (instance.condition, condition))
                instance.condition = " and ".join(both)
            except CannotConvertError as e:
                instance.refused = f"holds only where {line.key} matches: {e}"
    return instances


def sets_nothing(line: TunedLine, instance: TunedInstance, *, inherits: bool) -> bool:
    """Return whether a line sets nothing. Raises `CannotConvertError` for lines to report."""
    if instance.kind == "variables":
        return True
    if instance.disabled:
        if inherits and line.key == "enabled":
            raise CannotConvertError("cannot switch off a setting of a parent")
        return True
    if line.key in ("replace", "drop") and inherits:
        raise CannotConvertError("cannot remove a setting of a parent")
    if line.key in ("type", "enabled", "replace"):
        return True
    if instance.refused:
        raise CannotConvertError(instance.refused)
    return instance.kind != "main" and line.key in _DEVICES | _CONDITIONS


_ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}
_VENDOR = re.compile(r"\^?vendor_id\\s[*+]:\\s[*+]\(?(\w+(?:\|\w+)*)\)?")
_VENDORS = {
    frozenset({"GenuineIntel"}): "cpu.vendor == 'intel'",
    frozenset({"AuthenticAMD", "HygonGenuine"}): "cpu.vendor == 'amd'",
}
"""Sets of vendor names that one value of the fact `cpu.vendor` covers (`sidekick/facts.py`)."""


def _condition_of(key: str, regex: str) -> str:
    """Return the expression of facts that is true where a regular expression matches."""
    choices = regex.strip("()").split("|")
    if key == "uname_regex" and all(choice in _ARCHES for choice in choices):
        names = ", ".join(f"'{_ARCHES[choice]}'" for choice in choices)
        return f"cpu.arch in [{names}]" if choices[1:] else f"cpu.arch == {names}"
    vendor = _VENDOR.fullmatch(regex)
    if key == "cpuinfo_regex" and vendor and frozenset(vendor[1].split("|")) in _VENDORS:
        return _VENDORS[frozenset(vendor[1].split("|"))]
    raise CannotConvertError("no fact is equivalent")


def substituted(value: str, variables: dict[str, str]) -> str:
    """Return a value with its `${NAME}` replaced. Raises `CannotConvertError` if one is unknown."""
    for _ in range(8):
        value = _VARIABLE.sub(lambda m: variables.get(m[1], m[0]), value)
    if "${" in value:
        raise CannotConvertError("computed by TuneD: write an expression of facts instead")
    return value.strip("\"'")
