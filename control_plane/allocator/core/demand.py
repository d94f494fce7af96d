"""The demand of a task: the resources that it claims, and its hard requirements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import floor

from msgspec.structs import replace

from agent.api.credentials import CONFIGURATION
from agent.api.own_init import CAPABILITY as OWN_INIT
from agent.api.own_init import NESTED
from agent.api.relaxations import Relaxation
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import Property
from control_plane.api.requirement_parser import parse
from control_plane.api.requirements import CAPABILITY, Because, Exists, In, Term, is_pair
from control_plane.broker.core.capacity import MICRO, Capacity, micro

_OF_RELAXATIONS = {
    Relaxation.OWN_INIT: Because(
        Exists(CAPABILITY + OWN_INIT), "its tasks have the relaxation own-init"
    ),
    Relaxation.NESTED: Because(Exists(CAPABILITY + NESTED), "its tasks have the relaxation nested"),
}
_OF_CONFIGURATION = Because(Exists(CAPABILITY + CONFIGURATION), "it has a configuration")
"""Requirement that is added to jobs with a configuration."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The resources that one task of a job claims on a machine, and its hard requirements."""

    memory_bytes: int = 0
    cpus: float = 0.0
    rru: float = 0.0
    gpus: float = 0
    network_mbps: int = 0
    disk_bytes: int = 0
    ports: tuple[str, ...] = ()
    requires: tuple[Term, ...] = ()
    micro_cpus: int = field(init=False, compare=False, hash=False, repr=False)
    micro_rru: int = field(init=False, compare=False, hash=False, repr=False)
    size: tuple[object, ...] = field(init=False, compare=False, hash=False, repr=False)
    """Equal for demands that fit the same machines; the names of ports do not matter."""

    def __post_init__(self) -> None:
        """Compute values that are read often."""
        object.__setattr__(self, "micro_cpus", micro(self.cpus))
        object.__setattr__(self, "micro_rru", micro(self.rru))
        size = (self.memory_bytes, self.cpus, self.rru, self.gpus, self.network_mbps)
        rest = (self.disk_bytes, len(self.ports), self.requires)
        object.__setattr__(self, "size", (*size, *rest))

    def cpu_on(self, capacity: Capacity) -> int:
        """Return the grains of CPU that the task claims on such a machine."""
        return self.micro_rru * capacity.per_rru + self.micro_cpus * capacity.per_cpu

    def is_no_less_than(self, other: Demand) -> bool:
        """Return whether a machine without room for `other` has none for this one either."""
        return (
            self.memory_bytes >= other.memory_bytes
            and self.rru >= other.rru
            and self.cpus >= other.cpus
            and self.gpus >= other.gpus
            and self.network_mbps >= other.network_mbps
            and self.disk_bytes >= other.disk_bytes
            and len(self.ports) >= len(other.ports)
            and (not other.requires or self.requires == other.requires)
        )


def demand_of(
    spec: JobSpec,
    datacenter: str | None = None,
    requires: Iterable[str] = (),
    region: str | None = None,
) -> Demand:
    """Return what one task of a job claims: its limits, less where it opted in to overcommit.

    CPUs of its own are claimed as they are, whatever else it may use.

    `datacenter` and `region` are where its entitlement is pinned to, `requires` what that requires.
    """
    pins = {Property.DATACENTER: datacenter, Property.REGION: region}
    cpu, memory = spec.overcommit.cpu, spec.overcommit.memory
    own = spec.resources.exclusive_cpus
    cpus = spec.limits.cpu_max_cores if spec.cpus is None else spec.cpus
    cpus, cpu = (float(own), 1.0) if own else (cpus, cpu)
    return Demand(
        memory_bytes=int(spec.limits.memory_max_bytes / memory),
        cpus=0.0 if spec.rru and not own else _shared(cpus or 0.0, cpu),
        rru=0.0 if own else _shared(spec.rru or 0.0, cpu),
        gpus=spec.gpus,
        network_mbps=spec.network_mbps,
        disk_bytes=spec.disk_bytes,
        ports=tuple(spec.ports),
        requires=tuple(
            sorted(_requirements(spec, pins, requires), key=lambda term: not is_pair(term))
        ),  # as it is read from the store
    )


def _shared(amount: float, overcommit: float) -> float:
    """Return the claim for an overcommitted amount, rounded down so that parts never exceed it."""
    return amount if overcommit == 1 else floor(micro(amount) / overcommit) / MICRO


def claiming_cpu(spec: JobSpec, default_cpus: float) -> JobSpec:
    """Return the specification with a claim of CPU, `default_cpus` if the job gives none."""
    if spec.cpus is not None or spec.limits.cpu_max_cores or spec.rru:
        return spec
    if spec.resources.exclusive_cpus:
        return spec
    return replace(spec, cpus=default_cpus)


def _requirements(
    spec: JobSpec, pins: Mapping[Property, str | None], requires: Iterable[str]
) -> Iterator[Term]:
    if spec.machine_types:
        yield In(Property.MACHINE_TYPE, frozenset(spec.machine_types))
    for request in spec.requires:
        yield (
            parse(request)
            if isinstance(request, str)
            else In(request.property, frozenset(request.values))
        )
    for level, pin in pins.items():
        if pin is not None:
            yield In(level, frozenset({pin}))
    yield from map(parse, requires)
    yield from (term for name, term in _OF_RELAXATIONS.items() if name in spec.relaxations)
    if spec.configuration:
        yield _OF_CONFIGURATION


def demand_for(spec: JobSpec, entitlement: EntitlementSpec | None) -> Demand:
    """Return the demand of a task, with the requirements and the place of its entitlement."""
    if entitlement is None:
        return demand_of(spec)
    return demand_of(spec, entitlement.datacenter, entitlement.requires, entitlement.region)
