"""CPU Turbo: whether processors may run above their nominal frequency. One switch for all vendors.

Intel's driver has `no_turbo` (inverted), others have `boost`, for the whole machine or for each
policy. If the firmware disables Turbo, the processor's flag `ida` is missing and the kernel refuses
the write, so the setting is unsupported there.
Source: Linux, Documentation/admin-guide/pm/{intel_pstate,cpufreq,amd-pstate}.rst; Intel SDM,
IA32_MISC_ENABLE bit 38 and CPUID.06H:EAX[1].
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from sidekick.cpulists import CPUS, join_values, split_values
from sidekick.facts import cpuinfo_of, frequency_policies
from sidekick.setting import Host, Setting

INTEL = f"{CPUS}/intel_pstate/no_turbo"
GLOBAL = f"{CPUS}/cpufreq/boost"


class Turbo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [turbo] table."""

    mode: Literal["on", "off"] | None = None
    required: bool = False
    """Whether a host that cannot switch Turbo cannot run the profile."""


class TurboSetting(Setting):
    """One switch, whatever the processor."""

    kind: ClassVar[str] = "turbo"
    section: ClassVar[type[Turbo]] = Turbo

    def touches(self, setting: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the files of all vendors."""
        return (INTEL, GLOBAL)

    def why_missing(self, setting: str) -> str:  # noqa: ARG002
        """Return why a host has no such switch."""
        return (
            "Turbo cannot be switched: the processor or its firmware forbids it, or this is a guest"
        )

    def read(self, host: Host, setting: str) -> str | None:  # noqa: ARG002
        """Return `on`, `off`, or one of them for each policy where they differ."""
        no_turbo = host.fs.find(INTEL)
        if no_turbo is not None:
            return ("off" if no_turbo == "1" else "on") if _is_turbo_possible(host) else None
        boost = host.fs.find(GLOBAL)
        if boost is not None:
            return "on" if boost == "1" else "off"
        modes = {n: host.fs.read(_boost_file(n)) for n in _boost_policies(host)}
        return join_values({n: "on" if v == "1" else "off" for n, v in modes.items()}) or None

    def write(self, host: Host, setting: str, value: str) -> None:  # noqa: ARG002
        """Set the mode with the switch that this host has."""
        if host.fs.exists(INTEL):
            host.fs.write(INTEL, "0" if value == "on" else "1")
        elif host.fs.exists(GLOBAL):
            host.fs.write(GLOBAL, "1" if value == "on" else "0")
        else:
            for number, mode in split_values(value, _boost_policies(host)).items():
                host.fs.write(_boost_file(number), "1" if mode == "on" else "0")


def _is_turbo_possible(host: Host) -> bool:
    """Return whether an Intel processor has Turbo and its firmware allows it."""
    return "ida" in cpuinfo_of(host.fs.find("/proc/cpuinfo") or "", "flags").split()


def _boost_policies(host: Host) -> list[int]:
    return [n for n in frequency_policies(host.fs) if host.fs.exists(_boost_file(n))]


def _boost_file(number: int) -> str:
    return f"{CPUS}/cpufreq/policy{number}/boost"
