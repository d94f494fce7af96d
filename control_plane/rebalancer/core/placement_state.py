"""A placement model on numpy: where objects are, and what that costs.

`tables` has the same arrays in the form in which `placement_steps` reads and changes them. Numbers
are floating-point; those of models whose amounts are integers stay exact below 2**53.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from control_plane.rebalancer.core.arrays import Flags, Floats, Ints
from control_plane.rebalancer.core.language import (
    Above,
    AtMostIn,
    EvenUse,
    FitsIn,
    InProportion,
    MoveDistance,
    MovedObjects,
    MovedOfGroup,
    NearGroup,
    PlacementModel,
    SpreadOver,
    UsedContainers,
)
from control_plane.rebalancer.core.placement_steps import exchange
from control_plane.rebalancer.core.step_tables import CHAINED, StepTables, interpreted

_ANY = np.iinfo(np.int32).max


class GroupCounts:
    """Objects of each group by bin of one scope, and what constraints say about them."""

    def __init__(self, bins: Ints, groups: int) -> None:
        """Count nothing yet."""
        self.bins = bins
        self.count = np.zeros((groups, int(bins.max(initial=0)) + 1), np.int32)
        self.most = np.full(groups, _ANY, np.int64)
        self.least = np.zeros(groups, np.int64)
        self.needs: list[list[int]] = [[] for _ in range(groups)]
        self.needed: list[list[int]] = [[] for _ in range(groups)]

    def tied(self, group: int) -> list[int]:
        """Return the groups that one needs and that need it."""
        return [*self.needs[group], *self.needed[group]]

    @property
    def is_ruled(self) -> Flags:
        """Return for each group whether some rule is about it."""
        tied = [bool(self.tied(group)) for group in range(len(self.needs))]
        return np.asarray((self.most < _ANY) | (self.least > 0) | np.array(tied, np.bool_))


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
        self.tables = self._tables()
        self.views = interpreted(self.tables)

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
        bins, numbers = _bins(model, goal.scope)
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
                bins, _ = _bins(model, rule.scope)
                counts = found[rule.scope] = GroupCounts(bins, len(groups))
                np.add.at(counts.count, (self.group, bins[self.where]), 1)
            if isinstance(rule, AtMostIn):
                named = rule.by_group or {g: rule.objects for g in groups if g}
                for name, most in named.items():
                    counts.most[groups[name]] = min(counts.most[groups[name]], most)
            elif isinstance(rule, SpreadOver):
                for name, least in rule.bins.items():
                    counts.least[groups[name]] = max(counts.least[groups[name]], least)
            elif isinstance(rule, NearGroup):
                for name, others in rule.needs.items():
                    counts.needs[groups[name]] += [groups[other] for other in others]
                    for other in others:
                        counts.needed[groups[other]].append(groups[name])
        return found

    # -- for steps

    def _tables(self) -> StepTables:
        """Return what steps look at and change: these arrays, and more that is counted here."""
        rows = np.full(len(self.need), -1)
        rows[list(self.may)] = np.arange(len(self.may))
        nowhere = np.zeros((0, len(self.offers)))
        return StepTables(
            need=np.append(self.need, np.zeros((1, len(self.wide))), axis=0),
            origin=np.append(self.origin, -1),
            price=np.append(self.price, 0.0),
            group=self.group,
            offers=self.offers,
            room=self.room,
            leaves=self.leaves,
            **self._levels(),
            **self._of_bins(),
            distance=np.zeros((0, 0)) if self.distance is None else self.distance,
            used_weight=self.used_weight,
            group_weight=float(self.group_weight),
            may_row=rows,
            may=np.array(list(self.may.values()) or nowhere, np.bool_),
            **self._rules(),
            where=self.where,
            used=self.used,
            held=self.held,
            number=self.number,
            cost=self.cost,
            moved=self.moved,
            with_moved=np.bincount(self.moved, minlength=len(self.where) + 1),
            **self._lists(),
            chain=np.zeros((CHAINED, 2), np.int64),
            best=self.where.copy(),
            sums=np.zeros(2),
            marks=np.array([0, 1, 0]),
        )

    def _levels(self) -> dict[str, Any]:
        """Return the tables of goals about levels, and about proportions."""
        over = [(d, *layer) for layer in self.layers for d in np.nonzero(layer[1].any(axis=0))[0]]
        one, two, ratio, weight = list(zip(*self.pairs, strict=True)) or [(), (), (), ()]
        empty = np.zeros((0, len(self.offers)))
        return {
            "over_of": np.array([d for d, _, _ in over], np.int64),
            "level": np.array([level[:, d] for d, level, _ in over] or empty).T.copy(),
            "weight": np.array([weights[:, d] for d, _, weights in over] or empty).T.copy(),
            "one_of": np.array(one, np.int64),
            "two_of": np.array(two, np.int64),
            "ratio": np.array(ratio, np.float64),
            "pair_weight": np.array(weight, np.float64),
        }

    def _of_bins(self) -> dict[str, Any]:
        """Return the tables of goals about bins of scopes, and what is used of these bins."""
        wide = max((len(level) for _, _, level, _ in self.by_bin), default=0)
        empty = np.zeros((0, len(self.offers)))
        used = [
            np.bincount(bins, weights=self.used[:, d], minlength=wide)
            for bins, d, _, _ in self.by_bin
        ]
        return {
            "bin_at": np.array([bins for bins, _, _, _ in self.by_bin] or empty, np.int64),
            "bin_of": np.array([d for _, d, _, _ in self.by_bin], np.int64),
            "bin_level": np.array([np.resize(of, wide) for _, _, of, _ in self.by_bin] or empty),
            "bin_weight": np.array([weight for _, _, _, weight in self.by_bin], np.float64),
            "in_bin": np.array(used or empty),
        }

    def _lists(self) -> dict[str, Any]:
        """Return the objects of each container as lists."""
        nothing = len(self.where)
        order = np.argsort(self.where, kind="stable")
        at = self.where[order]
        head, starts = np.full(len(self.offers), nothing), np.diff(at, prepend=-1) != 0
        head[at[starts]] = order[starts]
        after, before = np.full(nothing, nothing), np.full(nothing, nothing)
        linked = np.nonzero(~starts)[0]
        after[order[linked - 1]], before[order[linked]] = order[linked], order[linked - 1]
        return {"head": head, "after": after, "before": before}

    def _rules(self) -> dict[str, Any]:
        """Return the tables about groups; the counts of all scopes become parts of one."""
        scopes, groups = list(self.scopes.values()), len(self.moved)
        wide = [counts.count.shape[1] for counts in scopes]
        first = np.cumsum([0, *(groups * bins for bins in wide)])
        count = np.concatenate([c.count.ravel() for c in scopes] or [np.zeros(0, np.int32)])
        for counts, start, bins in zip(scopes, first.tolist(), wide, strict=False):
            counts.count = count[start : start + groups * bins].reshape(groups, bins)
        none = np.zeros((0, groups), np.int64)
        found = {
            "scope_at": np.array(
                [c.bins for c in scopes] or np.zeros((0, len(self.offers))), np.int64
            ),
            "first": first[:-1],
            "wide": np.array(wide, np.int64),
            "most": np.array([c.most for c in scopes] or none),
            "least": np.array([c.least for c in scopes] or none),
            "counted": count,
            "seen": np.array([np.count_nonzero(c.count, axis=1) for c in scopes] or none),
        }
        for name in ("needs", "needed"):
            lists = [of for counts in scopes for of in getattr(counts, name)]
            found[f"{name}_from"] = np.cumsum([0, *map(len, lists)])
            found[name] = np.array(list(chain(*lists)), np.int64)
        return found

    # -- what it costs

    def costs(self, containers: Ints | slice, used: Floats) -> Floats:
        """Return the cost of each container at the use `used`."""
        found: Floats = np.zeros(len(used))
        for level, weight in self.layers:
            over = np.maximum(used - level[containers], 0.0)
            found += np.einsum("md,md->m", over, weight[containers])
        if self.pairs:
            free = self.offers[containers] - used
            for one, two, ratio, of_pair in self.pairs:
                found += of_pair * np.maximum(ratio * free[:, one] - free[:, two], 0.0)
        return found

    def paid(self) -> float:
        """Return what is paid for moves, by object and distance."""
        found = float(self.price[self.where != self.origin].sum())
        if self.distance is not None:
            found += float(self.distance[self.origin, self.where].sum())
        return found

    def total(self) -> float:
        """Return the sum of the goals, counted again from where objects are."""
        used = np.zeros_like(self.offers)
        np.add.at(used, self.where, self.need)
        found = float(self.costs(slice(None), used).sum()) + self.paid()
        for bins, d, level, of_bin in self.by_bin:
            in_bin = np.bincount(bins, weights=used[:, d], minlength=len(level))
            found += of_bin * float(np.maximum(in_bin - level, 0.0).sum())
        if self.group_weight:
            moved = np.bincount(self.group[self.where != self.origin], minlength=1)
            found += self.group_weight * float(moved.max(initial=0))
        return found + float(self.used_weight[np.unique(self.where)].sum())

    # -- changing it

    def move(self, i: int, to: int) -> None:
        """Bring an object to another container."""
        at = int(self.where[i])
        if at != to:
            exchange(self.views, i, len(self.where), at, to)


def _bins(model: PlacementModel, scope: str) -> tuple[Ints, dict[str, int]]:
    """Return the bin of each container as a number, and the numbers by name."""
    names = [model.bin_of(c, scope) for c in model.containers]
    numbers = {name: b for b, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64), numbers


def _table(rows: Sequence[dict[str, float]], dimensions: list[str]) -> Floats:
    found = [[row.get(d, 0.0) for d in dimensions] for row in rows]
    return np.array(found, np.float64).reshape(len(rows), len(dimensions))
