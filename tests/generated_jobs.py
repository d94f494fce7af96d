"""Entitlements and jobs of a made-up region, with the published distributions of sizes.

The 50 largest services use about 70 % of capacity (Figure 9), the 54 largest of many
entitlements 70 % of theirs (Figure 22), the largest has 15,000-60,000 of a million machines;
a job has 36 tasks in the mean and 15,000 at most (§6.1).
"""

from __future__ import annotations

import bisect
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from msgspec.structs import replace

from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.machines import Hardware, Loan, MachineRecord
from vm_lab.region.generator import BY_NAME, GIB, HardwareType, Rack

LARGEST_JOB = 15_000
MEAN_TASKS = 36
_HEAD = 54
_HEAD_SHARE = 0.7
_KNEE = 4.9
"""Flattens the head of the power law, so that the largest has about 6 % of all."""
_USABLE = 0.9
"""Share of a machine's memory for tasks; the rest is for the kernel and the agent."""
_MANY = 10_000
"""Number of jobs from which on one has the size `LARGEST_JOB`."""
_TAIL = 0.715
"""Exponent of job sizes: from 1 to 15,000 their mean is then 36."""


@dataclass(frozen=True, slots=True)
class Service:
    """A kind of service that an entitlement is for."""

    name: str
    types: tuple[str, ...]
    profile: str
    weight: float
    share: tuple[float, float]
    """Share of the CPUs of its smallest machine that one task needs, from and to."""
    memory: tuple[float, float]
    """Share of that machine's memory, from and to."""


SERVICES = (
    Service("web", ("web-",), "web", 45, (0.4, 0.9), (0.3, 0.8)),
    Service("cache", ("cache-",), "cache", 8, (0.1, 0.45), (0.4, 0.9)),
    Service("batch", ("web-", "compute-"), "batch", 25, (0.1, 0.3), (0.05, 0.3)),
    Service("stream", ("compute-",), "base", 10, (0.1, 0.5), (0.1, 0.5)),
    Service("storage", ("storage-",), "base", 6, (0.3, 0.9), (0.3, 0.8)),
    Service("inference", ("inference-",), "base", 2, (0.3, 0.45), (0.2, 0.45)),
    Service("training", ("training-",), "base", 2, (0.5, 0.9), (0.3, 0.9)),
)
OFF_PEAK = {"web": (0.75, 0.15), "cache": (0.85, 0.1), "inference": (0.75, 0.15)}
"""Service with a daily load → share of its machines with tasks, and share given back, off-peak. A
quarter of the web tier is freed off-peak (§5.1)."""
ALL_DAY = (0.87, 0.05)
"""The same two shares for all other services, at any time."""
LENT_OFF_PEAK = 0.5
"""Share of the machines without tasks, and not given back, that are lent off-peak."""
_UNITS = ("ads/ranking", "ads/delivery", "feed", "video/live", "video/vod", "messaging", "infra")


@dataclass(frozen=True, slots=True)
class GeneratedJob:
    """A job as an allocator sees it: a number of tasks, and the demand of each."""

    name: str
    entitlement: str
    tasks: int
    cpus: float
    rru: float
    memory_bytes: int
    gpus: int = 0


def make_entitlements(
    count: int = 3000, machines: int = 700_000, seed: int = 1
) -> list[EntitlementRecord]:
    """Return entitlements, largest first, whose quotas add up to `machines`."""
    chance = random.Random(f"{seed} entitlements")
    weights = _power_law(count)
    scale = machines / sum(weights)
    due = list(accumulate(weight * scale for weight in weights))
    ends = [max(i + 1, round(end)) for i, end in enumerate(due)]  # none is empty
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return [
        _entitlement(number, max(1, size), chance)
        for number, size in enumerate(sorted(sizes, reverse=True))
    ]


def service_of(entitlement: EntitlementRecord) -> Service:
    """Return what a generated entitlement is for."""
    return next(s for s in SERVICES if entitlement.name.startswith(f"{s.name}-"))


def assigned(
    machines: Iterable[MachineRecord],
    racks: Iterable[Rack],
    entitlements: Sequence[EntitlementRecord],
    seed: int = 1,
) -> Iterator[MachineRecord]:
    """Yield the machines, assigned to the entitlements as far as their types allow.

    An entitlement gets its quota from each of its types in proportion to their numbers, spread over
    the region. Other machines stay free. `racks` are the racks of the machines.
    """
    chance = random.Random(f"{seed} assigned")
    supply = Counter[str]()
    for rack in racks:
        supply[rack.kind.name] += rack.size
    owners: dict[str, list[str]] = {kind: [] for kind in supply}
    for entitlement in entitlements:
        types = [kind for kind in entitlement.spec.machine_types if supply[kind]]
        total = sum(supply[kind] for kind in types)
        left = entitlement.spec.machines or 0
        for kind in types:
            part = min(
                round((entitlement.spec.machines or 0) * supply[kind] / total),
                left,
                supply[kind] - len(owners[kind]),
            )
            owners[kind] += [entitlement.name] * part
            left -= part
        for kind in types:  # the rest, after rounding and exhausted types
            part = min(left, supply[kind] - len(owners[kind]))
            owners[kind] += [entitlement.name] * part
            left -= part
    for kind, names in owners.items():
        names += [""] * (supply[kind] - len(names))
        chance.shuffle(names)
    for machine in machines:
        owner = owners[machine.machine_type].pop()
        yield _assign(machine, owner) if owner else machine


