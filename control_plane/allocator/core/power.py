"""Power budgets of racks, rows, MSBs and data centers, and the use of power there.

A budget is the power for which a rack, row, MSB or data center is provisioned. A machine counts
with its nominal draw while it has tasks. Few machines draw that at the same time, so power is
overcommitted: the sum may exceed a budget by a factor (AL22). Capping and moves handle an excessive
draw. At that limit no further machine there gets its first task; machines with tasks still get
more. A machine whose draw is unknown counts as 0 W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor
from typing import Protocol

from control_plane.api.capacity_report import PowerBudget
from control_plane.api.settings import PowerSettings
from control_plane.broker.core.capacity import Place
from control_plane.broker.core.matching import Subject


class Powered(Subject, Protocol):
    """The properties of a machine that matter for power."""

    @property
    def jobs(self) -> tuple[object, ...]: ...


@dataclass(slots=True, eq=False)
class Budget:
    """The power budget of one place."""

    place: str
    watts: int
    limit: int
    """The most watts of nominal draw for the machines in use there."""
    used: int = 0
    """Watts of nominal draw of the machines in use."""
    was_short: bool = False
    """Whether it refused a task since its use last fell."""

    def left(self, extra: Mapping[Budget, int] | None) -> int:
        """Return how many watts are left beyond the machines in use and `extra`."""
        return self.limit - self.used - (extra.get(self, 0) if extra else 0)


class Power:
    """All power budgets of a region, and the machines that count against them."""

    def __init__(self, settings: PowerSettings) -> None:
        factor = settings.overcommit
        self.budgets = [
            Budget(p, w, floor(w * factor + 1e-6)) for p, w in sorted(settings.budgets_w.items())
        ]
        self._by_place = {budget.place: budget for budget in self.budgets}
        self._of: dict[Place, tuple[Budget, ...]] = {}
        self._powered_on: dict[str, tuple[int, tuple[Budget, ...]]] = {}
        """Machine in use → its watts, and the budgets against which these count."""
        self._listeners: list[Callable[[], None]] = []

    def listen(self, on_relief: Callable[[], None]) -> None:
        """Call `on_relief()` when a budget that was short has more left."""
        self._listeners.append(on_relief)

    def unlisten(self, on_relief: Callable[[], None]) -> None:
        """Stop calling `on_relief`."""
        self._listeners.remove(on_relief)

    @staticmethod
    def of(settings: PowerSettings) -> Power | None:
        """Return the budgets of the settings; None if there are none."""
        return Power(settings) if settings.budgets_w else None

    def shown(self) -> list[PowerBudget]:
        """Return all budgets for a report."""
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

    def reserve_power(self, machine: Powered) -> bool:
        """Count a machine that gets its first task, or whose record changed.

        Return whether a job may have waited for power that this releases.
        """
        waited = self.release_power(machine)
        watts, budgets = machine.capacity.power_w, self.budgets_of(machine.place)
        for budget in budgets:
            budget.used += watts
        self._powered_on[machine.name] = watts, budgets
        return waited

    def release_power(self, machine: Powered) -> bool:
        """Stop counting a machine; return whether a job may have waited for its power."""
        watts, budgets = self._powered_on.pop(machine.name, (0, ()))
        waited = False
        for budget in budgets:
            budget.used -= watts
            waited = waited or budget.was_short
            budget.was_short = False
        if waited:
            for on_relief in self._listeners:
                on_relief()
        return waited

    def short(self, machine: Powered, extra: Mapping[Budget, int] | None = None) -> Budget | None:
        """Return the budget that keeps a machine from its first task; None if it may get one.

        `extra` has the watts that a plan adds.
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

    def describe_lack(self, machine: Powered, extra: Mapping[Budget, int] | None = None) -> str:
        """Describe why a machine may get no first task; empty if it may."""
        budget = self.short(machine, extra)
        if budget is None:
            return ""
        return (
            f"power: {budget.place} has {max(0, budget.left(extra))} W left of {budget.limit} W; "
            f"another machine draws {machine.capacity.power_w} W"
        )
