"""The control plane as one process, which is paused, stopped, killed and started again."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from agent.api import ImageFormat, ImageInfo
from control_plane.api.machines import MachineRecord
from control_plane.api.settings import Overgrant, PortalSettings, SchedulerSettings
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer
from control_plane.roles import ControlPlane
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.shards.ownership import OwnershipMap
from control_plane.shards.processes import RoleLeaders
from control_plane.store import Store
from control_plane.task_control.controllers import CallController, no_controller
from vm_lab.region.history import History
from vm_lab.region.link import AgentLink, FollowedEvents
from vm_lab.region.loop import Killed, Timeline, VirtualLoop
from vm_lab.region.machine import EPOCH_S, SimulatedMachine
from vm_lab.region.network import Path, SimulatedNetwork
from vm_lab.region.observer import Observer
from vm_lab.region.stores import SimulatedDisk, StoreFacade, run_immediately
from wire.errors import TwineError, Unreachable

if TYPE_CHECKING:
    from vm_lab.region.process_life import ProcessLife

RESTART_S = 2.0
"""Seconds until a process that ended is started again (systemd's RestartSec)."""
SOLVER_STEPS = 500
"""Attempts of the ReBalancer's solver to improve a machine, for one plan."""
CATCH_UP_S = 0.05
"""Seconds from the end of a pause until the process has read waiting answers."""


class PlaneLife:
    """One life of the process, from its start to its end, with its connections."""

    name = "control plane"

    def __init__(
        self,
        number: int,
        timeline: Timeline,
        history: History,
        observer: Observer,
        path: Path | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """Start a life; with `shared` other processes run on the same timeline."""
        self.number = number
        self.timeline, self.history, self.observer = timeline, history, observer
        self.path = path or Path(base_s=0.0)
        """The network path to and from the host of the process."""
        self.loop = VirtualLoop(timeline, shared=shared)
        self.alive = True
        self.control_plane: ControlPlane | None = None
        """Set once it is loaded and its loops run."""
        self.streams: list[FollowedEvents] = []
        self.ended = asyncio.Event()
        self._frozen_at = self._thawed_at = float("-inf")

    @property
    def leads(self) -> bool:
        """Return whether no other process has taken over from this one."""
        return True

    def require_leader(self) -> None:
        """Raise if the process does not lead, so that its answers are void; here it leads."""

    @property
    def frozen(self) -> bool:
        """Return whether the process is paused."""
        return self.loop.frozen

    def serving(self) -> ControlPlane:
        """Return the control plane, or raise `Unreachable` while it does not serve."""
        if self.control_plane is None:
            raise Unreachable("the control plane does not serve")
        return self.control_plane

    def kill(self, why: str) -> None:
        """End the process now; nothing it does has an effect from here on."""
        if self.alive:
            self.history.note(f"{self.name} killed {why}")
            self.sever()
            self.loop.kill()
            self.observer.plane_changed("killed")

    def sever(self) -> None:
        """Cut all connections of the process."""
        self.alive = False
        self.control_plane = None
        for stream in list(self.streams):
            stream.sever()

    def freeze(self, seconds: float) -> None:
        """Pause the process for a while; it does not notice."""
        self._frozen_at = self.timeline.now
        self._thawed_at = self.timeline.now + seconds
        self.loop.freeze(self._thawed_at)
        self.history.note(f"{self.name} stops for {seconds:.1f} s")
        self.observer.plane_changed("frozen")
        for stream in list(self.streams):
            stream.path_changed()
        self.timeline.at(self._thawed_at, self._thaw)

    def _thaw(self) -> None:
        if self.alive:
            self.history.note(f"{self.name} continues")
            self.observer.plane_changed("thawed")
            for stream in list(self.streams):
                stream.path_changed()

    def complete(self, waiting: asyncio.Future[Any], outcome: object) -> None:
        """Hand an answer or an error to the waiting call, unless the process has ended."""
        if waiting.done() or not self.alive:
            return
        if isinstance(outcome, TwineError):
            waiting.set_exception(outcome)
        else:
            waiting.set_result(outcome)

    def read_time(self, at: float) -> float:
        """Return when the process read an answer that arrived at `at`: not during a pause."""
        read_at = self._thawed_at + CATCH_UP_S
        if not self._frozen_at <= at < read_at:
            return at
        return self._frozen_at if self.timeline.now < read_at else read_at

    def contact_changed(self, machine: SimulatedMachine) -> None:
        """Notify a machine whether it has contact with any process of the control plane."""
        ends = [stream.contact_lost_at() for stream in machine.streams if stream.is_alive]
        lost = [at for at in ends if at is not None]
        if not ends:
            machine.contact.changed(False, self.timeline.now)
        elif len(lost) < len(ends):
            machine.contact.changed(True, 0.0)
        else:
            machine.contact.changed(False, max(lost))


class Plane:
    """The control plane's host: runs one process at a time, always on the same stores."""

    def __init__(
        self,
        timeline: Timeline,
        history: History,
        network: SimulatedNetwork,
        disks: Mapping[str, SimulatedDisk],
        machines: Mapping[str, SimulatedMachine],
        settings: SchedulerSettings,
        seed: str,
    ) -> None:
        """`disks` has `main`, and one for each data center with a store of its own."""
        self.timeline, self.history, self.network = timeline, history, network
        self.disks, self.machines, self.settings = disks, machines, settings
        self.shards = settings.shards
        self.observer = Observer()
        self.controller_caller: Callable[[PlaneLife], CallController] = lambda _: no_controller
        """Returns the function that a life calls TaskControllers with."""
        self.images: set[str] = set()
        self.profile_keys: dict[str, list[str]] = {}
        """Profile → the keys that owners may change."""
        self.overgrant = Overgrant.REFUSE
        self.clock_offset_s = 0.0
        self.life: PlaneLife | None = None
        self.lives = 0
        self.writer: ProcessLife | None = None
        """The process that made the write that is being checked."""
        self.on_serving: list[Callable[[PlaneLife], None]] = []
        """Called with each life once it serves."""
        self._seed = seed
        self._down_until = 0.0
        self._over = False

    @property
    def serving(self) -> ControlPlane | None:
        """Return the control plane, if one is up."""
        life = self.life
        return None if life is None or not life.alive else life.control_plane

    def owners(self, entitlement: str) -> list[str]:
        """Return the shards that own an entitlement."""
        shards = self.serving.shards.all if self.serving is not None else []
        return [str(shard.number) for shard in shards if shard.allocator.region.owns(entitlement)]

    def run(self, until: float) -> None:
        """Run the region up to a time."""
        self.timeline.at(until, self.finish)
        self._over = False
        while not self._over:
            if self.timeline.now < self._down_until:
                self.timeline.run_until(min(self._down_until, until))
            else:
                self._run_life()

    def finish(self) -> None:
        """Stop the process regularly, and end the run."""
        self._over = True
        self._down_until = 0.0
        if self.life is not None:
            self.life.ended.set()

    def kill(self, down_s: float, why: str = "by its enemy") -> None:
        """Kill the process; it is started again after `down_s` seconds."""
        self._down_until = max(self._down_until, self.timeline.now + down_s)
        if self.life is not None and self.life.alive:
            self.life.kill(why)

    def restart(self) -> None:
        """Stop the process regularly; it is started again at once."""
        if self.life is not None and self.life.control_plane is not None:
            self.history.note("control plane restarts")
            self.life.ended.set()

    def wall_time(self) -> float:
        """Return the time of the clock of the control plane's host."""
        return EPOCH_S + self.timeline.now + self.clock_offset_s

    def _run_life(self) -> None:
        self.lives += 1
        life = self.life = PlaneLife(self.lives, self.timeline, self.history, self.observer)
        self.history.note(f"control plane starts, life {life.number}")
        self.observer.plane_changed("started")
        why = ""
        try:
            life.loop.run_until_complete(self._main(life))
        except Killed:
            if life.alive:
                life.kill("at one of its steps")
        except Exception as e:
            why = "; ".join(error_texts(e))
            self.history.note(f"control plane ended: {why}")
            if life.control_plane is not None or not isinstance(e, TwineError):
                self.observer.plane_failed(why)
        finally:
            life.sever()
            life.loop.free()
        for disk in self.disks.values():
            run_immediately(disk.engine.__aexit__(None, None, None))
        if not self._over:
            pause = RESTART_S if why or not life.ended.is_set() else 0.1
            self._down_until = max(self._down_until, self.timeline.now + pause)
        self.observer.plane_changed("ended")

    async def _main(self, life: PlaneLife) -> None:
        async with AsyncExitStack() as stack:
            stores = dict[str, Store]()
            for name, disk in self.disks.items():
                stores[name] = await stack.enter_async_context(StoreFacade(disk, life))
            main = stores.pop("main")
            seed = zlib.crc32(f"{self._seed} {life.number}".encode())
            runtime = SteppedRuntime(self.wall_time, seed)
            control_plane = self._control_plane(
                life, main, runtime, "always the same", broker_stores=stores
            )
            async with control_plane:
                life.control_plane = control_plane
                self.history.note("control plane serves")
                self.observer.plane_changed("serves")
                for call in self.on_serving:
                    call(life)
                await self._until_end(life, control_plane)

    async def _until_end(self, life: PlaneLife, control_plane: ControlPlane) -> None:
        failed = asyncio.create_task(control_plane.wait_failed())
        ended = asyncio.create_task(life.ended.wait())
        await asyncio.wait({failed, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if failed.done():
            failed.result()
        failed.cancel()

    def _control_plane(
        self,
        life: PlaneLife,
        store: Store,
        runtime: SteppedRuntime,
        boot_id: str,
        *,
        broker_stores: Mapping[str, Store] | None = None,
        processes: RoleLeaders | None = None,
    ) -> ControlPlane:
        """Return the control plane of one life, not loaded yet."""
        ownership = OwnershipMap(store)
        return ControlPlane(
            store,
            lambda record: self._link(life, record, ownership),
            runtime,
            self.settings,
            self._find_image,
            broker_stores=broker_stores,
            call_controller=self.controller_caller(life),
            boot_id=boot_id,
            portal=PortalSettings(profile_keys=self.profile_keys, overgrant=self.overgrant),
            solve=solve_in_steps,
            ownership=ownership,
            processes=processes,
        )

    def _link(self, life: PlaneLife, record: MachineRecord, ownership: OwnershipMap) -> AgentLink:
        return AgentLink(self.network, life, self.machines[record.machine], ownership.headers)

    async def _find_image(self, digest: str) -> ImageInfo | None:
        if digest not in self.images:
            return None
        return ImageInfo(digest=digest, format=ImageFormat.TAR, stream_bytes=1, created_at=0.0)


async def solve_in_steps(model: RegionModel, effort: Effort) -> SolverAnswer:
    """Return a plan after `SOLVER_STEPS` steps: no virtual time passes, so time cannot end it."""
    from control_plane.rebalancer.core.solving import solve

    counted = Effort(steps=SOLVER_STEPS, moves=effort.moves, swaps=effort.swaps, with_bound=False)
    return solve(model, counted, clock=lambda: 0.0)


def error_texts(error: BaseException) -> list[str]:
    """Return the errors as text, without the groups around them."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in error_texts(inner)]
    return [f"{type(error).__name__}: {error}"]
