"""A language for placement models: objects, containers, constraints and goals.

Objects (tasks, entitlements) are in containers (machines). A *dimension* is an amount that objects
need and containers offer, in any unit. A *scope* (`rack`, `msb`) groups containers into bins; in
the scope `""` each container is a bin. Constraints must always hold. The solver minimizes the sum
of the goals. A model is written in TOML, one table for each object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf, isfinite
from typing import Any

import msgspec

from wire.errors import InvalidInput
from wire.toml_limits import parse_toml

SOLVED_MAX = 20_000
"""The most objects of a model. The language is for small models that people read and write."""


class ModelObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object to be placed."""

    name: str
    at: str
    """The container that the object is in now."""
    group: str = ""
    """Name of the object's group, for example its job; constraints count objects by group."""
    needs: dict[str, float] = {}
    move_price: float = 0.0
    may: list[str] = []
    """Containers that the object may move to; empty: all."""


class ModelContainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A container of objects."""

    name: str
    offers: dict[str, float] = {}
    scopes: dict[str, str] = {}
    """Scope → its bin."""


class ModelTerm(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """The base of constraints and goals; the TOML key `kind` selects the class."""


class FitsIn(ModelTerm, frozen=True, kw_only=True, tag="fits"):
    """The objects of a container need at most what it offers of a dimension."""

    dimension: str
    twice_while_moving: bool = False
    """A moved object also counts in its old container, which it leaves only after it arrived."""

    def text(self) -> str:
        """Return the term as text."""
        twice = ", including objects that are leaving" if self.twice_while_moving else ""
        return f"no container has more {self.dimension} in use than it offers{twice}"


class AtMostIn(ModelTerm, frozen=True, kw_only=True, tag="at-most"):
    """One bin of a scope has at most `objects` objects of a group."""

    scope: str = ""
    objects: int = 1
    by_group: dict[str, int] = {}
    """Group → its limit. If there are any, groups that are not named have no limit."""

    def text(self) -> str:
        """Return the term as text."""
        if self.by_group:
            return f"{len(self.by_group)} groups have limits of their own per {_bin(self.scope)}"
        return f"at most {self.objects} objects of a group per {_bin(self.scope)}"


class SpreadOver(ModelTerm, frozen=True, kw_only=True, tag="spread"):
    """Each named group has objects in at least `bins[group]` bins of a scope."""

    scope: str
    bins: dict[str, int]
    """Group → bins."""

    def text(self) -> str:
        """Return the term as text."""
        return f"{len(self.bins)} groups are spread over {self.scope}, in {_range(self.bins)} bins"


class NearGroup(ModelTerm, frozen=True, kw_only=True, tag="beside"):
    """In each bin where a group has an object, the groups that it depends on have one too."""

    scope: str
    needs: dict[str, list[str]]
    """Group → groups that it depends on."""

    def text(self) -> str:
        """Return the term as text."""
        return (
            f"{len(self.needs)} groups have the groups on which they depend in the same "
            f"{self.scope}"
        )


class Above(ModelTerm, frozen=True, kw_only=True, tag="above"):
    """In each bin of a scope, use of a dimension above a level costs."""

    dimension: str
    weight: float = 1.0
    scope: str = ""
    level: dict[str, float] = {}
    """Bin → level; the level of other bins is `share` of what they offer."""
    share: float = 1.0

    def text(self) -> str:
        """Return the term as text."""
        level = f"{self.share:.0%} of what it offers" if not self.level else "its level"
        return f"{self.weight:g} x {self.dimension} in use of each {_bin(self.scope)} above {level}"


class EvenUse(ModelTerm, frozen=True, kw_only=True, tag="even"):
    """Use of a container above the average share plus a tolerance costs."""

    dimension: str
    weight: float = 1.0
    tolerance: float = 0.1

    def text(self) -> str:
        """Return the term as text."""
        return (
            f"{self.weight:g} x share of {self.dimension} in use of each container"
            f" above the average plus {self.tolerance:.0%}"
        )


class InProportion(ModelTerm, frozen=True, kw_only=True, tag="proportion"):
    """In each container, free `dimension` without `ratio` times as much free `other` costs."""

    dimension: str
    other: str
    ratio: float
    weight: float = 1.0

    def text(self) -> str:
        """Return the term as text."""
        return (
            f"{self.weight:g} x shortage of free {self.other} against {self.ratio:g} for each "
            f"free {self.dimension}"
        )


class MovedObjects(ModelTerm, frozen=True, kw_only=True, tag="moves"):
    """Each object that moves costs its price."""

    weight: float = 1.0
    each: float = 0.0
    """A cost that is added to the price of each moved object."""

    def text(self) -> str:
        """Return the term as text."""
        return f"{self.weight:g} x (price + {self.each:g}) of each object that moves"


class MovedOfGroup(ModelTerm, frozen=True, kw_only=True, tag="group-moves"):
    """The largest number of moved objects of one group costs."""

    weight: float = 1.0

    def text(self) -> str:
        """Return the term as text."""
        return f"{self.weight:g} x moving objects of the group with the most moves"


class MoveDistance(ModelTerm, frozen=True, kw_only=True, tag="distance"):
    """The cost of a move depends on its source and its target."""

    prices: list[list[float]]
    """Prices from container (row) to container (column), in the order of the model's containers."""
    weight: float = 1.0

    def text(self) -> str:
        """Return the term as text."""
        return f"{self.weight:g} x the price between two containers, for each move"


