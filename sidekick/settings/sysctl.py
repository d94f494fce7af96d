"""Kernel parameters below /proc/sys.

Source of the rules: Linux, Documentation/admin-guide/sysctl/{vm,kernel,net}.rst.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from sidekick.cpulists import parse_cpu_list
from sidekick.profile import Profile
from sidekick.report import SettingChange, SettingReport, WantedSetting
from sidekick.setting import FileSetting, Host, Observed
from wire.errors import FieldError

Value = int | str | bool | list[int]


class SysctlValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sysctl in its long form."""

    value: Value
    required: bool = True
    """False: a kernel without it reports `unsupported`, and the rest of the profile is applied."""


Section = dict[str, Value | SysctlValue]

PREFIX = "sysctl."
_NAME = re.compile(r"[a-z][A-Za-z0-9_]*([./][A-Za-z0-9_:@.-]+)+")
_VALUE = re.compile(r"[\x20-\x7e\t]{1,1024}")
"""One line; the kernel takes a whole value in one write of at most a page."""

_COUNTERPARTS = {
    "vm.dirty_ratio": "vm.dirty_bytes",
    "vm.dirty_background_ratio": "vm.dirty_background_bytes",
    "vm.overcommit_ratio": "vm.overcommit_kbytes",
}
COUNTERPARTS = {
    PREFIX + a: PREFIX + b
    for a, b in (*_COUNTERPARTS.items(), *((b, a) for a, b in _COUNTERPARTS.items()))
}
"""Two names of one limit: writing one makes the other read 0, and 0 cannot be written to it
(sysctl/vm.rst: "only one of them may be specified at a time")."""
_COARSE = re.compile(
    r"(.+[./]neigh[./].+[./](?:unres_qlen|base_reachable_time|retrans_time)"
    r"|.+[./]route[./]gc_min_interval)(_bytes|_ms)?"
)
"""Values that the kernel shows in a coarse and in an exact unit. A write of the coarse name rounds,
so only the exact name can restore a value (net/core/neighbour.c, route.c)."""

_RANGES = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")
"""Port numbers and processors: none has more digits."""
_NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|(?P<octal>0[0-7]+)|0|[1-9]\d*)")

CONFIGURED = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d")
"""Folders of sysctl.d(5): loading their files again changes our values."""
REFUSED = (
    (r"vm/nr_hugepages.*", "belongs in [hugepages]"),
    (r"vm/(drop_caches|compact_memory|stat_refresh)", "is an action, not a value"),
    (r".*/flush|kernel/ns_last_pid|kernel/random/(uuid|boot_id)", "is not a value"),
    (r"kernel/(modules_disabled|kexec_load_disabled|kexec_load_limit_.*)", "cannot be undone"),
    (
        r"kernel/(unprivileged_bpf_disabled|yama/ptrace_scope|tainted|cad_pid)",
        "cannot be undone: the kernel refuses to lower it until the next boot",
    ),
    (
        r"net/netfilter/nf_hooks_lwtunnel",
        "cannot be undone: once on, it stays on until the next boot",
    ),
    (
        r"net/ipv6/conf/[^/]+/(disable_ipv6|addr_gen_mode)",
        "cannot be undone: it drops addresses and routes, which the old value does not restore",
    ),
    (
        r"net/ipv6/conf/(?!default/)[^/]+/forwarding",
        "cannot be undone: it drops the default routes of routers, which the old value does not "
        "restore",
    ),
    (r"kernel/(core_pattern|modprobe|hotplug|poweroff_cmd)", "makes the kernel run programs"),
    (r"kernel/usermodehelper/.*|fs/binfmt_misc/.*", "makes the kernel run programs"),
    (r"kernel/(hostname|domainname)", "is the host's identity"),
    (r"net/ipv6/conf/[^/]+/stable_secret", "cannot be undone: once set, it cannot be unset"),
    (
        r"net/ipv4/(ip_forward|conf/all/forwarding)|net/ipv6/conf/all/.*",
        "also changes settings of every interface, which cannot be restored",
    ),
)
"""Sysctls that a profile may not set: undo cannot restore the value, or it belongs to others."""


