"""Hardware prefetch: which cache lines processors fetch before a program accesses them.

The switches are bits of a model-specific register, so only models with a documented register are
supported. The kernel has such a list for the same reason
(arch/x86/kernel/cpu/resctrl/pseudo_lock.c). Source: Intel, "Disclosure of hardware prefetcher
control on some Intel processors" and SDM volume 4, MSR_MISC_FEATURE_CONTROL (1A4H); AMD, PPR of
family 19h models 10h and above, PrefetchControl (C000_0108H). A set bit switches one off.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from agent.machine.msr import find_msr, write_msr
from sidekick.cpulists import join_values, split_values
from sidekick.facts import cpuinfo_of, online_cpus
from sidekick.setting import Host, Setting

Switch = Literal["on", "off"]

INTEL_REGISTER = 0x1A4
INTEL_BITS = {"l2_stream": 0, "l2_adjacent": 1, "l1_stream": 2, "l1_stride": 3}
INTEL_MODELS = frozenset(
    {0x3C, 0x3F, 0x45, 0x46}  # Haswell
    | {0x3D, 0x47, 0x4F, 0x56}  # Broadwell
    | {0x4E, 0x5E, 0x55, 0x8E, 0x9E}  # Skylake, Cascade Lake, Cooper Lake
    | {0x6A, 0x6C, 0x7D, 0x7E}  # Ice Lake
    | {0x8F, 0xCF}  # Sapphire and Emerald Rapids
)
"""Models of family 6."""
AMD_REGISTER = 0xC0000108
AMD_BITS = {"l1_stream": 0, "l1_stride": 1, "l1_region": 2, "l2_stream": 3, "l2_adjacent": 5}
AMD_MODELS = frozenset({*range(0x10, 0x20), *range(0x60, 0x80), *range(0xA0, 0xB0)})
"""Models of family 19h: Zen 4."""


class Prefetch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [prefetch] table."""

    l1_stream: Switch | None = None
    """Fetches the next line into the first-level cache."""
    l1_stride: Switch | None = None
    """Fetches by the stride of an instruction into the first-level cache."""
    l1_region: Switch | None = None
    """Fetches by earlier accesses in the same region; AMD only."""
    l2_stream: Switch | None = None
    """Fetches streams into the second-level cache."""
    l2_adjacent: Switch | None = None
    """Fetches the other line of a pair into the second-level cache."""
    required: bool = False
    """Whether a processor without one of these cannot run the profile."""


class PrefetchSetting(Setting):
    """One switch for each prefetcher, of all processors."""

    kind: ClassVar[str] = "prefetch"
    section: ClassVar[type[Prefetch]] = Prefetch

    def why_missing(self, setting: str) -> str:  # noqa: ARG002
        """Return why a host has no such switch."""
        return (
            "no known register for it: an unknown model, a guest, or the msr module is not loaded"
        )

    def read(self, host: Host, setting: str) -> str | None:
        """Return `on`, `off`, or one of them for each processor where they differ."""
        known = _register_and_bit(host, setting)
        if known is None:
            return None
        values = {}
        for cpu in online_cpus(host.fs):
            register = find_msr(host.fs, cpu, known[0])
            if register is None:
                return None
            values[cpu] = "off" if register >> known[1] & 1 else "on"
        return join_values(values) or None

    def write(self, host: Host, setting: str, value: str) -> None:
        """Set the bit of every processor that has another one; other bits stay."""
        known = _register_and_bit(host, setting)
        for cpu, mode in split_values(value, online_cpus(host.fs)).items() if known else ():
            register, bit = known or (0, 0)
            before = find_msr(host.fs, cpu, register) or 0
            after = before | 1 << bit if mode == "off" else before & ~(1 << bit)
            if after != before:
                write_msr(host.fs, cpu, register, after)


def _register_and_bit(host: Host, setting: str) -> tuple[int, int] | None:
    """Return the register and the bit that switch a prefetcher of this model."""
    cpuinfo = host.fs.find("/proc/cpuinfo") or ""
    vendor, family, model = (
        cpuinfo_of(cpuinfo, key) for key in ("vendor_id", "cpu family", "model")
    )
    key = setting.removeprefix("prefetch.")
    if "hypervisor" in cpuinfo_of(cpuinfo, "flags").split() or not model.isdigit():
        return None
    if vendor == "GenuineIntel" and family == "6" and int(model) in INTEL_MODELS:
        return (INTEL_REGISTER, INTEL_BITS[key]) if key in INTEL_BITS else None
    if vendor == "AuthenticAMD" and family == "25" and int(model) in AMD_MODELS:
        return (AMD_REGISTER, AMD_BITS[key]) if key in AMD_BITS else None
    return None
