"""Power budgets of racks, rows and MSBs, and what the machines in use there may draw.

A budget is what a rack, row, MSB or data center is provisioned for. A machine counts with its
nominal draw while it has tasks. Few machines draw that at the same time, so power is overcommitted:
the sum may exceed a budget by a factor (AL22). Capping and moves handle an excessive draw. Beyond
that factor no further machine there gets its first task; machines that run tasks already get more.
A machine whose draw is unknown counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor
from typing import Protocol

from control_plane.api.capacity_report import PowerBudget
from control_plane.api.settings import PowerSettings
from control_plane.broker.core.capacity import Capacity, Place


class Powered(Protocol):
    """A machine as far as power is concerned."""

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> Capacity: ...
    @property
    def place(self) -> Place: ...
    @property
    def jobs(self) -> tuple[object, ...]: ...


@dataclass(slots=True, eq=False)
class Budget:
    """The power budget of one place."""

    place: str
    watts: int
    limit: int
    """Watts that the machines in use there may draw, nominally."""
    used: int = 0
    """Watts that the machines in use draw, nominally."""
    was_short: bool = False
    """Whether it refused a task since it last gained room."""

    def left(self, extra: Mapping[Budget, int] | None) -> int:
        """Return how many watts machines may draw in addition to those in use and to `extra`."""
        return self.limit - self.used - (extra.get(self, 0) if extra else 0)


class Power:
    """All budgets of a region, and which machines count against them."""

    def __init__(self, settings: PowerSettings) -> None:
        factor = settings.overcommit
        self.budgets = [
            Budget(p, w, floor(w * factor + 1e-6)) for p, w in sorted(settings.budgets_w.items())
        ]
        self._by_place = {budget.place: budget for budget in self.budgets}
        self._of: dict[Place, tuple[Budget, ...]] = {}
        self._lit: dict[str, tuple[int, tuple[Budget, ...]]] = {}
        """Machine in use → its watts, and the budgets that they count against."""
        self._listeners: list[Callable[[], None]] = []

    def listen(self, relieved: Callable[[], None]) -> None:
        """Call `relieved()` when a budget that was short has more left."""
        self._listeners.append(relieved)

    def unlisten(self, relieved: Callable[[], None]) -> None:
        """Stop calling it."""
        self._listeners.remove(relieved)

    @staticmethod
    def of(settings: PowerSettings) -> Power | None:
        """Return the budgets of the settings; None: there is no budget."""
        return Power(settings) if settings.budgets_w else None

    def shown(self) -> list[PowerBudget]:
        """Return all budgets as a report shows them."""
        return [
            PowerBudget(place=b.place, budget_w=b.watts, limit_w=b.limit, used_w=b.used)
            for b in self.budgets
        ]

    def budgets_of(self, place: Place) -> tuple[Budget, ...]:
        """Return the budgets against which machines of a place count."""
        found = self._of.get(place)
        if found is None:
            levels = (place.datacenter, place.msb, place.row, place.rack)
            known = self._by_place
            found = self._of[place] = tuple(known[level] for level in levels if level in known)
        return found

    def light(self, machine: Powered) -> bool:
        """Count a machine that gets its first task, or whose record changed; return whether a job
        may have waited for that.
        """
        waited = self.dark(machine)
        watts, budgets = machine.capacity.power_w, self.budgets_of(machine.place)
        for budget in budgets:
            budget.used += watts
        self._lit[machine.name] = watts, budgets
        return waited

    def dark(self, machine: Powered) -> bool:
        """Stop counting a machine; return whether a job may have waited for that."""
        watts, budgets = self._lit.pop(machine.name, (0, ()))
        waited = False
        for budget in budgets:
            budget.used -= watts
            waited = waited or budget.was_short
            budget.was_short = False
        if waited:
            for relieved in self._listeners:
                relieved()
        return waited

    def short(self, machine: Powered, extra: Mapping[Budget, int] | None = None) -> Budget | None:
        """Return the budget that keeps a machine from its first task; None: it may get one.

        `extra` is what a plan adds that the index does not show yet.
        """
        return None if machine.jobs else self._short(machine.place, machine.capacity.power_w, extra)

    def has(self, place: Place, watts: int, extra: Mapping[Budget, int] | None = None) -> bool:
        """Return whether a machine in a place may get its first task; see `short`."""
        return self._short(place, watts, extra) is None

    def _short(self, place: Place, watts: int, extra: Mapping[Budget, int] | None) -> Budget | None:
        for budget in self.budgets_of(place) if watts else ():
            if budget.left(extra) < watts:
                budget.was_short = True
                return budget
        return None

    def why(self, machine: Powered, extra: Mapping[Budget, int] | None = None) -> str:
        """Return why a machine may get no first task, in words; empty: it may."""
        budget = self.short(machine, extra)
        if budget is None:
            return ""
        return (
            f"power: {budget.place} has {max(0, budget.left(extra))} W left of"
            f" {budget.limit} W, a machine more draws {machine.capacity.power_w} W"
        )
