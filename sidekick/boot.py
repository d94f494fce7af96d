"""The owner of the boot line: the only module that stages kernel arguments and kernel versions.

Settings contribute arguments (`Setting.boot`). This module combines them into one line and one
entry of the boot loader, so that all of them need one boot. The entry becomes the loader's default
only after a boot with it; until then an unplanned boot uses the host's own entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from sidekick.bootline import (
    GUARD,
    GUARD_ARGUMENT,
    MAX_LINE,
    VERSION,
    compose,
    group_in,
    in_force,
    leftovers,
    owned_groups,
    tokens_of,
    without_owned,
)
from sidekick.loaders import find_loader
from sidekick.loaders.entry import Entry
from sidekick.record import OwnedGroup
from sidekick.report import ApplyOutcome, Disruption, SettingChange, SettingReport
from sidekick.setting import RUNNING, STAGED, Applied, Contribution, Host
from wire.errors import FieldError, HostError

LINE = "boot.line"
"""The name of the one change that only a boot brings into force."""
_GUARD_VALUE = GUARD_ARGUMENT.partition("=")[2]
PANIC = "/proc/sys/kernel/panic"


def conflicts(contributions: Iterable[Contribution]) -> list[FieldError]:
    """Return the groups that two settings want to be different."""
    wanted: dict[str, Contribution] = {}
    errors = []
    for each in contributions:
        other = wanted.setdefault(each.group, each)
        if other.arguments != each.arguments:
            reason = (
                f"sets {' '.join(each.arguments)} on the kernel command line, "
                f"{other.settings[0]} sets {' '.join(other.arguments)}"
            )
            errors.append(FieldError(field=each.settings[0], reason=reason))
    return errors


class WantedBoot(msgspec.Struct, frozen=True):
    """The entry that the next boot must use, and why."""

    entry: Entry | None
    """None for the host's own."""
    groups: Mapping[str, tuple[str, ...]]
    owned: tuple[OwnedGroup, ...]
    """All groups of sidekick from now on, including released ones that are still in force."""
    missing: tuple[str, ...]
    """Wanted arguments that are not in force."""
    leftover: tuple[str, ...]
    """Sidekick's arguments in force that no profile wants any more."""
    why: str

    @property
    def needs_boot(self) -> bool:
        """Whether a boot must add or remove arguments."""
        return bool(self.missing or self.leftover)

    @property
    def purpose(self) -> str:
        """The arguments that the next boot must bring, as text that identifies a failed attempt.

        The text does not depend on the running line: after a failed boot with the host's own line
        the old arguments may be missing too.
        """
        arguments = [a for group, ours in self.groups.items() if group != GUARD for a in ours]
        return " ".join(arguments) or "the host's own line"


