"""The state of a placement model on numpy: where objects are, and what that costs.

`tables` has the same arrays for `placement_steps`, which reads and changes them. Numbers are
floating-point. Integer amounts stay exact below 2**53.
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
from control_plane.rebalancer.core.step_tables import EJECTED_MAX, StepTables, interpreted

_ANY = np.iinfo(np.int32).max


class GroupCounts:
    """The objects of each group by bin of one scope, and the constraints on these counts."""

    def __init__(self, bins: Ints, groups: int) -> None:
        """`bins`: the bin of each container; all counts are 0."""
        self.bins = bins
        self.count = np.zeros((groups, int(bins.max(initial=0)) + 1), np.int32)
        self.most = np.full(groups, _ANY, np.int64)
        self.least = np.zeros(groups, np.int64)
        self.needs: list[list[int]] = [[] for _ in range(groups)]
        self.needed: list[list[int]] = [[] for _ in range(groups)]

    def related(self, group: int) -> list[int]:
        """Return the groups that a group depends on, and those that depend on it."""
        return [*self.needs[group], *self.needed[group]]

    @property
    def has_constraint(self) -> Flags:
        """Return for each group whether it has a constraint."""
        is_related = [bool(self.related(group)) for group in range(len(self.needs))]
        return np.asarray((self.most < _ANY) | (self.least > 0) | np.array(is_related, np.bool_))


class PlacementState:
    """The placement of all objects, and its cost."""

    def __init__(self, model: PlacementModel) -> None:
        """Begin with the model's placement."""
        self.model, dimensions = model, model.dimensions()
        number = {c.name: m for m, c in enumerate(model.containers)}
        self.dimension_index = {name: d for d, name in enumerate(dimensions)}
        self.need: Floats = _amounts([o.needs for o in model.objects], dimensions)
        self.offers: Floats = _amounts([c.offers for c in model.containers], dimensions)
        self.origin = np.array([number[o.at] for o in model.objects], np.int64)
        self.where = self.origin.copy()
        self.may = {
            i: np.isin(np.arange(len(number)), [number[m] for m in (o.at, *o.may)])
            for i, o in enumerate(model.objects)
            if o.may
        }
        groups = {name: g for g, name in enumerate(dict.fromkeys(o.group for o in model.objects))}
        self.group = np.array([groups[o.group] for o in model.objects], np.int64)
        self._set_rooms(model)
        self._set_goals(model)
        self.scopes = self._scopes(model, groups)
        self.used = np.zeros_like(self.offers)
        np.add.at(self.used, self.where, self.need)
        self.held = self.used.copy()
        """Use by container, plus what moved objects still hold in their origin."""
        self.objects_in = np.bincount(self.where, minlength=len(number))
        self.moved = np.zeros(len(groups), np.int64)
        """Objects of each group that are not in their origin."""
        self.cost = self.costs(np.arange(len(number)), self.used)
        self.tables = self._step_tables()
        self.views = interpreted(self.tables)

    def _set_rooms(self, model: PlacementModel) -> None:
        self.room = np.full_like(self.offers, np.inf)
        self.frees_at_once = np.ones(len(self.dimension_index), np.bool_)
        """By dimension: whether an object that moves frees at once what it held."""
        for rule in model.constraints:
            if isinstance(rule, FitsIn):
                d = self.dimension_index[rule.dimension]
                self.room[:, d] = self.offers[:, d]
                self.frees_at_once[d] = not rule.twice_while_moving

    def _set_goals(self, model: PlacementModel) -> None:
        self.layers: list[tuple[Floats, Floats]] = []
        """Levels by container and dimension, and the weight of a unit above them."""
        self.bin_goals: list[tuple[Ints, int, Floats, float]] = []
        """By goal about bins: bins of containers, dimension, levels of bins, weight."""
        self.ratio_goals: list[tuple[int, int, float, float]] = []
        self.price = np.zeros(len(self.need))
        self.distance: Floats | None = None
        self.group_weight = 0.0
        self.used_weight: Floats = np.zeros(len(self.offers))
        for goal in model.goals:
            if isinstance(goal, Above):
                self._add_level(model, goal)
            elif isinstance(goal, EvenUse):
                d = self.dimension_index[goal.dimension]
                size = self.offers[:, d]
                average = self.need[:, d].sum() / max(size.sum(), 1e-12)
                share = np.divide(goal.weight, size, out=np.zeros_like(size), where=size > 0)
                self._add_to_layer(d, size * (average + goal.tolerance), share)
            elif isinstance(goal, InProportion):
                index = self.dimension_index
                ratio = index[goal.dimension], index[goal.other], goal.ratio, goal.weight
                self.ratio_goals.append(ratio)
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

    def _add_level(self, model: PlacementModel, goal: Above) -> None:
        d = self.dimension_index[goal.dimension]
        bins, numbers = _numbered_bins(model, goal.scope)
        level: Floats = np.asarray(
            goal.share * np.bincount(bins, weights=self.offers[:, d]), np.float64
        )
        for name, value in goal.level.items():
            if name in numbers:
                level[numbers[name]] = value
        if goal.scope:
            self.bin_goals.append((bins, d, level, goal.weight))
        else:
            self._add_to_layer(d, level, np.full(len(level), goal.weight))

    def _add_to_layer(self, d: int, level: Floats, weight: Floats) -> None:
        """Add levels of one dimension to the first layer that has none of this dimension."""
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
                bins, _ = _numbered_bins(model, rule.scope)
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

    def _step_tables(self) -> StepTables:
        """Return the tables for steps: the arrays of this state, and more that follow from them."""
        rows = np.full(len(self.need), -1)
        rows[list(self.may)] = np.arange(len(self.may))
        nowhere = np.zeros((0, len(self.offers)))
        return StepTables(
            need=np.append(self.need, np.zeros((1, len(self.dimension_index))), axis=0),
            origin=np.append(self.origin, -1),
            price=np.append(self.price, 0.0),
            group=self.group,
            offers=self.offers,
            room=self.room,
            frees_at_once=self.frees_at_once,
            **self._level_tables(),
            **self._bin_tables(),
            distance=np.zeros((0, 0)) if self.distance is None else self.distance,
            used_weight=self.used_weight,
            group_weight=float(self.group_weight),
            may_row=rows,
            may=np.array(list(self.may.values()) or nowhere, np.bool_),
            **self._group_tables(),
            where=self.where,
            used=self.used,
            held=self.held,
            objects_in=self.objects_in,
            cost=self.cost,
            moved=self.moved,
            groups_with_moved=np.bincount(self.moved, minlength=len(self.where) + 1),
            **self._object_lists(),
            ejected=np.zeros((EJECTED_MAX, 2), np.int64),
            best=self.where.copy(),
            sums=np.zeros(2),
            registers=np.array([0, 1, 0]),
        )

    def _level_tables(self) -> dict[str, Any]:
        """Return the tables of goals about levels and proportions."""
        over = [(d, *layer) for layer in self.layers for d in np.nonzero(layer[1].any(axis=0))[0]]
        d, other, ratio, weight = list(zip(*self.ratio_goals, strict=True)) or [(), (), (), ()]
        empty = np.zeros((0, len(self.offers)))
        return {
            "level_dimension": np.array([d for d, _, _ in over], np.int64),
            "level": np.array([level[:, d] for d, level, _ in over] or empty).T.copy(),
            "weight": np.array([weights[:, d] for d, _, weights in over] or empty).T.copy(),
            "ratio_dimension": np.array(d, np.int64),
            "ratio_other": np.array(other, np.int64),
            "ratio": np.array(ratio, np.float64),
            "ratio_weight": np.array(weight, np.float64),
        }

    def _bin_tables(self) -> dict[str, Any]:
        """Return the tables of goals about bins of scopes, with the use of these bins."""
        wide = max((len(level) for _, _, level, _ in self.bin_goals), default=0)
        empty = np.zeros((0, len(self.offers)))
        used = [
            np.bincount(bins, weights=self.used[:, d], minlength=wide)
            for bins, d, _, _ in self.bin_goals
        ]
        return {
            "goal_bin": np.array([bins for bins, _, _, _ in self.bin_goals] or empty, np.int64),
            "bin_dimension": np.array([d for _, d, _, _ in self.bin_goals], np.int64),
            "bin_level": np.array([np.resize(of, wide) for _, _, of, _ in self.bin_goals] or empty),
            "bin_weight": np.array([weight for _, _, _, weight in self.bin_goals], np.float64),
            "bin_used": np.array(used or empty),
        }

    def _object_lists(self) -> dict[str, Any]:
        """Return the objects of each container as linked lists."""
        nothing = len(self.where)
        order = np.argsort(self.where, kind="stable")
        at = self.where[order]
        head, starts = np.full(len(self.offers), nothing), np.diff(at, prepend=-1) != 0
        head[at[starts]] = order[starts]
        after, before = np.full(nothing, nothing), np.full(nothing, nothing)
        linked = np.nonzero(~starts)[0]
        after[order[linked - 1]], before[order[linked]] = order[linked], order[linked - 1]
        return {"first_object": head, "next_object": after, "previous_object": before}

    def _group_tables(self) -> dict[str, Any]:
        """Return the tables about groups; the counts of all scopes become parts of one array."""
        scopes, groups = list(self.scopes.values()), len(self.moved)
        wide = [counts.count.shape[1] for counts in scopes]
        first = np.cumsum([0, *(groups * bins for bins in wide)])
        count = np.concatenate([c.count.ravel() for c in scopes] or [np.zeros(0, np.int32)])
        for counts, start, bins in zip(scopes, first.tolist(), wide, strict=False):
            counts.count = count[start : start + groups * bins].reshape(groups, bins)
        none = np.zeros((0, groups), np.int64)
        found = {
            "scope_bin": np.array(
                [c.bins for c in scopes] or np.zeros((0, len(self.offers))), np.int64
            ),
            "counts_from": first[:-1],
            "bins_in_scope": np.array(wide, np.int64),
            "most": np.array([c.most for c in scopes] or none),
            "least": np.array([c.least for c in scopes] or none),
            "group_counts": count,
            "bins_with_group": np.array(
                [np.count_nonzero(c.count, axis=1) for c in scopes] or none
            ),
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
        if self.ratio_goals:
            free = self.offers[containers] - used
            for d, other, ratio, ratio_weight in self.ratio_goals:
                found += ratio_weight * np.maximum(ratio * free[:, d] - free[:, other], 0.0)
        return found

    def paid(self) -> float:
        """Return the prices of all moves, by object and by distance."""
        paid = float(self.price[self.where != self.origin].sum())
        if self.distance is not None:
            paid += float(self.distance[self.origin, self.where].sum())
        return paid

    def total(self) -> float:
        """Return the sum of the goals, computed again from where the objects are."""
        used = np.zeros_like(self.offers)
        np.add.at(used, self.where, self.need)
        found = float(self.costs(slice(None), used).sum()) + self.paid()
        for bins, d, level, of_bin in self.bin_goals:
            in_bin = np.bincount(bins, weights=used[:, d], minlength=len(level))
            found += of_bin * float(np.maximum(in_bin - level, 0.0).sum())
        if self.group_weight:
            moved = np.bincount(self.group[self.where != self.origin], minlength=1)
            found += self.group_weight * float(moved.max(initial=0))
        return found + float(self.used_weight[np.unique(self.where)].sum())

    # -- changing it

    def move(self, i: int, to: int) -> None:
        """Move an object to another container."""
        at = int(self.where[i])
        if at != to:
            exchange(self.views, i, len(self.where), at, to)


def _numbered_bins(model: PlacementModel, scope: str) -> tuple[Ints, dict[str, int]]:
    """Return the bin of each container as a number, and the numbers by name."""
    names = [model.bin_of(c, scope) for c in model.containers]
    numbers = {name: b for b, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64), numbers


def _amounts(rows: Sequence[dict[str, float]], dimensions: list[str]) -> Floats:
    found = [[row.get(d, 0.0) for d in dimensions] for row in rows]
    return np.array(found, np.float64).reshape(len(rows), len(dimensions))
