"""Computes a lower bound of the goals of any plan: linear programs over machine classes, by HiGHS.

The programs relax the problem. Tasks may be split, each dimension of a task may go elsewhere,
claims take no room, and moves cost nothing. But load may only go to machines that admit it, or stay
on its machine. So no plan brings the sum of the goals below the optimum of these programs. Machines
of equal size that admit the same loads form one class: cost is convex, so equal use is best.
"""

from __future__ import annotations

from collections import defaultdict
from math import inf

import numpy as np

from control_plane.rebalancer.core.model import DIMENSIONS, Weights
from control_plane.rebalancer.core.region_state import RegionState

_FLOWS_MAX = 100_000
"""The most flows in one program; above it, no bound is computed."""
_FINE_MAX = 2_000
"""The most classes. Above it, classes that differ only in the load that stays there are merged, so
the bound is weaker."""


def lower_bound(state: RegionState) -> float | None:
    """Return the lower bound; None: HiGHS is not installed, or a program is too large."""
    try:
        import highspy  # noqa: F401
    except ImportError:
        return None
    bound = 0.0
    for pool in range(len(state.model.pools)):
        machines = np.nonzero(state.pool == pool)[0]
        if not len(machines):
            continue
        for dimension in range(len(DIMENSIONS)):
            part = _dimension_bound(state, pool, machines, dimension)
            if part is None:
                return None
            bound += part
    return bound


def _dimension_bound(
    state: RegionState, pool: int, machines: np.ndarray, dimension: int
) -> float | None:
    """Return the least cost of one dimension of one entitlement; None: not computed."""
    size = state.sizes[:, dimension]
    loads, fixed_load = _movable_and_fixed_loads(state, pool, dimension)
    admits = state.admits[:, machines]
    keys = [size[machines].view(np.int64), *np.packbits(admits, axis=0).astype(np.int64)]
    tasks, kept = _one_way_tasks(state, pool, dimension)
    fine = _classify([*keys, fixed_load[machines].view(np.int64), kept[machines].view(np.int64)])
    first, which = fine if len(fine[0]) <= _FINE_MAX else _classify(keys)
    number = np.bincount(which, minlength=len(first))
    own = machines[first]
    fixed = np.bincount(which, weights=fixed_load[machines], minlength=len(own))
    class_of = dict(zip(machines.tolist(), which.tolist(), strict=True))
    stays: defaultdict[tuple[int, int], float] = defaultdict(float)
    for task in tasks.tolist():
        kind, at = int(state.admission[state.kind[task]]), class_of[int(state.where[task])]
        stays[kind, at] += float(state.load[task, dimension])
    flows = {
        (kind, at): inf if admits[kind, first[at]] else stays[kind, at]
        for kind in loads
        for at in range(len(own))
        if admits[kind, first[at]] or (kind, at) in stays
    }
    if len(flows) > _FLOWS_MAX:
        return None
    level = float(state.pool_limits[pool, dimension])
    weights = state.model.weights
    unit = float(size[own].max(initial=0.0)) or 1.0  # bytes would exceed the solver's range
    return _optimum(
        {kind: load / unit for kind, load in loads.items()},
        {flow: most / unit for flow, most in flows.items()},
        [
            (float(size[m]) / unit, int(n), float(f) / unit, level, weights)
            for m, n, f in zip(own, number, fixed, strict=True)
        ],
    )


def _classify(keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first machine of each class, and the class of each machine."""
    _, first, which = np.unique(np.vstack(keys), axis=1, return_index=True, return_inverse=True)
    return first, which.ravel()


def _movable_and_fixed_loads(
    state: RegionState, pool: int, dimension: int
) -> tuple[dict[int, float], np.ndarray]:
    """Return the load that may move, by admission, and the load that may not, by machine."""
    loads: defaultdict[int, float] = defaultdict(float)
    here = state.pool[state.where] == pool
    free = here & state.can_move
    sums = np.bincount(
        state.admission[state.kind[free]],
        weights=state.load[free, dimension],
        minlength=len(state.admits),
    )
    for admission, load in enumerate(sums):
        if load > 0:
            loads[admission] = float(load)
    fixed_load = here & ~state.can_move
    return dict(loads), np.bincount(
        state.where[fixed_load],
        weights=state.load[fixed_load, dimension],
        minlength=len(state.pool),
    )


def _one_way_tasks(state: RegionState, pool: int, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tasks that may leave their machine but not return, and their load by machine.

    Their machine is closed or does not admit them, so it keeps at most the load that it has of
    them. Such machines are not in one class, because none may get the load of another.
    """
    tasks = np.nonzero((state.pool[state.where] == pool) & state.can_move)[0]
    tasks = tasks[~state.admits[state.admission[state.kind[tasks]], state.where[tasks]]]
    loads = state.load[tasks, dimension]
    return tasks, np.bincount(state.where[tasks], weights=loads, minlength=len(state.pool))


_Class = tuple[float, int, float, float, Weights]
"""Size, number of machines, load that stays there, the pool's limit, and the weights of goals."""


def _optimum(
    loads: dict[int, float], flows: dict[tuple[int, int], float], classes: list[_Class]
) -> float | None:
    """Return the optimum of a program; `flows` has the most load from an admission to a class."""
    import highspy

    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    moved = [solver.addVariable(lb=0, ub=most) for most in flows.values()]
    into: defaultdict[int, list[object]] = defaultdict(list)
    out: defaultdict[int, list[object]] = defaultdict(list)
    for (kind, at), variable in zip(flows, moved, strict=True):
        into[at].append(variable)
        out[kind].append(variable)
    costs = []
    for at, (size, number, fixed, level, weights) in enumerate(classes):
        if size <= 0 or not (into[at] or fixed):
            continue
        share = sum(into[at]) * (1.0 / size) + fixed / size  # type: ignore[arg-type]
        for limit, weight in ((level, weights.balance), (weights.hot_from, weights.hot)):
            over = solver.addVariable(lb=0)
            solver.addConstr(over >= share - number * limit)
            costs.append(weight * over)
    for kind, load in loads.items():
        if out[kind]:
            solver.addConstr(sum(out[kind]) == load)  # type: ignore[arg-type]
    if not costs:
        return 0.0
    solver.minimize(sum(costs))
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return max(0.0, float(solver.getObjectiveValue()))
