"""Limits and resources of a task: unit properties, the kernel's values for them, and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from agent.api import IoLimit, Limits, Resize, Resources, TaskSpec
from agent.api.resources import changes, io_after
from agent.runtime.core.unit_parts import UNLIMITED

_S = 1_000_000
_PERIOD_USEC = 100_000
"""Period of cpu.max, systemd's default."""
_DEV = "/dev/"
IO_FILES = {
    "read_bytes_per_s": "IOReadBandwidthMax",
    "write_bytes_per_s": "IOWriteBandwidthMax",
    "read_ops_per_s": "IOReadIOPSMax",
    "write_ops_per_s": "IOWriteIOPSMax",
}


def limit_properties(spec: TaskSpec, *, whole: bool = False) -> dict[str, object]:
    """Return the properties that can also be changed while the unit runs.

    `whole`: include properties that have their default value.
    """
    limits, more = spec.limits, spec.resources
    quota = limits.cpu_max_cores
    properties: dict[str, object] = {
        "CPUWeight": limits.cpu_weight,
        "CPUQuotaPerSecUSec": round(quota * _S) if quota is not None else UNLIMITED,
        "MemoryMax": limits.memory_max_bytes,
        "MemorySwapMax": more.swap_max_bytes,
        "TasksMax": limits.tasks_max,
    }
    if more == Resources() and not whole:
        return properties
    properties |= {
        "MemoryMin": more.memory_min_bytes,
        "MemoryLow": more.memory_low_bytes,
        "ManagedOOMPreference": _preference(spec),
        "MemoryHigh": UNLIMITED if more.memory_high_bytes is None else more.memory_high_bytes,
        "IOWeight": more.io_weight,
        "AllowedCPUs": tuple(more.cpus),
        "AllowedMemoryNodes": tuple(more.numa_nodes),
    }
    for field, name in IO_FILES.items():
        rates = {io.device: getattr(io, field) for io in more.io if getattr(io, field)}
        properties |= {name: rates} if rates else {}
    return properties


def reclaim_above_bytes(spec: TaskSpec) -> int:
    """Return the memory above which the kernel reclaims from a task: its high or maximum limit."""
    high = spec.resources.memory_high_bytes
    return spec.limits.memory_max_bytes if high is None else min(high, spec.limits.memory_max_bytes)


def protected_bytes(resources: Resources) -> int:
    """Return how much memory of a task is protected."""
    return max(resources.memory_min_bytes, resources.memory_low_bytes)


def _preference(spec: TaskSpec) -> str:
    """Return the preference for systemd-oomd: it kills tasks with protected memory last, and never
    a task whose whole memory is protected.
    """
    kept = protected_bytes(spec.resources)
    if not kept:
        return "none"
    return "omit" if kept >= spec.limits.memory_max_bytes else "avoid"


def on_devices(properties: Mapping[str, object], disks: Mapping[str, str]) -> dict[str, object]:
    """Return properties of a unit with the kernel's name for each device that has a limit.

    systemd stores limits by the given device name and writes them one after the other. If one
    device has two names, the later limit wins, even if it only removes a limit. `disks` maps each
    name below /dev to the kernel's name; other names are not changed.
    """
    result = dict(properties)
    for name in IO_FILES.values():
        rates = result.get(name, {})
        assert isinstance(rates, dict)
        kernel_names = {d: disks.get(d.removeprefix(_DEV), d.removeprefix(_DEV)) for d in rates}
        lifted = {d: rate for d, rate in rates.items() if rate == UNLIMITED}
        ordered = {**lifted, **{d: rates[d] for d in rates if d not in lifted}}
        if rates:
            result[name] = {_DEV + kernel_names[d]: rate for d, rate in ordered.items()}
    return result


def live_properties(spec: TaskSpec, before: Resources | None) -> dict[str, object]:
    """Return the properties that adapt a running unit to its specification.

    They also remove limits that are no longer requested. `before` are the unit's current resources.
    """
    had = before or Resources()
    properties = limit_properties(spec, whole=had != Resources())
    for field, name in IO_FILES.items():
        lifted = {io.device: UNLIMITED for io in had.io if getattr(io, field)}
        now = properties.get(name, {})
        assert isinstance(now, dict)
        properties |= {name: {**lifted, **now}} if lifted or now else {}
    return properties


def kernel_values(spec: TaskSpec, page_bytes: int) -> dict[str, str]:
    """Return the required values of the task's cgroup files (cgroup-v2.rst)."""
    limits, more = spec.limits, spec.resources
    return {
        "cpu.weight": str(limits.cpu_weight),
        "cpu.max": f"{_quota(limits.cpu_max_cores)} {_PERIOD_USEC}",
        "memory.max": pages(limits.memory_max_bytes, page_bytes),
        "memory.high": pages(more.memory_high_bytes, page_bytes),
        "memory.min": pages(more.memory_min_bytes, page_bytes),
        "memory.low": pages(more.memory_low_bytes, page_bytes),
        "memory.swap.max": pages(more.swap_max_bytes, page_bytes),
        "pids.max": str(limits.tasks_max),
    }


