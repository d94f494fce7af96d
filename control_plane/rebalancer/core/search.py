"""Local search: moves, swaps and chains of two that relieve the hottest machines, step by step.

Each step looks at one machine and a sample of others, scores all pairs of task and target at once
on numpy, and does the best that the rules allow. Every step is allowed by itself, so the answer is
good whenever the search is stopped (anytime), and the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from control_plane.rebalancer.core.state import Floats, Ints, State

_TARGETS = 48
"""Machines that are looked at for one that is too full: half of them in its own first bin."""
_TASKS = 48
"""Tasks of one machine that are looked at in a step, those that load it most."""
_TRIES = 24
"""Pairs that are tried against the rules of their job, best first."""
_SWAPS = 6
"""Machines with whose tasks those of a machine are swapped, in one step."""
_EPS = 1e-9
_SPENT = 3
"""Rounds without an improvement after which a machine is skipped."""
_NEVER = -np.inf

Going = Callable[[], bool]
"""Returns whether the search may continue."""


class LocalSearch:
    """One search from where tasks are now."""

    def __init__(self, state: State, seed: int, most_moves: int) -> None:
        """`most_moves`: tasks that may end up elsewhere."""
        self.state, self.steps = state, 0
        self._most = most_moves
        self._may_leave = state.can_move.copy()
        """A task moves once: then the order in which moves were found is one that is possible."""
        self.moves: list[tuple[int, int]] = []
        """Tasks and where they went, in that order."""
        self._rng = np.random.default_rng(seed)
        self._pools: dict[int, Ints] = {}
        """Pool → its machines that may get tasks, the emptiest first."""
        self._near: dict[tuple[int, int], Ints] = {}
        """The same by pool and bin of the first property."""

    def run(self, going: Going) -> bool:
        """Improve until no improvement is found (True), or until `going` returns False."""
        state, failed = self.state, np.zeros(len(self.state.cost), np.int64)
        while True:
            hot = state.power.hot() if state.power.is_budgeted else False
            worst = np.nonzero(((state.cost > _EPS) | hot) & (failed < _SPENT))[0]
            if not len(worst):
                return True
            self._sort()
            for machine in worst[np.argsort(-state.cost[worst], kind="stable")]:
                improved = False
                while self._is_allowed() and self._is_worse(int(machine)):
                    if not going():
                        return False
                    self.steps += 1
                    if not self._improve(int(machine), deep=failed[machine] > 0):
                        break
                    improved = True
                failed[machine] = 0 if improved else failed[machine] + 1
            if not self._is_allowed():
                return False

    def _is_worse(self, machine: int) -> bool:
        """Return whether a machine costs something, or draws in a place that does."""
        state = self.state
        return bool(state.cost[machine] > _EPS or state.power.is_over(machine))

    def _is_allowed(self) -> bool:
        return len(self.moves) < self._most

    def _sort(self) -> None:
        """Put the machines of each pool in order, those first that have most to give."""
        state = self.state
        usable = np.nonzero(state.is_open)[0]
        shares = (state.used * state.per_size).max(axis=1)
        usable = usable[np.argsort(shares[usable], kind="stable")]
        self._pools = _parted(usable, state.pool[usable])
        self._near = {}
        if len(state.bins):
            width = int(state.bins[0].max(initial=0)) + 1
            keys = state.pool[usable] * width + state.bins[0][usable]
            parts = _parted(usable, keys)
            self._near = {(key // width, key % width): part for key, part in parts.items()}

    def _targets(self, machine: int, number: int = _TARGETS) -> Ints:
        state = self.state
        pool = int(state.pool[machine])
        found = [self._sample(self._pools.get(pool), number // 2)]
        if len(state.bins):
            key = (pool, int(state.bins[0][machine]))
            found.append(self._sample(self._near.get(key), number - number // 2))
        picked = np.concatenate(found)
        return np.asarray(picked[picked != machine])

    def _sample(self, machines: Ints | None, number: int) -> Ints:
        """Return some of the emptier half of machines."""
        if machines is None or not len(machines):
            return np.zeros(0, np.int64)
        if len(machines) <= number:
            return machines
        half = max(number, len(machines) // 2)
        return np.asarray(machines[self._rng.integers(0, half, number)])

    def _movable(self, machine: int) -> Ints:
        state = self.state
        tasks = np.array(state.on[machine], np.int64)
        tasks = tasks[self._may_leave[tasks]] if len(tasks) else tasks
        if len(tasks) > _TASKS:
            weight = (state.load[tasks] * state.per_size[machine]).max(axis=1)
            tasks = tasks[np.argsort(-weight, kind="stable")[:_TASKS]]
        return tasks

    # -- one step

    def _improve(self, machine: int, *, deep: bool) -> bool:
        """Do the best single moves; if there is none, `deep`, what takes two."""
        tasks, targets = self._movable(machine), self._targets(machine)
        if not (len(tasks) and len(targets)):
            return False
        losses = self._losses(tasks, targets)
        ok = self.state.fits(self.state.kind[tasks], targets)
        if self._moved(machine, tasks, targets, np.where(ok, losses, -_NEVER)):
            return True
        if not deep:
            return False
        blocked = self._scores(tasks, machine, targets, np.where(ok, -_NEVER, losses))
        return self._chain(tasks, targets, blocked) or self._swap(machine, tasks, targets)

    def _moved(self, machine: int, tasks: Ints, targets: Ints, losses: Floats) -> bool:
        """Make the best moves one by one, each task and target once; return whether there was any.

        A move changes what all tasks of the machine gain, but not what other targets lose.
        """
        state, tries, moved = self.state, 0, False
        scores = self._scores(tasks, machine, targets, losses)
        while tries < _TRIES and self._is_allowed():
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
            if not self._is_worse(machine):
                break
            losses[row], losses[:, targets == to] = -_NEVER, -_NEVER
            scores = self._scores(tasks, machine, targets, losses)
        return moved

    def _scores(self, tasks: Ints, machine: int, targets: Ints, losses: Floats) -> Floats:
        """Return what each task (rows) gains on each target (columns), its price paid."""
        state, load = self.state, self.state.load[tasks]
        here = np.full(len(tasks), machine)
        gain = state.cost[machine] - state.costs(here, state.used[machine] - load)
        found = gain[:, None] - losses
        if state.power.is_budgeted:
            found += state.power.gains(load[:, :1], machine, targets)
        return np.asarray(found)

    def _losses(self, tasks: Ints, targets: Ints) -> Floats:
        """Return what each target (columns) loses by each task (rows), and the task's price."""
        state = self.state
        used = state.used[targets][None, :, :] + state.load[tasks][:, None, :]
        loss = state.costs(targets, used) - state.cost[targets] + self._opening(targets)
        return np.asarray(loss + state.price[tasks][:, None])

    def _opening(self, targets: Ints) -> Floats:
        state = self.state
        first = state.is_free[targets]
        if first.any():
            first = np.array([state.is_free[m] and not state.on[m] for m in targets], np.bool_)
        return np.where(first, state.model.weights.open, 0.0)

    def _move(self, task: int, to: int) -> None:
        self.state.move(task, to)
        self._may_leave[task] = False
        self.moves.append((task, to))

    def _undo(self, at: int) -> None:
        """Take the last move back."""
        task, _ = self.moves.pop()
        self.state.move(task, at)
        self._may_leave[task] = True

    def _swap(self, machine: int, tasks: Ints, targets: Ints) -> bool:
        """Exchange two tasks; one goes first, so that its machine has room."""
        state = self.state
        for other in map(int, targets[:_SWAPS]):
            theirs = self._movable(other)
            if not len(theirs):
                continue
            change = state.load[tasks][:, None, :] - state.load[theirs][None, :, :]
            here, there = np.array(machine), np.array(other)
            scores = state.cost[machine] + state.cost[other]
            scores = scores - state.costs(here, state.used[machine] - change)
            scores = scores - state.costs(there, state.used[other] + change)
            scores -= self.state.price[tasks][:, None] + state.price[theirs][None, :]
            if state.power.is_budgeted:
                scores += state.power.gains(change[:, :, 0], machine, np.full(len(theirs), other))
            goes = state.fits(state.kind[tasks], np.array([other]))[:, 0]
            comes = state.fits(state.kind[theirs], np.array([machine]))[:, 0]
            scores = np.where(goes[:, None] | comes[None, :], scores, _NEVER)
            for row, column in _best(scores, most=4):
                if self._exchange(int(tasks[row]), int(theirs[column])):
                    return True
        return False

    def _exchange(self, one: int, two: int) -> bool:
        state = self.state
        here, there = int(state.where[one]), int(state.where[two])
        for first, to, second, back in ((one, there, two, here), (two, here, one, there)):
            if not self._may(first, to):
                continue
            self._move(first, to)
            if self._may(second, back):
                self._move(second, back)
                return True
            self._undo(back)
        return False

    def _chain(self, tasks: Ints, targets: Ints, blocked: Floats) -> bool:
        """Make room on a full machine first: one of its tasks goes to a third machine."""
        for row, column in _best(blocked, most=2):
            task, target = int(tasks[row]), int(targets[column])
            left = float(blocked[row, column])
            theirs = self._movable(target)
            third = self._targets(target, _TARGETS // 2)
            third = third[third != self.state.where[task]]
            if not (len(theirs) and len(third)):
                continue
            scores = self._scores(theirs, target, third, self._losses(theirs, third)) + left
            ok = self.state.fits(self.state.kind[theirs], third)
            for their, where in _best(np.where(ok, scores, _NEVER), most=4):
                if self._displace(task, target, int(theirs[their]), int(third[where])):
                    return True
        return False

    def _displace(self, task: int, target: int, other: int, third: int) -> bool:
        state = self.state
        at = int(state.where[task])
        before = state.cost[[at, target, third]].sum() + state.power.total()
        if not self._may(other, third):
            return False
        price = state.price[[task, other]].sum()
        price += self._opening(np.array([third]))[0]
        self._move(other, third)
        if self._may(task, target):
            self._move(task, target)
            if before - state.cost[[at, target, third]].sum() - state.power.total() > price + _EPS:
                return True
            self._undo(at)
        self._undo(target)
        return False

    def _may(self, task: int, to: int) -> bool:
        return self.state.fits_one(task, to) and self.state.keeps_rules(task, to)


def _best(scores: Floats, most: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the best positive scores, best first."""
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


def _parted(machines: Ints, keys: Ints) -> dict[int, Ints]:
    """Return machines by key, each part in the order that it had."""
    order = np.argsort(keys, kind="stable")
    edges = np.nonzero(np.diff(keys[order]))[0] + 1
    parts = np.split(machines[order], edges)
    return {
        int(keys[order[start]]): part
        for start, part in zip([0, *edges], parts, strict=True)
        if len(part)
    }