SIDE_EFFECTS = {
    PREFIX + "net.ipv4.tcp_congestion_control": (
        PREFIX + "net.ipv4.tcp_allowed_congestion_control",
        *(f"modules.tcp_{name}" for name in ("bbr", "dctcp", "htcp", "vegas", "westwood")),
    ),
    PREFIX + "net.core.default_qdisc": ("modules.sch_fq", "modules.sch_cake"),
}
"""Values that a write also changes: the kernel allows the default congestion algorithm to every
user (net/ipv4/tcp_cong.c), also after another one becomes the default. Naming a module loads it,
and it stays loaded."""


def exact_name_of(setting: str) -> str:
    """Return the exact name of a coarse name, "" for every other name."""
    match = _COARSE.fullmatch(setting)
    if not match or match[2]:
        return ""
    return setting + ("_bytes" if setting.endswith("unres_qlen") else "_ms")


def counterpart_of(setting: str) -> str:
    """Return the other name of the same value, "" where it has only one."""
    match = _COARSE.fullmatch(setting)
    if match and match[2]:
        return match[1] if exact_name_of(match[1]) == setting else ""
    return exact_name_of(setting) or COUNTERPARTS.get(setting, "")


def with_dots(name: str) -> str:
    """Return a name with dots if it is one of `COUNTERPARTS` written with slashes."""
    dotted = name.replace("/", ".")
    return dotted if PREFIX + dotted in COUNTERPARTS else name


def text_of(value: Value) -> str:
    """Return a profile's value as text for the kernel."""
    if isinstance(value, list):
        return "\t".join(str(part) for part in value)
    return str(int(value)) if isinstance(value, bool) else str(value).strip()


def kernel_value(value: str) -> tuple[object, ...]:
    """Return the meaning of a value for the kernel, which prints base 10 and joins ranges.

    A list of numbers and ranges is a set. Source: Linux, kernel/sysctl.c (`strtoul_lenient` with
    base 0, `proc_do_large_bitmap`).
    """
    return tuple(_word_value(word) for word in value.split())


def _word_value(word: str) -> object:
    if _RANGES.fullmatch(word) and ("," in word or "-" in word[1:]):
        with contextlib.suppress(ValueError):  # 3-1: the kernel refuses it
            return frozenset(parse_cpu_list(word))
    match = _NUMBER.fullmatch(word)
    if not match:
        return word
    return int(word.replace("0", "0o", 1) if match["octal"] else word, 0)


def values_of(profile: Profile) -> dict[str, SysctlValue]:
    """Return the section with every value in its long form."""
    table: Section = profile.sections["sysctl"]
    return {
        name: value if isinstance(value, SysctlValue) else SysctlValue(value=value)
        for name, value in table.items()
    }


