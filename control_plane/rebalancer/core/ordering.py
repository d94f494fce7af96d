"""From moves that the search found to a plan that can be carried out: waves of moves.

A task that moves claims its new place before its old one is free. So a wave has only moves for
which there was room, and which their jobs' rules allow, before any of the wave began: within a
wave the order is free, and so is the number of them at once. What frees room or evenness counts
from the next wave on.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from control_plane.api.rebalancing import MoveView
from control_plane.rebalancer.core.model import DIMENSIONS
from control_plane.rebalancer.core.state import Ints, State


class Wave:
    """Moves that may begin in any order, as they are collected."""

    def __init__(self, state: State) -> None:
        """`state` is the one in which the wave begins."""
        self._state = state
        self.moves: list[tuple[int, int]] = []
        self._came: Counter[tuple[int, int, int]] = Counter()
        """Job, number of its rule, bin → tasks that come there in this wave …"""
        self._left: Counter[tuple[int, int, int]] = Counter()
        """… and that go."""
        self._to: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
        """Job, number of its rule, bin → bins to which tasks go from there …"""
        self._from: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
        """… and from which they come."""
        self._cpu: Counter[int] = Counter()
        self._needs: dict[int, Ints] = {}
        self._waiting: set[tuple[str, int]] = set()
        """Machines and jobs of moves that a later wave gets."""

    def take(self, task: int, to: int) -> bool:
        """Take a move in, if no other that was found before it and touches the same must wait."""
        state = self._state
        job = int(state.job[task])
        touched = {("machine", int(state.where[task])), ("machine", to)}
        if state.model.rules[job]:
            touched.add(("job", job))
        if self._waiting.isdisjoint(touched) and self._add(task, to):
            return True
        self._waiting |= touched
        return False

    def _add(self, task: int, to: int) -> bool:
        """Take a move in, if whatever else of the wave was done before or not it is allowed."""
        state = self._state
        kind, job = state.kind[task], int(state.job[task])
        if not state.admits[state.admission[kind], to]:
            return False
        cpu = self._cpu[to] + int((state.kind_cpu[kind] * state.grains[to]).sum())
        needs = self._needs.get(to, np.zeros(5, np.int64)) + state.kind_needs[kind]
        if cpu > state.room_cpu[to] or (needs > state.room[to]).any():
            return False
        crossed = []
        for number, rule, here, there in state.crossed(task, to):
            if not rule.even or not self._stays_even((job, number), here, there, rule.at_most):
                return False
            crossed.append(((job, number), here, there))
        for rule_of, here, there in crossed:
            self._left[(*rule_of, here)] += 1
            self._came[(*rule_of, there)] += 1
            self._to[(*rule_of, here)].add(there)
            self._from[(*rule_of, there)].add(here)
        self._cpu[to], self._needs[to] = cpu, needs
        self.moves.append((task, to))
        return True

    def _stays_even(self, rule: tuple[int, int], here: int, there: int, at_most: int) -> bool:
        """Return whether all moves between bins stay allowed, whichever of them is done last."""
        counts = self._state.counts
        came = counts[(*rule, there)] + self._came[(*rule, there)] + 1
        rest = counts[(*rule, here)] - self._left[(*rule, here)]
        if came > rest or 0 < at_most < came:
            return False
        for other in self._to[(*rule, here)]:
            if counts[(*rule, other)] + self._came[(*rule, other)] > rest:
                return False
        return all(
            came <= counts[(*rule, other)] - self._left[(*rule, other)] + 1
            for other in self._from[(*rule, there)]
        )


def ordered(state: State, moves: list[tuple[int, int]]) -> list[MoveView]:
    """Carry out moves on `state`, wave by wave, and return the steps.

    `state` is as the region is now. The order of `moves` is one that is possible one by one; what
    shares a machine or a job with others keeps its place among them, so it stays possible.
    """
    steps: list[MoveView] = []
    wave = 0
    while moves:
        found = Wave(state)
        rest = [move for move in moves if not found.take(*move)]
        assert found.moves, "the first of these was possible when it was found"
        steps += [_step(state, task, to, wave) for task, to in found.moves]
        moves, wave = rest, wave + 1
    return steps


def _step(state: State, task: int, to: int, wave: int) -> MoveView:
    """Carry out one move and say what it gains."""
    model, at = state.model, int(state.where[task])
    pair = np.array([at, to])
    before, power = float(state.cost[pair].sum()), state.power.total()
    opening = model.weights.open if state.is_free[to] and not state.on[to] else 0.0
    was, parts = state.used[at] * state.per_size[at], state.parts(pair[:1], state.used[at])[0]
    place = state.power.relieved(at, to)
    state.move(task, to)
    now, less = state.used[at] * state.per_size[at], state.parts(pair[:1], state.used[at])[0]
    power -= state.power.total()
    most = int(np.argmax(parts - less))
    why = f"{DIMENSIONS[most]} of {model.machines[at]}: {was[most]:.0%} -> {now[most]:.0%}"
    return MoveView(
        id="",
        job=model.jobs[state.job[task]],
        task=int(state.index[task]),
        from_machine=model.machines[at],
        to_machine=model.machines[to],
        wave=wave,
        gain=before - float(state.cost[pair].sum()) + power,
        power_gain=power,
        price=float(state.price[task]) + opening,
        why=f"power of {place}" if place else why,
    )
