"""Settings that others follow: writing one changes its partners, which must be right afterwards.

A scheduler brings its own depth of the queue along; checksums that go take segmentation with them.
So leaders are written first, whatever follows one that changes is written after it, and undoing a
leader brings back what followed it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sidekick.report import SettingChange, WantedSetting
from sidekick.setting import Host, Observed, Setting
from wire.errors import KernelFileError

LED_BY = "led by"
"""In the options of a change: the leader of the same plan that it follows."""


class LeadingSetting(Setting):
    """A kind some of whose settings have `partners` that follow them."""

    def rank(self, setting: str) -> int:
        """Return the place of a setting among those of its device: leaders before followers."""
        return 0 if self.partners(setting) else 1

    def plan(
        self, wanted: Sequence[WantedSetting], observed: Observed, originals: Observed
    ) -> list[SettingChange]:
        """Return the writes. What follows a leader that is not as it originally was is left as
        the leader makes it.
        """
        led = {
            partner
            for w in wanted
            if not self.same(w.value, originals.get(w.setting) or observed.get(w.setting) or "")
            for partner in self.partners(w.setting)
        }
        kept = {name: value for name, value in originals.items() if name not in led}
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
        found = (self._noted(c, observed, leaders.get(c.setting, "")) for c in changes.values())
        return sorted(found, key=lambda change: self.rank(change.setting))

    def undo(self, host: Host, change: SettingChange) -> None:
        """Bring back what was before a change, and what followed it.

        What follows a leader of the same run could not be brought back before that: it comes
        back with the leader, which was written first and is therefore undone last.
        """
        if LED_BY in change.options:
            return
        super().undo(host, change)
        for partner, value in change.options.items():
            if not self.same(self.read(host, partner) or "", value):
                self.write(host, partner, value)
                actual = self.read(host, partner) or ""
                if not self.same(actual, value):
                    raise KernelFileError(
                        f"cannot restore {partner} to {value!r}: it reads {actual!r}"
                    )

    def _noted(self, change: SettingChange, observed: Observed, leader: str) -> SettingChange:
        if leader:
            return replace(change, options={LED_BY: leader})
        before = {p: observed.get(p) for p in self.partners(change.setting)}
        return replace(change, options={p: v for p, v in before.items() if v is not None})
