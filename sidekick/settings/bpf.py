"""How much programs in the kernel may sample: the rates of events and of BPF's own accounts.

Said as values of this host, so that whoever observes hosts with BPF sees the same shape everywhere.
Source: Linux, Documentation/admin-guide/sysctl/kernel.rst (perf_event_max_sample_rate,
perf_cpu_time_max_percent, bpf_stats_enabled) and net.rst (bpf_jit_enable).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from sidekick.profile import Profile
from sidekick.report import Wanted
from sidekick.setting import Host, Setting

FILES = {
    "max_cpu_percent": "/proc/sys/kernel/perf_cpu_time_max_percent",
    "max_sample_rate": "/proc/sys/kernel/perf_event_max_sample_rate",
    "stats": "/proc/sys/kernel/bpf_stats_enabled",
    "jit": "/proc/sys/net/core/bpf_jit_enable",
}


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
    required: bool = False
    """Whether a kernel without one of these cannot run the profile."""


class BpfSetting(Setting):
    """One value for each key."""

    kind: ClassVar[str] = "bpf"
    section: ClassVar[type[Bpf]] = Bpf

    def wanted(self, profile: Profile, host: Host) -> list[Wanted]:  # noqa: ARG002
        """Return one value for each key that is given."""
        found: Bpf | None = profile.section(self.kind)
        return [
            Wanted(
                setting=f"bpf.{key}",
                value=str(int(value)),
                required=found.required if found else False,
                source=profile.source_of(f"bpf.{key}"),
            )
            for key in FILES
            if (value := getattr(found, key, None)) is not None
        ]

    def touches(self, setting: str) -> tuple[str, ...]:
        """Return the file."""
        return (_path(setting),)

    def lacking(self, setting: str) -> str:
        """Return why a host has none."""
        return f"this kernel has no {_path(setting)}"

    def read(self, host: Host, setting: str) -> str | None:
        """Return the value in force."""
        return host.fs.find(_path(setting))

    def write(self, host: Host, setting: str, value: str) -> None:
        """Set the value."""
        host.fs.write(_path(setting), value)


def _path(setting: str) -> str:
    return FILES[setting.removeprefix("bpf.")]
