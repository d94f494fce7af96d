"""Kernel parameters below /proc/sys.

Source of the rules: Linux, Documentation/admin-guide/sysctl/{vm,kernel,net}.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.errors import FieldError, KernelFileError
from sidekick.profile import Profile, Value
from sidekick.report import Change, Outcome, SettingReport, Wanted
from sidekick.setting import Applied, Host, Observed

PREFIX = "sysctl."
_NAME = re.compile(r"[a-z][A-Za-z0-9_]*([./][A-Za-z0-9_:@.-]+)+")
_VALUE = re.compile(r"[\x20-\x7e\t]{1,1024}")
"""One line; the kernel takes a whole value in one write of at most a page."""

_TWINS = {
    "vm.dirty_ratio": "vm.dirty_bytes",
    "vm.dirty_background_ratio": "vm.dirty_background_bytes",
    "vm.overcommit_ratio": "vm.overcommit_kbytes",
}
TWINS = {PREFIX + a: PREFIX + b for a, b in (*_TWINS.items(), *((b, a) for a, b in _TWINS.items()))}
"""Two names of one limit: writing one makes the other read 0, and 0 cannot be written to it
(sysctl/vm.rst: "only one of them may be specified at a time")."""

REFUSED = (
    (r"vm/nr_hugepages.*", "belongs into [hugepages]"),
    (r"vm/(drop_caches|compact_memory|stat_refresh)", "is an action, not a value"),
    (r".*/flush|kernel/ns_last_pid|kernel/random/(uuid|boot_id)", "is not a value"),
    (r"kernel/(modules_disabled|kexec_load_disabled|kexec_load_limit_.*)", "cannot be undone"),
    (r"kernel/(core_pattern|modprobe|hotplug|poweroff_cmd)", "makes the kernel run programs"),
    (r"kernel/usermodehelper/.*|fs/binfmt_misc/.*", "makes the kernel run programs"),
    (r"kernel/(hostname|domainname)", "is the host's identity"),
    (
        r"net/ipv[46]/(ip_forward|conf/all/forwarding)",
        "also changes settings of every interface, which could not be given back",
    ),
)
"""What a profile may not set: a value that undo cannot restore, or one that is not its own."""


def path_of(setting: str) -> str:
    """Return the file of a setting: dots separate, or slashes where a part has dots."""
    return "/proc/sys/" + _below_proc_sys(setting.removeprefix(PREFIX))


def same(one: str, other: str) -> bool:
    """Return whether two texts are one value: the kernel separates with tabs."""
    return one.split() == other.split()


def text_of(value: Value) -> str:
    """Return a profile's value as the kernel takes it."""
    if isinstance(value, list):
        return "\t".join(str(part) for part in value)
    return str(int(value)) if isinstance(value, bool) else str(value).strip()


@dataclass(frozen=True, slots=True)
class SysctlSetting:
    """The [sysctl] table of a profile."""

    kind: str = "sysctl"

    def check(self, profile: Profile) -> list[FieldError]:
        """Return the names and values that may not or cannot be set."""
        errors = []
        for name, wanted in profile.sysctl.items():
            reason = _why_not(name) or _why_not_value(text_of(wanted.value))
            twin = TWINS.get(PREFIX + name, "").removeprefix(PREFIX)
            if twin in profile.sysctl and name < twin:
                reason = f"only one of it and {twin} can be in force"
            if reason:
                source = profile.source_of(PREFIX + name)
                errors.append(FieldError(field=PREFIX + name, reason=f"{reason} (in {source})"))
        return errors

    def wanted(self, profile: Profile, host: Host) -> list[Wanted]:  # noqa: ARG002
        """Return one value for each name."""
        return [
            Wanted(
                setting=PREFIX + name,
                value=text_of(wanted.value),
                required=wanted.required,
                source=profile.source_of(PREFIX + name),
            )
            for name, wanted in profile.sysctl.items()
        ]

    def observe(self, host: Host, settings: Iterable[str]) -> dict[str, str | None]:
        """Return the values in force, those of twins too."""
        names = dict.fromkeys(s for s in settings if s.startswith(PREFIX))
        names |= dict.fromkeys(TWINS[name] for name in names if name in TWINS)
        return {name: host.fs.find(path_of(name)) for name in names}

    def plan(
        self, wanted: Sequence[Wanted], observed: Observed, originals: Observed
    ) -> list[Change]:
        """Return what goes back to its original, then what the profile asks for."""
        ours = {w.setting: w for w in wanted}
        targets = {
            setting: (original, "back to the original")
            for setting, original in originals.items()
            if original is not None and setting not in ours and TWINS.get(setting) not in ours
        }
        targets |= {w.setting: (w.value, w.source) for w in wanted}
        changes = []
        for setting, (value, why) in targets.items():
            now = observed.get(setting)
            twin = TWINS.get(setting, "")
            follows = value == "0" and targets.get(twin, ("0",))[0] != "0"
            if now is None or same(now, value) or follows:
                continue
            inverse = observed.get(twin) if now == "0" else None
            changes.append(
                Change(
                    setting=setting,
                    before=now,
                    after=value,
                    why=why,
                    undo_setting=twin if inverse else "",
                    undo_value=inverse or "",
                )
            )
        return changes

    def apply(self, host: Host, change: Change) -> Applied:
        """Write the value; what the kernel made of it decides."""
        path = path_of(change.setting)
        host.fs.write(path, change.after)
        actual = host.fs.read(path)
        if same(actual, change.after):
            return Applied(Outcome.APPLIED, actual)
        return Applied(
            Outcome.FAILED, actual, f"wrote {change.after!r}, the kernel keeps {actual!r} instead"
        )

    def verify(self, wanted: Wanted, observed: Observed) -> SettingReport:
        """Say whether the value is still in force."""
        actual = observed.get(wanted.setting)
        if actual is None:
            outcome = Outcome.UNSUPPORTED if not wanted.required else Outcome.DRIFTED
        else:
            outcome = Outcome.APPLIED if same(actual, wanted.value) else Outcome.DRIFTED
        return SettingReport(
            setting=wanted.setting,
            outcome=outcome,
            wanted=wanted.value,
            actual=actual or "-",
            detail="this kernel lacks it" if actual is None else "",
        )

    def undo(self, host: Host, change: Change) -> None:
        """Write the earlier value, through the twin where only that one can bring it back."""
        path = path_of(change.setting)
        if same(host.fs.read(path), change.before):
            return
        if change.undo_setting:
            host.fs.write(path_of(change.undo_setting), change.undo_value)
        else:
            host.fs.write(path, change.before)
        actual = host.fs.read(path)
        if not same(actual, change.before):
            raise KernelFileError(
                f"cannot bring {change.setting} back to {change.before!r}: it reads {actual!r}"
            )


def _below_proc_sys(name: str) -> str:
    return name if "/" in name else name.replace(".", "/")


def _why_not(name: str) -> str:
    path = _below_proc_sys(name)
    if not _NAME.fullmatch(name) or {"", ".", ".."} & set(path.split("/")):
        return "is not the name of a sysctl"
    reasons = (reason for pattern, reason in REFUSED if re.fullmatch(pattern, path))
    return next(reasons, "")


def _why_not_value(value: str) -> str:
    return "" if _VALUE.fullmatch(value) else "must be one line of printable characters"