class BootLine:
    """The kernel command line at one moment: running, staged, and the host's own."""

    def __init__(self, host: Host, owned: Sequence[OwnedGroup], panic: str | None = None) -> None:
        """Read all three. `panic` is the host's own `kernel.panic` where a profile changed it."""
        self.host = host
        self._panic = panic
        self.owned = tuple(owned)
        self.loader = find_loader(host)
        self.running = host.fs.find("/proc/cmdline") or ""
        own = self.loader.own_line(host)
        self.own = own if own is not None else without_owned(self.running, owned)
        self.staged = self.loader.read(host)

    def observed(self) -> dict[str, str | None]:
        """Return the lines as settings see them when they verify."""
        staged = self.staged.line if self.staged else None
        return {RUNNING: self.running, STAGED: staged}

    def booted_with(self) -> list[str]:
        """Return sidekick's arguments that are in force."""
        tokens = set(tokens_of(self.running)[0])
        ours = [each for each in self.owned if set(each.arguments) <= tokens]
        return [argument for each in ours for argument in each.arguments]

    def wanted(
        self, contributions: Sequence[Contribution], short: Iterable[str] = ()
    ) -> WantedBoot:
        """Return the entry that the next boot must use, and why.

        A late contribution counts if its setting is in `short` (the values that this boot could
        not provide), or if its group is sidekick's already.
        """
        fell_short = set(short)
        ours = {each.group: each.arguments for each in self.owned}
        due = [
            each
            for each in contributions
            if not each.late
            or fell_short & set(each.settings)
            or ours.get(each.group) == each.arguments
        ]
        groups = {each.group: each.arguments for each in due}
        late = {each.group for each in due if each.late}
        if groups and not group_in(self.own, GUARD):
            groups[GUARD] = (GUARD_ARGUMENT,)
            late.add(GUARD)
        missing = [
            argument
            for each in due
            if not self._is_running(each)
            if not each.late or fell_short & set(each.settings)
            for argument in each.arguments
        ]
        owned = tuple(map(self._with_original_panic, owned_groups(self.own, groups, late)))
        known = {(each.group, each.arguments) for each in owned}
        still = tuple(each for each in self.owned if (each.group, each.arguments) not in known)
        leftover = leftovers(self.running, self.owned, groups)
        return WantedBoot(
            entry=self._entry(groups, owned, all(self._is_running(each) for each in due)),
            groups=groups,
            owned=owned + still,
            missing=tuple(dict.fromkeys(missing)),
            leftover=tuple(leftover),
            why=", ".join(dict.fromkeys(each.source for each in due)) or "back to the original",
        )

    def plan(self, wanted: WantedBoot) -> list[SettingChange]:
        """Return the staging of the line, if the loader does not have it already."""
        if wanted.entry == self.staged and not wanted.needs_boot:
            return []
        return [
            SettingChange(
                setting=LINE,
                before=_entry_text(self.staged),
                after=_entry_text(wanted.entry),
                needs=Disruption.KEXEC if wanted.needs_boot else Disruption.LIVE,
                why=wanted.why,
            )
        ]

    def stage(self, wanted: WantedBoot) -> Applied:
        """Write the line for the loader. Raises `HostError`, and then undo has to follow."""
        line = wanted.entry.line if wanted.entry else ""
        if len(line) > MAX_LINE:
            detail = f"the line is longer than {MAX_LINE} characters"
            return Applied(ApplyOutcome.FAILED, "", detail)
        detail = self.write_entry(wanted.entry)
        outcome = ApplyOutcome.PENDING_REBOOT if wanted.needs_boot else ApplyOutcome.APPLIED
        return Applied(outcome, line, detail)

    def write_entry(self, entry: Entry | None) -> str:
        """Make this the only entry of sidekick in the loader; return where it is stored."""
        if entry is not None and entry.line:
            return self.loader.stage(self.host, entry)
        self.loader.clear(self.host)
        left = self.loader.read(self.host)
        if left is not None:
            raise HostError(
                f"{self.loader.name} still has an entry of sidekick after it was removed"
            )
        return ""

    def verify(self, wanted: WantedBoot) -> list[SettingReport]:
        """Report what no setting reports: arguments to remove, and a wrong staged entry."""
        actual, detail = " ".join(wanted.leftover), ""
        if wanted.leftover:
            outcome = ApplyOutcome.PENDING_REBOOT
            detail = "after the next boot: " + ", ".join(f"without {a}" for a in wanted.leftover)
        elif wanted.entry != self.staged:
            outcome, actual = ApplyOutcome.DRIFTED, _entry_text(self.staged)
            detail = f"{self.loader.name} would boot another line than the profile's"
        else:
            return []
        return [
            SettingReport(
                setting=LINE,
                outcome=outcome,
                wanted=_entry_text(wanted.entry),
                actual=actual or "-",
                detail=detail,
            )
        ]

    def owned_after_run(self, wanted: WantedBoot) -> tuple[OwnedGroup, ...]:
        """Return the groups that sidekick owns after the run: wanted, or still in force."""
        tokens = set(tokens_of(self.running)[0])
        return tuple(
            each
            for each in wanted.owned
            if wanted.groups.get(each.group) == each.arguments or set(each.arguments) <= tokens
        )

    def kexec_line(self, wanted: WantedBoot) -> str:
        """Return the line for a kernel that is started without the loader.

        It is the running line with sidekick's arguments changed. The text in a loader's file may
        contain variables and quotes that only the loader understands.
        """
        base = without_owned(self.running, self.owned)
        groups = wanted.groups if wanted.entry else {}
        guarded = group_in(base, GUARD)
        return compose(base, {g: a for g, a in groups.items() if g != GUARD or not guarded})

    def why_no_kexec_line(self, wanted: WantedBoot) -> str:
        """Return why the line is not known without the loader, "" if it is."""
        computed = [a for each in self.owned for a in each.displaced if "$" in a]
        if computed:
            return f"only {self.loader.name} knows the host's own {' '.join(computed)}"
        too_long = len(self.kexec_line(wanted)) > MAX_LINE
        return f"the line is longer than {MAX_LINE} characters" if too_long else ""

    def _with_original_panic(self, group: OwnedGroup) -> OwnedGroup:
        """Record with the guard the value of `kernel.panic` before the first boot with it."""
        if group.group != GUARD:
            return group
        original = next((each.before for each in self.owned if each.group == GUARD), None)
        if original is None:
            own = self._panic if self._panic is not None else self.host.fs.find(PANIC)
            original = own or ""
        return replace(group, before=original)

    def _is_running(self, wanted: Contribution) -> bool:
        if wanted.group == VERSION:
            return wanted.arguments == (self.host.hardware.kernel,)
        return in_force(self.running, wanted.group, wanted.arguments)

    def _entry(
        self, groups: Mapping[str, tuple[str, ...]], owned: Sequence[OwnedGroup], proven: bool
    ) -> Entry | None:
        if not any(each.group != GUARD for each in owned):
            return None  # the host's own line has it all
        version = next(iter(groups.get(VERSION, ())), "")
        entry = Entry(line=compose(self.own, groups), version=version, default=proven)
        return self.loader.as_read_back(self.host, entry)


def disarm_panic_guard(host: Host, owned: Sequence[OwnedGroup]) -> None:
    """Undo the effect of the guard after a successful boot.

    A host whose own value equals the guard's keeps it: the record has the host's value.
    """
    guard = next((each for each in owned if each.group == GUARD), None)
    running = (host.fs.find("/proc/cmdline") or "").split()
    if guard is None or guard.before == _GUARD_VALUE or GUARD_ARGUMENT not in running:
        return
    if host.fs.find(PANIC) == _GUARD_VALUE:
        host.fs.write(PANIC, "0")


def _entry_text(entry: Entry | None) -> str:
    if entry is None:
        return ""
    version = f"[{entry.version}] " if entry.version else ""
    return version + entry.line
