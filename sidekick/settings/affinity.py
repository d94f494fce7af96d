"""Which processors serve the network's interrupts, and which are left to tasks.

On a cache machine some hardware threads take the interrupts of the network interfaces, some run the
task's busy loop, and the rest run its workers (paper, §5.4: 12, 1 and 23 of 36). Whole cores are
taken first, those next to the interfaces before others. All interrupts share one set of processors:
the kernel spreads vectors over it, and interrupt numbers change with every boot. Tasks read the
division from `/run/twine/processors`. Source: Linux, Documentation/core-api/irq/irq-affinity.rst;
systemd.resource-control(5), AllowedCPUs.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from sidekick.cpulists import CPUS, cpu_list_text, join_values, parse_cpu_list, split_values
from sidekick.facts import nic_names, online_cpus
from sidekick.profile import Profile
from sidekick.report import WantedSetting
from sidekick.setting import Host, Setting

IRQS, TASKS, PUBLISHED = "affinity.irqs", "affinity.tasks", "affinity.told"
NEW_IRQS = "affinity.new_irqs"
"""The processors of interrupts that a driver requests later, such as after a reset."""
DEFAULT_MASK = "/proc/irq/default_smp_affinity"
SLICE = "workload.slice"
CPUSET = f"/sys/fs/cgroup/{SLICE}/cpuset.cpus"
PUBLISHED_FILE = "/run/twine/processors"
SYSTEMCTL = "/usr/bin/systemctl"
NONE = "none"
TOO_FEW = ":too-few"


class Affinity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [affinity] table."""

    nic_irq_threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Hardware threads that take the interrupts of the network interfaces, and run no tasks."""
    busy_loop_threads: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Hardware threads that tasks should reserve for a loop that never sleeps."""
    required: bool = False
    """Whether a host with too few processors cannot run the profile."""


class Division(msgspec.Struct, frozen=True):
    """The processors of a host by their purpose."""

    irqs: tuple[int, ...]
    busy: tuple[int, ...]
    workers: tuple[int, ...]


class AffinitySetting(Setting):
    """Interrupts, the tasks' processors, and the file that lists these for tasks."""

    kind: ClassVar[str] = "affinity"
    section: ClassVar[type[Affinity]] = Affinity

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:
        """Return the values, of the processors of this host."""
        table: Affinity = profile.sections[self.kind]
        if table.nic_irq_threads is None:
            return []
        parts = divide(host, table.nic_irq_threads, table.busy_loop_threads)
        suffix = "" if parts else TOO_FEW
        parts = parts or Division((), (), ())
        by_use = {"irqs": parts.irqs, "busy": parts.busy, "workers": parts.workers}
        published = " ".join(f"{use}={cpu_list_text(cpus)}" for use, cpus in by_use.items())
        values = {
            IRQS: cpu_list_text(parts.irqs),
            TASKS: cpu_list_text(parts.busy + parts.workers),
            PUBLISHED: published,
        }
        if host.fs.exists(DEFAULT_MASK):  # a kernel of one processor has none
            values[NEW_IRQS] = cpu_list_text(parts.irqs)
        return [
            self.value_of(profile, "nic_irq_threads", value, name + suffix)
            for name, value in values.items()
        ]

    def why_missing(self, setting: str) -> str:
        """Return why a host cannot have it."""
        if setting.endswith(TOO_FEW):
            return "this host has too few processors to divide them so"
        return {
            IRQS: "its interfaces have no interrupts that could be moved",
            TASKS: f"{SLICE} has no cpuset: the controller is missing or disabled",
        }.get(setting, "")

    def read(self, host: Host, setting: str) -> str | None:
        """Return the value in force."""
        if setting == IRQS:
            masks = {irq: host.fs.find(_affinity_file(irq)) for irq in _nic_irqs(host)}
            return (
                join_values({irq: mask for irq, mask in masks.items() if mask is not None}) or None
            )
        if setting == NEW_IRQS:
            mask = host.fs.find(DEFAULT_MASK)
            return None if mask is None else _list_of_mask(mask)
        if setting == TASKS:
            return host.fs.find(CPUSET)
        return (host.fs.find(PUBLISHED_FILE) or NONE) if setting == PUBLISHED else None

    def write(self, host: Host, setting: str, value: str) -> None:
        """Set the value."""
        if setting == IRQS:
            for irq, mask in split_values(value, _nic_irqs(host)).items():
                if host.fs.read(_affinity_file(irq)) != mask:
                    host.fs.write(_affinity_file(irq), mask)
        elif setting == NEW_IRQS:
            host.fs.write(DEFAULT_MASK, _mask_of_list(value))
        elif setting == TASKS:
            command = [SYSTEMCTL, "set-property", "--runtime", SLICE, f"AllowedCPUs={value}"]
            host.processes.run(command)
        elif value == NONE:
            host.disk.remove(host.fs.path(PUBLISHED_FILE))
        else:
            host.disk.write(host.fs.path(PUBLISHED_FILE), value + "\n")


def divide(host: Host, irqs: int, busy: int) -> Division | None:
    """Return the division of the online processors, None where less than one is left over."""
    near = {cpu for nic in nic_names(host.fs) for cpu in _cpus_near(host, nic)}
    cores: dict[str, list[int]] = {}
    for cpu in online_cpus(host.fs):
        siblings = host.fs.find(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    ordered = sorted(cores.values(), key=lambda core: (core[0] not in near, core[0]))
    cpus = [cpu for core in ordered for cpu in core]
    if irqs + busy >= len(cpus):
        return None
    return Division(
        irqs=tuple(cpus[:irqs]),
        busy=tuple(cpus[irqs : irqs + busy]),
        workers=tuple(cpus[irqs + busy :]),
    )


def _cpus_near(host: Host, nic: str) -> list[int]:
    return list(parse_cpu_list(host.fs.find(f"/sys/class/net/{nic}/device/local_cpulist") or ""))


def _nic_irqs(host: Host) -> list[int]:
    """Return the interrupts of all interfaces; those of a virtio device are its parent's."""
    irqs: set[int] = set()
    for nic in nic_names(host.fs):
        for folder in ("device/msi_irqs", "device/../msi_irqs"):
            names = host.fs.names(f"/sys/class/net/{nic}/{folder}")
            irqs |= {int(name) for name in names if re.fullmatch(r"\d+", name)}
    return sorted(irq for irq in irqs if host.fs.exists(_affinity_file(irq)))


def _list_of_mask(mask: str) -> str:
    """Return the processors of the kernel's mask: groups of 32 bits in hex, the highest first."""
    bits = int("".join(group.rjust(8, "0") for group in mask.split(",")), 16)
    return cpu_list_text([cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1])


def _mask_of_list(listed: str) -> str:
    digits = f"{sum(1 << cpu for cpu in parse_cpu_list(listed)):x}"
    digits = digits.rjust(-(-len(digits) // 8) * 8, "0")
    return ",".join(digits[at : at + 8] for at in range(0, len(digits), 8))


def _affinity_file(irq: int) -> str:
    return f"/proc/irq/{irq}/smp_affinity_list"
