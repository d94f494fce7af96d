"""The control plane of a simulated region as processes: a core and shards, each with standbys.

Each process runs the product's code: elections with leases in a modelled etcd, the store, and calls
between processes. A process that ends, for any reason, is started again on its host as a standby.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, cast

from control_plane.api.settings import SchedulerSettings
from control_plane.config import EtcdSettings
from control_plane.process import run_until
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.shards.processes import CORE, OwnRole, RoleLeaders
from control_plane.store.etcd import EtcdStore
from vm_lab.region.core_front_end import CoreFrontEnd, shard_front_end_of
from vm_lab.region.etcd import LEADERS, SimulatedEtcd
from vm_lab.region.etcd_connection import EtcdConnection
from vm_lab.region.history import History
from vm_lab.region.loop import Killed, Stuck, Timeline
from vm_lab.region.machine import EPOCH_S, SimulatedMachine
from vm_lab.region.network import SimulatedNetwork
from vm_lab.region.plane import RESTART_S, Plane, error_texts
from vm_lab.region.process_life import ProcessHost, ProcessLife
from vm_lab.region.scenario import RoleCounts
from wire.errors import TwineError

if TYPE_CHECKING:
    from control_plane.roles import ControlPlane
    from control_plane.store.etcd_client import EtcdClient

PREFIX = "/twine"
TTL_S = 4
"""Time to live of a leader's lease (`EtcdSettings.ttl_s`)."""
BEGIN_S = 0.3
"""Seconds between the starts of two processes; the core starts first."""


