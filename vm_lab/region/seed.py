"""Runs one seed: builds the region, runs its story, and waits until the region is at rest."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from control_plane.api.autoscale import Autoscale
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.settings import Overgrant, SchedulerSettings
from vm_lab.region import owners, quiescence, topology
from vm_lab.region.applications import Applications
from vm_lab.region.checker import Checker, Violation
from vm_lab.region.clients import Clients
from vm_lab.region.composed import scenario_of_seed
from vm_lab.region.faults import inject
from vm_lab.region.history import History
from vm_lab.region.intent_checker import IntentChecker
from vm_lab.region.kinds import KINDS
from vm_lab.region.loop import Stuck, Timeline
from vm_lab.region.machine import MachineContext, SimulatedMachine
from vm_lab.region.network import SimulatedNetwork
from vm_lab.region.plane import Plane, PlaneLife
from vm_lab.region.rest import RestWatch
from vm_lab.region.scenario import Scenario
from vm_lab.region.stores import SimulatedDisk
from vm_lab.region.story import Fault, check_targets, draw
from vm_lab.region.topology import MachinePlace

if TYPE_CHECKING:
    from vm_lab.region.processes import RegionProcesses

SET_UP_S = 600.0
"""Most seconds until all jobs of a region without faults run."""
ELECTIONS_S = 5.0
"""Seconds until all shards have a leader, which entitlements can be assigned to."""
JOB_INTERVAL_S = 4.0
"""Seconds between jobs with [roles]: each entitlement goes to the least loaded shard then."""
OnProgress = Callable[[float], None]
"""Called regularly with the virtual time, in seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers of tasks in the region at a time."""

    at: float
    wanted: int
    copies: int
    listed: int


@dataclass(slots=True)
class SeedOutcome:
    """The outcome of one seed."""

    scenario: str
    seed: int
    story: list[Fault]
    violations: list[Violation]
    digest: str
    """Digest of the event log: the same for the same seed, on every machine."""
    events: int
    lines: int
    virtual_s: float
    cpu_s: float
    lives: int
    figures: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    story_at: float = 0.0
    """When the story began."""
    settle_s: float = 0.0
    """Seconds from the end of the last fault until the region was at rest, or the run ended."""

    @property
    def ok(self) -> bool:
        """Return whether no rule was broken."""
        return not self.violations


class SimulatedRegion:
    """All parts of one run."""

    def __init__(
        self, scenario: Scenario, seed: int, on_progress: OnProgress = lambda _: None
    ) -> None:
        """Build the region; `run` starts it."""
        self._on_progress = on_progress
        self.scenario, self.seed = scenario, seed
        name = f"{scenario.name} {seed}"
        self.timeline = Timeline()
        self.history = History(self.timeline)
        self.machine_context = MachineContext(self.timeline, self.history)
        self.network = SimulatedNetwork(self.timeline)
        self.places = topology.places(scenario.shape)
        self.machines = {place.machine: self._machine(place, name) for place in self.places}
        self.clients = Clients(self.timeline, self.history)
        self.disks = dict[str, SimulatedDisk]()
        self.roles = self._processes(name)
        """The processes of the control plane, if there are several."""
        self.plane = self.roles or self._plane(name)
        self.intent_checker = IntentChecker(self)
        self.checker = Checker(self)
        self.applications = Applications(self.checker, scenario.work.replicas)
        self.active_faults: dict[tuple[str, str], int] = {}
        """(Machine, kind) → how many faults of the kind are active on it."""
        self.newest_store_fault: dict[str, int] = {}
        """Store → number of the fault that began last."""
        self.release_counts: dict[int, int] = {}
        """Number of a job → how many images its owner released."""
        self.samples: list[Sample] = []
        self.policies: dict[str, Autoscale] = {}
        """Job → the policy in its job file, for jobs whose size follows their load (`load.py`)."""
        self.externally_written: frozenset[str] = frozenset()
        """Jobs whose image and size are written by other clients than their owners."""
        self.figures: dict[str, int] = {}
        """Further figures of the outcome."""
        self.more_unsettled: Callable[[], list[str]] = list
        """Returns further reasons why the region is not at rest."""
        self.rest = RestWatch(self)
        self.faults_end = 0.0
        self.story_at = 0.0
        self._connect()

    def _machine(self, place: MachinePlace, seed: str) -> SimulatedMachine:
        """Return a machine of the region, connected to its network."""
        machine = SimulatedMachine(
            self.machine_context,
            place.machine,
            place.location(),
            seed,
            memory_bytes=self.scenario.shape.memory_gib << 30,
            cpus=self.scenario.shape.cpus,
        )
        self.network.connect(machine)
        return machine

    def _connect(self) -> None:
        """Connect the control plane with its callers, and all parts with the checkers."""
        if self.scenario.work.overgranted:
            self.plane.overgrant = Overgrant.ALLOW
        self.plane.controller_caller = self.applications.caller
        self.clients.observer = self.plane.observer = self.machine_context.observer = self.checker
        self.clients.report_late = self.checker.check_late_answer
        self.plane.on_serving = [self.clients.serve, self._start_loss_check]
        if self.roles is not None:
            from vm_lab.region.role_checker import RoleChecker

            RoleChecker(self, self.roles)

    def _processes(self, name: str) -> RegionProcesses | None:
        """Return the control plane as several processes on etcd; None without [roles]."""
        counts = self.scenario.roles
        if counts is None:
            return None
        from vm_lab.region.etcd import SimulatedEtcd
        from vm_lab.region.processes import RegionProcesses

        etcd = self.disks["main"] = SimulatedEtcd(self.timeline, name)
        return RegionProcesses(
            timeline=self.timeline,
            history=self.history,
            network=self.network,
            etcd=etcd,
            machines=self.machines,
            settings=self._settings(),
            seed=name,
            counts=counts,
        )

    def _plane(self, name: str) -> Plane:
        """Return the control plane as one process with its stores."""
        own = sorted({p.datacenter for p in self.places})[: self.scenario.shape.own_stores]
        self.disks |= {disk: SimulatedDisk(disk, name) for disk in ("main", *own)}
        return Plane(
            timeline=self.timeline,
            history=self.history,
            network=self.network,
            disks=self.disks,
            machines=self.machines,
            settings=self._settings(),
            seed=name,
        )

    def _settings(self) -> SchedulerSettings:
        return msgspec.convert(self.scenario.settings, SchedulerSettings)

    def stores_faultless(self, for_s: float) -> bool:
        """Return whether no store has had a fault for `for_s` seconds."""
        return all(disk.is_faultless(self.timeline.now, for_s) for disk in self.disks.values())

    # -- the course of events

    def run(self, story: Sequence[Fault]) -> None:
        """Set up the region, run the story, end its faults, and wait until it is at rest."""
        self._set_up()
        self.timeline.at(1.0, self.rest.wait_ready, lambda: self._begin(story), SET_UP_S)
        self.timeline.at(0.0, self._sample)
        limit = SET_UP_S + (self.scenario.minutes + self.scenario.settle_minutes) * 60 + 600.0
        try:
            self.plane.run(limit)
        except Stuck as e:
            self.checker.violate("life", str(e))

    def _set_up(self) -> None:
        specs = topology.jobs(self.scenario, self.seed)
        specs = owners.with_update_policies(self.scenario, self.seed, specs)
        specs = topology.with_controllers(self.scenario, self.seed, specs, self.applications.add)
        specs = [replace(spec, autoscale=self.policies.get(spec.name)) for spec in specs]
        for spec in specs:
            self.plane.images.add(spec.image)
            self.machine_context.known_images.add(spec.image)
        for machine in self.machines.values():
            self.clients.join(machine.join_request())
        granted = topology.entitlements(self.scenario, specs, self.seed)
        self.machine_context.reboot_profiles = frozenset(
            e.host_profile for e in granted.values() if e.host_profile.startswith("boot")
        )
        self.plane.profile_keys = {e.host_profile: owners.PROFILE_KEYS for e in granted.values()}
        begin = 0.5 if self.roles is None else ELECTIONS_S
        self.timeline.at(begin, self._create_jobs, granted, specs)

    def _create_jobs(self, granted: dict[str, EntitlementSpec], specs: list[JobSpec]) -> None:
        for name, entitlement in granted.items():
            self.clients.put_entitlement(name, entitlement)
        interval_s = 0.0 if self.roles is None else JOB_INTERVAL_S
        for number, spec in enumerate(specs):
            self.timeline.after(0.4 + number * interval_s, self.clients.apply_job, spec)

    def _begin(self, story: Sequence[Fault]) -> None:
        """Schedule the events of the story; all jobs run now."""
        start = self.timeline.now
        self.history.note("the story begins")
        self.story_at = start
        idle_s = 0.0 if self.scenario.faults else self.scenario.minutes * 60
        self.faults_end = start + max((f.at + f.seconds for f in story), default=idle_s)
        for number, fault in enumerate(story):
            self.timeline.at(start + fault.at, inject, self, fault, number)
        self.timeline.at(self.faults_end, self._end_faults)

    def _end_faults(self) -> None:
        """End the remaining faults; from here on the region must come to rest."""
        self.history.note("the story ends")
        for machine in self.machines.values():
            machine.power_on()
            machine.reach_changed()
        within_s = self.scenario.settle_minutes * 60
        self.timeline.after(1.0, self.rest.wait_rested, self.plane.finish, within_s)

    # -- lost writes

    def _start_loss_check(self, life: PlaneLife) -> None:
        if life.number > 1:
            life.loop.create_task(self._check_losses(life))

    async def _check_losses(self, life: PlaneLife) -> None:
        serving = life.control_plane
        if serving is not None:
            for text in await quiescence.lost_writes(self, serving):
                self.checker.violate("lost-write", text)

    # -- figures

    def _sample(self) -> None:
        wanted = sum(
            o.granted.tasks for o in self.clients.jobs.values() if o.granted and o.requested
        )
        copies = sum(len(where) for where in self.checker.copies.values())
        listed = sum(len(tasks) for tasks in self.checker.budgets.endpoints.values())
        self.samples.append(Sample(self.timeline.now, wanted, copies, listed))
        self._on_progress(self.timeline.now)
        self.timeline.after(5.0, self._sample)


def run_seed(
    scenario: Scenario,
    seed: int,
    story: Sequence[Fault] | None = None,
    on_progress: OnProgress = lambda _: None,
) -> SeedOutcome:
    """Run one seed and return its outcome; `story` replaces the story that the seed draws.

    The control plane's log is disabled meanwhile: it would report the intended faults. The history
    has the relevant events.
    """
    scenario = scenario_of_seed(scenario, seed)
    events = draw(scenario, seed) if story is None else check_targets(story, scenario)
    with _without_logs():
        began = time.process_time()
        region = SimulatedRegion(scenario, seed, on_progress)
        if scenario.work.delivered:
            from vm_lab.region.delivery import DeliveredJobs

            DeliveredJobs(region, scenario.work.delivered)
        if scenario.work.best_effort:
            from vm_lab.region.best_effort import BestEffortWork

            BestEffortWork(region, scenario.work.best_effort)
        region.run(events)
        cpu_s = time.process_time() - began
    return SeedOutcome(
        scenario=scenario.name,
        seed=seed,
        story=events,
        violations=region.checker.violations,
        digest=region.history.digest(),
        events=region.timeline.events,
        lines=len(region.history),
        virtual_s=region.timeline.now,
        cpu_s=cpu_s,
        lives=region.plane.lives,
        figures=_figures(region, events),
        samples=region.samples,
        refused=region.clients.refused,
        story_at=region.story_at,
        settle_s=max(0.0, (region.rest.rested_at or region.timeline.now) - region.faults_end),
    )


@contextmanager
def _without_logs() -> Iterator[None]:
    """Disable logs, and collect garbage less often: the objects of a run stay until its end."""
    thresholds, disabled = gc.get_threshold(), logging.root.manager.disable
    gc.set_threshold(200_000, 20, 50)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        gc.set_threshold(*thresholds)


def _figures(region: SimulatedRegion, story: Sequence[Fault]) -> dict[str, int]:
    kinds = Counter(fault.kind for fault in story)
    figures = {kind: kinds[kind] for kind in KINDS if kinds[kind]}
    figures |= region.figures
    figures["calls to agents"] = region.network.calls
    figures["transactions"] = sum(disk.transactions for disk in region.disks.values())
    figures["largest value"] = max(disk.largest_value for disk in region.disks.values())
    figures["largest transaction"] = max(d.largest_transaction for d in region.disks.values())
    return figures
