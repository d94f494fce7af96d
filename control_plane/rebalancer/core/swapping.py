"""Plans exchanges of machines between entitlements with an integer program on HiGHS (RE3).

A group has the machines of one class that are inside (or outside) of places above their power
budget. The program says how many machines of each group every entitlement gives and receives. Two
things cost: each machine class that an entitlement has, since its tasks must fit there, and the
power that busy entitlements draw in places above their budget. Every entitlement keeps its number
of machines, and 95 % of its CPU and memory. An exchange follows where two entitlements each give
what the other receives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from control_plane.api.rebalancing import SwapView
from control_plane.rebalancer.core.arrays import Flags
from control_plane.rebalancer.core.region_state import RegionState

_KEPT_SHARE = 0.95
"""The least share of its CPU and memory that an entitlement keeps."""
_TIME_LIMIT_S = 10.0
_CANDIDATES_MAX = 8
"""Machines of an entitlement and group that are tried until one can be emptied, and machines that
are tried for each of its tasks."""


class MachineGroup(NamedTuple):
    """Machines that are alike for an exchange."""

    machine_class: int
    is_over_budget: bool
    """They are in a place that draws more power than its budget."""


class Holding(NamedTuple):
    """The machines of a group that one entitlement has, gives or receives."""

    pool: int
    group: MachineGroup


class GroupedMachines:
    """The machines of all entitlements by group."""

    def __init__(self, state: RegionState) -> None:
        model = state.model
        self.held: defaultdict[Holding, list[int]] = defaultdict(list)
        self.by_group: defaultdict[MachineGroup, list[int]] = defaultdict(list)
        self.is_exchanged: Flags = np.zeros(len(model.machines), np.bool_)
        """By machine: whether an exchange of this plan gives it to another entitlement."""
        self._received_classes: Counter[tuple[int, int]] = Counter()
        """(entitlement, machine class) → machines that exchanges of this plan give it."""
        hot = state.power.machines_over_budget()
        for machine in np.nonzero(~state.is_free)[0].tolist():
            group = MachineGroup(model.machine_class[machine], bool(hot[machine]))
            self.held[Holding(int(state.pool[machine]), group)].append(machine)
            self.by_group[group].append(machine)
        self.admitted: list[list[bool]] = []
        """By entitlement and machine: whether all tasks of the entitlement may run there."""
        masks = np.array([np.frombuffer(mask, np.uint8) for mask in model.admissions], bool)
        for pool in range(len(model.pools)):
            needed = np.unique(state.admission[state.kind[state.pool[state.where] == pool]])
            admits_all = masks[needed].all(axis=0) if len(needed) else np.ones(len(hot), bool)
            self.admitted.append(admits_all.tolist())

    def count(self, pool: int, group: MachineGroup) -> int:
        """Return how many machines of a group an entitlement has."""
        return len(self.held.get(Holding(pool, group), ()))

    def count_class(self, pool: int, machine_class: int) -> int:
        """Return how many machines of a class an entitlement has after the planned exchanges."""
        held = sum(self.count(pool, MachineGroup(machine_class, hot)) for hot in (False, True))
        return held + self._received_classes[pool, machine_class]

    def exchange(self, sides: tuple[Holding, Holding], machines: list[int]) -> None:
        """Record that an exchange gives each machine to the entitlement of the other side."""
        for side, other, machine in zip(sides, sides[::-1], machines, strict=True):
            self.held[side].remove(machine)
            self.is_exchanged[machine] = True
            self._received_classes[other.pool, side.group.machine_class] += 1


def swaps(state: RegionState, most: int) -> list[SwapView]:
    """Return at most `most` exchanges that together gain more than their price; none without HiGHS.

    `state` is the region after the moves of the plan. This function moves tasks in it.
    """
    try:
        import highspy  # noqa: F401
    except ImportError:
        return []
    if most < 1 or not state.model.machine_class:
        return []
    grouped = GroupedMachines(state)
    given, received = _Transfers(state, grouped, most).solved()
    exchanges: list[SwapView] = []
    for first, second in _exchanges(given, received):
        if len(exchanges) == most:
            break
        exchange = _exchange_machines(state, grouped, first, second)
        if exchange is not None:
            exchanges.append(exchange)
    while exchanges and sum(e.gain for e in exchanges) <= sum(e.price for e in exchanges):
        exchanges.pop()  # the exchanges that would complete the gain were not possible
    return exchanges


class _Transfers:
    """The integer program: the number of machines that each entitlement gives and receives."""

    def __init__(self, state: RegionState, grouped: GroupedMachines, exchanges_max: int) -> None:
        import highspy

        self._state, self._grouped = state, grouped
        self._solver = highspy.Highs()  # type: ignore[no-untyped-call]
        self._solver.silent()
        self._solver.setOptionValue("time_limit", _TIME_LIMIT_S)
        self._given: dict[Holding, Any] = {}
        self._received: dict[Holding, Any] = {}
        self._add_variables(exchanges_max)
        price = state.model.weights.swap / 2
        costs = [price * given for given in self._given.values()]
        for pool in range(len(state.model.pools)):
            change = self._change_of(pool)
            if change:
                self._keep_size(pool, change)
                costs += self._class_costs(pool, change)
                costs += self._power_costs(pool, change)
        self._solver.addConstr(sum(self._given.values()) <= 2 * exchanges_max)
        self._costs = costs

    def _add_variables(self, exchanges_max: int) -> None:
        """Add what each entitlement gives and receives; in each group both sums are equal."""
        add, grouped = self._solver.addIntegral, self._grouped
        for holding, machines in grouped.held.items():
            swappable = sum(self._state.model.swappable[m] for m in machines)
            self._given[holding] = add(lb=0, ub=min(swappable, exchanges_max))
        for pool, admitted in enumerate(grouped.admitted):
            for group, machines in sorted(grouped.by_group.items()):
                usable = sum(admitted[m] for m in machines)
                if usable:
                    variable = add(lb=0, ub=min(usable, exchanges_max))
                    self._received[Holding(pool, group)] = variable
        for group in grouped.by_group:
            given = [v for holding, v in self._given.items() if holding.group == group]
            received = [v for holding, v in self._received.items() if holding.group == group]
            self._solver.addConstr(sum(given) - sum(received) == 0)

    def _change_of(self, pool: int) -> dict[MachineGroup, Any]:
        """Return by group how many machines an entitlement has more after all exchanges."""
        change = {}
        for group in self._grouped.by_group:
            holding = Holding(pool, group)
            if holding in self._given or holding in self._received:
                change[group] = self._received.get(holding, 0) - self._given.get(holding, 0)
        return change

    def _keep_size(self, pool: int, change: dict[MachineGroup, Any]) -> None:
        """Let an entitlement keep its number of machines, and most of its CPU and memory."""
        self._solver.addConstr(sum(change.values()) == 0)
        grouped = self._grouped
        for dimension in (0, 1):
            size = {
                group: float(self._state.sizes[grouped.by_group[group][0], dimension])
                for group in change
            }
            present = sum(size[group] * grouped.count(pool, group) for group in change)
            if present > 0:
                gained = sum(size[group] / present * more for group, more in change.items())
                self._solver.addConstr(gained >= _KEPT_SHARE - 1.0)

    def _class_costs(self, pool: int, change: dict[MachineGroup, Any]) -> Iterator[object]:
        """Yield the cost of each machine class that an entitlement has after all exchanges."""
        grouped, solver = self._grouped, self._solver
        for machine_class in {group.machine_class for group in change}:
            groups = [group for group in change if group.machine_class == machine_class]
            present = grouped.count_class(pool, machine_class)
            upper_bound = present + sum(len(grouped.by_group[group]) for group in groups)
            has_class = solver.addBinary()
            after = sum(change[group] for group in groups) + present
            solver.addConstr(after <= upper_bound * has_class)
            yield self._state.model.weights.fragment * has_class

    def _power_costs(self, pool: int, change: dict[MachineGroup, Any]) -> Iterator[object]:
        """Yield the cost of an entitlement's power, at its present CPU use, above budgets."""
        state = self._state
        machines = np.nonzero((state.pool == pool) & ~state.is_free)[0]
        size = float(state.sizes[machines, 0].sum())
        cpu_use = float(state.used[machines, 0].sum()) / size if size else 0.0
        for group, more in change.items():
            if group.is_over_budget:
                yield state.model.weights.power * cpu_use * more

    def solved(self) -> tuple[Counter[Holding], Counter[Holding]]:
        """Return how many machines are given and received; nothing if no solution was found."""
        import highspy

        solver, found = self._solver, highspy.HighsModelStatus
        solver.minimize(sum(self._costs))
        if solver.getModelStatus() not in (found.kOptimal, found.kTimeLimit):
            return Counter(), Counter()
        values = solver.getSolution().col_value
        given, received = (
            Counter({holding: round(values[v.index]) for holding, v in variables.items()})
            for variables in (self._given, self._received)
        )
        return given, received


