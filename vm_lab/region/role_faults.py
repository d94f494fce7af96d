"""Faults of the processes of a simulated control plane, and of their connections to etcd.

`role:shard-1` is the current leader of that role, `standby:shard-1` one of its standbys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vm_lab.region.network import Condition, Path
from vm_lab.region.operators import move_entitlement
from vm_lab.region.process_life import WritePoint
from vm_lab.region.story import Fault

if TYPE_CHECKING:
    from vm_lab.region.process_life import ProcessHost, ProcessLife
    from vm_lab.region.processes import RegionProcesses
    from vm_lab.region.seed import SimulatedRegion

Injector = Callable[["SimulatedRegion", Fault, int], None]
DOWN_S = 10.0
"""Seconds until a process that was killed at a write is started again."""


def _target_process(plane: RegionProcesses, fault: Fault) -> ProcessLife | None:
    """Return the process that a fault names, if there is one now."""
    where, _, role = fault.target.partition(":")
    leader = plane.leader(role)
    if where == "role":
        return leader if leader is not None and leader.alive else None
    lives = (host.life for host in plane.hosts if host.role == role)
    waiting = (life for life in lives if life is not None and life.alive and life is not leader)
    return next(waiting, None)


def _on_process(change: Callable[[RegionProcesses, ProcessLife, Fault], None]) -> Injector:
    """Return an injector that changes the process that a fault names."""

    def begin_fault(region: SimulatedRegion, fault: Fault, _: int) -> None:
        plane = region.roles
        if plane is not None and (life := _target_process(plane, fault)) is not None:
            region.history.note(f"… strikes {life.name}")
            change(plane, life, fault)

    return begin_fault


def _pause(_: RegionProcesses, life: ProcessLife, fault: Fault) -> None:
    life.freeze(fault.seconds)


def _kill(plane: RegionProcesses, life: ProcessLife, fault: Fault) -> None:
    plane.kill_life(life, fault.seconds)


def _kill_at_step(_: RegionProcesses, life: ProcessLife, fault: Fault) -> None:
    life.loop.kill_at_step(int(fault.value))


def _clock(_: RegionProcesses, life: ProcessLife, fault: Fault) -> None:
    life.host.clock_offset_s += fault.value


def _at_write(plane: RegionProcesses, life: ProcessLife, fault: Fault) -> None:
    """Kill or pause a process at one of its next writes: `role-pause-at-write`, `…-after-write`."""
    is_pause, is_after = "pause" in fault.kind, "after" in fault.kind

    def change(writer: ProcessLife) -> None:
        if is_pause:
            writer.freeze(fault.seconds)
        else:
            plane.kill_life(writer, DOWN_S, "at one of its writes")

    life.write_points.append(WritePoint(max(1, int(fault.value)), is_after, change))


def _cut(condition: Condition, *, etcd: bool = False) -> Injector:
    """Return an injector that imposes a condition on the network of a process's host."""

    def begin_fault(region: SimulatedRegion, fault: Fault, number: int) -> None:
        plane = region.roles
        if plane is None or (life := _target_process(plane, fault)) is None:
            return
        host = life.host
        region.history.note(f"… strikes {host.name}")
        _path_of(host, etcd=etcd).conditions[number] = condition
        plane.paths_changed(host)
        region.timeline.after(fault.seconds, end_fault, plane, host, number)

    def end_fault(plane: RegionProcesses, host: ProcessHost, number: int) -> None:
        del _path_of(host, etcd=etcd).conditions[number]
        plane.paths_changed(host)

    return begin_fault


def _late(region: SimulatedRegion, fault: Fault, number: int) -> None:
    plane = region.roles
    if plane is not None and (life := _target_process(plane, fault)) is not None:
        late = life.host.etcd_delays
        late[number] = fault.value
        region.timeline.after(fault.seconds, late.pop, number)


def _crash_in_move(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Move an entitlement to another shard, and kill a process at one of its next writes."""
    move_entitlement(region, fault, number)
    if region.roles is not None:
        names = region.roles.role_names()  # the core, the old owner, the new one, or another
        kind = "role-kill-after-write" if number % 2 else "role-kill-at-write"
        target = f"role:{names[number // 2 % len(names)]}"
        _INJECT_AT_WRITE(region, Fault(fault.at, kind, target, 0.0, fault.value), number)


def _path_of(host: ProcessHost, *, etcd: bool) -> Path:
    return host.etcd_path if etcd else host.path


_INJECT_AT_WRITE = _on_process(_at_write)
_BOTH = Condition(cut_in=True, cut_out=True)
INJECTORS: dict[str, Injector] = {
    "role-pause": _on_process(_pause),
    "role-kill": _on_process(_kill),
    "role-kill-at-step": _on_process(_kill_at_step),
    "role-kill-at-write": _INJECT_AT_WRITE,
    "role-kill-after-write": _INJECT_AT_WRITE,
    "role-pause-at-write": _INJECT_AT_WRITE,
    "role-pause-after-write": _INJECT_AT_WRITE,
    "role-clock": _on_process(_clock),
    "role-cut": _cut(_BOTH),
    "role-cut-in": _cut(Condition(cut_in=True)),
    "role-cut-out": _cut(Condition(cut_out=True)),
    "etcd-cut": _cut(_BOTH, etcd=True),
    "etcd-cut-in": _cut(Condition(cut_in=True), etcd=True),
    "etcd-cut-out": _cut(Condition(cut_out=True), etcd=True),
    "etcd-late": _late,
    "crash-in-move": _crash_in_move,
}