class SysctlSetting(FileSetting):
    """The [sysctl] table of a profile."""

    kind = "sysctl"
    section = Section
    interdependent = True
    is_restored_by_boot = True

    def merge(self, parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
        """Return the values of both; the child's name of a limit replaces the parent's other."""
        own = {with_dots(name) for name in child}
        replaced = own | {counterpart_of(PREFIX + name).removeprefix(PREFIX) for name in own}
        inherited = {k: v for k, v in parent.items() if k in child or with_dots(k) not in replaced}
        return {**inherited, **child}

    def check(self, profile: Profile) -> list[FieldError]:
        """Return an error for each name or value that may not or cannot be set."""
        errors = []
        values = values_of(profile)
        names = {with_dots(name) for name in values}
        for name, wanted in values.items():
            reason = _why_refused(name) or _why_value_refused(text_of(wanted.value))
            dotted = with_dots(name)
            counterpart = counterpart_of(PREFIX + dotted).removeprefix(PREFIX)
            if counterpart in names and dotted < counterpart:
                reason = f"only one of it and {counterpart} can be in force"
            elif dotted != name and dotted in values:
                reason = f"is {dotted}, which the profile also sets"
            if reason:
                source = profile.source_of(PREFIX + name)
                errors.append(FieldError(field=PREFIX + name, reason=f"{reason} (in {source})"))
        return errors

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:  # noqa: ARG002
        """Return one value for each name."""
        return [
            WantedSetting(
                setting=PREFIX + with_dots(name),
                value=text_of(wanted.value),
                required=wanted.required,
                source=profile.source_of(PREFIX + name),
            )
            for name, wanted in values_of(profile).items()
        ]

    def partners(self, setting: str) -> tuple[str, ...]:
        """Return the other name of the same limit."""
        counterpart = counterpart_of(setting)
        return (counterpart,) if counterpart else ()

    def side_effects(self, setting: str) -> tuple[str, ...]:
        """Return the values that the kernel extends with a write of this one."""
        return SIDE_EFFECTS.get(PREFIX + setting.removeprefix(PREFIX).replace("/", "."), ())

    def path(self, setting: str) -> str:
        """Return the file of a setting: dots separate, or slashes where a part has dots."""
        return "/proc/sys/" + _below_proc_sys(setting.removeprefix(PREFIX))

    def same(self, one: str, other: str) -> bool:
        """Return whether two texts have the same meaning for the kernel."""
        return one.split() == other.split() or kernel_value(one) == kernel_value(other)

    def write(self, host: Host, setting: str, value: str) -> None:
        """Write the value. A write of no bytes never reaches the kernel; an empty line does."""
        super().write(host, setting, value or "\n")

    def plan(
        self, wanted: Sequence[WantedSetting], observed: Observed, originals: Observed
    ) -> list[SettingChange]:
        """Return the writes that restore originals, then those for the profile.

        Of two names of one limit only the one for the new value is written. Undo writes the other
        name if that was in force: neither accepts the 0 that it reads. A coarse name is always
        undone through its exact one.
        """
        ours = {w.setting for w in wanted}
        back = {s: v for s, v in originals.items() if counterpart_of(s) not in ours}
        targets = {s: v for s, v in back.items() if v is not None}
        targets |= {w.setting: w.value for w in wanted}
        changes = []
        for change in super().plan(wanted, observed, back):
            counterpart, exact = counterpart_of(change.setting), exact_name_of(change.setting)
            if exact or counterpart not in COUNTERPARTS:
                follows = exact in targets
                inverse = observed.get(exact)
            else:
                follows = change.after == "0" and targets.get(counterpart, "0") != "0"
                inverse = observed.get(counterpart) if change.before == "0" else None
            if inverse:
                change = replace(change, undo_setting=counterpart, undo_value=inverse)
            changes += [] if follows else [change]
        return changes

    def cause_of_drift(self, host: Host, report: SettingReport) -> str:
        """Return the file of sysctl.d(5) that sets the value that was found."""
        path = _below_proc_sys(report.setting.removeprefix(PREFIX))
        for folder in CONFIGURED:
            names = [n for n in host.fs.names(folder) if n.endswith(".conf")]
            for name in names:
                text = host.fs.find(f"{folder}/{name}") or ""
                for number, line in enumerate(text.splitlines(), 1):
                    key, equals, value = line.strip().lstrip("-").partition("=")
                    same_name = equals and _below_proc_sys(key.strip()) == path
                    if same_name and self.same(value, report.actual):
                        return f"to the value in {folder}/{name}:{number}"
        return ""

    def undo(self, host: Host, change: SettingChange) -> None:
        """Write the earlier value; through the counterpart if only that one can restore it."""
        if not change.undo_setting:
            super().undo(host, change)
            return
        found = host.fs.read(self.path(change.undo_setting))
        if not self.same(found, change.undo_value) or not self.same(
            host.fs.read(self.path(change.setting)), change.before
        ):
            host.fs.write(self.path(change.undo_setting), change.undo_value)
            self.check_restored(host, change.setting, change.before)


def _below_proc_sys(name: str) -> str:
    return name if "/" in name else name.replace(".", "/")


def _why_refused(name: str) -> str:
    path = _below_proc_sys(name)
    if not _NAME.fullmatch(name) or {"", ".", ".."} & set(path.split("/")):
        return "is not the name of a sysctl"
    reasons = (reason for pattern, reason in REFUSED if re.fullmatch(pattern, path))
    return next(reasons, "")


def _why_value_refused(value: str) -> str:
    return "" if _VALUE.fullmatch(value) else "must be one line of printable characters"
