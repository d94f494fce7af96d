"""Resources of a task in addition to `limits`; all can change while the task runs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api.ranges import END, Bytes, Count, CpuWeight, Few, Written

Device = Annotated[
    str,
    Meta(
        pattern=r"^/dev/[A-Za-z0-9/_.:=+@-]{1,200}" + END,
        max_length=205,
        description="a block device such as /dev/vda",
    ),
]
DEVICES_MAX = 16
"""The most devices for which a task can have limits."""
Pages = Annotated[int, Meta(ge=0, le=1 << 24)]
Rate = Annotated[int, Meta(ge=1, le=1 << 53)]


class IoLimit(Written, frozen=True, kw_only=True):
    """Limits of all processes of a task on one disk; None: no limit."""

    device: Device
    """A block device of the machine."""
    read_bytes_per_s: Rate | None = None
    """Bytes read per second."""
    write_bytes_per_s: Rate | None = None
    """Bytes written per second."""
    read_ops_per_s: Rate | None = None
    """Read requests per second, of any size."""
    write_ops_per_s: Rate | None = None
    """Write requests per second, of any size."""


class Resources(Written, frozen=True, kw_only=True):
    """Shares and limits, named as in the kernel (cgroup-v2.rst)."""

    memory_min_bytes: Bytes = 0
    """Memory that is never reclaimed from the task; admission counts it."""
    memory_low_bytes: Bytes = 0
    """Memory that is not reclaimed while other tasks have reclaimable memory."""
    memory_high_bytes: Annotated[int, Meta(ge=4 << 20, le=1 << 53)] | None = None
    """Above this the task is throttled and its memory reclaimed, before `memory_max`."""
    swap_max_bytes: Bytes = 0
    """Swap space that it may use."""
    io_weight: CpuWeight = 100
    """Share of the disks relative to other tasks."""
    io: Annotated[list[IoLimit], Meta(max_length=DEVICES_MAX)] = []
    cpus: Annotated[list[Few], Meta(max_length=4096)] = []
    """The only CPUs that it runs on, by number; no other task can request them. Empty: all."""
    exclusive_cpus: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Number of CPUs (hardware threads) that only this task uses. The machine chooses whole cores,
    of one NUMA node where possible. 0: it shares CPUs with other tasks."""
    hugepages_2mib: Pages = 0
    """Pages of 2 MiB that are reserved for the task; it gets no more."""
    hugepages_1gib: Pages = 0
    """Pages of 1 GiB that are reserved for the task; it gets no more."""
    numa_nodes: Annotated[list[Few], Meta(max_length=64)] = []
    """The only nodes that its memory comes from; empty: all."""


def contradiction(resources: Resources, cpu_max_cores: float | None) -> tuple[str, str] | None:
    """Return field and reason of the first contradiction in a task or job; None for none."""
    devices = [io.device for io in resources.io]
    if twice := sorted({d for d in devices if devices.count(d) > 1}):
        return "resources.io", f"{twice[0]} is named twice: put all its limits into one table"
    if bare := [io.device for io in resources.io if io == IoLimit(device=io.device)]:
        return "resources.io", f"{bare[0]} has no limit: set at least one"
    if len(devices) > DEVICES_MAX:
        return "resources.io", f"{len(devices)} devices have a limit; the maximum is {DEVICES_MAX}"
    own = resources.exclusive_cpus
    if own and resources.cpus:
        reason = (
            "cannot be combined with exclusive_cpus: the machine chooses these CPUs and "
            "keeps other tasks off them"
        )
        return "resources.cpus", reason
    if own and cpu_max_cores is not None and cpu_max_cores > own:
        return "limits.cpu_max_cores", f"{cpu_max_cores:g} exceeds its {own} exclusive CPUs"
    return None


class Resize(Written, frozen=True, kw_only=True):
    """A change of the resources of a running task; None keeps a value."""

    cpu_weight: CpuWeight | None = None
    cpu_max_cores: Annotated[float, Meta(ge=0.01, le=4096)] | None = None
    memory_max_bytes: Annotated[int, Meta(ge=4 << 20, le=1 << 53)] | None = None
    tasks_max: Annotated[int, Meta(ge=1, le=4_194_304)] | None = None
    memory_min_bytes: Bytes | None = None
    memory_low_bytes: Bytes | None = None
    memory_high_bytes: Annotated[int, Meta(ge=4 << 20, le=1 << 53)] | None = None
    swap_max_bytes: Bytes | None = None
    io_weight: CpuWeight | None = None
    io: Annotated[list[IoLimit], Meta(max_length=DEVICES_MAX)] | None = None
    """New limits of the devices that are named; a device without a limit loses its limits. Other
    devices keep theirs."""
    exclusive_cpus: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """New number of exclusive CPUs, only for a task that has some."""
    hugepages_2mib: Pages | None = None
    hugepages_1gib: Pages | None = None
    generation: Annotated[int, Meta(ge=1, le=1 << 53)] | None = None
    """Generation of the changed specification; None: one above the present generation."""
    epoch: Count | None = None


def changes(resize: Resize, of: type[msgspec.Struct]) -> dict[str, object]:
    """Return the fields of a type that a resize sets, with their values."""
    names = set(of.__struct_fields__)
    asked = {n: getattr(resize, n) for n in Resize.__struct_fields__ if n in names}
    return {name: value for name, value in asked.items() if value is not None}


def io_after(before: list[IoLimit], resize: Resize) -> list[IoLimit]:
    """Return the limits of devices after a resize; devices that it names come last."""
    asked = resize.io or []
    named = {io.device for io in asked}
    kept = [io for io in before if io.device not in named]
    return kept + [io for io in asked if io != IoLimit(device=io.device)]
