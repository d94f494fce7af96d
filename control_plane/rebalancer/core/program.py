"""A mixed-integer program for HiGHS that chooses new containers for some objects.

It has a binary variable for each free object and each container of the program; all other objects
stay. Sums of what stays are constants of the rows, and rows that no solution can violate are left
out. Each row is scaled by its largest amount, because amounts of some models exceed the solver's
tolerances.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import highspy
import msgspec
import numpy as np

from control_plane.rebalancer.core.arrays import Floats, Ints
from control_plane.rebalancer.core.placement_state import GroupCounts, PlacementState

_NONE: Ints = np.zeros(0, np.int64)


class ProgramAnswer(msgspec.Struct, frozen=True):
    """What the solver found."""

    where: Ints
    """The new containers of the free objects."""
    bound: float
    """Lower bound of the change of the sum of the goals by any placement of the free objects."""
    is_optimal: bool
    work: int
    """Variables plus iterations of the solver; the same on each machine."""


class PlacementProgram:
    """The program of one model, in which some objects are free to go to some containers."""

    def __init__(self, state: PlacementState, free: Ints, containers: Ints) -> None:
        """`free`: objects that may move; `containers` must include those where they are."""
        self.state, self.free, self.containers = state, free, containers
        self._cost, self._upper, self._is_integer = list[Floats](), list[Floats](), list[Floats]()
        self._columns = 0
        self._row_start, self._row_lower, self._row_upper = [0], list[float](), list[float]()
        self._index, self._value = list[Ints](), list[Floats]()
        self.constant = 0.0
        self._add_objects()
        self._add_amounts()
        for counts in state.scopes.values():
            self._add_group_rules(counts)
        self._add_group_moves()
        self._add_used_containers()

    # -- variables and rows

    def _add_variables(self, costs: Floats, upper: float, *, is_integer: bool) -> int:
        """Add variables from 0 to `upper`; return the number of the first."""
        first, number = self._columns, len(costs)
        self._cost.append(costs)
        self._upper.append(np.full(number, upper))
        self._is_integer.append(np.full(number, float(is_integer)))
        self._columns += number
        return first

    def _add_variable(self, cost: float, upper: float, *, is_integer: bool = False) -> int:
        return self._add_variables(np.array([cost]), upper, is_integer=is_integer)

    def _add_row(self, index: Ints, value: Floats, lower: float, upper: float) -> None:
        self._index.append(index)
        self._value.append(value)
        self._row_start.append(self._row_start[-1] + len(index))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def _add_objects(self) -> None:
        """Add the variables of free objects: one for each container that an object may go to."""
        state, free, containers = self.state, self.free, self.containers
        may = np.ones((len(free), len(containers)), np.bool_)
        for row, i in enumerate(free.tolist()):
            if i in state.may:
                may[row] = state.may[i][containers]
        self.rows, columns = np.nonzero(may)
        self.object, self.container = free[self.rows], containers[columns]
        """By variable: the object, and its container if the variable is 1."""
        self.need = state.need[self.object]
        away = self.container != state.origin[self.object]
        costs = np.where(away, state.price[self.object], 0.0)
        if state.distance is not None:
            costs = costs + state.distance[state.origin[self.object], self.container]
        self._add_variables(costs, 1.0, is_integer=True)
        self.away = away
        """By variable: whether it leads away from the object's origin."""
        self.is_now = self.container == state.where[self.object]
        self.constant -= float(costs[self.is_now].sum())
        for start, end in _runs(self.rows):
            self._add_row(np.arange(start, end), np.ones(end - start), 1.0, 1.0)

    # -- amounts

    def _add_amounts(self) -> None:
        """Add room and goals by container, and goals by bin of a scope."""
        state = self.state
        used, held = state.used.copy(), state.held.copy()
        np.subtract.at(used, state.where[self.free], state.need[self.free])
        holds = np.where((~self.away)[:, None] & ~state.frees_at_once, 0.0, self.need)
        np.subtract.at(held, self.container[self.is_now], holds[self.is_now])
        order = np.argsort(self.container, kind="stable")
        self.constant -= float(state.cost[self.containers].sum())
        for start, end in _runs(self.container[order]):
            variables = order[start:end]
            m = int(self.container[variables[0]])
            self._add_room(variables, holds[variables], state.room[m] - held[m])
            for level, weights in state.layers:
                for d in np.nonzero(weights[m])[0].tolist():
                    above, weight = float(used[m, d] - level[m, d]), float(weights[m, d])
                    self._add_excess(variables, self.need[variables, d], above, weight)
            for d, other, ratio, weight in state.ratio_goals:
                amounts = self.need[variables, other] - ratio * self.need[variables, d]
                free = state.offers[m] - used[m]
                self._add_excess(variables, amounts, float(ratio * free[d] - free[other]), weight)
        for m in set(self.containers.tolist()) - set(self.container.tolist()):
            self.constant += float(state.cost[m])
        self._add_bin_goals(used)

    def _add_bin_goals(self, used: Floats) -> None:
        """Add goals about bins; bins without containers of the program do not change."""
        state = self.state
        for bins, d, level, weight in state.bin_goals:
            now = np.bincount(bins, weights=state.used[:, d], minlength=len(level))
            stays = np.bincount(bins, weights=used[:, d], minlength=len(level))
            bin_of_variable = bins[self.container]
            for b in np.unique(bin_of_variable).tolist():
                variables = np.nonzero(bin_of_variable == b)[0]
                self.constant -= weight * max(0.0, float(now[b] - level[b]))
                above = float(stays[b] - level[b])
                self._add_excess(variables, self.need[variables, d], above, weight)

    def _add_room(self, variables: Ints, amounts: Floats, left: Floats) -> None:
        """Require that the objects of a container need at most the free room `left`."""
        for d in np.nonzero(amounts.sum(axis=0) > left)[0].tolist():
            some = np.nonzero(amounts[:, d])[0]
            size = float(amounts[some, d].max())
            self._add_row(variables[some], amounts[some, d] / size, -np.inf, float(left[d]) / size)

    def _add_excess(self, variables: Ints, amounts: Floats, above: float, weight: float) -> None:
        """Add the cost of use above a level; `above`: what stays, less the level."""
        some = np.nonzero(amounts)[0]
        least = above + float(amounts[amounts < 0].sum())
        most = above + float(amounts[amounts > 0].sum())
        if most <= 0 or not len(some):
            self.constant += weight * max(0.0, above)
            return
        size = float(np.abs(amounts).max())
        if least >= 0:
            np.add.at(self._cost[0], variables[some], weight * amounts[some])
            self.constant += weight * above
            return
        over = self._add_variable(weight * size, np.inf)
        index, value = np.append(variables[some], over), np.append(amounts[some] / size, -1.0)
        self._add_row(index, value, -np.inf, -above / size)

    # -- groups

    def _add_group_rules(self, counts: GroupCounts) -> None:
        """Add the rules about groups of free objects: limits per bin, spread, dependencies."""
        state = self.state
        stays = counts.count.copy()
        at = counts.bins[state.where[self.free]]
        np.subtract.at(stays, (state.group[self.free], at), 1)
        into = self._by_group_and_bin(counts)
        for group, by_bin in into.items():
            size = int((state.group[self.free] == group).sum())
            for b, variables in by_bin.items():
                most = int(counts.most[group]) - int(stays[group, b])
                if min(size, len(variables)) > most:
                    self._add_sum(variables, -np.inf, most)
            self._add_spread(by_bin, stays[group], int(counts.least[group]))
            for other in counts.needs[group]:
                of_other = into.get(other, {})
                for b, variables in by_bin.items():
                    if not stays[other, b]:
                        self._add_dependency(variables, of_other.get(b, _NONE))
            for b in np.nonzero(stays[counts.needed[group]].any(axis=0))[0].tolist():
                if not stays[group, b]:
                    self._add_sum(by_bin.get(b, _NONE), 1.0, np.inf)

    def _by_group_and_bin(self, counts: GroupCounts) -> dict[int, dict[int, Ints]]:
        """Return the variables of each group with a constraint in a scope, by bin."""
        groups, bins = self.state.group[self.object], counts.bins[self.container]
        has_constraint = counts.has_constraint[groups]
        bins_in_scope = counts.count.shape[1]
        keys = groups * bins_in_scope + bins
        some = np.nonzero(has_constraint)[0]
        some = some[np.argsort(keys[some], kind="stable")]
        by_group: defaultdict[int, dict[int, Ints]] = defaultdict(dict)
        for start, end in _runs(keys[some]):
            group, b = divmod(int(keys[some[start]]), bins_in_scope)
            by_group[group][b] = some[start:end]
        return by_group

    def _add_sum(self, variables: Ints, lower: float, upper: float) -> None:
        self._add_row(variables, np.ones(len(variables)), lower, upper)

    def _add_spread(self, by_bin: dict[int, Ints], stays: Ints, least: int) -> None:
        """Require objects of a group in at least `least` bins; `stays`: those that stay, by bin."""
        missing = least - int(np.count_nonzero(stays))
        if missing <= 0:
            return
        occupied = list[int]()
        for b, variables in by_bin.items():
            if not stays[b]:
                occupied.append(self._add_any_of(variables))
        self._add_sum(np.array(occupied, np.int64), missing, np.inf)

    def _add_any_of(self, variables: Ints) -> int:
        """Return a new variable that is 1 only if one of the given variables is."""
        any_of = self._add_variable(0.0, 1.0, is_integer=True)
        index, value = np.append(variables, any_of), np.append(np.ones(len(variables)), -1.0)
        self._add_row(index, value, 0.0, np.inf)
        return any_of

    def _add_dependency(self, variables: Ints, needed: Ints) -> None:
        """Require that a variable of `variables` is 1 only if one of `needed` is."""
        ones = np.ones(len(needed))
        for variable in variables.tolist():
            self._add_row(np.append(needed, variable), np.append(ones, -1.0), 0.0, np.inf)

    # -- moves and containers

    def _add_group_moves(self) -> None:
        """Add the cost of the most moved objects of a group."""
        state = self.state
        if not state.group_weight:
            return
        moved = state.moved.copy()
        gone = state.where[self.free] != state.origin[self.free]
        np.subtract.at(moved, state.group[self.free[gone]], 1)
        self.constant -= state.group_weight * int(state.moved.max())
        least = int(moved.max())
        self.constant += state.group_weight * least
        most = self._add_variable(state.group_weight, np.inf)
        away = np.nonzero(self.away)[0]
        groups = state.group[self.object[away]]
        order = np.argsort(groups, kind="stable")
        for start, end in _runs(groups[order]):
            variables, group = away[order[start:end]], int(groups[order[start]])
            size = len(np.unique(self.object[variables]))
            if int(moved[group]) + size > least:
                index, value = np.append(variables, most), np.append(np.ones(len(variables)), -1.0)
                self._add_row(index, value, -np.inf, least - int(moved[group]))

    def _add_used_containers(self) -> None:
        """Add the cost of containers that have objects."""
        state = self.state
        if not state.used_weight.any():
            return
        stays = state.objects_in.copy()
        np.subtract.at(stays, state.where[self.free], 1)
        for m in self.containers.tolist():
            weight = float(state.used_weight[m])
            if not weight or stays[m]:
                continue
            self.constant -= weight * float(state.objects_in[m] > 0)
            used = self._add_variable(weight, 1.0, is_integer=True)
            for variable in np.nonzero(self.container == m)[0].tolist():
                self._add_row(np.array([variable, used]), np.array([1.0, -1.0]), -np.inf, 0.0)

    # -- solving

    def solved(
        self,
        is_over: Callable[[], bool],
        patience: int = 0,
        nodes: int = 0,
        most_s: float = np.inf,
    ) -> ProgramAnswer | None:
        """Return the best solution that HiGHS finds in time; None: it found none.

        HiGHS stops after `patience` progress checks without a better solution, after `nodes`
        nodes (0: no limit), and after `most_s` seconds of wall-clock time. HiGHS makes no
        progress checks while it solves one LP, which can take minutes if the simplex method
        cycles.
        """
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.silent()
        solver.setOptionValue("mip_rel_gap", 1e-9)
        solver.setOptionValue("time_limit", most_s)
        if nodes:
            solver.setOptionValue("mip_max_nodes", nodes)
        best, idle = np.inf, 0

        def on_progress(event: Any) -> None:
            nonlocal best, idle
            found = float(event.data_out.mip_primal_bound)
            best, idle = (found, 0) if found < best else (best, idle + 1)
            event.interrupt(is_over() or 0 < patience < idle)

        # `is_over` ends the search, because the solver's own limit counts time of other processes
        solver.cbMipInterrupt.subscribe(on_progress)
        solver.passModel(self._program())
        start = np.nonzero(self.is_now)[0]
        solver.setSolution(len(start), start.astype(np.int32), np.ones(len(start)))
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = np.array(solver.getSolution().col_value[: len(self.object)])
        where = self.state.where[self.free].copy()
        chosen = values > 0.5
        where[self.rows[chosen]] = self.container[chosen]
        return ProgramAnswer(
            where,
            float(info.mip_dual_bound) + self.constant,
            solver.getModelStatus() == highspy.HighsModelStatus.kOptimal,
            len(self.object) + max(0, int(info.simplex_iteration_count)),
        )

    def _program(self) -> highspy.HighsLp:
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = self._columns, len(self._row_lower)
        program.col_cost_ = np.concatenate(self._cost)
        program.col_lower_ = np.zeros(self._columns)
        program.col_upper_ = np.concatenate(self._upper)
        program.row_lower_ = np.array(self._row_lower)
        program.row_upper_ = np.array(self._row_upper)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.array(self._row_start, np.int32)
        program.a_matrix_.index_ = np.concatenate(self._index).astype(np.int32)
        program.a_matrix_.value_ = np.concatenate(self._value)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        program.integrality_ = [kinds[int(each)] for each in np.concatenate(self._is_integer)]
        return program


def _runs(keys: Ints) -> list[tuple[int, int]]:
    """Return start and end of each run of equal keys."""
    if not len(keys):
        return []
    edges = [0, *(np.nonzero(np.diff(keys))[0] + 1).tolist(), len(keys)]
    return list(pairwise(edges))
