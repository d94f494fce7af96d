"""How full do machines get with mixes that are hard to pack: GPU jobs, and jobs with much memory?

    python -m tests.bench.traces [--machines 1200] [--json]

Two mixes are generated, each on one MSB, on three and on twelve. Jobs come in one order and exceed
the room by a tenth. Five packers place them:

    twine       the product's planner as it is by default: even over MSBs
    free        the same from the free pool, by an entitlement that holds no machine yet
    tight       as twine with `fit = "tight"`
    best_fit    each task to the machine with fewest GPUs left, then least CPU and memory (as parts
                of the largest machine's), that will do
    first_fit   each task to the first machine that will do

The figures of each are the claimed share of the scarce resource (GPUs, or memory) at the end, and
at the first task without room. `spread` is the largest difference between two MSBs in tasks of one
job that was placed whole while half of it was free. The last two packers know no MSBs and store
nothing; they are baselines for quality, not for speed. `small` compares with the largest possible
placement (HiGHS), or with a bound of it where that was not `proved` in time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.api import Location
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.api.policy import Fit
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import Capacity, Place

GIB = 1 << 30
POOL = "e"
SOLVE_S = 10.0
_MORE = 1.1
"""Demand of the jobs for the scarce resource, as a multiple of the capacity."""


@dataclass(frozen=True)
class Kind:
    """A kind of machine, and its share in percent of all machines."""

    name: str
    share: int
    cpus: int
    memory_gib: int
    gpus: int = 0

    @property
    def capacity(self) -> Capacity:
        """Capacity of a machine."""
        memory = self.memory_gib * GIB
        return Capacity(self.name, float(self.cpus), float(self.cpus), memory, self.gpus)


@dataclass(frozen=True)
class Mix:
    """Machines, and a sequence of jobs for them."""

    name: str
    kinds: tuple[Kind, ...]
    scarce: str
    """`gpus` or `memory`: the counted resource."""


MIXES = (
    Mix(
        "gpu",
        (
            Kind("gpu8", 30, 96, 768, 8),
            Kind("gpu2", 30, 48, 256, 2),
            Kind("web", 40, 64, 256),
        ),
        "gpus",
    ),
    Mix(
        "memory",
        (Kind("small", 50, 64, 128), Kind("large", 30, 64, 512), Kind("huge", 20, 64, 2048)),
        "memory",
    ),
)
Job = tuple[Demand, int]
"""Claim of one task, and the number of tasks."""


def a_job(mix: Mix, chance: random.Random) -> Job:
    """Return a job of a mix: most are small, a few have dozens of tasks."""
    tasks = chance.choice((1, 1, 1, 2, 3, 6, 12, 24))
    if mix.name == "gpu" and chance.random() < 0.25:
        gpus = chance.choice((0.5, 1, 1, 1, 2, 4, 8))
        tasks = min(tasks, int(16 / gpus))  # training is gangs of a machine or two
        cpus = max(1, round(gpus * chance.choice((4, 6, 8, 11))))
        return Demand(round(gpus * chance.choice((16, 32, 64)) * GIB), cpus, gpus=gpus), tasks
    cpus = chance.choice((1, 2, 4, 8))
    if mix.name == "gpu":
        return Demand(cpus * chance.choice((2, 4)) * GIB, cpus), tasks
    return Demand(round(cpus * min(chance.lognormvariate(2.0, 1.4), 200) * GIB), cpus), tasks


def jobs_of(mix: Mix, machines: Sequence[Capacity], chance: random.Random) -> list[Job]:
    """Return jobs that want `_MORE` of the scarce resource, and the matching amount of the rest."""
    limit, wanted = _MORE * sum(_scarce(mix, capacity) for capacity in machines), 0.0
    cores, room = 0.0, sum(capacity.cpus for capacity in machines)
    found: list[Job] = []
    while wanted < limit:
        demand, tasks = a_job(mix, chance)
        plain = mix.scarce == "gpus" and not demand.gpus
        if plain and cores > 0.6 * room:  # or tasks without GPUs would fill everything
            continue
        cores += demand.cpus * tasks if plain else 0
        wanted += tasks * (demand.gpus if mix.scarce == "gpus" else demand.memory_bytes)
        found.append((demand, tasks))
    return found


def _scarce(mix: Mix, capacity: Capacity) -> float:
    return capacity.gpus if mix.scarce == "gpus" else capacity.memory_bytes


def machines_of(mix: Mix, count: int) -> list[Capacity]:
    """Return machines of all kinds, mixed, the same for each multiple of twelve."""
    kinds = [kind.capacity for kind in mix.kinds]
    shares = [kind.share for kind in mix.kinds]
    return random.Random(f"{mix.name} machines").choices(kinds, shares, k=count)


@dataclass
class Outcome:
    """The result of a packer on a mix."""

    claimed: float = 0.0
    first_failure: float | None = None
    """Claimed share when the first task found no room."""
    spread: int = 0

    def failed(self) -> None:
        """Record that a task found no room."""
        if self.first_failure is None:
            self.first_failure = self.claimed


def by_twine(
    mix: Mix,
    machines: Sequence[Capacity],
    msbs: int,
    jobs: Sequence[Job],
    fit: Fit,
    pool: str = POOL,
) -> Outcome:
    """Place the jobs by the product's planner, in an entitlement that holds or takes machines."""
    index, outcome = RegionIndex(), Outcome()
    scarce_units = sum(_scarce(mix, capacity) for capacity in machines)
    for number, capacity in enumerate(machines):
        place = Place.of(Location(msb=f"msb{number % msbs}", rack=f"rack{number // msbs // 20}"))
        index.put(f"m{number}", capacity, place, pool, "")
    for number, (demand, tasks) in enumerate(jobs):
        request = Request(f"job{number}", POOL, (Group(demand, tuple(range(tasks))),), fit=fit)
        made = plan(index, request, Allowance(machines=0 if pool == POOL else None))
        if index.reserve(made.change):
            raise SystemExit("a plan without any disturbance was refused")
        index.settle(made.change)
        outcome.claimed += (tasks - len(made.unplaced)) * _wants(mix, demand)
        if made.unplaced:
            outcome.failed()
        elif outcome.claimed <= scarce_units / 2:
            per_msb = Counter(claim.machine.place.msb for claim in made.change.claims)
            least = min(per_msb.values()) if len(per_msb) == msbs else 0
            outcome.spread = max(outcome.spread, max(per_msb.values()) - least)
    return outcome


