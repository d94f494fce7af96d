"""One process of the simulated control plane: its host, its lives, and faults at its writes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vm_lab.region.network import Path
from vm_lab.region.observer import Observer
from vm_lab.region.plane import PlaneLife
from wire.errors import Busy

if TYPE_CHECKING:
    from control_plane.front_end.shard_front_end import ShardFrontEnd
    from control_plane.roles import ControlPlane
    from control_plane.store.etcd import EtcdStore
    from vm_lab.region.etcd_connection import EtcdConnection
    from vm_lab.region.processes import RegionProcesses


@dataclass(slots=True)
class ProcessHost:
    """The host of one replica of a role."""

    name: str
    """`core-a`, `shard-1-b`."""
    role: str
    shard: int | None
    path: Path = field(default_factory=lambda: Path(base_s=0.0))
    """The path of all its messages."""
    etcd_path: Path = field(default_factory=lambda: Path(base_s=0.0))
    """The path of its messages from and to etcd."""
    etcd_delays: dict[int, float] = field(default_factory=dict)
    """Fault → most seconds by which messages between it and etcd are late."""
    clock_offset_s: float = 0.0
    down_until: float = 0.0
    life: ProcessLife | None = None

    @property
    def etcd_delay_s(self) -> float:
        """Return the most seconds by which messages between it and etcd are late now."""
        return max(self.etcd_delays.values(), default=0.0)


@dataclass(slots=True)
class WritePoint:
    """A fault of a process at its n-th transaction from now on: before it, or after."""

    left: int
    is_after: bool
    inject: Callable[[ProcessLife], None]
    life: ProcessLife | None = None

    def inject_before(self) -> bool:
        """Trigger a fault that is due before the write; return whether the write is lost."""
        assert self.life is not None
        if not self.is_after:
            self.inject(self.life)
        return not self.is_after and not self.life.alive

    def inject_after(self) -> None:
        """Trigger a fault that is due after the write."""
        assert self.life is not None
        if self.is_after:
            self.inject(self.life)


class ProcessLife(PlaneLife):
    """One life of one process."""

    def __init__(
        self, number: int, host: ProcessHost, plane: RegionProcesses, observer: Observer
    ) -> None:
        """A process that was just started."""
        super().__init__(number, plane.timeline, plane.history, observer, host.path, shared=True)
        self.name, self.host = host.name, host
        self.random = random.Random(f"{plane.seed} {host.name} {number}")
        self.store: EtcdStore | None = None
        self.plane: ControlPlane | None = None
        """Set once it is loaded, for a core and for a shard."""
        self.front_end: ShardFrontEnd | None = None
        self.etcd_connections: list[EtcdConnection] = []
        self.write_points: list[WritePoint] = []
        self.main: asyncio.Task[None] | None = None
        self.led_at_end = False
        """Whether it ended while it led, by etcd's state and by its own."""
        self.awake_since = plane.timeline.now
        """When it started or last resumed. A cut does not change it: the process cannot know
        whether it or a machine is cut off."""
        self._is_leader = plane.is_leader

    @property
    def leads(self) -> bool:
        """Return whether it leads its role now, by etcd's state."""
        return self._is_leader(self)

    def freeze(self, seconds: float) -> None:
        """Pause the process for a while; it must not count that time as silence of machines."""
        super().freeze(seconds)
        self.timeline.after(seconds, self._wake)

    def _wake(self) -> None:
        self.awake_since = self.timeline.now

    def require_leader(self) -> None:
        """Raise if this process no longer leads, so that its answers are void."""
        if failure := self.store_failure():
            raise Busy(f"this control plane cannot answer any more: {failure}")

    @property
    def sends(self) -> bool:
        """Return whether its messages reach etcd."""
        return not (self.host.path.cut_out or self.host.etcd_path.cut_out)

    @property
    def receives(self) -> bool:
        """Return whether etcd's messages reach it."""
        return not (self.host.path.cut_in or self.host.etcd_path.cut_in)

    def store_failure(self) -> str:
        """Return why it does not lead, by its own state; empty: it leads."""
        return self.store.failure() if self.store is not None else "it is not open"

    def revision(self) -> int:
        """Return the newest revision that it has written or read."""
        return self.store.revision() if self.store is not None else 0

    def due_write_point(self, request: Any) -> WritePoint | None:
        """Return the fault that is due at this transaction, if there is one."""
        if not request.success:
            return None
        for point in list(self.write_points):
            point.left -= 1
            if point.left <= 0:
                self.write_points.remove(point)
                if self.alive:
                    point.life = self
                    return point
        return None

    def paths_changed(self) -> None:
        """Handle a change of its host's network."""
        for stream in list(self.streams):
            stream.path_changed()
        for connection in self.etcd_connections:
            connection.paths_changed()
