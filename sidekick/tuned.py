"""Converts TuneD's profiles to sidekick's, and lists every line that has no counterpart.

A line is converted only if ours then does the same on every host. Any other line is reported with
file, number and reason. The condition of an instance becomes the `if` of a `[[when]]`; an instance
whose condition has no equivalent in facts is left out as a whole. TuneD ignores what a kernel
lacks, so every converted setting is optional here too.
Source of the format: TuneD, tuned.conf(5) and tuned-profiles(7).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from sidekick.tuned_file import (
    CannotConvertError,
    instances_of,
    read_lines,
    sets_nothing,
    substituted,
)
from wire.errors import InvalidInput, NotFound

FILE = "tuned.conf"

REASONS = {
    "acpi": "firmware's platform profile is not a setting of sidekick",
    "audio": "power saving of audio devices is not for servers",
    "eeepc_she": "is for one laptop",
    "irqbalance": "stop irqbalance.service in [services] and divide processors in [affinity]",
    "mounts": "barriers of file systems are not a setting of sidekick",
    "rtentsk": "keeps a socket open, which requires a daemon",
    "scheduler": "changes running processes one by one, which a profile cannot undo",
    "scsi_host": "power saving of SATA links is not a setting of sidekick",
    "script": "runs programs as root; their changes cannot be undone",
    "selinux": "weakens or changes the host's policy",
    "systemd": "use [affinity]; tasks get its processors",
    "uncore": "uncore frequencies are not a setting of sidekick",
    "usb": "power saving of USB devices is not for servers",
    "video": "power saving of graphics is not for servers",
}
"""Why no line of a section is converted."""


@dataclass(frozen=True, slots=True)
class UnconvertedLine:
    """A line that could not be converted."""

    where: str
    """File and line."""
    line: str
    reason: str


@dataclass(slots=True)
class Converted:
    """One converted profile, and the lines that are missing in it."""

    name: str
    text: str = ""
    left: list[UnconvertedLine] = field(default_factory=list)


Tables = dict[str, dict[str, Any]]
Refusal = Callable[[str, str], str]
"""Returns why a profile may not have a key or word of a table, "" if it may."""


def convert(folder: Path, refusal: Refusal) -> list[Converted]:
    """Return all profiles below a folder, or the one of the folder itself."""
    paths = [folder / FILE] if (folder / FILE).is_file() else sorted(folder.glob(f"*/{FILE}"))
    paths = paths or sorted(folder.glob(f"profiles/*/{FILE}"))  # as TuneD 2.23 and later has them
    if not paths:
        raise NotFound(
            f"{folder} has no {FILE}", hint="try /usr/lib/tuned/profiles or /usr/lib/tuned"
        )
    known = {path.parent.name for path in paths}
    for name, folders in groupby(sorted(known, key=_profile_name), _profile_name):
        same = [*folders]
        if not name or same[1:]:
            raise InvalidInput(
                f"{' and '.join(map(repr, same))} in {folder} would be the profile {name!r}",
                hint="rename the folder, and the `include` lines that name it",
            )
    return [_convert(path, known, refusal) for path in paths]


def _convert(path: Path, known: set[str], refusal: Refusal) -> Converted:
    done = Converted(_profile_name(path.parent.name))
    lines = read_lines(path.read_text(errors="replace"))
    variables = {line.key: line.value for line in lines if line.section == "variables"}
    instances = instances_of(lines, variables)
    inherits = any(line.section == "main" and line.key == "include" for line in lines)
    blocks: dict[str, Tables] = {"": {}}
    head: dict[str, str] = {"description": f"Converted from TuneD's {path.parent.name}"}
    for line in lines:
        instance = instances[line.section]
        try:
            if sets_nothing(line, instance, inherits=inherits):
                continue
            value = substituted(line.value, variables)
            if instance.kind == "main":
                _convert_main(line.key, value, head, known)
            else:
                tables = blocks.setdefault(instance.condition, {})
                _convert_line(instance.kind, line.key, value, tables, refusal)
        except CannotConvertError as e:
            source = f"[{line.section}] {line.key} = {line.value}"
            done.left.append(UnconvertedLine(f"{path}:{line.number}", source, str(e)))
    done.text = _file_text(head, blocks.pop(""), blocks)
    return done


def _convert_main(key: str, value: str, head: dict[str, str], known: set[str]) -> None:
    if key == "summary":
        head["description"] = value
    elif key == "include":
        names = [name.strip() for name in value.split(",")]
        head["extends"] = _profile_name(names[0])
        if names[1:]:
            raise CannotConvertError(
                f"a profile has one parent; {', '.join(names[1:])} is left out"
            )
        if names[0] not in known:
            raise CannotConvertError(f"{names[0]} is not in this folder: convert it too")
    else:
        raise CannotConvertError("is not a setting")


def _convert_line(kind: str, key: str, value: str, tables: Tables, refusal: Refusal) -> None:
    match kind:
        case "sysctl":
            _convert_sysctl(key, value, tables, refusal)
        case "vm" if key in ("transparent_hugepages", "transparent_hugepage"):
            _set(tables, "thp", "enabled", value)
        case "vm" if key.startswith("dirty_"):
            _convert_sysctl(f"vm.{key}", value, tables, refusal)
        case "cpu":
            _convert_cpu(key, value, tables)
        case "disk":
            _convert_disk(key, value, tables)
        case "net":
            _convert_net(key, value, tables)
        case "sysfs":
            _convert_sysfs(key, value, tables)
        case "bootloader":
            _convert_bootloader(key, value, tables, refusal)
        case "modules":
            if value.replace("+r", "").strip():
                raise CannotConvertError("parameters of modules are not a profile's")
            _check_allowed(refusal, "modules", key)
            _append(tables, "modules", "load", [key.replace("-", "_")])
        case "service":
            _convert_service(key, value, tables, refusal)
        case _:
            raise CannotConvertError(REASONS.get(kind, "there is no such setting"))


def _convert_sysctl(key: str, value: str, tables: Tables, refusal: Refusal) -> None:
    _check_allowed(refusal, "sysctl", key)
    if value[:1] in "<>":
        raise CannotConvertError("sets it only if it is lower or higher: write an expression")
    number: object = int(value) if re.fullmatch(r"-?\d{1,18}", value) else value  # else as text
    parts = value.split()
    if len(parts) > 1 and all(part.isdigit() for part in parts):
        number = [int(part) for part in parts]
    _set(tables, "sysctl", key, {"value": number, "required": False})


def _convert_cpu(key: str, value: str, tables: Tables) -> None:
    words = [word.strip() for word in value.split("|")]
    if key == "governor":
        _set(tables, "power", "governor", words)
    elif key == "energy_performance_preference":
        _set(tables, "power", "energy_preference", words)
    elif key in ("no_turbo", "boost") and value in ("0", "1"):
        _set(tables, "turbo", "mode", "on" if (value == "1") is (key == "boost") else "off")
    elif key == "force_latency" and value.isdigit():
        _set(tables, "cstates", "max_latency_us", int(value))
    elif key == "force_latency":
        raise CannotConvertError("names idle states: give the wake-up time in microseconds")
    else:
        raise CannotConvertError("has no counterpart")


def _convert_disk(key: str, value: str, tables: Tables) -> None:
    if key == "elevator":
        pair: dict[str, object] = {"scheduler": value}
    elif key == "readahead" and value.isdigit():
        pair = {"read_ahead_kb": int(value)}
    elif key == "readahead" and (sectors := re.fullmatch(r"(\d+)\s+s", value)):
        pair = {"read_ahead_kb": int(sectors[1]) // 2}
    elif key == "readahead":
        raise CannotConvertError("sets it only if it is lower or higher: give KiB")
    else:
        raise CannotConvertError("has no counterpart")
    for disks in ("flash", "rotating"):
        _set(tables, "block", disks, {**tables.get("block", {}).get(disks, {}), **pair})


_NET = {
    "ring": {"rx": "rx_ring", "tx": "tx_ring"},
    "channels": {"combined": "queues"},
    "coalesce": {
        "adaptive-rx": "adaptive_rx",
        "adaptive-tx": "adaptive_tx",
        "rx-usecs": "rx_usecs",
        "tx-usecs": "tx_usecs",
        "rx-frames": "rx_frames",
        "tx-frames": "tx_frames",
    },
    "features": {
        "rx": "rx_checksum",
        "tx": "tx_checksum",
        "sg": "scatter_gather",
        "tso": "tso",
        "gso": "gso",
        "gro": "gro",
        "lro": "lro",
        "rxhash": "rxhash",
    },
}


def _convert_net(key: str, value: str, tables: Tables) -> None:
    words = value.replace(",", " ").split()
    if key not in _NET or len(words) % 2:
        raise CannotConvertError("has no counterpart")
    unknown = []
    for name, wanted in zip(words[::2], words[1::2], strict=True):
        ours = _NET[key].get(name)
        if ours is None:
            unknown.append(name)
        else:
            _set(tables, "nic", ours, int(wanted) if wanted.isdigit() else wanted)
    if unknown:
        raise CannotConvertError(f"{', '.join(unknown)} has no counterpart; the rest is converted")


_SYSFS = {
    "/sys/kernel/mm/transparent_hugepage/enabled": ("thp", "enabled"),
    "/sys/kernel/mm/transparent_hugepage/defrag": ("thp", "defrag"),
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled": ("thp", "shmem_enabled"),
    "/sys/devices/system/cpu/smt/control": ("smt", "mode"),
}


def _convert_sysfs(key: str, value: str, tables: Tables) -> None:
    if key == "/sys/devices/system/cpu/intel_pstate/no_turbo" and value in ("0", "1"):
        _set(tables, "turbo", "mode", "off" if value == "1" else "on")
    elif key in _SYSFS:
        _set(tables, *_SYSFS[key], value)
    else:
        raise CannotConvertError("no kind of setting owns this file")


def _convert_bootloader(key: str, value: str, tables: Tables, refusal: Refusal) -> None:
    if not key.startswith("cmdline"):
        raise CannotConvertError("has no counterpart")
    refused = {}
    for argument in value.lstrip("+-").split():
        name = argument.partition("=")[0]
        reason = refusal("kernel", argument) if not value.startswith("-") else "is to be removed"
        if reason:
            refused[name] = reason
        else:
            _append(tables, "kernel", "cmdline", [argument])
    if refused:
        raise CannotConvertError("; ".join(f"{name} {why}" for name, why in refused.items()))


def _convert_service(key: str, value: str, tables: Tables, refusal: Refusal) -> None:
    name = key.removeprefix("service.")
    unit = name if name.endswith(".service") else f"{name}.service"
    verbs = [verb.strip() for verb in value.split(",")]
    for verb, into in (("start", "running"), ("stop", "stopped")):
        if verb in verbs:
            _check_allowed(refusal, "services", unit)
            _append(tables, "services", into, [unit])
    rest = [verb for verb in verbs if verb not in ("start", "stop")]
    if rest:
        raise CannotConvertError(f"{', '.join(rest)}: services are started and stopped only")


def _check_allowed(refusal: Refusal, table: str, key: str) -> None:
    reason = refusal(table, key)
    if reason:
        raise CannotConvertError(reason)


def _set(tables: Tables, table: str, key: str, value: object) -> None:
    tables.setdefault(table, {})[key] = value


def _append(tables: Tables, table: str, key: str, values: list[str]) -> None:
    before = tables.setdefault(table, {}).setdefault(key, [])
    before += [value for value in values if value not in before]


def _profile_name(name: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:63]


def _file_text(head: dict[str, str], tables: Tables, whens: dict[str, Tables]) -> str:
    lines = [f"{key} = {_toml_value(value)}" for key, value in head.items()]
    lines += _tables(tables, "")
    for condition, conditional in whens.items():
        if conditional:
            lines += ["", "[[when]]", f"if = {_toml_value(condition)}"]
            lines += _tables(_with_unconditional_members(tables, conditional), "when.")
    return "\n".join(lines) + "\n"


def _tables(tables: Tables, prefix: str) -> list[str]:
    lines = []
    for table, pairs in tables.items():
        lines += ["", f"[{prefix}{table}]"]
        lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in pairs.items()]
    return lines


def _with_unconditional_members(tables: Tables, conditional: Tables) -> Tables:
    """Return conditional tables with unconditional members of lists: our lists replace others."""
    both = {kind: dict(pairs) for kind, pairs in conditional.items()}
    for kind, pairs in both.items():
        for key, value in pairs.items():
            before = tables.get(kind, {}).get(key)
            if isinstance(value, list) and isinstance(before, list) and kind != "power":
                pairs[key] = [*before, *(each for each in value if each not in before)]
    return both


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
        )
    return json.dumps(value, ensure_ascii=False)
