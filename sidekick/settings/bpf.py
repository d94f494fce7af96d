"""Limits for BPF programs in the kernel: rates of events, BPF's own statistics, and numbers in
pinned maps that configure those programs.

As settings of the host they are the same on every machine that runs tools with BPF.
Source: Linux, Documentation/admin-guide/sysctl/kernel.rst (perf_event_max_sample_rate,
perf_cpu_time_max_percent, bpf_stats_enabled) and net.rst (bpf_jit_enable).
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from sidekick.profile import Profile
from sidekick.report import WantedSetting
from sidekick.setting import FileSetting, Host
from wire.errors import FieldError

FILES = {
    "max_cpu_percent": "/proc/sys/kernel/perf_cpu_time_max_percent",
    "max_sample_rate": "/proc/sys/kernel/perf_event_max_sample_rate",
    "stats": "/proc/sys/kernel/bpf_stats_enabled",
    "jit": "/proc/sys/net/core/bpf_jit_enable",
}

MAPS = "maps."
_MAP_KEY = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,3}:\d{1,9}"
)


class Bpf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [bpf] table."""

    stats: bool | None = None
    """Whether each run of a program is counted and timed."""
    max_sample_rate: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Events a second that one processor may sample."""
    max_cpu_percent: Annotated[int, Meta(ge=1, le=99)] | None = None
    """Share of a processor that sampling may take before the kernel lowers the rate. 0 and 100
    would switch that guard off."""
    jit: bool | None = None
    """Whether programs are compiled to machine code."""
    maps: dict[str, Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]] = {}
    """Numbers in array maps that are pinned below /sys/fs/bpf: `"sampler/config:0" = 100` is key 0
    of the map `sampler/config`."""
    required: bool = False
    """Whether a kernel without one of these cannot run the profile."""


class BpfSetting(FileSetting):
    """One value for each key, and for each key of a map."""

    kind: ClassVar[str] = "bpf"
    section: ClassVar[type[Bpf]] = Bpf

    def check(self, profile: Profile) -> list[FieldError]:
        """Return an error for each name that is not a key of a pinned map."""
        table: Bpf = profile.sections[self.kind]
        reason = "is not of the form MAP:KEY, with a map below /sys/fs/bpf and a number"
        return [
            FieldError(field=f"bpf.{MAPS}{place}", reason=f"{place!r} {reason}")
            for place in table.maps
            if not _MAP_KEY.fullmatch(place)
        ]

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:  # noqa: ARG002
        """Return one value for each key that is given."""
        table: Bpf = profile.sections[self.kind]
        given = {key: getattr(table, key) for key in FILES}
        given |= {f"{MAPS}{place}": value for place, value in table.maps.items()}
        return [
            self.value_of(profile, key, str(int(value)))
            for key, value in given.items()
            if value is not None
        ]

    def path(self, setting: str) -> str:
        """Return the file, or the key of the map."""
        if _is_map_value(setting):
            from agent.machine.bpf import PINNED

            return f"{PINNED}/{setting.removeprefix(f'bpf.{MAPS}')}"
        return FILES[setting.removeprefix("bpf.")]

    def why_missing(self, setting: str) -> str:
        """Return why a host has none."""
        return f"this kernel has no {self.path(setting)}" + (
            ", or it is no array of numbers" if _is_map_value(setting) else ""
        )

    def read(self, host: Host, setting: str) -> str | None:
        """Return the value in force."""
        if not _is_map_value(setting):
            return super().read(host, setting)
        from agent.machine.bpf_maps import find_value  # with ctypes: for maps alone

        found = find_value(host.fs, *_map_and_key(setting))
        return None if found is None else str(found)

    def write(self, host: Host, setting: str, value: str) -> None:
        """Set the value."""
        if _is_map_value(setting):
            from agent.machine.bpf_maps import set_value

            set_value(host.fs, *_map_and_key(setting), int(value))
        else:
            super().write(host, setting, value)


def _is_map_value(setting: str) -> bool:
    return setting.startswith(f"bpf.{MAPS}")


def _map_and_key(setting: str) -> tuple[str, int]:
    """Return map and key."""
    name, _, key = setting.removeprefix(f"bpf.{MAPS}").rpartition(":")
    return name, int(key)