def _quota(cores: float | None) -> str:
    """Return the quota of cpu.max: systemd rounds `CPUQuotaPerSecUSec` down for each period
    (`cgroup_apply_unified_cpu_quota`); `max` for None.
    """
    return "max" if cores is None else str(round(cores * _S) * _PERIOD_USEC // _S)


def pages(size: int | None, page_bytes: int) -> str:
    """Return a size as the kernel's files show it: rounded down to whole pages, `max` for None."""
    return "max" if size is None else str(size // page_bytes * page_bytes)


def not_in_force(values: Mapping[str, str], read: Mapping[str, str]) -> str:
    """Return which of the required values are not in force, empty if all are.

    A missing file belongs to a controller that is off, which `twine-agent facts` shows.
    """
    wrong = [
        f"{name} is {read[name]!r} instead of {wanted!r}"
        for name, wanted in values.items()
        if name in read and read[name] != wanted
    ]
    return "; ".join(wrong)


def missing_files(values: Mapping[str, str], read: Mapping[str, str]) -> str:
    """Return which required files are missing because a controller is off; empty if none."""
    missing = sorted(set(values) - set(read))
    off = ", ".join(missing)
    return f"{off} does not exist: the controller is off below workload.slice" if missing else ""


def resize_refusal(spec: TaskSpec, resize: Resize) -> str:
    """Return which limit a resize removes that the task does not have, empty if there is none."""
    had = [io.device for io in spec.resources.io]
    for io in resize.io or []:
        if io == IoLimit(device=io.device) and io.device not in had:
            there = ", ".join(had) or "none"
            return f"io: {io.device} has no limit to remove; devices with limits: {there}"
    return ""


def resized(spec: TaskSpec, resize: Resize) -> TaskSpec:
    """Return a specification after a resize, by default with the next generation."""
    resources = replace(spec.resources, **changes(resize, Resources))
    return replace(
        spec,
        limits=replace(spec.limits, **changes(resize, Limits)),
        resources=replace(resources, io=io_after(spec.resources.io, resize)),
        generation=spec.generation + 1 if resize.generation is None else resize.generation,
        epoch=spec.epoch if resize.epoch is None else resize.epoch,
    )


def hardware_refusal(spec: TaskSpec, numa_nodes: int, disks: Mapping[str, str]) -> str:
    """Return which device or memory node of a task this machine does not have, empty if none.

    systemd ignores a missing device, and the task would run without its limit. `disks` maps each
    name below /dev to the kernel's name. Two names of one device cannot have two limits.
    """
    more, seen = spec.resources, dict[str, str]()
    for io in more.io:
        name = io.device.removeprefix(_DEV)
        if name not in disks:
            folder = name.rpartition("/")[0]
            siblings = [disk for disk in disks if folder and disk.rpartition("/")[0] == folder]
            names = siblings or [disk for disk, kernels in disks.items() if disk == kernels]
            there = ", ".join(_DEV + disk for disk in names) or "none"
            return f"resources.io: there is no block device {io.device}; the machine has {there}"
        if (first := seen.setdefault(disks[name], io.device)) != io.device:
            return (
                f"resources.io: {first} and {io.device} are both {_DEV}{disks[name]}: "
                "put all its limits into one table"
            )
    if unknown := [node for node in more.numa_nodes if node >= numa_nodes]:
        return (
            f"resources.numa_nodes: there is no node {unknown[0]}; the machine has "
            f"{numa_nodes} (from 0 on)"
        )
    return ""


def resources_refusal(spec: TaskSpec, cpus: int, others: Iterable[TaskSpec]) -> str:
    """Return why this machine cannot give a task its resources, with the numbers.

    `others` are all other wanted tasks, because an ended task keeps the CPUs that it names.
    """
    more, most = spec.resources, spec.limits.memory_max_bytes
    for name in ("memory_min_bytes", "memory_low_bytes", "memory_high_bytes"):
        value = getattr(more, name)
        if value is not None and value > most:
            return f"resources.{name} {value} exceeds limits.memory_max_bytes {most}"
    if unknown := [cpu for cpu in more.cpus if cpu >= cpus]:
        return f"resources.cpus: there is no CPU {unknown[0]}; the machine has {cpus} (from 0 on)"
    taken = {cpu for other in others for cpu in other.resources.cpus}
    if shared := sorted(taken.intersection(more.cpus)):
        return f"resources.cpus: CPU {shared[0]} is exclusive to another task"
    return ""


def memory_protection_refusal(spec: TaskSpec, others: Iterable[TaskSpec], memory_bytes: int) -> str:
    """Return why the machine cannot protect the memory of one more task, empty if it can."""
    more = spec.resources
    kept = sum(other.resources.memory_min_bytes for other in others)
    if kept + more.memory_min_bytes > memory_bytes:
        return (
            f"resources.memory_min_bytes {more.memory_min_bytes} does not fit: the "
            f"machine has {memory_bytes}, and {kept} of them are reserved for other tasks"
        )
    return ""
