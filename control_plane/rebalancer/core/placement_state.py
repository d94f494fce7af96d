"""A placement model on numpy: where objects are, what that costs, and what a move changes.

All containers are looked at at once for one object, and all objects for an exchange with one.
Numbers are floating-point; those of models whose amounts are integers stay exact below 2**53.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from control_plane.rebalancer.core.language import (
    Above,
    AtMostIn,
    BesideGroup,
    EvenUse,
    FitsIn,
    InProportion,
    MoveDistance,
    MovedObjects,
    MovedOfGroup,
    PlacementModel,
    SpreadOver,
    UsedContainers,
)
from control_plane.rebalancer.core.state import Flags, Floats, Ints

_ANY = np.iinfo(np.int32).max


class GroupCounts:
    """Objects of each group by bin of one scope, and what constraints say about them."""

    def __init__(self, bins: Ints, groups: int) -> None:
        """Count nothing yet."""
        self.bins = bins
        self.count = np.zeros((groups, int(bins.max(initial=0)) + 1), np.int32)
        self.most = np.full(groups, _ANY, np.int32)
        self.least = np.zeros(groups, np.int32)
        self.needs: list[list[int]] = [[] for _ in range(groups)]
        self.needed_by: list[list[int]] = [[] for _ in range(groups)]

    def tied(self, group: int) -> list[int]:
        """Return the groups that one needs and that need it."""
        return [*self.needs[group], *self.needed_by[group]]

    @property
    def is_ruled(self) -> Flags:
        """Return for each group whether some rule is about it."""
        tied = [bool(self.tied(group)) for group in range(len(self.needs))]
        return np.asarray((self.most < _ANY) | (self.least > 0) | np.array(tied, np.bool_))

    def allows(self, group: int, at: int) -> Flags | None:
        """Return for each container whether an object may go there from `at`; None: anywhere."""
        bins, here, count = self.bins, int(self.bins[at]), self.count[group]
        ok: Flags | None = None
        if self.most[group] < _ANY:
            left = count.copy()
            left[here] -= 1
            ok = (left < self.most[group])[bins]
        if self.least[group] > 0:
            kept = np.count_nonzero(count) - (count[here] == 1)
            spread = kept + ((count == 0) | ((count == 1) & (np.arange(len(count)) == here)))
            ok = _both(ok, (spread >= self.least[group])[bins])
        for other in self.needs[group]:
            ok = _both(ok, (self.count[other] > 0)[bins])
        if count[here] == 1 and any(self.count[other, here] for other in self.needed_by[group]):
            ok = _both(ok, bins == here)
        return ok

    def move(self, group: int, at: int, to: int) -> None:
        """Count an object elsewhere."""
        self.count[group, self.bins[at]] -= 1
        self.count[group, self.bins[to]] += 1


def _both(one: Flags | None, two: Flags) -> Flags:
    return two if one is None else one & two


class PlacementState:
    """Objects in containers, and what that costs now."""

    def __init__(self, model: PlacementModel) -> None:
        """Take over where objects are."""
        self.model, dimensions = model, model.dimensions()
        number = {c.name: m for m, c in enumerate(model.containers)}
        self.wide = {name: d for d, name in enumerate(dimensions)}
        self.need: Floats = _table([o.needs for o in model.objects], dimensions)
        self.offers: Floats = _table([c.offers for c in model.containers], dimensions)
        self.origin = np.array([number[o.at] for o in model.objects], np.int64)
        self.where = self.origin.copy()
        self.may = {
            i: np.isin(np.arange(len(number)), [number[m] for m in (o.at, *o.may)])
            for i, o in enumerate(model.objects)
            if o.may
        }
        groups = {name: g for g, name in enumerate(dict.fromkeys(o.group for o in model.objects))}
        self.group = np.array([groups[o.group] for o in model.objects], np.int64)
        self._limits(model)
        self._goals(model)
        self.scopes = self._scopes(model, groups)
        self.used = np.zeros_like(self.offers)
        np.add.at(self.used, self.where, self.need)
        self.held = self.used.copy()
        """What is used, and what objects that moved still hold where they were."""
        self.number = np.bincount(self.where, minlength=len(number))
        self.moved = np.zeros(len(groups), np.int64)
        """Objects of each group that are not where they were."""
        self.cost = self.costs(np.arange(len(number)), self.used)

    def _limits(self, model: PlacementModel) -> None:
        self.room = np.full_like(self.offers, np.inf)
        self.leaves = np.ones(len(self.wide), np.bool_)
        """By dimension: whether an object that moves gives back at once what it held."""
        for rule in model.constraints:
            if isinstance(rule, FitsIn):
                d = self.wide[rule.dimension]
                self.room[:, d] = self.offers[:, d]
                self.leaves[d] = not rule.twice_while_moving

    def _goals(self, model: PlacementModel) -> None:
        self.layers: list[tuple[Floats, Floats]] = []
        """Levels of containers and what a unit above them weighs."""
        self.by_bin: list[tuple[Ints, int, Floats, float]] = []
        """Bins of containers, a dimension, levels of bins, and a weight."""
        self.pairs: list[tuple[int, int, float, float]] = []
        self.price = np.zeros(len(self.need))
        self.distance: Floats | None = None
        self.group_weight = 0.0
        self.used_weight: Floats = np.zeros(len(self.offers))
        for goal in model.goals:
            if isinstance(goal, Above):
                self._above(model, goal)
            elif isinstance(goal, EvenUse):
                d = self.wide[goal.dimension]
                size = self.offers[:, d]
                average = self.need[:, d].sum() / max(size.sum(), 1e-12)
                share = np.divide(goal.weight, size, out=np.zeros_like(size), where=size > 0)
                self._layer(d, size * (average + goal.tolerance), share)
            elif isinstance(goal, InProportion):
                one, two = self.wide[goal.dimension], self.wide[goal.other]
                self.pairs.append((one, two, goal.ratio, goal.weight))
            elif isinstance(goal, MovedObjects):
                prices = np.array([o.move_price for o in model.objects])
                self.price += goal.weight * (prices + goal.each)
            elif isinstance(goal, MovedOfGroup):
                self.group_weight += goal.weight
            elif isinstance(goal, MoveDistance):
                priced = goal.weight * np.array(goal.prices, np.float64)
                self.distance = priced if self.distance is None else self.distance + priced
            elif isinstance(goal, UsedContainers):
                each = [goal.each.get(c.name, 1.0) for c in model.containers]
                self.used_weight += goal.weight * np.array(each, np.float64)

    def _above(self, model: PlacementModel, goal: Above) -> None:
        d = self.wide[goal.dimension]
        names = [model.bin_of(c, goal.scope) for c in model.containers]
        numbers = {name: b for b, name in enumerate(dict.fromkeys(names))}
        bins = np.array([numbers[name] for name in names], np.int64)
        level: Floats = np.asarray(
            goal.share * np.bincount(bins, weights=self.offers[:, d]), np.float64
        )
        for name, value in goal.level.items():
            if name in numbers:
                level[numbers[name]] = value
        if goal.scope:
            self.by_bin.append((bins, d, level, goal.weight))
        else:
            self._layer(d, level, np.full(len(level), goal.weight))

    def _layer(self, d: int, level: Floats, weight: Floats) -> None:
        """Add levels of one dimension to the first layer that has none of it."""
        free = (layer for layer in self.layers if not layer[1][:, d].any())
        levels, weights = next(free, (np.zeros_like(self.offers), np.zeros_like(self.offers)))
        if not any(levels is known for known, _ in self.layers):
            self.layers.append((levels, weights))
        levels[:, d], weights[:, d] = level, weight

    def _scopes(self, model: PlacementModel, groups: dict[str, int]) -> dict[str, GroupCounts]:
        found: dict[str, GroupCounts] = {}
        for rule in model.constraints:
            if isinstance(rule, FitsIn):
                continue
            counts = found.get(rule.scope)
            if counts is None:
                names = [model.bin_of(c, rule.scope) for c in model.containers]
                numbers = {name: b for b, name in enumerate(dict.fromkeys(names))}
                bins = np.array([numbers[name] for name in names], np.int64)
                counts = found[rule.scope] = GroupCounts(bins, len(groups))
                np.add.at(counts.count, (self.group, bins[self.where]), 1)
            if isinstance(rule, AtMostIn):
                named = rule.by_group or {g: rule.objects for g in groups if g}
                for name, most in named.items():
                    counts.most[groups[name]] = min(counts.most[groups[name]], most)
            elif isinstance(rule, SpreadOver):
                for name, least in rule.bins.items():
                    counts.least[groups[name]] = max(counts.least[groups[name]], least)
            elif isinstance(rule, BesideGroup):
                for name, others in rule.needs.items():
                    counts.needs[groups[name]] += [groups[other] for other in others]
                    for other in others:
                        counts.needed_by[groups[other]].append(groups[name])
        return found

    # -- what it costs

    def costs(self, containers: Ints | slice, used: Floats) -> Floats:
        """Return what each container costs while so much of it is used."""
        found: Floats = np.zeros(len(used))
        for level, weight in self.layers:
            over = np.maximum(used - level[containers], 0.0)
            found += np.einsum("md,md->m", over, weight[containers])
        if self.pairs:
            free = self.offers[containers] - used
            for one, two, ratio, of_pair in self.pairs:
                found += of_pair * np.maximum(ratio * free[:, one] - free[:, two], 0.0)
        return found

    def total(self) -> float:
        """Return the sum of the goals, counted again from where objects are."""
        used = np.zeros_like(self.offers)
        np.add.at(used, self.where, self.need)
        away = self.where != self.origin
        found = float(self.costs(slice(None), used).sum()) + float(self.price[away].sum())
        for bins, d, level, of_bin in self.by_bin:
            in_bin = np.bincount(bins, weights=used[:, d], minlength=len(level))
            found += of_bin * float(np.maximum(in_bin - level, 0.0).sum())
        if self.distance is not None:
            found += float(self.distance[self.origin, self.where].sum())
        if self.group_weight:
            moved = np.bincount(self.group[away], minlength=1)
            found += self.group_weight * float(moved.max(initial=0))
        return found + float(self.used_weight[np.unique(self.where)].sum())

    def changes(self, i: int) -> Floats:
        """Return what the sum of the goals changes by if an object goes to each container."""
        at, need, origin = int(self.where[i]), self.need[i], int(self.origin[i])
        left = self.cost[at] - self.costs(slice(at, at + 1), (self.used[at] - need)[None])[0]
        found = self.costs(slice(None), self.used + need) - self.cost - left
        if self.used_weight.any():
            found += self.used_weight * (self.number == 0)
            found -= float(self.used_weight[at]) * float(self.number[at] == 1)
        for bins, d, level, weight in self.by_bin:
            found += weight * self._bin_changes(bins, d, level, at, float(need[d]))
        home = -float(self.price[i]) - self._groups(i, -1)
        away = float(self.price[i]) + self._groups(i, 1)
        if at == origin:
            found += away
        else:
            found[origin] += home
        if self.distance is not None:
            found += self.distance[origin] - self.distance[origin, at]
        found[at] = 0.0
        return np.asarray(found)

    def _bin_changes(self, bins: Ints, d: int, level: Floats, at: int, need: float) -> Floats:
        in_bin = np.bincount(bins, weights=self.used[:, d], minlength=len(level))
        now = np.maximum(in_bin - level, 0.0)
        more = np.maximum(in_bin + need - level, 0.0) - now
        here = int(bins[at])
        less = now[here] - max(in_bin[here] - need - level[here], 0.0)
        return np.where(bins == here, 0.0, (more - less)[bins])

    def _groups(self, i: int, by: int) -> float:
        """Return by how much the largest number of moved objects of a group changes (or falls)."""
        if not self.group_weight:
            return 0.0
        group, most = int(self.group[i]), int(self.moved.max())
        if by > 0:
            return self.group_weight * max(0, int(self.moved[group]) + 1 - most)
        alone = self.moved[group] == most and np.count_nonzero(self.moved == most) == 1
        return self.group_weight * float(alone)

    # -- what is allowed

    def allowed(self, i: int) -> Flags:
        """Return for each container whether an object may go there; where it is, it may stay."""
        at, origin, need = int(self.where[i]), int(self.origin[i]), self.need[i]
        left = self.room - self.held
        ok = (left >= need).all(axis=1)
        if at != origin:
            ok[origin] = (left[origin] >= need)[self.leaves].all()
        if i in self.may:
            ok &= self.may[i]
        for counts in self.scopes.values():
            found = counts.allows(int(self.group[i]), at)
            if found is not None:
                ok &= found
        ok[at] = True
        return np.asarray(ok)

    def may_go(self, i: int, to: int) -> bool:
        """Return whether the rules about groups let an object go to a container; room apart."""
        at, group = int(self.where[i]), int(self.group[i])
        if i in self.may and not self.may[i][to]:
            return False
        found = (counts.allows(group, at) for counts in self.scopes.values())
        return all(ok is None or bool(ok[to]) for ok in found)

    # -- exchanges

    def exchanges(self, i: int, others: Ints) -> Floats:
        """Return what exchanging an object with each other one changes; infinite without room.

        Goals about groups and about bins of scopes are left out.
        """
        at, need, origin = int(self.where[i]), self.need[i], self.origin
        theirs, home = self.need[others], self.where[others]
        come = np.where((origin[others] == at)[:, None] & ~self.leaves, 0.0, theirs)
        go = np.where((home == origin[i])[:, None] & ~self.leaves, 0.0, need)
        given = np.where(self.leaves | (at != origin[i]), need, 0.0)
        freed = np.where(self.leaves | (home != origin[others])[:, None], theirs, 0.0)
        ok = (self.held[at] - given + come <= self.room[at]).all(axis=1)
        ok &= (self.held[home] - freed + go <= self.room[home]).all(axis=1)
        ok &= (home != at) & (self.group[others] != self.group[i])
        found = np.full(len(others), np.inf)
        kept = np.nonzero(ok)[0]
        if not len(kept):
            return found
        others, theirs, home = others[kept], theirs[kept], home[kept]
        here = np.full(len(kept), at)
        change = self.costs(here, self.used[at] - need + theirs) - self.cost[at]
        change += self.costs(home, self.used[home] - theirs + need) - self.cost[home]
        change += self.price[i] * ((home != origin[i]) * 1.0 - float(at != origin[i]))
        came = (at != origin[others]) * 1.0 - (home != origin[others]) * 1.0
        change += self.price[others] * came
        if self.distance is not None:
            change += self.distance[origin[i], home] - self.distance[origin[i], at]
            change += self.distance[origin[others], at] - self.distance[origin[others], home]
        found[kept] = change
        return found

    # -- changing it

    def move(self, i: int, to: int) -> None:
        """Bring an object to another container."""
        at, need, origin = int(self.where[i]), self.need[i], int(self.origin[i])
        if at == to:
            return
        self.used[at] -= need
        self.used[to] += need
        self.held[at] -= np.where(self.leaves, need, 0.0) if at == origin else need
        self.held[to] += np.where(self.leaves, need, 0.0) if to == origin else need
        self.number[at] -= 1
        self.number[to] += 1
        self.moved[self.group[i]] += int(at == origin) - int(to == origin)
        for counts in self.scopes.values():
            counts.move(int(self.group[i]), at, to)
        self.where[i] = to
        for m in (at, to):
            self.cost[m] = self.costs(slice(m, m + 1), self.used[m][None])[0]


def _table(rows: Sequence[dict[str, float]], dimensions: list[str]) -> Floats:
    found = [[row.get(d, 0.0) for d in dimensions] for row in rows]
    return np.array(found, np.float64).reshape(len(rows), len(dimensions))
