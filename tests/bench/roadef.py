"""Google's machine reassignment problem (ROADEF/EURO challenge 2012), solved by the ReBalancer.

    python -m tests.bench.roadef [--json] [--seconds 300] FOLDER [NAME …]

FOLDER has `model_NAME.txt` and `assignment_NAME.txt`, as the challenge published them (set A is in
the folder `instances` of the public repository gturri/roadef2012). `beyond_best` compares with the
best results of the challenge's qualification. Without a folder, an instance of the same form is
generated (`generated`), for which nothing is published.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from control_plane.rebalancer.core.language import (
    Above,
    AtMostIn,
    FitsIn,
    InProportion,
    ModelContainer,
    ModelGoal,
    ModelObject,
    ModelRule,
    MoveDistance,
    MovedObjects,
    MovedOfGroup,
    NearGroup,
    PlacementModel,
    SpreadOver,
)
from control_plane.rebalancer.core.neighbourhoods import improved

BEST = {
    "a1_1": 44_306_501,
    "a1_2": 777_532_896,
    "a1_3": 583_005_717,
    "a1_4": 252_728_589,
    "a1_5": 727_578_309,
    "a2_1": 198,
    "a2_2": 816_523_983,
    "a2_3": 1_306_868_761,
    "a2_4": 1_681_353_943,
    "a2_5": 336_170_182,
}
"""The best sums of costs of the qualification, by instance of set A."""


def read_instance(text: str, assignment: str) -> PlacementModel:
    """Return an instance as a model; `text` and `assignment` are files of the challenge."""
    numbers = iter(map(int, text.split()))

    def some(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    resources = [some(2) for _ in range(next(numbers))]
    wide = len(resources)
    machines = next(numbers)
    rows = [(some(2), some(wide), some(wide), some(machines)) for _ in range(machines)]
    spread, needs = dict[str, int](), dict[str, list[str]]()
    for service in range(next(numbers)):
        least, count = some(2)
        spread[f"s{service}"] = least
        needs[f"s{service}"] = [f"s{other}" for other in some(count)]
    at = list(map(int, assignment.split()))
    objects = []
    for process in range(next(numbers)):
        service, *amounts, price = some(wide + 2)
        objects.append(
            ModelObject(
                name=f"p{process}",
                at=f"m{at[process]}",
                group=f"s{service}",
                needs={f"r{d}": float(amount) for d, amount in enumerate(amounts)},
                move_price=price,
            )
        )
    proportions = [some(4) for _ in range(next(numbers))]
    of_move, of_service, of_machine = some(3)
    constraints: list[ModelRule] = [
        FitsIn(dimension=f"r{d}", twice_while_moving=bool(twice))
        for d, (twice, _) in enumerate(resources)
    ]
    constraints.append(AtMostIn())
    constraints.append(SpreadOver(scope="location", bins=spread))
    constraints.append(
        NearGroup(scope="neighbourhood", needs={k: v for k, v in needs.items() if v})
    )
    goals: list[ModelGoal] = [
        Above(
            dimension=f"r{d}",
            weight=weight,
            level={f"m{m}": float(safe[d]) for m, (_, _, safe, _) in enumerate(rows)},
        )
        for d, (_, weight) in enumerate(resources)
    ]
    goals += [
        InProportion(dimension=f"r{one}", other=f"r{two}", ratio=ratio, weight=weight)
        for one, two, ratio, weight in proportions
    ]
    goals += [MovedObjects(weight=of_move), MovedOfGroup(weight=of_service)]
    prices = [[float(price) for price in row[3]] for row in rows]
    goals.append(MoveDistance(weight=of_machine, prices=prices))
    return PlacementModel(
        objects=objects,
        containers=[
            ModelContainer(
                name=f"m{m}",
                offers={f"r{d}": float(amount) for d, amount in enumerate(offered)},
                scopes={"neighbourhood": f"n{place[0]}", "location": f"l{place[1]}"},
            )
            for m, (place, offered, _, _) in enumerate(rows)
        ],
        constraints=constraints,
        goals=goals,
    )


def checked(model: PlacementModel, where: dict[str, str]) -> tuple[float, list[str]]:
    """Return the sum of costs of a placement and its violations; shares no code with the solver."""
    wrong: list[str] = []
    used: dict[tuple[str, str], float] = {}
    held: dict[tuple[str, str], float] = {}
    twice = {
        r.dimension for r in model.constraints if isinstance(r, FitsIn) and r.twice_while_moving
    }
    for o in model.objects:
        for d, amount in o.needs.items():
            used[where[o.name], d] = used.get((where[o.name], d), 0.0) + amount
            for at in {where[o.name], o.at} if d in twice else {where[o.name]}:
                held[at, d] = held.get((at, d), 0.0) + amount
    of = {c.name: c for c in model.containers}
    for (at, d), amount in held.items():
        if amount > of[at].offers[d]:
            wrong.append(f"{at} has {amount} of {d} in use, {of[at].offers[d]} are there")
    groups: dict[str, list[str]] = {}
    for o in model.objects:
        groups.setdefault(o.group, []).append(where[o.name])
    total = 0.0
    for rule in model.constraints:
        if isinstance(rule, AtMostIn):
            wrong += [f"{g} twice on one" for g, at in groups.items() if len(set(at)) < len(at)]
        elif isinstance(rule, SpreadOver):
            for g, least in rule.bins.items():
                bins = {of[at].scopes[rule.scope] for at in groups[g]}
                wrong += [f"{g} is in {len(bins)} of {least} bins"] if len(bins) < least else []
        elif isinstance(rule, NearGroup):
            bins_of = {g: {of[m].scopes[rule.scope] for m in at} for g, at in groups.items()}
            for g, others in rule.needs.items():
                wrong += [f"{g} without {o}" for o in others if bins_of[g] - bins_of[o]]
    away = [o for o in model.objects if where[o.name] != o.at]
    order = {c.name: m for m, c in enumerate(model.containers)}
    for goal in model.goals:
        for c in model.containers:
            if isinstance(goal, Above):
                over = used.get((c.name, goal.dimension), 0.0) - goal.level[c.name]
                total += goal.weight * max(0.0, over)
            elif isinstance(goal, InProportion):
                one, two = (
                    c.offers[d] - used.get((c.name, d), 0.0) for d in (goal.dimension, goal.other)
                )
                total += goal.weight * max(0.0, goal.ratio * one - two)
        if isinstance(goal, MovedObjects):
            total += goal.weight * sum(o.move_price for o in away)
        elif isinstance(goal, MovedOfGroup):
            moved = [sum(o.group == g for o in away) for g in {o.group for o in away}]
            total += goal.weight * max(moved, default=0)
        elif isinstance(goal, MoveDistance):
            legs = ((order[o.at], order[where[o.name]]) for o in model.objects)
            total += goal.weight * sum(goal.prices[a][b] for a, b in legs)
    return total, wrong


def generated(seed: int, machines: int = 12, processes: int = 80, wide: int = 3) -> tuple[str, str]:
    """Return an instance of the challenge's form: its model file, and its assignment file."""
    made, at = random.Random(seed), list[int]()
    services = [made.randint(1, 4) for _ in range(processes)]
    of = [s for s, size in enumerate(services) for _ in range(size)][:processes]
    number = of[-1] + 1
    needs = [[made.randint(1, 90) for _ in range(wide)] for _ in of]
    left = [[made.randint(700, 1200) for _ in range(wide)] for _ in range(machines)]
    offers = [row.copy() for row in left]
    taken: set[tuple[int, int]] = set()
    for service, need in zip(of, needs, strict=True):
        order = sorted(range(machines), key=lambda m: made.random() + 0.05 * m)
        fits = (
            m
            for m in order
            if (service, m) not in taken and all(n <= r for n, r in zip(need, left[m], strict=True))
        )
        m = next(fits)
        left[m] = [r - n for r, n in zip(left[m], need, strict=True)]
        taken.add((service, m))
        at.append(m)
    lines = [f"{wide}", *(f"{int(d == 0)} {made.choice((1, 10))}" for d in range(wide))]
    lines.append(f"{machines}")
    for m, row in enumerate(offers):
        safe = [round(amount * 0.4) for amount in row]
        prices = [0 if other == m else made.randint(1, 3) for other in range(machines)]
        lines.append(" ".join(map(str, (m % 3, m % 4, *row, *safe, *prices))))
    bins = [{at[p] % 4 for p in range(len(of)) if of[p] == s} for s in range(number)]
    near = [{at[p] % 3 for p in range(len(of)) if of[p] == s} for s in range(number)]
    lines.append(f"{number}")
    for s in range(number):
        others = (
            [o for o in range(number) if o != s and near[s] <= near[o]][:1] if s % 5 == 0 else []
        )
        lines.append(" ".join(map(str, (made.randint(1, len(bins[s])), len(others), *others))))
    lines.append(f"{len(of)}")
    lines += [
        " ".join(map(str, (s, *need, made.randint(1, 5))))
        for s, need in zip(of, needs, strict=True)
    ]
    lines += ["1", "0 1 2", "10", "1 10 100"]
    return "\n".join(lines), " ".join(map(str, at))