def _wants(mix: Mix, demand: Demand) -> float:
    return demand.gpus if mix.scarce == "gpus" else demand.memory_bytes


def by_fit(mix: Mix, machines: Sequence[Capacity], jobs: Sequence[Job], *, best: bool) -> Outcome:
    """Place the jobs task by task on the best machine that will do, or on the first one."""
    outcome = Outcome()
    whole = np.array([(m.cpus, m.memory_bytes, m.gpus) for m in machines], dtype=float)
    largest = whole[:, :2].max(axis=0)
    free: NDArray[np.float64] = whole.copy()
    for demand, tasks in jobs:
        wanted = np.array((demand.cpus, demand.memory_bytes, demand.gpus), dtype=float)
        for _ in range(tasks):
            fits = np.flatnonzero((free >= wanted).all(axis=1))
            if not fits.size:
                outcome.failed()
                break
            at = fits[0]
            if best:
                left = free[fits] - wanted
                rest = (left[:, :2] / largest).sum(axis=1)
                at = fits[np.lexsort((rest, left[:, 2]))[0]]
            free[at] -= wanted
            outcome.claimed += _wants(mix, demand)
    return outcome


def at_best(mix: Mix, machines: Sequence[Capacity], jobs: Sequence[Job]) -> tuple[float, bool]:
    """Return the largest possible claim of the scarce resource, and whether it is proved."""
    import highspy  # 29 MB that only this needs

    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("time_limit", SOLVE_S)
    rooms: list[list[dict[int, float]]] = [[{}, {}, {}] for _ in machines]
    for demand, tasks in jobs:
        own: dict[int, float] = {}
        for at, capacity in enumerate(machines):
            needs = (demand.cpus, demand.memory_bytes / GIB, demand.gpus)
            has = (capacity.cpus, capacity.memory_bytes / GIB, capacity.gpus)
            if any(need > scarce_units for need, scarce_units in zip(needs, has, strict=True)):
                continue
            model.addCol(-_wants(mix, demand), 0, tasks, 0, [], [])
            column = model.getNumCol() - 1
            model.changeColIntegrality(column, highspy.HighsVarType.kInteger)
            own[column] = 1.0
            for room, need in zip(rooms[at], needs, strict=True):
                room[column] = need
        model.addRow(0, tasks, len(own), list(own), list(own.values()))
    for capacity, room in zip(machines, rooms, strict=True):
        has = (capacity.cpus, capacity.memory_bytes / GIB, capacity.gpus)
        for scarce_units, terms in zip(has, room, strict=True):
            model.addRow(0, scarce_units, len(terms), list(terms), list(terms.values()))
    model.run()
    proved = model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    bound = max(model.getInfo().mip_dual_bound, -sum(_scarce(mix, m) for m in machines))
    return -(model.getInfo().objective_function_value if proved else bound), proved