class RegionProcesses(Plane):
    """All processes of the control plane, their hosts, and which process leads each role."""

    def __init__(
        self,
        timeline: Timeline,
        history: History,
        network: SimulatedNetwork,
        etcd: SimulatedEtcd,
        machines: Mapping[str, SimulatedMachine],
        settings: SchedulerSettings,
        seed: str,
        counts: RoleCounts,
    ) -> None:
        """Start without processes."""
        super().__init__(timeline, history, network, {"main": etcd}, machines, settings, seed)
        self.seed, self.etcd = seed, etcd
        letters = [chr(ord("a") + n) for n in range(max(counts.core, counts.replicas))]
        self.hosts = [
            ProcessHost(f"core-{letter}", CORE, None) for letter in letters[: counts.core]
        ]
        for shard in range(1, counts.shards + 1):
            self.hosts += [
                ProcessHost(f"shard-{shard}-{letter}", f"shard-{shard}", shard)
                for letter in letters[: counts.replicas]
            ]
        self.shards = counts.shards + 1
        self.by_number: dict[int, ProcessLife] = {}
        """All lives, including those that ended."""
        self._leaders: dict[str, int] = {}

    # -- leaders

    def role_names(self) -> list[str]:
        """Return the roles, the core first."""
        return list(dict.fromkeys(host.role for host in self.hosts))

    def leader(self, role: str) -> ProcessLife | None:
        """Return the life that leads a role now, by etcd's state."""
        return self.by_number.get(self._leaders.get(role, 0))

    def is_leader(self, life: ProcessLife) -> bool:
        """Return whether a life leads its role now, by etcd's state."""
        return self.leader(life.host.role) is life

    def leader_changed(self, key: bytes, sender: int | None) -> None:
        """Record that a life wrote a leader's key; `sender` None: the key was deleted."""
        role = key.partition(LEADERS)[2].decode().removeprefix("-") or CORE
        if sender is None:
            self._leaders.pop(role, None)
        else:
            self._leaders[role] = sender

    def owners(self, entitlement: str) -> list[str]:
        """Return the leading processes that own an entitlement, each by its own state."""
        owners = []
        for role in self.role_names():
            life = self.leader(role)
            if life is None or not life.alive or life.plane is None:
                continue
            shards = life.plane.shards.all
            if any(shard.allocator.region.owns(entitlement) for shard in shards):
                owners.append(life.name)
        return owners

    def find_serving(self, url: str) -> ProcessLife | None:
        """Return the process that serves at a URL now."""
        for host in self.hosts:
            if host.life is not None and host.life.alive and _url(host) == url:
                return host.life if host.life.front_end is not None else None
        return None

    # -- the course of events

    def run(self, until: float) -> None:
        """Run the region up to a time."""
        self.timeline.at(until, self.finish)
        self._over = False
        for number, host in enumerate(self.hosts):
            self.timeline.after(number * BEGIN_S, self._start, host)
        while not self._over:
            self._run_processes()
            if not self._over:
                self._run_events()
        for host in self.hosts:
            if host.life is not None:
                self._free(host.life)

    def _run_processes(self) -> None:
        """Run the callbacks of all processes that are due now."""
        busy = True
        while busy and not self._over:
            busy = False
            for host in self.hosts:
                life = host.life
                if life is not None and life.loop.next_at() <= self.timeline.now + 1e-9:
                    busy = True
                    self._run_due_callbacks(host, life)

    def _run_events(self) -> None:
        """Run other events until a callback of a process is due."""
        timeline = self.timeline
        loops = [host.life.loop for host in self.hosts if host.life is not None]
        next_callback = min((loop.next_at() for loop in loops), default=float("inf"))
        while not any(loop.is_ready for loop in loops):
            next_event = timeline.next_at()
            if next_event == next_callback == float("inf"):
                raise Stuck(f"every process waits for another at {timeline.now:.3f} s")
            if next_event > next_callback:
                timeline.now = max(timeline.now, next_callback)
                return
            timeline.step()
            if self._over or len(loops) != sum(host.life is not None for host in self.hosts):
                return

    def _run_due_callbacks(self, host: ProcessHost, life: ProcessLife) -> None:
        try:
            life.loop.run_while_due()
        except Killed:
            if life.alive:
                life.kill("at one of its steps")
            self._restart_later(host, life, "")
            return
        if life.main is not None and life.main.done():
            error = None if life.main.cancelled() else life.main.exception()
            why = "; ".join(error_texts(error)) if error is not None else ""
            self._report_failure(life, error, why)
            self._restart_later(host, life, why)

    def _report_failure(self, life: ProcessLife, error: BaseException | None, why: str) -> None:
        """Report a process that ended with an error while it led; one that did not lead may end."""
        if error is None:
            return
        self.history.note(f"{life.name} ended: {why}")
        if life.led_at_end or not isinstance(error, TwineError):
            self.observer.plane_failed(f"{life.name}: {why}")

    def _restart_later(self, host: ProcessHost, life: ProcessLife, why: str) -> None:
        self._free(life)
        host.life = None
        pause = RESTART_S if why or not life.ended.is_set() else 0.1
        at = max(host.down_until, self.timeline.now + pause)
        self.timeline.at(at, self._start, host)
        self.observer.plane_changed("ended")

    def _free(self, life: ProcessLife) -> None:
        life.sever()
        life.loop.free()

    def _start(self, host: ProcessHost) -> None:
        if self._over or host.life is not None:
            return
        if self.timeline.now < host.down_until:
            self.timeline.at(host.down_until, self._start, host)
            return
        self.lives += 1
        life = ProcessLife(self.lives, host, self, self.observer)
        self.by_number[life.number] = host.life = life
        self.history.note(f"{life.name} starts, life {life.number}")
        life.main = life.loop.create_task(self._run_process(life))

    # -- faults

    def finish(self) -> None:
        """End all processes, and the run."""
        self._over = True

    def kill(self, down_s: float, why: str = "by its enemy") -> None:
        """Kill the leading core; it is started again after `down_s` seconds."""
        life = self.leader(CORE)
        if life is not None and life.alive:
            self.kill_life(life, down_s, why)

    def kill_life(self, life: ProcessLife, down_s: float, why: str = "by its enemy") -> None:
        """Kill a process; it is started again after `down_s` seconds."""
        life.host.down_until = max(life.host.down_until, self.timeline.now + down_s)
        life.kill(why)

    def paths_changed(self, host: ProcessHost) -> None:
        """Handle a change of a host's network."""
        for path in (host.path, host.etcd_path):
            path.refresh(self.timeline.now)
        self.observer.plane_changed("network")
        if host.life is not None:
            host.life.paths_changed()

    def restart(self) -> None:
        """Stop the core regularly."""
        life = self.leader(CORE)
        if life is not None and life.plane is not None:
            self.history.note(f"{life.name} restarts")
            life.ended.set()

    # -- one process

    async def _run_process(self, life: ProcessLife) -> None:
        host = life.host
        role = OwnRole(
            name=host.role,
            shard=host.shard,
            url=_url(host),
            shards=self.shards,
            life=f"{life.number:016x}",
        )
        runtime = SteppedRuntime(
            lambda: EPOCH_S + self.timeline.now + life.host.clock_offset_s,
            zlib.crc32(f"{self.seed} {life.number}".encode()),
        )
        runtime.date()  # detects steps of the clock from here on, as in `process.before`
        async with AsyncExitStack() as stack:
            life.store = self._store(life, role)
            await stack.enter_async_context(life.store)
            self.history.note(f"{life.name} leads, epoch {life.store.epoch()}")
            processes = RoleLeaders(life.store, role)
            boot_id = f"boot of {host.name}"
            plane = self._control_plane(life, life.store, runtime, boot_id, processes=processes)
            front_end = CoreFrontEnd(plane, life, self.find_serving) if role.is_core else None
            await stack.enter_async_context(plane)
            life.plane = plane
            self.history.note(f"{life.name} serves")
            if front_end is not None:
                life.control_plane = cast("ControlPlane", front_end)
                if life.leads:  # a process that was paused until now may have a successor
                    self._connect_clients(life)
            else:
                life.front_end = shard_front_end_of(plane, life)
                self.observer.plane_changed("shard serves")
            try:
                await run_until(life.ended, plane.wait_failed())
            finally:
                life.led_at_end = life.leads and not life.store_failure()

    def _store(self, life: ProcessLife, role: OwnRole) -> EtcdStore:
        """Return the store of a process, not open yet."""
        return EtcdStore(
            EtcdSettings(endpoints=["http://etcd.sim:2379"], prefix=PREFIX, ttl_s=TTL_S),
            role=role.lock,
            announce=role.election_records,
            client=lambda _: cast("EtcdClient", EtcdConnection(self.etcd, life)),
            clock=lambda: self.timeline.now,
        )

    def _connect_clients(self, life: ProcessLife) -> None:
        """Make clients call a core."""
        self.life = life
        self.observer.plane_changed("serves")
        for call in self.on_serving:
            call(life)


def role_of(shard: int) -> str:
    """Return the role that runs a shard."""
    return f"shard-{shard}" if shard else CORE


def _url(host: ProcessHost) -> str:
    return f"https://{host.name}"