def figures(name: str, model: PlacementModel, seconds: float, seed: int = 1) -> dict[str, Any]:
    """Return the result after `seconds` of CPU time."""
    answer = improved(model, time.process_time, seconds, seed=seed)
    where = {o.name: o.at for o in model.objects}
    before, _ = checked(model, where)
    where |= {moved: to for moved, _, to in answer.moves}
    after, wrong = checked(model, where)
    assert (before, after) == (answer.before, answer.after), "the solver counts otherwise"
    assert not wrong, wrong[:3]
    best = BEST.get(name)
    return {
        "machines": len(model.containers),
        "processes": len(model.objects),
        "before": round(before),
        "after": round(after),
        "moves": len(answer.moves),
        "steps": answer.steps,
        "seconds": round(answer.took_s, 1),
        "beyond_best": None if best is None else round(after / best - 1.0, 4),
        "of_what_was_to_gain": None
        if best is None
        else round((before - after) / (before - best), 4),
    }


def instances(folder: Path, names: list[str]) -> Iterator[tuple[str, PlacementModel]]:
    """Yield the instances of a folder; raises `SystemExit` where there are none."""
    found = sorted(path.stem.removeprefix("model_") for path in folder.glob("model_*.txt"))
    missing = [name for name in names if name not in found]
    if not found or missing:
        what = f"no instance {missing[0]!r}" if missing else "no model_*.txt"
        sys.exit(
            f"{folder} has {what}: it takes the folder `instances` of the public repository"
            " gturri/roadef2012 (set A of the ROADEF/EURO challenge 2012)"
        )
    for name in names or found:
        texts = [(folder / f"{what}_{name}.txt").read_text() for what in ("model", "assignment")]
        yield name, read_instance(*texts)


def main() -> None:
    """Print the figures of each instance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("name", nargs="*")
    options = parser.parse_args()
    instances_to_solve: Iterator[tuple[str, PlacementModel]] = iter(
        [("generated", read_instance(*generated(1)))]
    )
    if options.folder is not None:
        instances_to_solve = instances(options.folder, options.name)
    else:
        print("no folder given: one generated instance, not the challenge's", file=sys.stderr)
    found = {}
    for name, model in instances_to_solve:
        found[name] = figures(name, model, options.seconds, options.seed)
        if not options.json:
            print(f"{name:10} {found[name]}", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