def outcomes(
    mix: Mix, machines: Sequence[Capacity], msbs: int, jobs: Sequence[Job]
) -> Iterator[tuple[str, Outcome]]:
    """Yield the result of each packer."""
    yield "twine", by_twine(mix, machines, msbs, jobs, Fit.EVEN)
    yield "free", by_twine(mix, machines, msbs, jobs, Fit.EVEN, FREE)
    yield "tight", by_twine(mix, machines, msbs, jobs, Fit.TIGHT)
    yield "best_fit", by_fit(mix, machines, jobs, best=True)
    yield "first_fit", by_fit(mix, machines, jobs, best=False)


def measured(count: int, seed: int) -> dict[str, Any]:
    """Return all figures as shares of the machines' capacity."""
    found: dict[str, Any] = {"machines": count}
    for mix in MIXES:
        machines = machines_of(mix, count)
        scarce_units = sum(_scarce(mix, capacity) for capacity in machines)
        jobs = jobs_of(mix, machines, random.Random(f"{seed} {mix.name}"))
        for msbs in (1, 3, 12):
            case: dict[str, Any] = {"jobs": len(jobs)}
            for name, outcome in outcomes(mix, machines, msbs, jobs):
                case[f"{name}_share"] = round(outcome.claimed / scarce_units, 4)
                first = outcome.claimed if outcome.first_failure is None else outcome.first_failure
                case[f"{name}_first_failure"] = round(first / scarce_units, 4)
                if name in ("twine", "free", "tight"):
                    case[f"{name}_spread"] = outcome.spread
            best = case["best_fit_share"], case["best_fit_first_failure"]
            case["points_below_best_fit"] = round(100 * (best[0] - case["twine_share"]), 2)
            case["free_points_below_best_fit"] = round(100 * (best[0] - case["free_share"]), 2)
            case["first_failure_to_best_fit"] = round(case["twine_first_failure"] / best[1], 3)
            found[f"{mix.name}_{msbs}_msb"] = case
        found[f"{mix.name}_small"] = _small(mix, seed)
    return found


def _small(mix: Mix, seed: int) -> dict[str, Any]:
    """Compare with the optimum where it can be found: six machines, three in each of two MSBs.

    The optimum and the baselines spread nothing; `twine_1_msb_share` is without MSBs to spread
    over.
    """
    machines = machines_of(mix, 6)
    scarce_units = sum(_scarce(mix, capacity) for capacity in machines)
    jobs = jobs_of(mix, machines, random.Random(f"{seed} small {mix.name}"))
    optimum, proved = at_best(mix, machines, jobs)
    shares = {
        f"{name}_share": round(outcome.claimed / scarce_units, 4)
        for name, outcome in outcomes(mix, machines, 2, jobs)
    }
    together = by_twine(mix, machines, 1, jobs, Fit.EVEN).claimed
    shares["twine_1_msb_share"] = round(together / scarce_units, 4)
    return {"optimum_share": round(optimum / scarce_units, 4), "proved": proved, **shares}


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", type=int, default=1_200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measured(options.machines, options.seed)
    if options.json:
        print(json.dumps(result))
        return
    for case, figures in result.items():
        print(f"{case}:" if isinstance(figures, dict) else f"{case} {figures}")
        for name, value in figures.items() if isinstance(figures, dict) else ():
            print(f"  {name:28} {value}")


if __name__ == "__main__":
    main()
