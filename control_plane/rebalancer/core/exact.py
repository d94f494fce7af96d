"""Solves a small placement model exactly: a mixed-integer program on HiGHS.

One binary variable per object and container. It ends with an optimum, or with the best placement
and the bound that it has when its time is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import highspy
import numpy as np

from control_plane.rebalancer.core.annealing import PlacementAnswer, answer_of
from control_plane.rebalancer.core.language import PlacementModel
from control_plane.rebalancer.core.placement_state import GroupCounts, PlacementState

VARIABLES_MAX = 50_000
"""Objects times containers; above it annealing is used."""


def optimum(model: PlacementModel, clock: Callable[[], float], seconds: float) -> PlacementAnswer:
    """Return the best placement and a bound; raises `ValueError` above `VARIABLES_MAX`."""
    if len(model.objects) * len(model.containers) > VARIABLES_MAX:
        raise ValueError(f"more than {VARIABLES_MAX} variables")
    began, program = clock(), _Program(PlacementState(model))
    before = program.state.total()
    where, bound, is_optimal = program.solved(seconds)
    made = answer_of(program.state, where, before, clock() - began)
    return PlacementAnswer(
        before=before,
        after=made.after,
        moves=made.moves,
        bound=bound,
        took_s=made.took_s,
        is_optimal=is_optimal,
    )


class _Program:
    """The program of one model."""

    def __init__(self, state: PlacementState) -> None:
        self.state = state
        self.solver = highspy.Highs()  # type: ignore[no-untyped-call]
        self.solver.silent()
        objects, containers = range(len(state.where)), range(len(state.offers))
        self.put: dict[tuple[int, int], Any] = {
            (i, m): self.solver.addBinary()
            for i, m in product(objects, containers)
            if i not in state.may or state.may[i][m]
        }
        self.into: defaultdict[int, list[int]] = defaultdict(list)
        of_object: defaultdict[int, list[Any]] = defaultdict(list)
        for (i, m), variable in self.put.items():
            self.into[m].append(i)
            of_object[i].append(variable)
        for variables in of_object.values():
            self.solver.addConstr(sum(variables) == 1)
        self._fit()
        for counts in state.scopes.values():
            self._groups(counts)
        self.costs: list[Any] = [*self._levels(), *self._moves(), *self._containers()]

    def _used(self, m: int, d: int) -> Any:
        need = self.state.need[:, d]
        return sum(float(need[i]) * self.put[i, m] for i in self.into[m] if need[i])

    def _fit(self) -> None:
        state = self.state
        limited = np.nonzero(np.isfinite(state.room).any(axis=0))[0].tolist()
        for m, d in product(range(len(state.offers)), limited):
            used, room = self._used(m, d), float(state.room[m, d])
            if not state.leaves[d]:
                mine = [i for i in np.nonzero(state.origin == m)[0].tolist() if state.need[i, d]]
                used += sum(float(state.need[i, d]) * (1 - self.put[i, m]) for i in mine)
            if not isinstance(used, (int, float)):
                self.solver.addConstr(used <= room)

    def _groups(self, counts: GroupCounts) -> None:
        for group in range(len(counts.count)):
            mine = np.nonzero(self.state.group == group)[0].tolist()
            in_bin: dict[int, list[Any]] = defaultdict(list)
            for i, m in product(mine, range(len(counts.bins))):
                if (i, m) in self.put:
                    in_bin[int(counts.bins[m])].append(self.put[i, m])
            if counts.most[group] < len(mine):
                for variables in in_bin.values():
                    self.solver.addConstr(sum(variables) <= int(counts.most[group]))
            if counts.least[group] > 1:
                seen = [self._any_of(variables) for variables in in_bin.values()]
                self.solver.addConstr(sum(seen) >= int(counts.least[group]))
            for other in counts.needs[group]:
                theirs = np.nonzero(self.state.group == other)[0].tolist()
                for b, variables in in_bin.items():
                    beside = [
                        self.put[i, m]
                        for i in theirs
                        for m in np.nonzero(counts.bins == b)[0].tolist()
                        if (i, m) in self.put
                    ]
                    for variable in variables:
                        self.solver.addConstr(variable <= sum(beside))

    def _any_of(self, variables: list[Any]) -> Any:
        """Return a variable that is 1 only if one of these is."""
        seen = self.solver.addBinary()
        self.solver.addConstr(seen <= sum(variables))
        return seen

    def _above(self, used: Any, level: float, weight: float) -> Any:
        over = self.solver.addVariable(lb=0)
        self.solver.addConstr(over >= used - level)
        return weight * over

    def _levels(self) -> Iterable[Any]:
        state = self.state
        for level, weight in state.layers:
            for m, d in zip(*np.nonzero(weight), strict=True):
                used = self._used(int(m), int(d))
                yield self._above(used, float(level[m, d]), float(weight[m, d]))
        for bins, d, level, of_bin in state.by_bin:
            for b, limit in enumerate(level.tolist()):
                inside = np.nonzero(bins == b)[0].tolist()
                yield self._above(sum(self._used(m, d) for m in inside), limit, of_bin)
        for one, two, ratio, of_pair in state.pairs:
            for m, row in enumerate(state.offers.tolist()):
                missing = self._used(m, two) - ratio * self._used(m, one)
                yield self._above(missing, row[two] - ratio * row[one], of_pair)

    def _moves(self) -> Iterable[Any]:
        state, moved = self.state, defaultdict[int, list[Any]](list)
        for (i, m), variable in self.put.items():
            origin = int(state.origin[i])
            price = float(state.price[i]) if m != origin else 0.0
            if state.distance is not None:
                price += float(state.distance[origin, m])
            if price:
                yield price * variable
            if m != origin:
                moved[int(state.group[i])].append(variable)
        if state.group_weight and moved:
            most = self.solver.addVariable(lb=0)
            for variables in moved.values():
                self.solver.addConstr(most >= sum(variables))
            yield state.group_weight * most

    def _containers(self) -> Iterable[Any]:
        for m, objects in sorted(self.into.items()):
            if not self.state.used_weight[m]:
                continue
            used = self.solver.addBinary()
            for i in objects:
                self.solver.addConstr(self.put[i, m] <= used)
            yield float(self.state.used_weight[m]) * used

    def solved(self, seconds: float) -> tuple[np.ndarray, float, bool]:
        """Return where objects are best, a bound, and whether that is proved to be optimal."""
        self.solver.setOptionValue("time_limit", seconds)
        self.solver.setOptionValue("mip_rel_gap", 1e-9)
        self.solver.minimize(sum(self.costs))
        info, where = self.solver.getInfo(), self.state.where.copy()
        values = self.solver.getSolution().col_value
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            for (i, m), variable in self.put.items():
                if values[variable.index] > 0.5:
                    where[i] = m
        proved = self.solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return where, float(info.mip_dual_bound), proved
