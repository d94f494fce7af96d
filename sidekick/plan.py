"""From what is wanted and what was read to ordered changes: pure.

Only differences are changed. Going back to every default first, as a profile switch that
unloads one profile and loads the next does, would make values flap under running tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidekick.report import Change, PlanReport, RebootNeed, Wanted, most_disruptive
from sidekick.setting import Observed, Setting, kind_of


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run will do."""

    changes: tuple[Change, ...]
    missing: tuple[Wanted, ...]
    """Required, and not in this kernel."""
    unsupported: tuple[Wanted, ...]
    """Not in this kernel, and the profile can do without."""

    @property
    def needs(self) -> RebootNeed:
        """The reboot that brings all of it into force."""
        return most_disruptive(change.needs for change in self.changes)


def make_plan(
    settings: Sequence[Setting], wanted: Sequence[Wanted], observed: Observed, originals: Observed
) -> Plan:
    """Return the changes kind by kind, in the order of `settings`."""
    absent = [w for w in wanted if observed.get(w.setting) is None]
    present = [w for w in wanted if observed.get(w.setting) is not None]
    changes: list[Change] = []
    for setting in settings:
        changes += setting.plan(
            _of_kind(setting.kind, present), observed, _originals_of(setting.kind, originals)
        )
    return Plan(
        changes=tuple(changes),
        missing=tuple(w for w in absent if w.required),
        unsupported=tuple(w for w in absent if not w.required),
    )


def claims(observed: Observed, originals: Observed) -> dict[str, str | None]:
    """Return `originals` with the value of everything that was not claimed before."""
    new = {s: v for s, v in observed.items() if v is not None and s not in originals}
    return {**originals, **new}


def describe(name: str, plan: Plan, wanted: Sequence[Wanted]) -> PlanReport:
    """Return the plan as it is printed."""
    changed = {change.setting for change in plan.changes}
    absent = len(plan.missing) + len(plan.unsupported)
    return PlanReport(
        name=name,
        needs=plan.needs,
        changes=list(plan.changes),
        missing=list(plan.missing),
        unsupported=list(plan.unsupported),
        unchanged=len([w for w in wanted if w.setting not in changed]) - absent,
    )


def _of_kind(kind: str, wanted: Sequence[Wanted]) -> list[Wanted]:
    return [w for w in wanted if kind_of(w.setting) == kind]


def _originals_of(kind: str, originals: Observed) -> dict[str, str | None]:
    return {k: v for k, v in originals.items() if kind_of(k) == kind}
