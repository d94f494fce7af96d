"""Local search: relieves the hottest machines by moves, swaps and chains of two moves.

Each step takes one machine and a sample of target machines, scores all pairs of task and target at
once on numpy, and makes the best move that the rules allow. Every step is allowed by itself, so the
answer is valid whenever the search is stopped (anytime). It is the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from control_plane.rebalancer.core.arrays import Floats, Ints
from control_plane.rebalancer.core.region_state import RegionState

_TARGETS = 48
"""Target machines that are sampled for a full machine: half of them in its own first bin."""
_TASKS = 48
"""Tasks of one machine that are scored in a step: those with the largest load."""
_TRIES = 24
"""Pairs that are checked against the rules of their job in a step, best first."""
_SWAP_MACHINES = 6
"""Machines with which a machine tries to swap tasks in one step."""
_EPS = 1e-9
_FAILURES_MAX = 3
"""Rounds without an improvement after which a machine is skipped."""
_NEVER = -np.inf

MayContinue = Callable[[], bool]
"""Returns whether the search may continue."""


class LocalSearch:
    """One search, which begins with the present placement."""

    def __init__(self, state: RegionState, seed: int, most_moves: int) -> None:
        """`most_moves`: the most tasks that may move."""
        self.state, self.steps = state, 0
        self._moves_max = most_moves
        self._may_leave = state.can_move.copy()
        """By task. Each task moves at most once, so the moves are possible in the order found."""
        self.moves: list[tuple[int, int]] = []
        """Task and target machine of each move, in order."""
        self._rng = np.random.default_rng(seed)
        self._pools: dict[int, Ints] = {}
        """Pool → its machines that may get tasks, least used first."""
        self._near: dict[tuple[int, int], Ints] = {}
        """Pool and bin of the first property → such machines."""

    def run(self, may_continue: MayContinue) -> bool:
        """Search until no improvement is found (True) or the search must stop (False)."""
        state, failed = self.state, np.zeros(len(self.state.cost), np.int64)
        while True:
            hot = state.power.machines_over_budget() if state.power.is_budgeted else False
            worst = np.nonzero(((state.cost > _EPS) | hot) & (failed < _FAILURES_MAX))[0]
            if not len(worst):
                return True
            self._sort_machines()
            for machine in worst[np.argsort(-state.cost[worst], kind="stable")]:
                improved = False
                while self._has_moves_left() and self._is_costly(int(machine)):
                    if not may_continue():
                        return False
                    self.steps += 1
                    if not self._improve(int(machine), deep=failed[machine] > 0):
                        break
                    improved = True
                failed[machine] = 0 if improved else failed[machine] + 1
            if not self._has_moves_left():
                return False

    def _is_costly(self, machine: int) -> bool:
        """Return whether a machine, or the power of its place, costs something."""
        state = self.state
        return bool(state.cost[machine] > _EPS or state.power.is_over_budget(machine))

    def _has_moves_left(self) -> bool:
        return len(self.moves) < self._moves_max

    def _sort_machines(self) -> None:
        """Sort the machines of each pool by use, least used first."""
        state = self.state
        usable = np.nonzero(state.is_open)[0]
        shares = (state.used * state.per_size).max(axis=1)
        usable = usable[np.argsort(shares[usable], kind="stable")]
        self._pools = _grouped(usable, state.pool[usable])
        self._near = {}
        if len(state.bins):
            width = int(state.bins[0].max(initial=0)) + 1
            keys = state.pool[usable] * width + state.bins[0][usable]
            parts = _grouped(usable, keys)
            self._near = {(key // width, key % width): part for key, part in parts.items()}

    def _targets(self, machine: int, number: int = _TARGETS) -> Ints:
        """Return a sample of machines that may get a machine's tasks, half of them in its bin."""
        state = self.state
        pool = int(state.pool[machine])
        samples = [self._sample(self._pools.get(pool), number // 2)]
        if len(state.bins):
            key = (pool, int(state.bins[0][machine]))
            samples.append(self._sample(self._near.get(key), number - number // 2))
        targets = np.concatenate(samples)
        return np.asarray(targets[targets != machine])

    def _sample(self, machines: Ints | None, number: int) -> Ints:
        """Return a sample of the less used half of machines."""
        if machines is None or not len(machines):
            return np.zeros(0, np.int64)
        if len(machines) <= number:
            return machines
        half = max(number, len(machines) // 2)
        return np.asarray(machines[self._rng.integers(0, half, number)])

    def _movable(self, machine: int) -> Ints:
        """Return the tasks of a machine that may move, at most `_TASKS` with the largest load."""
        state = self.state
        tasks = np.array(state.tasks_on[machine], np.int64)
        tasks = tasks[self._may_leave[tasks]] if len(tasks) else tasks
        if len(tasks) > _TASKS:
            weight = (state.load[tasks] * state.per_size[machine]).max(axis=1)
            tasks = tasks[np.argsort(-weight, kind="stable")[:_TASKS]]
        return tasks

    # -- one step

    def _improve(self, machine: int, *, deep: bool) -> bool:
        """Make the best single moves; if there are none and `deep`, try a chain or a swap."""
        tasks, targets = self._movable(machine), self._targets(machine)
        if not (len(tasks) and len(targets)):
            return False
        losses = self._losses_of_targets(tasks, targets)
        ok = self.state.fits(self.state.kind[tasks], targets)
        if self._make_moves(machine, tasks, targets, np.where(ok, losses, -_NEVER)):
            return True
        if not deep:
            return False
        blocked = self._scores(tasks, machine, targets, np.where(ok, -_NEVER, losses))
        return self._chain(tasks, targets, blocked) or self._swap(machine, tasks, targets)

    def _make_moves(self, machine: int, tasks: Ints, targets: Ints, losses: Floats) -> bool:
        """Make the best moves one by one, each task and target once; return whether one was made.

        A move changes the gain of all tasks of the machine, but not the loss of other targets.
        """
        state, tries, moved = self.state, 0, False
        scores = self._scores(tasks, machine, targets, losses)
        while tries < _TRIES and self._has_moves_left():
            row, column = divmod(int(scores.argmax()), len(targets))
            if not scores[row, column] > _EPS:
                break
            task, to = int(tasks[row]), int(targets[column])
            if not state.keeps_rules(task, to):
                losses[row, column], scores[row, column] = -_NEVER, _NEVER
                tries += 1
                continue
            self._move(task, to)
            moved = True
            if not self._is_costly(machine):
                break
            losses[row], losses[:, targets == to] = -_NEVER, -_NEVER
            scores = self._scores(tasks, machine, targets, losses)
        return moved

    def _scores(self, tasks: Ints, machine: int, targets: Ints, losses: Floats) -> Floats:
        """Return the gain of moving each task (row) to each target (column), less its price."""
        state, load = self.state, self.state.load[tasks]
        sources = np.full(len(tasks), machine)
        gain = state.cost[machine] - state.costs(sources, state.used[machine] - load)
        scores = gain[:, None] - losses
        if state.power.is_budgeted:
            scores += state.power.gains(load[:, :1], machine, targets)
        return np.asarray(scores)

    def _losses_of_targets(self, tasks: Ints, targets: Ints) -> Floats:
        """Return the loss of each target (column) by each task (row), plus the task's price."""
        state = self.state
        used = state.used[targets][None, :, :] + state.load[tasks][:, None, :]
        loss = state.costs(targets, used) - state.cost[targets] + self._opening_cost(targets)
        return np.asarray(loss + state.price[tasks][:, None])

    def _opening_cost(self, targets: Ints) -> Floats:
        state = self.state
        first = state.is_free[targets]
        if first.any():
            first = np.array(
                [state.is_free[m] and not state.tasks_on[m] for m in targets], np.bool_
            )
        return np.where(first, state.model.weights.open, 0.0)

    def _move(self, task: int, to: int) -> None:
        self.state.move(task, to)
        self._may_leave[task] = False
        self.moves.append((task, to))

    def _undo(self, source: int) -> None:
        """Undo the last move, which led from `source`."""
        task, _ = self.moves.pop()
        self.state.move(task, source)
        self._may_leave[task] = True

    def _swap(self, machine: int, tasks: Ints, targets: Ints) -> bool:
        """Swap two tasks of two machines; one moves first, so its target needs room for both."""
        state = self.state
        for other in map(int, targets[:_SWAP_MACHINES]):
            other_tasks = self._movable(other)
            if not len(other_tasks):
                continue
            change = state.load[tasks][:, None, :] - state.load[other_tasks][None, :, :]
            scores = state.cost[machine] + state.cost[other]
            scores = scores - state.costs(np.array(machine), state.used[machine] - change)
            scores = scores - state.costs(np.array(other), state.used[other] + change)
            scores -= self.state.price[tasks][:, None] + state.price[other_tasks][None, :]
            if state.power.is_budgeted:
                scores += state.power.gains(
                    change[:, :, 0], machine, np.full(len(other_tasks), other)
                )
            leaves_first = state.fits(state.kind[tasks], np.array([other]))[:, 0]
            comes_first = state.fits(state.kind[other_tasks], np.array([machine]))[:, 0]
            scores = np.where(leaves_first[:, None] | comes_first[None, :], scores, _NEVER)
            for row, column in _best_pairs(scores, most=4):
                if self._exchange(int(tasks[row]), int(other_tasks[column])):
                    return True
        return False

    def _exchange(self, task: int, other: int) -> bool:
        """Swap two tasks, whichever of them can move first; return whether that was possible."""
        for first, second in ((task, other), (other, task)):
            first_source = int(self.state.where[first])
            second_source = int(self.state.where[second])
            if not self._is_possible(first, second_source):
                continue
            self._move(first, second_source)
            if self._is_possible(second, first_source):
                self._move(second, first_source)
                return True
            self._undo(first_source)
        return False

    def _chain(self, tasks: Ints, targets: Ints, blocked: Floats) -> bool:
        """Make room for a task on a full target by moving one of its tasks to a third machine."""
        for row, column in _best_pairs(blocked, most=2):
            task, target = int(tasks[row]), int(targets[column])
            gain = float(blocked[row, column])
            other_tasks = self._movable(target)
            third = self._targets(target, _TARGETS // 2)
            third = third[third != self.state.where[task]]
            if not (len(other_tasks) and len(third)):
                continue
            scores = (
                self._scores(
                    other_tasks, target, third, self._losses_of_targets(other_tasks, third)
                )
                + gain
            )
            ok = self.state.fits(self.state.kind[other_tasks], third)
            for other, place in _best_pairs(np.where(ok, scores, _NEVER), most=4):
                if self._displace(task, target, int(other_tasks[other]), int(third[place])):
                    return True
        return False

    def _displace(self, task: int, target: int, other: int, third: int) -> bool:
        """Move `other` from the target to a third machine, then the task to the target.

        Return whether both moves were possible and gain more than their price; else undo them.
        """
        state = self.state
        source = int(state.where[task])
        machines = [source, target, third]
        before = state.cost[machines].sum() + state.power.cost()
        if not self._is_possible(other, third):
            return False
        price = state.price[[task, other]].sum()
        price += self._opening_cost(np.array([third]))[0]
        self._move(other, third)
        if self._is_possible(task, target):
            self._move(task, target)
            if before - state.cost[machines].sum() - state.power.cost() > price + _EPS:
                return True
            self._undo(source)
        self._undo(target)
        return False

    def _is_possible(self, task: int, to: int) -> bool:
        return self.state.fits_one(task, to) and self.state.keeps_rules(task, to)


def _best_pairs(scores: Floats, most: int) -> Iterator[tuple[int, int]]:
    """Yield row and column of the best positive scores, best first."""
    flat = scores.ravel()
    good = int((flat > _EPS).sum())
    if not good:
        return
    number = min(good, most)
    top = (
        np.argpartition(-flat, number - 1)[:number] if number < len(flat) else np.arange(len(flat))
    )
    for place in top[np.argsort(-flat[top], kind="stable")][:number]:
        yield int(place) // scores.shape[1], int(place) % scores.shape[1]


def _grouped(machines: Ints, keys: Ints) -> dict[int, Ints]:
    """Return the machines of each key, in their present order."""
    order = np.argsort(keys, kind="stable")
    edges = np.nonzero(np.diff(keys[order]))[0] + 1
    parts = np.split(machines[order], edges)
    return {
        int(keys[order[start]]): part
        for start, part in zip([0, *edges], parts, strict=True)
        if len(part)
    }