def _exchanges(
    given: Counter[Holding], received: Counter[Holding]
) -> Iterator[tuple[Holding, Holding]]:
    """Yield for each exchange what its two entitlements give."""
    given, received = +given, +received
    for first in sorted(given):
        for second in sorted(given):
            gives = first, second
            receives = Holding(first.pool, second.group), Holding(second.pool, first.group)
            while (
                first.pool < second.pool
                and first.group != second.group
                and min(given[holding] for holding in gives) > 0
                and min(received[holding] for holding in receives) > 0
            ):
                given.subtract(gives)
                received.subtract(receives)
                yield first, second


def _exchange_machines(
    state: RegionState, grouped: GroupedMachines, first: Holding, second: Holding
) -> SwapView | None:
    """Return an exchange of two machines that can be emptied now; None: there are none."""
    sides = first, second
    machines: list[int] = []
    for side, other in (sides, sides[::-1]):
        usable = [m for m in grouped.held[side] if grouped.admitted[other.pool][m]]
        machine = _empty_one(state, grouped, usable)
        if machine is None:
            return None
        machines.append(machine)
    model, weights = state.model, state.model.weights
    differ = first.group.machine_class != second.group.machine_class
    counts = [grouped.count_class(side.pool, side.group.machine_class) for side in sides]
    reasons = [
        f"{model.pools[side.pool]} has {count} machines of the type of {model.machines[machine]}"
        for side, count, machine in zip(sides, counts, machines, strict=True)
        if differ
    ]
    over_budget = [side for side in sides if side.group.is_over_budget]
    reasons += [
        f"{model.pools[side.pool]} is busy in a place without power" for side in over_budget
    ]
    received_counts = [
        grouped.count_class(side.pool, other.group.machine_class)
        for side, other in (sides, sides[::-1])
    ]
    classes_less = counts.count(1) - received_counts.count(0) if differ else 0
    grouped.exchange(sides, machines)
    return SwapView(
        id="",
        one=model.machines[machines[0]],
        two=model.machines[machines[1]],
        pool_one=model.pools[first.pool],
        pool_two=model.pools[second.pool],
        gain=weights.fragment * classes_less + weights.power * len(over_budget),
        price=weights.swap,
        why="; ".join(reasons),
    )


