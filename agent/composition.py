"""Creates all services of an agent and connects them.

`HostParts` creates the services of each room. `stages` lists the stages that prepare a task.
`services` creates the tasks and the services of the API, and starts the loops of the agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agent import api
from agent.config import AgentConfig
from agent.credentials.credentials import CredentialHolder
from agent.host.core.pressure import HostPressure, starts_at_once
from agent.host.facts import FactsReader, installed_profiles
from agent.host.gc import HostInspector
from agent.host.host_profile import HostProfile
from agent.host.logs import Logs
from agent.host.metrics import AgentMetrics
from agent.host.output_pipes import OutputPipes
from agent.host.pressure import Pressure
from agent.host.usage import UsageReader
from agent.identity.clone_check import CloneCheck
from agent.identity.identity import LAST_OWNERS, LAST_TERM, HostIdentity
from agent.identity.task_identities import TaskIdentities
from agent.images.core.retention import RetentionLimits
from agent.images.images import HostImages
from agent.images.oci import Registries
from agent.images.roots import FreshRoot, TaskRoots
from agent.lease.contact import Contact
from agent.lease.fencing import FencingOwners, FencingTerm
from agent.machine import HostAccess, HostHardware
from agent.network.core.resolver_files import Resolver
from agent.network.name_files import NameFiles
from agent.network.networks import Networks, site_with
from agent.notices.notices import TaskNotices
from agent.resources.exclusive_cpus import ExclusiveCpus
from agent.resources.huge_pages import HugePages
from agent.resources.memory_protection import MemoryProtection
from agent.resources.task_limits import TaskLimits
from agent.runtime.core.records import TASK_UNITS
from agent.runtime.disk import StateDisk
from agent.runtime.events import HostEvents
from agent.runtime.journal import Journal
from agent.runtime.offload import Lanes
from agent.runtime.reserve import Reserve
from agent.runtime.stage import TaskStage
from agent.runtime.units import Units
from agent.services import AgentServices
from agent.tasks.context import HostCapacity, TaskContext
from agent.tasks.core import own_init
from agent.tasks.exec import Sessions
from agent.tasks.inside import Inside
from agent.tasks.observer import TaskObserver
from agent.tasks.oomd import Oomd
from agent.tasks.prober import Prober
from agent.tasks.shutdown import HostShutdown
from agent.tasks.starts import Starts
from agent.tasks.storage import TaskStorage
from agent.tasks.tasks import HostTasks
from agent.tasks.unit import SystemContainer, UnitOfTask
from agent.tasks.unit_view import UnitView
from agent.usage import Usages
from agent.volumes.volume_service import VolumeService
from agent.volumes.volumes import Volumes
from wire import durable
from wire.errors import ConfigError

log = logging.getLogger(__name__)


class HostParts:
    """The parts of one agent. `services` starts their loops."""

    tasks: HostTasks
    """Created by `services`, because it needs the task group of the loops."""

    def __init__(
        self,
        config: AgentConfig,
        machine: HostAccess,
        hardware: HostHardware,
        identity: HostIdentity,
        lanes: Lanes,
    ) -> None:
        self.config, self.machine, self.hardware = config, machine, hardware
        self.identity, self.lanes = identity, lanes
        self.state, self.run = Path(config.state_dir), Path(config.run_dir)
        cgroups = machine.cgroups
        identity.boot_id = hardware.boot_id
        self.events = HostEvents(hardware.boot_id)
        self.reserve = Reserve(self.state / "reserve", machine.btrfs.sync)
        self.disk = StateDisk(self.state, self.events, self.reserve, lanes)
        self.units = Units(machine.systemd, lanes)
        self.images = self._images()
        self.roots = TaskRoots(machine.btrfs, self.state / "tasks", self.state / "images")
        self.networks = Networks(machine.network, lanes, self._site())
        self.shutdown = HostShutdown(self.units, self.events, machine.boottime_s)
        self.clones = CloneCheck(identity, hardware.boot_id, self.events)
        self.clones.wake = self.units.wake_all
        self.credentials = CredentialHolder(self.run / "credentials.sock")
        self.identities = TaskIdentities(self.run / "identities", identity, lanes, self.events)
        self.cpus = ExclusiveCpus(self.units, cgroups, lanes, machine.cores, self.run / "own-cpus")
        with_pages = "hugetlb" in hardware.cgroup_controllers
        self.pages = HugePages(self.units, cgroups, lanes, machine.hugepages, controller=with_pages)
        self.memory = MemoryProtection(self.units, cgroups, lanes, hardware.page_bytes)
        self.notices = TaskNotices(self.run / "notices", lanes)
        self.volumes = Volumes(machine.btrfs, self.state)
        self.volume_service = VolumeService(self.volumes, lambda: self.tasks.specs(), lanes)
        self.pipes = OutputPipes(self.run, lanes)
        self.unit = UnitOfTask(self.roots, self.stages())
        self.oomd, self.prober = Oomd(machine.processes), Prober()
        self.starts = Starts(starts_at_once(hardware.cpu.online, HostPressure()))
        self.context, self.capacity = self._context(), self._capacity()
        self.last_term = FencingTerm(self.state / "identity" / LAST_TERM)
        self.last_owners = FencingOwners(self.state / "identity" / LAST_OWNERS)

    def _images(self) -> HostImages:
        config, machine = self.config, self.machine
        registries = Registries(config.registry_tls_verify, config.registry_credentials_file)
        return HostImages(
            self.state,
            machine.btrfs,
            self.units,
            machine.processes,
            self.lanes,
            self.events,
            registries,
        )

    def _site(self) -> Callable[[str], Any]:
        config = self.config
        own = config.network_address, config.address()[1]
        return site_with(config.network_prefix6, config.network_prefix4, *own)

    def stages(self) -> tuple[TaskStage, ...]:
        """Return the stages that prepare a task, in the order in which they run."""
        dns = Resolver(*self.config.dns())
        name = self.hardware.hostname
        return (
            self.credentials,
            self.identities,
            self.notices,
            SystemContainer(self.config.state_dir, self.config.run_dir),
            self.cpus,
            self.pages,
            self.memory,
            TaskLimits(
                self.units,
                self.machine.cgroups,
                self.lanes,
                self.cpus,
                self.pages,
                self.hardware.page_bytes,
            ),
            FreshRoot(self.roots, self.lanes),
            self.volume_service,
            self.networks,
            NameFiles(self.roots.path, self.machine, self.lanes, dns, name),
            self.pipes,
        )

    def _context(self) -> TaskContext:
        boot_id = self.hardware.boot_id
        journal = Journal(self.state / "journal", self.reserve, self.run / "records")
        storage = TaskStorage(journal, self.roots, self.lanes)
        observer = TaskObserver(boot_id, self.units, storage, self.oomd, self.shutdown, self.clones)
        return TaskContext(
            units=self.units,
            observer=observer,
            storage=storage,
            events=self.events,
            unit=self.unit,
            inside=Inside(self.units, self.unit),
            prober=self.prober,
            contact=Contact(self.run / "fence", boot_id, self.machine.boottime_s),
            starts=self.starts,
        )

    def _capacity(self) -> HostCapacity:
        wanted, has_program = self.config.own_init, self.machine.has_program
        return HostCapacity(
            roots=self.roots,
            cpus=self.cpus,
            pages=self.pages,
            memory=self.memory,
            volumes=self.volumes,
            cgroups=self.machine.cgroups,
            lanes=self.lanes,
            clones=self.clones,
            no_containers=lambda: own_init.missing(wanted, has_program),
        )

    def services(
        self, group: asyncio.TaskGroup, pull: Callable[[api.ImagePull], Awaitable[api.ImageInfo]]
    ) -> AgentServices:
        """Return the services for the API, and start their loops in `group`."""
        machine, lanes, usage = self.machine, self.lanes, self._start(group)
        return AgentServices(
            lanes=lanes,
            tasks=self.tasks,
            usage=usage,
            metrics=AgentMetrics(
                self.tasks, self.images, self.prober, machine.cgroups, lanes, usage, self.disk
            ),
            images=self.images,
            logs=Logs(machine.processes),
            unit_view=UnitView(machine.processes, lanes, self.unit),
            events=self.events,
            contact=self.context.contact,
            credentials=self.credentials,
            leaving=self.shutdown,
            sessions=Sessions(self.context.inside, self.units, self.run / "exec"),
            networks=self.networks,
            notices=self.notices,
            profile=self._profile(),
            facts=self._facts(),
            pull=pull,
            accounts=self._inspector(),
            volumes=self.volume_service,
            spawn=lambda work: _spawn(group, work),
            renew=self.identity.renew_when_asked,
            clones=self.clones,
            last_term=self.last_term,
            last_owners=self.last_owners,
            domain=self.identity.domain,
        )

    def _start(self, group: asyncio.TaskGroup) -> Callable[[], Awaitable[Usages]]:
        """Create the tasks and start the loops; return a function that reads the usage of tasks."""
        machine, lanes = self.machine, self.lanes
        reserve_bytes = self.config.reserve_memory_bytes
        self.tasks = HostTasks(
            self.context, self.capacity, self.hardware, group, reserve_bytes=reserve_bytes
        )
        reader = UsageReader(
            machine.cgroups, self.tasks, lanes, machine.boottime_s, machine.host_text
        )
        host = self.hardware.cpu.online, machine.boottime_s
        pressure = Pressure(machine.cgroups, self.tasks, reader, self.starts, self.oomd, host)

        async def write(path: Path, data: bytes) -> None:
            await lanes.run("last-term", durable.write, path, data)

        group.create_task(self.last_term.watch(write), name="last term")
        group.create_task(self.last_owners.watch(write), name="last owners")
        group.create_task(self.disk.watch(), name="disk")
        group.create_task(pressure.watch(), name="pressure")
        group.create_task(self.units.watch(TASK_UNITS), name="units")
        group.create_task(self.identities.watch(self.tasks.active_specs), name="identities")
        group.create_task(self.notices.watch(self.tasks.records), name="notices")
        return reader.read

    def _profile(self) -> HostProfile:
        config = self.config
        return HostProfile(
            self.units,
            self.events,
            self.lanes,
            Path(config.sidekick),
            Path(config.sidekick_state_dir),
            self.hardware.boot_id,
            self.machine.boottime_s,
            installed_profiles,
        )

    def _inspector(self) -> HostInspector:
        return HostInspector(
            (self.state, self.run),
            self.context,
            self.capacity,
            self.networks,
            self.images,
            self.tasks,
            self.machine,
            RetentionLimits(0, self.config.image_free_bytes, self.config.image_keep_s),
        )

    def _facts(self) -> Callable[[], Coroutine[Any, Any, api.MachineFacts]]:
        config = self.config
        reader = FactsReader(self.machine, config.state_dir, own_init=config.own_init)

        last: tuple[api.MachineFacts, list[str]] | None = None

        def read() -> tuple[api.MachineFacts, list[str]]:
            name, unusable = self._identity()
            return reader.read(name), unusable

        async def facts() -> api.MachineFacts:
            """Return the facts; while the disk hangs, the last ones that were read."""
            nonlocal last
            if last is None or not self.disk.is_hung:
                last = await self.lanes.run("facts", read)
            found, unusable = last
            problems = [p for p in (self.disk.problem, self.networks.problem) if p] + unusable
            suppressed, lost = await self.lanes.run("usage", self.pipes.lost)
            return replace(
                found,
                problems=problems,
                leaving=self.shutdown.now(),
                log_lines_suppressed=suppressed,
                log_lines_lost=lost,
            )

        return facts

    def name(self) -> str:
        """Return the machine name of this host, empty if it has not joined."""
        return self._identity()[0]

    def _identity(self) -> tuple[str, list[str]]:
        """Return the machine name, and why the identity cannot be used.

        Only the TCP port needs the identity; the tasks of the host run without it.
        """
        try:
            held = self.identity.find()
        except ConfigError as e:
            return "", [f"{e}: the control plane cannot call this host; join again"]
        return (held.machine if held else ""), []


def _spawn(group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
    group.create_task(_logged(work))


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """Run work in the background; a failure is logged and does not end the agent."""
    try:
        await work
    except Exception:
        log.exception("a background job failed; this is a bug")
