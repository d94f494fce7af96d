"""The locations, entitlements and jobs of a simulated region: pure and seeded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from agent.api import Disconnect, DisconnectPolicy, Limits, Location
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.elastic import Elastic, Promise
from control_plane.api.jobs import ControllerRef, JobProbe, JobSpec, UpdatePolicy
from vm_lab.region.applications import CONTROLLER_KINDS
from vm_lab.region.machine import RESERVE_BYTES
from vm_lab.region.scenario import Scenario, Shape

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True)
class MachinePlace:
    """The location of one machine."""

    machine: str
    rack: str
    msb: str
    datacenter: str
    region: str = "sim"

    def location(self) -> Location:
        """Return it in the form that machines report."""
        return Location(
            region=self.region,
            datacenter=self.datacenter,
            msb=self.msb,
            row=f"row-{self.msb}",
            rack=self.rack,
        )

    def within(self, target: str) -> bool:
        """Return whether a fault of a target such as `rack:r1` or `region:` hits this machine."""
        domain, _, name = target.partition(":")
        return self.name_of(domain) == name

    def name_of(self, domain: str) -> str | None:
        """Return the name of a domain of this machine; None: it is in no domain of this kind."""
        return {
            "machine": self.machine,
            "rack": self.rack,
            "msb": self.msb,
            "datacenter": self.datacenter,
            "region": "",  # there is one, and targets do not name it
        }.get(domain)


def places(shape: Shape) -> list[MachinePlace]:
    """Return all machines, by name; racks, MSBs and data centers are dealt evenly."""
    width = len(str(shape.machines - 1))
    machines = []
    for number in range(shape.machines):
        rack = number % shape.racks
        msb = rack % shape.msbs
        datacenter = msb % shape.datacenters
        machines.append(
            MachinePlace(
                machine=f"m{number:0{width}}",
                rack=f"r{rack}",
                msb=f"b{msb}",
                datacenter=f"dc{datacenter + 1}",
                region=region_of(shape, datacenter),
            )
        )
    return machines


def region_of(shape: Shape, number: int) -> str:
    """Return the region of a data center; regions are dealt in turn."""
    return "sim" if shape.regions == 1 else f"sim{number % shape.regions + 1}"


def image(job: int, version: int) -> str:
    """Return the digest of a version of a job's image."""
    return f"sha256:{job + 1:04x}{version:04x}{'0' * 56}"


def jobs(scenario: Scenario, seed: int) -> list[JobSpec]:
    """Return the jobs at the start."""
    chance = random.Random(f"{scenario.name} {seed} jobs")
    work, specs = scenario.work, []
    for number in range(work.jobs):
        tasks = chance.randint(*work.tasks)
        memory = chance.randint(*work.memory_mib) * MIB
        cores = round(chance.uniform(*work.cpu_cores), 2)
        stop = chance.random() < work.stop_jobs
        specs.append(
            _with_disconnect_policy(
                JobSpec(
                    name=f"job{number}",
                    entitlement=f"ent{number % work.entitlements}",
                    tasks=tasks,
                    image=image(number, 0),
                    command=["/bin/serve", "${port:http}"],
                    ports=["http"],
                    probe=JobProbe(port="http"),
                    limits=Limits(memory_max_bytes=memory, cpu_max_cores=cores),
                    update=UpdatePolicy(
                        max_unavailable=0 if work.surge_tasks else max(1, tasks // 4),
                        surge=1 if work.surge_tasks else 0,
                        drain_s=chance.choice([0.0, 2.0, 5.0]),
                    ),
                ),
                stop=stop,
            )
        )
    return specs


def with_controllers(
    scenario: Scenario,
    seed: int,
    specs: list[JobSpec],
    add_controller: Callable[[str, str], ControllerRef],
) -> list[JobSpec]:
    """Return the jobs, some with a controller and a larger availability budget."""
    chance = random.Random(f"{scenario.name} {seed} controllers")
    kinds = scenario.work.controllers or CONTROLLER_KINDS
    changed = []
    for number, spec in enumerate(specs):
        if chance.random() < scenario.work.controlled:
            most = max(1, int(spec.tasks * scenario.work.controlled_away))
            spec = replace(
                spec,
                controller=add_controller(spec.name, kinds[(seed + number) % len(kinds)]),
                update=replace(spec.update, max_unavailable=most),
            )
        changed.append(spec)
    return changed


def _with_disconnect_policy(spec: JobSpec, *, stop: bool) -> JobSpec:
    """Return the job with its `disconnect` policy."""
    if not stop:
        return spec
    return replace(spec, disconnect=Disconnect(policy=DisconnectPolicy.STOP, after_s=30.0))


def _notice(number: int) -> Promise:
    return Promise.USUAL if number % 2 else Promise.QUICK


def usable_bytes(memory_bytes: int) -> int:
    """Return how much of a machine's memory tasks may have; the rest is its host's."""
    return memory_bytes - max(RESERVE_BYTES, memory_bytes // 10)


def entitlements(scenario: Scenario, specs: list[JobSpec], seed: int) -> dict[str, EntitlementSpec]:
    """Return entitlements with room for their jobs and for some growth."""
    chance = random.Random(f"{scenario.name} {seed} entitlements")
    shape, work = scenario.shape, scenario.work
    usable = usable_bytes(shape.memory_gib * GIB)
    made = {}
    for number in range(work.entitlements):
        name = f"ent{number}"
        own = [spec for spec in specs if spec.entitlement == name]
        memory = sum(spec.tasks * spec.limits.memory_max_bytes for spec in own) / usable
        cores = sum(spec.tasks * (spec.limits.cpu_max_cores or 1.0) for spec in own) / shape.cpus
        needed = max(2, round(max(memory, cores) * work.spare + 1))
        share = shape.machines // (1 if work.overgranted else work.entitlements)
        boots = chance.random() < work.reboot_profiles
        borrows = number >= work.entitlements - work.borrowers
        is_pinned = work.bound <= number < work.bound + work.pinned
        made[name] = EntitlementSpec(
            machines=0 if borrows else min(share, needed),
            datacenter=f"dc{shape.datacenters}" if number < work.bound else None,
            region=region_of(shape, number) if is_pinned else None,
            surge_tasks=work.surge_tasks or None,
            host_profile=f"boot{number}" if boots else f"soft{number}",
            elastic=Elastic(borrow=min(share, needed), notice=_notice(number)) if borrows else None,
        )
    return made