class UsedContainers(ModelTerm, frozen=True, kw_only=True, tag="used"):
    """Each container with objects costs, so that objects are packed."""

    weight: float = 1.0
    each: dict[str, float] = {}
    """Container → its cost; 1 for containers that are not named."""

    def text(self) -> str:
        """Return the term as text."""
        return f"{self.weight:g} x containers in use"


ModelRule = FitsIn | AtMostIn | SpreadOver | NearGroup
ModelGoal = (
    Above | EvenUse | InProportion | MovedObjects | MovedOfGroup | MoveDistance | UsedContainers
)


class PlacementModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objects, containers, constraints and goals."""

    objects: list[ModelObject] = msgspec.field(name="object", default_factory=list)
    containers: list[ModelContainer] = msgspec.field(name="container", default_factory=list)
    constraints: list[ModelRule] = msgspec.field(name="constraint", default_factory=list)
    goals: list[ModelGoal] = msgspec.field(name="goal", default_factory=list)

    def dimensions(self) -> list[str]:
        """Return all dimensions, in the order in which they are named first."""
        needed = dict.fromkeys(d for o in self.objects for d in o.needs)
        return list(needed | dict.fromkeys(d for c in self.containers for d in c.offers))

    def bin_of(self, container: ModelContainer, scope: str) -> str:
        """Return the bin of a container; containers without a bin share the bin `""`."""
        return container.scopes.get(scope, "") if scope else container.name


class PlacementAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The placement that a solver found."""

    before: float
    after: float
    moves: list[tuple[str, str, str]]
    """Object, from, to."""
    bound: float | None = None
    """No placement has a smaller sum of goals than this; None: unknown."""
    steps: int = 0
    took_s: float = 0.0
    is_optimal: bool = False


def read_model(text: str) -> PlacementModel:
    """Return the model that a TOML text describes; raises `InvalidInput`."""
    try:
        document: dict[str, Any] = parse_toml(text)
        model = msgspec.convert(document, PlacementModel, strict=False)
    except msgspec.ValidationError as e:
        raise InvalidInput(f"the model is not valid: {e}", hint="docs/rebalancing.md") from None
    except (ValueError, RecursionError) as e:
        raise InvalidInput(f"the model is not TOML: {e}") from None
    for wrong in model_errors(model):
        raise InvalidInput(f"the model is not valid: {wrong}", hint="docs/rebalancing.md")
    return model


def model_errors(model: PlacementModel) -> Iterator[str]:
    """Yield the errors of a model, such as duplicate names and unknown names."""
    if len(model.objects) > SOLVED_MAX:
        yield f"it has {len(model.objects)} objects; the maximum is {SOLVED_MAX}"
    for what, names in (("object", model.objects), ("container", model.containers)):
        for name, number in Counter(each.name for each in names).items():
            if number > 1:
                yield f"{number} {what}s are named {name!r}"
    containers = {c.name for c in model.containers}
    groups = {o.group for o in model.objects}
    scopes = {"", *(scope for c in model.containers for scope in c.scopes)}
    for each in model.objects:
        for name in (each.at, *each.may):
            if name not in containers:
                yield f"object {each.name!r} names the container {name!r}, which does not exist"
    yield from _amount_errors(model)
    known = set(model.dimensions())
    for rule in (*model.constraints, *model.goals):
        yield from _name_errors(rule, known, groups, scopes, len(model.containers))


