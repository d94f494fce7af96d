"""C-states: how deep idle processors may sleep, as the longest time they may take to wake up.

A bound in microseconds means the same on every processor; numbers of states do not. Source:
Linux, Documentation/admin-guide/pm/cpuidle.rst (`stateN/latency`, `stateN/disable`).
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from sidekick.cpulists import CPUS, cpu_list_text, parse_cpu_list
from sidekick.profile import Profile
from sidekick.report import WantedSetting
from sidekick.setting import Host, Setting

NONE = "none"


class CStates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [cstates] table."""

    max_latency_us: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """States that take longer to wake up from are not entered. 0 keeps processors polling."""
    required: bool = False
    """Whether a host whose processors have no idle states cannot run the profile."""


class CStatesSetting(Setting):
    """The states that are switched off, with the processors for which they are: `3:0-7 2:0-7`."""

    kind: ClassVar[str] = "cstates"
    section: ClassVar[type[CStates]] = CStates

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:
        """Return the states of this host that take too long."""
        table: CStates = profile.sections[self.kind]
        if table.max_latency_us is None:
            return []
        slow: dict[int, list[int]] = {}
        for cpu, state in _cpu_states(host):
            if int(host.fs.find(_path(cpu, state, "latency")) or 0) > table.max_latency_us:
                slow.setdefault(state, []).append(cpu)
        return [self.value_of(profile, "max_latency_us", _states_text(slow), "cstates.disabled")]

    def touches(self, setting: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return what it sets."""
        return (f"{CPUS}/cpuidle",)

    def why_missing(self, setting: str) -> str:  # noqa: ARG002
        """Return why a host has no such states."""
        return "this kernel has no driver for idle states of its processors"

    def read(self, host: Host, setting: str) -> str | None:  # noqa: ARG002
        """Return the states that are switched off."""
        states = _cpu_states(host)
        off: dict[int, list[int]] = {}
        for cpu, state in states:
            # Other bits are the kernel's own reasons to disable a state.
            if int(host.fs.read(_path(cpu, state, "disable"))) & 1:
                off.setdefault(state, []).append(cpu)
        return _states_text(off) if states else None

    def write(self, host: Host, setting: str, value: str) -> None:  # noqa: ARG002
        """Switch off the states that the value names, and switch on all others."""
        off = {(cpu, state) for state, cpus in _parse_states(value).items() for cpu in cpus}
        for cpu, state in _cpu_states(host):
            wanted = "1" if (cpu, state) in off else "0"
            if str(int(host.fs.read(_path(cpu, state, "disable"))) & 1) != wanted:
                host.fs.write(_path(cpu, state, "disable"), wanted)


def _cpu_states(host: Host) -> list[tuple[int, int]]:
    """Return all processors with each of their states that can be switched off."""
    return [
        (int(cpu[3:]), int(state[5:]))
        for cpu in host.fs.names(CPUS)
        if re.fullmatch(r"cpu\d+", cpu)
        for state in host.fs.names(f"{CPUS}/{cpu}/cpuidle")
        if re.fullmatch(r"state\d+", state)
        and host.fs.exists(_path(int(cpu[3:]), int(state[5:]), "disable"))
    ]


def _path(cpu: int, state: int, file: str) -> str:
    return f"{CPUS}/cpu{cpu}/cpuidle/state{state}/{file}"


def _states_text(off: dict[int, list[int]]) -> str:
    return " ".join(f"{state}:{cpu_list_text(cpus)}" for state, cpus in sorted(off.items())) or NONE


def _parse_states(value: str) -> dict[int, list[int]]:
    if value == NONE:
        return {}
    parts = (part.partition(":") for part in value.split())
    return {int(state): list(parse_cpu_list(cpus)) for state, _, cpus in parts}