def off_peak(
    machines: Iterable[MachineRecord], entitlements: Sequence[EntitlementRecord], seed: int = 1
) -> Iterator[tuple[MachineRecord, bool]]:
    """Yield the machines at an hour with few users, with whether each has tasks.

    Machines that services do not need are given back or idle, in the shares of `OFF_PEAK`. The
    share `LENT_OFF_PEAK` of the idle ones is lent to batch work. With 70 % of the machines granted,
    55 % are in guaranteed use and 45 % are opportunistic: the paper's split (§6.3). The paper does
    not give the sizes of its parts.
    """
    chance = random.Random(f"{seed} off-peak")
    known = {e.name: service_of(e) for e in entitlements}
    borrowers = [name for name, service in known.items() if service.name == "batch"]
    for record in machines:
        service = known.get(record.entitlement)
        if service is None:
            yield record, False
            continue
        used, returned = OFF_PEAK.get(service.name, ALL_DAY)
        drawn = chance.random()
        if drawn < used:
            yield record, True
        elif drawn < used + returned:
            yield replace(record, entitlement="", left_by=record.entitlement), False
        elif service.name != "batch" and chance.random() < LENT_OFF_PEAK:
            loan = Loan(donor=record.entitlement, since=0.0)
            yield replace(record, entitlement=chance.choice(borrowers), loan=loan), True
        else:
            yield record, False


def make_jobs(
    entitlements: Sequence[EntitlementRecord], seed: int = 1, fill: float = 0.6
) -> list[GeneratedJob]:
    """Return jobs that need about the share `fill` of the entitlements, in random order."""
    chance = random.Random(f"{seed} jobs")
    room = {e.name: _Room(e, fill, chance) for e in entitlements}
    names = list(room)
    weights = list(accumulate(room[name].tasks for name in names))
    count = max(1, round(weights[-1] / MEAN_TASKS))
    jobs = []
    most = max(part.tasks for part in room.values())
    for number, size in enumerate(_job_sizes(count)):
        tasks = min(size, most)  # a small region has no room for the largest
        for _ in range(16):
            name = names[bisect.bisect(weights, chance.random() * weights[-1], hi=len(names) - 1)]
            if room[name].tasks >= tasks:
                break
        else:
            name = max(names[:200], key=lambda n: room[n].tasks)
        room[name].tasks -= tasks
        jobs.append(room[name].job(f"{name}-j{number}", tasks, chance))
    chance.shuffle(jobs)
    return jobs


class _Room:
    """The remaining room of an entitlement for jobs, in tasks of its average size."""

    def __init__(self, entitlement: EntitlementRecord, fill: float, chance: random.Random) -> None:
        self.name = entitlement.name
        self.service = service_of(entitlement)
        kinds = [BY_NAME[name] for name in entitlement.spec.machine_types]
        self.smallest = min((kind.hardware for kind in kinds), key=lambda h: h.memory_bytes)
        self.cpus = min(kind.hardware.cpus for kind in kinds)
        low = chance.uniform(*self.service.share)
        self.shape = (low, chance.uniform(*self.service.memory))
        per_machine = max(1, int(1 / max(self.shape)))
        self.tasks = int((entitlement.spec.machines or 1) * fill * per_machine)

    def job(self, name: str, tasks: int, chance: random.Random) -> GeneratedJob:
        share, memory = (part * chance.uniform(0.7, 1) for part in self.shape)
        hardware: Hardware = self.smallest
        return GeneratedJob(
            name,
            self.name,
            tasks,
            cpus=round(self.cpus * share, 1),
            rru=round(hardware.rru * share, 2),
            memory_bytes=max(1, int(hardware.memory_bytes * _USABLE * memory / GIB)) * GIB,
            gpus=max(1, int(hardware.gpus * share)) if hardware.gpus else 0,
        )


def _entitlement(number: int, machines: int, chance: random.Random) -> EntitlementRecord:
    # the largest entitlements are for the largest services
    services = SERVICES[:1] if number == 0 else SERVICES[:5] if number < 20 else SERVICES
    (service,) = chance.choices(services, [s.weight for s in services])
    types = [kind for kind in BY_NAME.values() if kind.name.startswith(service.types)]
    if number and chance.random() < 0.2:  # some require one type
        types = [_commonest(types, chance)]
    return EntitlementRecord(
        name=f"{service.name}-{number:04}",
        spec=EntitlementSpec(
            machines=machines,
            machine_types=[kind.name for kind in types],
            host_profile=service.profile,
            business_unit=chance.choice(_UNITS),
            priority=chance.choice((300, 500, 500, 500, 800)),
        ),
    )


def _commonest(types: list[HardwareType], chance: random.Random) -> HardwareType:
    return chance.choices(types, [kind.share for kind in types])[0]


def _assign(machine: MachineRecord, entitlement: str) -> MachineRecord:
    return replace(machine, entitlement=entitlement, assignment_generation=1)


def _power_law(count: int) -> list[float]:
    """Return falling weights whose first 54 make 70 %, or 1/rank for a few."""
    low, high = 0.5, 6.0
    weights: list[float] = []
    for _ in range(40):
        exponent = (low + high) / 2 if count > 3 * _HEAD else 1.0
        weights = [(rank + _KNEE) ** -exponent for rank in range(count)]
        if sum(weights[:_HEAD]) < _HEAD_SHARE * sum(weights):
            low = exponent
        else:
            high = exponent
    return weights


def _job_sizes(count: int) -> list[int]:
    """Return job sizes, largest first: evenly spaced quantiles of a bounded Pareto law."""
    cut = 1 - LARGEST_JOB**-_TAIL
    sizes = [int((1 - cut * (1 - (i + 0.5) / count)) ** (-1 / _TAIL)) for i in range(count)]
    if count >= _MANY:
        sizes[0] = LARGEST_JOB
    return sizes
