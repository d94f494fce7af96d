"""Orders the moves that the search found in waves that can be carried out.

A task that moves claims room on its new machine before it frees room on the old one. So a wave has
only moves that fit, and that the rules of their jobs allow, before any move of the wave began.
Within a wave any order, and any number of moves at once, is possible. Room and evenness that a move
frees count from the next wave on.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from control_plane.api.rebalancing import MoveView
from control_plane.rebalancer.core.arrays import Floats, Ints
from control_plane.rebalancer.core.model import DIMENSIONS
from control_plane.rebalancer.core.region_state import RegionState

_RuleBin = tuple[int, int, int]
"""Job, number of its rule, bin."""


class Wave:
    """Collects moves that may begin in any order."""

    def __init__(self, state: RegionState) -> None:
        """`state`: the region when the wave begins."""
        self._state = state
        self.moves: list[tuple[int, int]] = []
        self._arrivals: Counter[_RuleBin] = Counter()
        """Tasks that enter a bin in this wave."""
        self._departures: Counter[_RuleBin] = Counter()
        """Tasks that leave a bin in this wave."""
        self._targets: defaultdict[_RuleBin, set[int]] = defaultdict(set)
        """Bins to which tasks of a bin move."""
        self._sources: defaultdict[_RuleBin, set[int]] = defaultdict(set)
        """Bins from which tasks move to a bin."""
        self._claimed_cpu: Counter[int] = Counter()
        self._claimed: dict[int, Ints] = {}
        """Machine → what moves of this wave claim there, in the order of `ROOM`."""
        self._deferred: set[tuple[str, int]] = set()
        """Machines and jobs of moves that are left to a later wave."""

    def try_add(self, task: int, target: int) -> bool:
        """Add a move; return whether it may be in this wave.

        It may not overtake an earlier move of the same machine or job that was deferred.
        """
        state = self._state
        job = int(state.job[task])
        touched = {("machine", int(state.where[task])), ("machine", target)}
        if state.model.rules[job]:
            touched.add(("job", job))
        if self._deferred.isdisjoint(touched) and self._add_if_allowed(task, target):
            return True
        self._deferred |= touched
        return False

    def _add_if_allowed(self, task: int, target: int) -> bool:
        """Add a move if it is allowed whichever other moves of the wave were done before it."""
        state = self._state
        kind, job = state.kind[task], int(state.job[task])
        if not state.admits[state.admission[kind], target]:
            return False
        cpu = self._claimed_cpu[target] + int((state.kind_cpu[kind] * state.grains[target]).sum())
        claimed = self._claimed.get(target, np.zeros(5, np.int64)) + state.kind_needs[kind]
        if cpu > state.room_cpu[target] or (claimed > state.room[target]).any():
            return False
        changes = []
        for number, rule, left, entered in state.changed_bins(task, target):
            if not rule.even or not self._stays_even((job, number), left, entered, rule.at_most):
                return False
            changes.append(((job, number), left, entered))
        for job_rule, left, entered in changes:
            self._departures[(*job_rule, left)] += 1
            self._arrivals[(*job_rule, entered)] += 1
            self._targets[(*job_rule, left)].add(entered)
            self._sources[(*job_rule, entered)].add(left)
        self._claimed_cpu[target], self._claimed[target] = cpu, claimed
        self.moves.append((task, target))
        return True

    def _stays_even(self, rule: tuple[int, int], left: int, entered: int, at_most: int) -> bool:
        """Return whether all moves between these bins stay allowed, whichever is done last."""
        counts = self._state.counts
        entered_after = counts[(*rule, entered)] + self._arrivals[(*rule, entered)] + 1
        left_before = counts[(*rule, left)] - self._departures[(*rule, left)]
        if entered_after > left_before or 0 < at_most < entered_after:
            return False
        for other in self._targets[(*rule, left)]:
            if counts[(*rule, other)] + self._arrivals[(*rule, other)] > left_before:
                return False
        return all(
            entered_after <= counts[(*rule, other)] - self._departures[(*rule, other)] + 1
            for other in self._sources[(*rule, entered)]
        )


def ordered(state: RegionState, moves: list[tuple[int, int]]) -> list[MoveView]:
    """Carry out moves on `state`, wave by wave, and return them with their waves and gains.

    `state` is the present region. One by one, the moves are possible in the order of `moves`. Moves
    that share a machine or a job keep that order, so they stay possible.
    """
    views: list[MoveView] = []
    number = 0
    while moves:
        wave = Wave(state)
        deferred = [move for move in moves if not wave.try_add(*move)]
        assert wave.moves, "the first move was possible when it was found"
        views += [_carry_out(state, task, target, number) for task, target in wave.moves]
        moves, number = deferred, number + 1
    return views


def _carry_out(state: RegionState, task: int, target: int, wave: int) -> MoveView:
    """Carry out one move, and return it with its gain and reason."""
    model, source = state.model, int(state.where[task])
    pair = np.array([source, target])

    def shares_and_costs() -> tuple[Floats, Floats]:
        used = state.used[source]
        return used * state.per_size[source], state.costs_by_dimension(pair[:1], used)[0]

    cost_before, power_before = float(state.cost[pair].sum()), state.power.cost()
    opening = model.weights.open if state.is_free[target] and not state.tasks_on[target] else 0.0
    place = state.power.relieved_place(source, target)
    shares_before, costs_before = shares_and_costs()
    state.move(task, target)
    shares_after, costs_after = shares_and_costs()
    power_gain = power_before - state.power.cost()
    relieved = int(np.argmax(costs_before - costs_after))
    change = f"{shares_before[relieved]:.0%} -> {shares_after[relieved]:.0%}"
    why = f"{DIMENSIONS[relieved]} of {model.machines[source]}: {change}"
    return MoveView(
        id="",
        job=model.jobs[state.job[task]],
        task=int(state.index[task]),
        from_machine=model.machines[source],
        to_machine=model.machines[target],
        wave=wave,
        gain=cost_before - float(state.cost[pair].sum()) + power_gain,
        power_gain=power_gain,
        price=float(state.price[task]) + opening,
        why=f"power of {place}" if place else why,
    )
