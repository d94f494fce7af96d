"""Plans the ordered changes from the observed to the wanted values. Pure.

Only differences are changed. Restoring every default first, as unloading one profile and loading
the next would, changes values twice under running tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from sidekick.report import Disruption, PlanReport, SettingChange, WantedSetting
from sidekick.setting import Observed, Setting


class ApplyPlan(msgspec.Struct, frozen=True):
    """The changes of one run."""

    changes: tuple[SettingChange, ...]
    missing: tuple[WantedSetting, ...]
    """Required, and not in this kernel."""
    unsupported: tuple[WantedSetting, ...]
    """Not in this kernel, and the profile can do without."""

    @property
    def needs(self) -> Disruption:
        """The largest disruption among the changes."""
        needs = (change.needs for change in self.changes)
        return max(needs, key=lambda need: need.rank, default=Disruption.LIVE)

    def changes_that_drain(self) -> list[SettingChange]:
        """Return the changes that may not be made while tasks run. A run only stages a boot."""
        return [c for c in self.changes if c.needs is Disruption.DRAIN]


def make_plan(
    settings: Sequence[Setting],
    wanted: Sequence[WantedSetting],
    observed: Observed,
    originals: Observed,
) -> ApplyPlan:
    """Return the changes kind by kind, in the order of `settings`.

    Kinds that others depend on (`has_dependents`) restore their originals at the end, the last
    kind first: a module cannot be unloaded while a value still uses it.
    """
    absent = [w for w in wanted if observed.get(w.setting) is None]
    present = [w for w in wanted if observed.get(w.setting) is not None]
    changes: list[SettingChange] = []
    restored_last: list[SettingChange] = []
    for setting in settings:
        present_of_kind = [w for w in present if setting.owns(w.setting)]
        before = {k: v for k, v in originals.items() if setting.owns(k)}
        names = {w.setting for w in present_of_kind}
        for change in setting.plan(present_of_kind, observed, before):
            is_restored = setting.has_dependents and change.setting not in names
            (restored_last if is_restored else changes).append(change)
    return ApplyPlan(
        changes=(*changes, *reversed(restored_last)),
        missing=tuple(w for w in absent if w.required),
        unsupported=tuple(w for w in absent if not w.required),
    )


def claims(names: Iterable[str], observed: Observed, originals: Observed) -> dict[str, str | None]:
    """Return `originals` with the present values of `names` that were not claimed before."""
    new = {
        name: observed[name]
        for name in sorted(names)
        if observed.get(name) is not None and name not in originals
    }
    return {**originals, **new}


def with_value_before_run(
    change: SettingChange, written: Sequence[SettingChange], observed: Observed
) -> SettingChange:
    """Return a change with the value before the run, which its undo restores."""
    first = next((c for c in written if c.setting == change.setting), change)
    found = observed.get(change.setting)
    if first is not change:
        return first if first.after == change.after else replace(first, after=change.after)
    return change if found is None else replace(change, before=found)


def describe(name: str, plan: ApplyPlan, wanted: Sequence[WantedSetting]) -> PlanReport:
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
