"""What a task has of its machine beyond `limits`: all of it can change while it runs."""

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
"""Devices with a limit of one task."""
Pages = Annotated[int, Meta(ge=0, le=1 << 24)]
Rate = Annotated[int, Meta(ge=1, le=1 << 53)]


class IoLimit(Written, frozen=True, kw_only=True):
    """Most that a task may do with one disk; None: as much as the disk gives."""

    device: Device
    """Of the machine."""
    read_bytes_per_s: Rate | None = None
    """At most; of all processes of the task."""
    write_bytes_per_s: Rate | None = None
    """The same of what it writes."""
    read_ops_per_s: Rate | None = None
    """Requests, however large."""
    write_ops_per_s: Rate | None = None
    """The same of what it writes."""


class Resources(Written, frozen=True, kw_only=True):
    """Shares and bounds in the kernel's words (cgroup-v2.rst)."""

    memory_min_bytes: Bytes = 0
    """Never taken from it, however short memory is; admission counts it."""
    memory_low_bytes: Bytes = 0
    """Not taken from it as long as others have something to give."""
    memory_high_bytes: Annotated[int, Meta(ge=4 << 20, le=1 << 53)] | None = None
    """From here on it is slowed down and made to give memory back, before `memory_max`."""
    swap_max_bytes: Bytes = 0
    """Swap space that it may use."""
    io_weight: CpuWeight = 100
    """Share of the disks against its neighbours."""
    io: Annotated[list[IoLimit], Meta(max_length=DEVICES_MAX)] = []
    cpus: Annotated[list[Few], Meta(max_length=4096)] = []
    """The only CPUs that it runs on, by number; no other task can ask for these. Empty: all."""
    exclusive_cpus: Annotated[int, Meta(ge=0, le=4096)] = 0
    """CPUs (hardware threads) that it alone runs on: whole cores that its machine chooses, of one
    NUMA node where possible; other tasks are kept off them. 0: it shares with others."""
    hugepages_2mib: Pages = 0
    """Pages of 2 MiB that are kept for it, and the most that it gets; no other task gets them."""
    hugepages_1gib: Pages = 0
    """The same of pages of 1 GiB."""
    numa_nodes: Annotated[list[Few], Meta(max_length=64)] = []
    """The only nodes that its memory comes from; empty: all."""


def contradiction(resources: Resources, cpu_max_cores: float | None) -> tuple[str, str] | None:
    """Return which fields of a task or job do not go together, and why; None where all do."""
    devices = [io.device for io in resources.io]
    if twice := sorted({d for d in devices if devices.count(d) > 1}):
        return "resources.io", f"{twice[0]} is named twice: put all its limits into one table"
    if bare := [io.device for io in resources.io if io == IoLimit(device=io.device)]:
        return "resources.io", f"{bare[0]} has no limit: say at least one"
    if len(devices) > DEVICES_MAX:
        return "resources.io", f"{len(devices)} devices have a limit: at most {DEVICES_MAX} can"
    own = resources.exclusive_cpus
    if own and resources.cpus:
        reason = "not with exclusive_cpus: its machine chooses these, and other tasks are kept off"
        return "resources.cpus", reason
    if own and cpu_max_cores is not None and cpu_max_cores > own:
        return "limits.cpu_max_cores", f"{cpu_max_cores:g} is more than its own {own} CPUs"
    return None


class Resize(Written, frozen=True, kw_only=True):
    """A change of what a running task may use; what is None stays as it is."""

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
    """For each device named here all its limits from now on, as written in the specification; one
    without any lifts what there is. Devices that are not named keep theirs."""
    exclusive_cpus: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """More or fewer for a task that has some."""
    hugepages_2mib: Pages | None = None
    hugepages_1gib: Pages | None = None
    generation: Annotated[int, Meta(ge=1, le=1 << 53)] | None = None
    """Generation of the changed specification; None: one more than that in force."""
    epoch: Count | None = None


def changes(resize: Resize, of: type[msgspec.Struct]) -> dict[str, object]:
    """Return the fields of a type that a resize sets, with their values."""
    names = set(of.__struct_fields__)
    asked = {n: getattr(resize, n) for n in Resize.__struct_fields__ if n in names}
    return {name: value for name, value in asked.items() if value is not None}


def io_after(before: list[IoLimit], resize: Resize) -> list[IoLimit]:
    """Return the limits of devices after a resize: what it lifts is gone, what it names is last."""
    asked = resize.io or []
    named = {io.device for io in asked}
    kept = [io for io in before if io.device not in named]
    return kept + [io for io in asked if io != IoLimit(device=io.device)]
