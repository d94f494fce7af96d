"""Settings whose writes change other settings (their partners), which must be correct afterwards.

A new scheduler sets its own depth of the queue; switching off checksums switches off segmentation.
So leaders are written first, partners of a changed leader are written after it, and undoing a
leader restores its partners.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sidekick.report import SettingChange, WantedSetting
from sidekick.setting import Host, Observed, Setting

FOLLOWS = "led by"
"""In the options of a change: the leader of the same plan that it follows."""


class LeadingSetting(Setting):
    """A kind some of whose settings have `partners` that follow them."""

    def rank(self, setting: str) -> int:
        """Return the place of a setting among those of its device: leaders before followers."""
        return 0 if self.partners(setting) else 1

    def plan(
        self, wanted: Sequence[WantedSetting], observed: Observed, originals: Observed
    ) -> list[SettingChange]:
        """Return the writes. Partners of a leader with a changed value keep the leader's values,
        unless the profile sets them.
        """
        followers = {
            partner
            for w in wanted
            if not self.same(w.value, originals.get(w.setting) or observed.get(w.setting) or "")
            for partner in self.partners(w.setting)
        }
        kept = {name: value for name, value in originals.items() if name not in followers}
        back = (
            WantedSetting(setting=name, value=value, source="back to the original")
            for name, value in kept.items()
            if value is not None
        )
        targets = {w.setting: w for w in (*back, *wanted)}
        changes = {c.setting: c for c in super().plan(wanted, observed, kept)}
        for name in [*changes]:
            for partner in self.partners(name):
                now = observed.get(partner)
                if partner in targets and partner not in changes and now is not None:
                    changes[partner] = self.change(targets[partner], now)
        leaders = {p: name for name in changes for p in self.partners(name)}
        noted = (
            self._with_options(c, observed, leaders.get(c.setting, "")) for c in changes.values()
        )
        return sorted(noted, key=lambda change: self.rank(change.setting))

    def undo(self, host: Host, change: SettingChange) -> None:
        """Restore the value before a change, and the values of its partners.

        Partners of a leader of the same run are restored with the leader, which was written first
        and is therefore undone last: they cannot be restored before it.
        """
        if FOLLOWS in change.options:
            return
        super().undo(host, change)
        for partner, value in change.options.items():
            if not self.same(self.read(host, partner) or "", value):
                self.write(host, partner, value)
                self.check_restored(host, partner, value)

    def _with_options(
        self, change: SettingChange, observed: Observed, leader: str
    ) -> SettingChange:
        if leader:
            return replace(change, options={FOLLOWS: leader})
        before = {p: observed.get(p) for p in self.partners(change.setting)}
        return replace(change, options={p: v for p, v in before.items() if v is not None})