def _empty_one(state: RegionState, grouped: GroupedMachines, machines: list[int]) -> int | None:
    """Move all tasks of one machine to others of its entitlement; return the emptied machine.

    Machines with the fewest tasks are tried first. A machine of an earlier exchange gets no task.
    None: no machine can be emptied.
    """
    may_receive = state.is_open & ~state.is_free & ~grouped.is_exchanged
    swappable = [m for m in machines if state.model.swappable[m]]
    for machine in sorted(swappable, key=lambda m: (len(state.tasks_on[m]), m))[:_CANDIDATES_MAX]:
        moved: list[int] = []
        targets = np.nonzero((state.pool == state.pool[machine]) & may_receive)[0]
        targets = targets[targets != machine]
        for task in list(state.tasks_on[machine]):
            target = _target_of(state, task, targets)
            if target is None:
                break
            state.move(task, target)
            moved.append(task)
        if not state.tasks_on[machine]:
            return machine
        for task in reversed(moved):
            state.move(task, machine)
    return None


def _target_of(state: RegionState, task: int, targets: np.ndarray) -> int | None:
    """Return the least used of these machines that may get a task; None: there is none."""
    if not state.can_move[task] or not len(targets):
        return None
    targets = targets[state.fits(state.kind[task : task + 1], targets)[0]]
    use = (state.used[targets] * state.per_size[targets]).max(axis=1, initial=0.0)
    for target in targets[np.argsort(use, kind="stable")][:_CANDIDATES_MAX].tolist():
        if _is_allowed_meanwhile(state, task, target):
            return int(target)
    return None


def _is_allowed_meanwhile(state: RegionState, task: int, target: int) -> bool:
    """Return whether a task may be on a machine until its entitlement received the other one.

    As while any machine is drained, the job may be less even for that time. No limit is exceeded.
    """
    job = int(state.job[task])
    return all(
        rule.even and not 0 < rule.at_most < state.counts[job, number, target_bin] + 1
        for number, rule, _, target_bin in state.changed_bins(task, target)
    )