def _amount_errors(model: PlacementModel) -> Iterator[str]:
    """Yield the amounts of a model that are negative, infinite or no numbers."""
    for each in model.objects:
        for dimension, amount in each.needs.items():
            if not 0 <= amount < inf:
                yield (
                    f"object {each.name!r} needs {amount:g} {dimension}: not a number of at least 0"
                )
        if not isfinite(each.move_price):
            yield f"object {each.name!r} has the move_price {each.move_price:g}: not a number"
    for container in model.containers:
        for dimension, amount in container.offers.items():
            if not 0 <= amount < inf:
                yield (
                    f"container {container.name!r} offers {amount:g} {dimension}: "
                    "not a number of at least 0"
                )
    for rule in (*model.constraints, *model.goals):
        for field, value in msgspec.structs.asdict(rule).items():
            for number in _numbers(value):
                if not isfinite(number):
                    kind = rule.__struct_config__.tag
                    yield f"{kind!r} has {number:g} as {field}: not a number"


def _numbers(value: object) -> Iterator[float]:
    """Yield all numbers in a value, also those in lists and mappings."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each)


def _name_errors(
    rule: ModelRule | ModelGoal,
    known: set[str],
    groups: set[str],
    scopes: set[str],
    containers: int,
) -> Iterator[str]:
    """Yield the unknown names of a rule, and a price table of the wrong size."""
    kind = rule.__struct_config__.tag
    for field in ("dimension", "other"):
        name = getattr(rule, field, None)
        if name is not None and name not in known:
            yield f"{kind!r} names the dimension {name!r}, which no object or container has"
    scope = getattr(rule, "scope", "")
    if scope not in scopes:
        yield f"{kind!r} names the scope {scope!r}, which no container has"
    named: Mapping[str, object] = {}
    if isinstance(rule, AtMostIn):
        named = rule.by_group
    elif isinstance(rule, SpreadOver):
        named = rule.bins
    elif isinstance(rule, NearGroup):
        named = rule.needs | {other: [] for others in rule.needs.values() for other in others}
    for group in named:
        if group not in groups:
            yield f"{kind!r} names the group {group!r}, which no object has"
    size = containers
    if isinstance(rule, MoveDistance) and [len(row) for row in rule.prices] != [size] * size:
        yield f"{kind!r} needs {size} rows of {size} prices, one for each container"


def describe_model(model: PlacementModel) -> list[str]:
    """Return lines that describe a model, its constraints and its goals."""
    lines = [f"{len(model.objects)} objects in {len(model.containers)} containers."]
    groups = Counter(o.group for o in model.objects if o.group)
    if groups:
        lines.append(f"{len(groups)} groups of {_range(groups)} objects.")
    for dimension in model.dimensions():
        needed = sum(o.needs.get(dimension, 0.0) for o in model.objects)
        offered = sum(c.offers.get(dimension, 0.0) for c in model.containers)
        of = f" of {offered:g} ({needed / offered:.0%})" if offered else ""
        lines.append(f"Dimension {dimension}: {needed:g}{of} in use.")
    for scope in dict.fromkeys(s for c in model.containers for s in c.scopes):
        bins = Counter(model.bin_of(c, scope) for c in model.containers)
        lines.append(f"Scope {scope}: {len(bins)} bins of {_range(bins)} containers.")
    bound = sum(bool(o.may) for o in model.objects)
    if bound:
        lines.append(f"{bound} objects may be in some containers only.")
    lines += [f"Constraint: {rule.text()}." for rule in model.constraints]
    lines += [f"Goal: less of {goal.text()}." for goal in model.goals]
    return lines


def _range(numbers: Mapping[str, int]) -> str:
    low, high = min(numbers.values()), max(numbers.values())
    return f"{low}" if low == high else f"{low} to {high}"


def _bin(scope: str) -> str:
    """Return what a bin of a scope is called."""
    return scope or "container"


def toml_of(model: PlacementModel) -> Iterator[str]:
    """Yield the lines of a model's TOML form; `read_model` reads them."""
    for name, value in msgspec.to_builtins(model).items():
        for table in value:
            yield f"[[{name}]]"
            for key, of in table.items():
                if of not in ({}, [], ""):
                    yield f"{key} = {_toml_value(of)}"
            yield ""


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        pairs: Iterable[str] = (
            f"{_toml_value(str(k))} = {_toml_value(v)}" for k, v in value.items()
        )
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007F")
    return repr(value)
