"""One observation of the host: wanted values, observed values, and the changes between them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from sidekick.boot import LINE, PANIC, BootLine, WantedBoot
from sidekick.plan import ApplyPlan, claims, make_plan
from sidekick.record import Record, Target
from sidekick.report import ApplyOutcome, Disruption, SettingChange, SettingReport
from sidekick.setting import Applied, Host
from sidekick.settings import setting_of, settings_of
from sidekick.targets import contributions, of_kind
from wire.errors import TwineError, Unprocessable

LEFT_TO_BOOT = "the next boot restores the original"
TASK_SLICES = ("workload.slice", "sideload.slice")
CGROUPS = "/sys/fs/cgroup"


def record_for_boot(host: Host, record: Record) -> Record:
    """Return the record for this boot.

    A boot resets values that were set at run time, so their originals are dropped. Originals that
    outlive a boot stay. In the same boot, originals of a replaced device are dropped.
    """
    if record.boot_id == host.hardware.boot_id:
        now = {name: setting_of(name).device(host, name) for name in record.devices}
        gone = {name for name, device in record.devices.items() if now[name] not in ("", device)}
        return _without_originals(record, gone) if gone else record
    booted_with = BootLine(host, record.boot).booted_with()
    originals = {
        setting: value
        for setting, value in record.originals.items()
        if setting_of(setting).outlives_boot(setting, booted_with)
    }
    return replace(record, boot_id=host.hardware.boot_id, originals=originals, left={}, devices={})


def _without_originals(record: Record, gone: set[str]) -> Record:
    """Return the record without the originals of some settings."""
    return replace(
        record,
        originals={k: v for k, v in record.originals.items() if k not in gone},
        left={k: v for k, v in record.left.items() if k not in gone},
        devices={k: v for k, v in record.devices.items() if k not in gone},
    )


class HostObservation:
    """The wanted and the observed values at one moment."""

    def __init__(
        self, host: Host, record: Record, target: Target, *, is_written: bool = False
    ) -> None:
        """Read everything that the target wants or an earlier profile changed.

        With `is_written` the target's changes are made already.
        """
        self.host = host
        self.target = target
        panics = (v for s, v in record.originals.items() if PANIC in setting_of(s).touches(s))
        self.boot = BootLine(host, record.boot, next(panics, None))
        self._contributions = contributions(target.wanted, self.boot.own)
        self._left = record.left if record.boot_id == host.hardware.boot_id else {}
        known = [w.setting for w in target.wanted] + list(record.originals) + list(self._left)
        names = known + [effect for n in known for effect in setting_of(n).side_effects(n)]
        self.observed: dict[str, str | None] = {}
        self._settings = settings_of(names)
        for setting in self._settings:
            self.observed |= setting.observe(host, names)
        self.claimed = {name for n in names for name in setting_of(n).claims(n)}
        self.wanted: WantedBoot = self.boot.wanted(self._contributions)
        originals = self._to_restore(record, is_written)
        live = make_plan(self._settings, target.wanted, self.observed, originals)
        self.plan = ApplyPlan(
            changes=(*live.changes, *self.boot.plan(self.wanted)),
            missing=live.missing,
            unsupported=live.unsupported,
        )

    @property
    def missing_text(self) -> str:
        """Return a sentence that names the wanted settings that this kernel does not have."""
        return f"this kernel lacks {', '.join(w.setting for w in self.plan.missing)}"

    def check_allowed(self, *, is_trial: bool) -> None:
        """Raise `Unprocessable` if tasks or a trial forbid the disruption of the plan."""
        draining = self.plan.changes_that_drain()
        tasks = tasks_of(self.host) if draining else []
        if tasks:
            raise Unprocessable(
                f"{', '.join(c.setting for c in draining)} cannot be changed while tasks run "
                f"({', '.join(tasks[:3])}{', …' if tasks[3:] else ''}); nothing was changed",
                hint="drain the machine first",
            )
        if is_trial and self.plan.needs.rank >= Disruption.KEXEC.rank:
            raise Unprocessable(
                "a setting that needs a boot cannot be tried: the boot ends the trial; "
                "nothing was changed"
            )

    def missing_reports(self) -> list[SettingReport]:
        """Return a failure for each wanted setting that this kernel does not have."""
        return [
            SettingReport(
                setting=wanted.setting,
                outcome=ApplyOutcome.FAILED,
                wanted=wanted.value,
                actual="-",
                detail=setting_of(wanted.setting).why_missing(wanted.setting),
            )
            for wanted in self.plan.missing
        ]

    def side_effects_of(self, written: Iterable[str]) -> list[SettingChange]:
        """Return the settings that the kernel changed with the written ones, with their values."""
        wrote = set(written)
        names = {n for s in wrote if s != LINE for n in setting_of(s).side_effects(s)} - wrote
        found = {name: self.observed.get(name) for name in sorted(names)}
        return [
            SettingChange(setting=n, before=v, after=v) for n, v in found.items() if v is not None
        ]

    def pruned(self, record: Record) -> Record:
        """Return the record without restored originals and without removed arguments."""
        wanted = self.target.wanted
        names = {name for w in wanted for name in setting_of(w.setting).claims(w.setting)}
        originals = {k: v for k, v in record.originals.items() if k in names}
        devices = {k: v for k, v in record.devices.items() if k in names}
        return replace(
            record,
            boot=self.boot.owned_after_run(self.wanted),
            originals=originals,
            devices=devices,
        )

    def claim(self, record: Record) -> Record:
        """Return the record with the present values of all settings that it did not have."""
        originals = claims(self.claimed, self.observed, record.originals)
        found = {n: setting_of(n).device(self.host, n) for n in originals.keys() - record.originals}
        devices = {**record.devices, **{n: found[n] for n in sorted(found) if found[n]}}
        return replace(record, originals=originals, devices=devices)

    def _to_restore(self, record: Record, is_written: bool) -> dict[str, str | None]:
        """Return the originals without side effects of wanted settings, which stay.

        Values that the applied profile set itself are restored too, before the wanted setting is
        written.
        """
        applied = record.applied.wanted if record.applied and not is_written else ()
        set_by_profile = {wanted.setting for wanted in applied}
        side_effects: set[str] = set()
        for wanted in self.target.wanted:
            setting = setting_of(wanted.setting)
            now = self.observed.get(wanted.setting)
            original = record.originals.get(wanted.setting) or now
            in_force = is_written or (now is not None and setting.same(now, wanted.value))
            if in_force and original is not None and not setting.same(wanted.value, original):
                side_effects.update(setting.side_effects(wanted.setting))
        kept = side_effects - set_by_profile
        return {k: v for k, v in record.originals.items() if k not in kept}

    @property
    def names(self) -> set[str]:
        """The names of the wanted settings."""
        return {w.setting for w in self.target.wanted}

    @property
    def changes_adding_settings(self) -> list[SettingChange]:
        """The changes that may add missing settings: a module adds its sysctls."""
        lacking = self.plan.missing or self.plan.unsupported
        changes = (c for c in self.plan.changes if lacking and c.setting in self.names)
        return [c for c in changes if setting_of(c.setting).adds_settings]

    def plan_boot_line(self, short: Iterable[str]) -> list[SettingChange]:
        """Return the change of the boot line; `short` are the settings that need the next boot."""
        self.wanted = self.boot.wanted(self._contributions, short)
        return self.boot.plan(self.wanted)

    def apply(self, change: SettingChange) -> Applied:
        """Write one change and read it back. Raises `HostError`."""
        if change.setting == LINE:
            return self.boot.stage(self.wanted)
        return setting_of(change.setting).apply(self.host, change)

    def apply_all(self) -> list[str]:
        """Write all changes of the plan; return what failed."""
        problems = []
        for change in self.plan.changes:
            try:
                applied = self.apply(change)
            except TwineError as e:
                applied = Applied(ApplyOutcome.FAILED, "-", str(e))
            if applied.outcome is ApplyOutcome.FAILED:
                problems.append(f"{change.setting}: {applied.detail}")
        return problems

    def undo(self, change: SettingChange) -> None:
        """Restore the value before one change. Raises `HostError`."""
        if change.setting == LINE:
            self.boot.write_entry(self.boot.staged)
        else:
            setting_of(change.setting).undo(self.host, change)

    def check_undone(self, change: SettingChange) -> None:
        """Raise `HostError` unless a change of an interdependent kind is undone."""
        setting_of(change.setting).check_restored(self.host, change.setting, change.before)

    def verify(self) -> list[SettingReport]:
        """Return a report for each wanted value, and for arguments to remove from the boot line."""
        observed = {**self.observed, **self.boot.observed()}
        reports = [
            setting.verify(wanted, observed)
            for setting in self._settings
            for wanted in of_kind(setting, self.target.wanted)
        ]
        return reports + self._left_reports() + self.boot.verify(self.wanted)

    def _left_reports(self) -> list[SettingReport]:
        """Return the originals that only a boot restores."""
        return [
            SettingReport(
                setting=name,
                outcome=ApplyOutcome.PENDING_REBOOT,
                wanted=original,
                actual=now,
                detail=LEFT_TO_BOOT,
            )
            for name, original in self._left.items()
            if name not in self.names
            if (now := self.observed.get(name)) is not None
            if not setting_of(name).same(now, original)
        ]


def tasks_of(host: Host) -> list[str]:
    """Return the units of tasks that run on this host: those whose cgroup has processes."""
    units = []
    pending = [f"{CGROUPS}/{name}" for name in TASK_SLICES]
    while pending:
        folder = pending.pop()
        for name in host.fs.names(folder):
            path = f"{folder}/{name}"
            if name.startswith("twine-task-") and name.endswith(".service"):
                events = (host.fs.find(f"{path}/cgroup.events") or "").splitlines()
                units += [name] if "populated 1" in events else []
            elif name.endswith(".slice"):
                pending.append(path)
    return sorted(units)
