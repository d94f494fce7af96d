"""Converts a region's model to the placement language, in which people can read and change it.

Objects are tasks, containers are machines. `may` lists the machines that the allocator permits. To
keep a job as even as it is, each bin is limited to the most tasks that the job has in one bin now.
Power is only described as text, because the draw of a task depends on its machine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from control_plane.rebalancer.core.language import (
    SOLVED_MAX,
    Above,
    AtMostIn,
    EvenUse,
    FitsIn,
    ModelContainer,
    ModelGoal,
    ModelObject,
    MovedObjects,
    PlacementModel,
    describe_model,
)
from control_plane.rebalancer.core.model import (
    DIMENSIONS,
    FLOAT,
    INT,
    ROOM,
    BinRule,
    RegionModel,
    unpacked,
)
from wire.errors import TooLarge

_CLAIMED = "claimed "
"""Prefix of a room's name: claims and use are different dimensions."""
_MICRO = 1e6
_PAIRS_MAX = 2_000_000
"""The most tasks times machines: each task lists its permitted machines, 10 bytes each."""


def describe_region(model: RegionModel) -> list[str]:
    """Return lines that describe a region's model, its constraints and its goals."""
    power = [
        f"Goal: less of {model.weights.power:g} x power that {place.name} draws above "
        f"{place.limit_w:.0f} W, in machines at full load."
        for place in model.places
    ]
    return [*describe_model(placement_model_of(model)), *power]


def placement_model_of(model: RegionModel) -> PlacementModel:
    """Return a region's model in the language; raises `TooLarge` for large regions."""
    columns = model.tasks
    tasks, pairs = len(columns.can_move), len(columns.can_move) * len(model.machines)
    if tasks > SOLVED_MAX or pairs > _PAIRS_MAX:
        raise TooLarge(
            f"{tasks} tasks on {len(model.machines)} machines are too many for a description: "
            f"the maximum is {SOLVED_MAX} tasks and {_PAIRS_MAX} pairs of both",
            hint="twinectl rebalance plan shows its size",
        )
    claimed = [Counter[str]() for _ in model.machines]
    objects = _objects(model, claimed)
    containers = [_container(model, m, claimed[m]) for m in range(len(model.machines))]
    known = {name for c in containers for name in c.offers}
    rooms = [_CLAIMED + name for name in ("cpu", *ROOM)]
    job, where = unpacked(INT, columns.job), unpacked(INT, columns.machine)
    return PlacementModel(
        objects=objects,
        containers=containers,
        constraints=[
            *(FitsIn(dimension=name) for name in rooms if name in known),
            *_limits(model, job, where),
        ],
        goals=list(_goals(model)) if known else [],
    )


def _objects(model: RegionModel, claimed: list[Counter[str]]) -> list[ModelObject]:
    """Return the tasks as objects, and add what they claim to `claimed`, by machine."""
    columns, dimensions = model.tasks, len(DIMENSIONS)
    job, index, kind, where = (
        unpacked(INT, column)
        for column in (columns.job, columns.index, columns.kind, columns.machine)
    )
    load, price = unpacked(FLOAT, columns.load), unpacked(FLOAT, columns.price)
    objects, allowed = [], _allowed(model)
    for t, at in enumerate(where):
        needs = _claims(model, kind[t], at)
        claimed[at].update(needs)
        needs |= dict(zip(DIMENSIONS, load[t * dimensions : (t + 1) * dimensions], strict=True))
        may = [model.machines[at]]
        if columns.can_move[t]:
            may = allowed[model.pool_of[at], model.kinds[kind[t]].admission] or may
            for rule in model.rules[job[t]]:
                may = may if rule.even else _same_bin(model, rule, at, may)
        objects.append(
            ModelObject(
                name=f"{model.jobs[job[t]]}-{index[t]}",
                at=model.machines[at],
                group=model.jobs[job[t]],
                needs={name: amount for name, amount in needs.items() if amount},
                move_price=price[t],
                may=may,
            )
        )
    return objects


def _allowed(model: RegionModel) -> dict[tuple[int, int], list[str]]:
    """Return the machines that take tasks of an entitlement with an admission."""
    return {
        (pool, a): [
            name
            for m, name in enumerate(model.machines)
            if mask[m] and model.is_open[m] and model.pool_of[m] == pool
        ]
        for pool in range(len(model.pools))
        for a, mask in enumerate(model.admissions)
    }


def _same_bin(model: RegionModel, rule: BinRule, at: int, names: list[str]) -> list[str]:
    """Return the given machines in one bin: a rule that is not even keeps tasks there."""
    bins = range(len(model.machines)) if rule.property < 0 else model.bins[rule.property]
    bin_of = {name: bins[m] for m, name in enumerate(model.machines)}
    return [name for name in names if bin_of[name] == bins[at]]


def _claims(model: RegionModel, kind: int, at: int) -> dict[str, float]:
    """Return what a task of a kind claims on a machine, by dimension."""
    known, (per_rru, per_cpu) = model.kinds[kind], model.cpu_grains[at]
    cpu = (known.micro_rru * per_rru + known.micro_cpus * per_cpu) / (per_rru * _MICRO)
    return {_CLAIMED + name: float(n) for name, n in zip(ROOM, known.needs, strict=True)} | {
        f"{_CLAIMED}cpu": cpu
    }


def _container(model: RegionModel, m: int, claimed: Counter[str]) -> ModelContainer:
    room = {_CLAIMED + name: float(n) for name, n in zip(ROOM, model.room[m], strict=True)}
    room[f"{_CLAIMED}cpu"] = model.room_cpu[m] / (model.cpu_grains[m][0] * _MICRO)
    offers = {name: left + claimed[name] for name, left in room.items()}
    sizes = dict(zip(DIMENSIONS, model.sizes[m], strict=True))
    scopes = {"entitlement": model.pools[model.pool_of[m]]}
    scopes |= {f"bins {n}": str(bins[m]) for n, bins in enumerate(model.bins)}
    return ModelContainer(name=model.machines[m], offers=offers | sizes, scopes=scopes)


def _limits(model: RegionModel, job: list[int], where: list[int]) -> Iterator[AtMostIn]:
    """Yield for each property the most tasks that each job may have in one bin."""
    of_scope: defaultdict[str, dict[str, int]] = defaultdict(dict)
    tasks = defaultdict[int, list[int]](list)
    for j, m in zip(job, where, strict=True):
        tasks[j].append(m)
    for j, rules in enumerate(model.rules):
        for rule in rules:
            scope = "" if rule.property < 0 else f"bins {rule.property}"
            of_scope[scope][model.jobs[j]] = _most_in_bin(model, rule, tasks[j])
    for scope, limits in sorted(of_scope.items()):
        yield AtMostIn(scope=scope, by_group={name: most for name, most in limits.items() if most})


def _most_in_bin(model: RegionModel, rule: BinRule, machines: list[int]) -> int:
    """Return the most tasks in one bin by a rule, for the machines of a job's tasks."""
    bins = (m if rule.property < 0 else model.bins[rule.property][m] for m in machines)
    return max(Counter(bins).values(), default=0)


def _goals(model: RegionModel) -> Iterator[ModelGoal]:
    weights = model.weights
    for name in DIMENSIONS:
        yield EvenUse(dimension=name, weight=weights.balance, tolerance=weights.tolerance)
    for d, name in enumerate(DIMENSIONS):
        size = sum(sizes[d] for sizes in model.sizes) / max(1, len(model.sizes))
        if size:
            yield Above(dimension=name, weight=weights.hot / size, share=weights.hot_from)
    yield MovedObjects(each=weights.move)
