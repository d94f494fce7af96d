"""The kernel command line: staged now, in force after the next boot.

Every argument has an owner. Ours are replaced, never appended twice; an argument of the
host's with the same key is set aside and given back when the profile goes; all others are
left alone. Source of the syntax: Linux, Documentation/admin-guide/kernel-parameters.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.errors import FieldError, HostError, KernelFileError
from sidekick.profile import Profile
from sidekick.report import Change, Outcome, RebootNeed, SettingReport, Wanted
from sidekick.setting import Applied, Host, Observed
from sidekick.state import OwnedArgument

CMDLINE = "kernel.cmdline"
STAGED = "kernel.staged"
STAGED_FILE = "/etc/kernel/cmdline"
"""What kernel-install(8) gives new boot entries."""
GRUB_FOLDER = "/etc/default/grub.d"
GRUB_FILE = f"{GRUB_FOLDER}/90-twine.cfg"
GRUB_UPDATE = "/usr/sbin/update-grub"
GRUB_RESULT = "/boot/grub/grub.cfg"

ALLOWED = frozenset(
    {
        "amd_iommu",
        "amd_pstate",
        "audit",
        "cgroup_disable",
        "clocksource",
        "cpufreq.default_governor",
        "cpuidle.off",
        "hugetlb_cma",
        "idle",
        "intel_idle.max_cstate",
        "intel_iommu",
        "intel_pstate",
        "iommu",
        "irqaffinity",
        "isolcpus",
        "nmi_watchdog",
        "nohz",
        "nohz_full",
        "nosmt",
        "nosoftlockup",
        "nowatchdog",
        "numa_balancing",
        "nvme.poll_queues",
        "pcie_aspm",
        "preempt",
        "processor.max_cstate",
        "psi",
        "rcu_nocb_poll",
        "rcu_nocbs",
        "skew_tick",
        "threadirqs",
        "transparent_hugepage",
        "tsc",
        "workqueue.power_efficient",
        "zswap.enabled",
    }
)
"""Tuning only. Nothing that decides what is booted or run (root, init, rd.*, systemd.*) and
nothing that weakens the host (mitigations, selinux, lockdown)."""
OF_HUGEPAGES = frozenset({"hugepages", "hugepagesz", "default_hugepagesz"})
"""Arguments of the hugepages setting. They may linger until the next boot: the count that
is in force is set at run time."""
_VALUE = re.compile(r"[A-Za-z0-9_.,:+-]{1,256}")
MAX_LINE = 2047
"""x86 keeps no more (COMMAND_LINE_SIZE 2048, with the final NUL)."""
_LOADER_KEYS = frozenset({"BOOT_IMAGE", "initrd"})
"""Added by boot loaders for one boot; no part of the line to stage."""


def key_of(argument: str) -> str:
    """Return the key; the kernel does not tell dashes from underscores in it."""
    return argument.partition("=")[0].replace("-", "_")


def split(line: str) -> list[str]:
    """Return the arguments as the kernel separates them: not within double quotes."""
    return re.findall(r'(?:[^\s"]|"[^"]*(?:"|$))+', line)


def value_of(line: str, argument: str) -> str:
    """Return the argument in force with this one's key, "" for none: the last one counts."""
    tokens, _ = _ours_and_inits(line)
    return next((t for t in reversed(tokens) if key_of(t) == key_of(argument)), "")


def merge(
    line: str, owned: Sequence[OwnedArgument], wanted: Sequence[str]
) -> tuple[str, tuple[OwnedArgument, ...]]:
    """Return the command line to boot with, and which of its arguments are ours then.

    Starts from the running line, so what the host's owner changes in the boot loader stays.
    """
    tokens, inits = _ours_and_inits(line)
    ours = {o.argument: o for o in owned}
    by_key = {key_of(w): w for w in wanted}
    displaced: dict[str, list[str]] = {}
    foreign: set[str] = set()
    out: list[str] = []
    for token in tokens:
        mine = ours.get(token)
        replacement = by_key.get(key_of(token))
        if token == replacement:
            out += [token] if token not in out else []
            foreign |= set() if mine else {token}
        elif mine and replacement is None:
            out += [d for d in mine.displaced if d not in out]
        elif replacement is not None:
            displaced.setdefault(replacement, []).extend(mine.displaced if mine else [token])
            out += [replacement] if replacement not in out else []
        else:
            out.append(token)
    out += [w for w in wanted if w not in out]
    after = tuple(
        OwnedArgument(
            argument=w,
            displaced=tuple(displaced.get(w) or (ours[w].displaced if w in ours else ())),
        )
        for w in wanted
        if w not in foreign
    )
    return " ".join(out + inits), after


def leftovers(line: str, owned: Sequence[OwnedArgument], wanted: Sequence[str]) -> list[str]:
    """Return our arguments that the kernel runs with and nobody wants any more."""
    tokens, _ = _ours_and_inits(line)
    return [
        o.argument
        for o in owned
        if o.argument in tokens
        and o.argument not in wanted
        and key_of(o.argument) not in OF_HUGEPAGES
    ]


def _ours_and_inits(line: str) -> tuple[list[str], list[str]]:
    """Return the kernel's arguments, and from `--` on those for init."""
    tokens = [t for t in split(line) if key_of(t) not in _LOADER_KEYS]
    end = tokens.index("--") if "--" in tokens else len(tokens)
    return tokens[:end], tokens[end:]


@dataclass(frozen=True, slots=True)
class KernelSetting:
    """The [kernel] section of a profile."""

    owned: tuple[OwnedArgument, ...] = ()
    kind: str = "kernel"

    def check(self, profile: Profile) -> list[FieldError]:
        """Return the arguments that may not be set or are no arguments."""
        errors = []
        for argument in profile.cmdline:
            reason = _why_not(argument)
            if reason:
                source = profile.source_of(f"kernel.{argument}")
                errors.append(
                    FieldError(
                        field="kernel.cmdline", reason=f"{argument!r} {reason} (in {source})"
                    )
                )
        return errors

    def wanted(self, profile: Profile, host: Host) -> list[Wanted]:  # noqa: ARG002
        """Return the arguments as one value: they are one line and one reboot."""
        if not profile.cmdline:
            return []
        owners = [f"{a} of {profile.source_of(f'kernel.{a}')}" for a in profile.cmdline]
        return [Wanted(setting=CMDLINE, value=" ".join(profile.cmdline), source=", ".join(owners))]

    def observe(
        self,
        host: Host,
        settings: Iterable[str],  # noqa: ARG002
    ) -> dict[str, str | None]:
        """Return the running line and the staged one, whatever is asked for."""
        return {CMDLINE: host.fs.find("/proc/cmdline"), STAGED: host.fs.find(STAGED_FILE)}

    def plan(
        self, wanted: Sequence[Wanted], observed: Observed, originals: Observed
    ) -> list[Change]:
        """Return the staging of another line; it needs a boot if what runs is not wanted."""
        running, staged = observed.get(CMDLINE) or "", observed.get(STAGED) or ""
        arguments = arguments_of(wanted)
        if not arguments and not self.owned and STAGED not in originals:
            return []
        line, ours = merge(running, self.owned, arguments)
        after = line if ours else originals.get(STAGED) or ""
        if not ours and STAGED not in originals:
            after = staged
        wrong = [a for a in arguments if not _in_force(running, a)]
        wrong += leftovers(running, self.owned, arguments)
        needs = RebootNeed.KEXEC if wrong else RebootNeed.NONE
        if after == staged and not wrong:
            return []
        why = ", ".join(w.source for w in wanted) or "back to the original"
        return [Change(setting=CMDLINE, before=staged, after=after, needs=needs, why=why)]

    def apply(self, host: Host, change: Change) -> Applied:
        """Stage the line and read it back; the boot loader's own result too."""
        if len(change.after) > MAX_LINE:
            return Applied(Outcome.FAILED, "", f"the line is longer than {MAX_LINE} characters")
        detail = self._stage(host, change.after)
        if change.needs is RebootNeed.NONE:
            return Applied(Outcome.APPLIED, change.after, detail)
        return Applied(Outcome.PENDING_REBOOT, change.after, detail)

    def verify(self, wanted: Wanted, observed: Observed) -> SettingReport:
        """Compare the wanted arguments with the line the kernel was booted with."""
        running, staged = observed.get(CMDLINE) or "", observed.get(STAGED) or ""
        arguments = wanted.value.split()
        wrong = [a for a in arguments if not _in_force(running, a)]
        extra = leftovers(running, self.owned, arguments)
        staged_too = all(_in_force(staged, a) for a in wrong)
        outcome, detail = Outcome.APPLIED, ""
        if wrong and not staged_too:
            outcome, detail = Outcome.DRIFTED, "neither in force nor staged"
        elif wrong or extra:
            gone = [f"without {a}" for a in extra]
            outcome = Outcome.PENDING_REBOOT
            detail = "after the next boot: " + ", ".join([*wrong, *gone])
        actual = [value_of(running, a) or f"no {key_of(a)}" for a in arguments] + extra
        return SettingReport(
            setting=CMDLINE,
            outcome=outcome,
            wanted=wanted.value,
            actual=" ".join(actual),
            detail=detail,
        )

    def undo(self, host: Host, change: Change) -> None:
        """Stage what was staged before."""
        self._stage(host, change.before)

    def _stage(self, host: Host, line: str) -> str:
        """Write the staged line ("" for none) and tell the boot loader; say what it did."""
        if (host.fs.find(STAGED_FILE) or "") != line:
            path = host.fs.path(STAGED_FILE)
            if line:
                host.disk.write(path, line + "\n")
            else:
                host.disk.remove(path)
            if (host.fs.find(STAGED_FILE) or "") != line:
                raise KernelFileError(f"cannot stage the command line in {STAGED_FILE}")
        if not (host.fs.exists(GRUB_FOLDER) and host.fs.exists(GRUB_UPDATE)):
            return f"staged in {STAGED_FILE}; no boot loader to update" if line else ""
        names = {o.argument for o in self.owned}
        return _update_grub(host, [t for t in split(line) if t in names])


def arguments_of(wanted: Iterable[Wanted]) -> list[str]:
    """Return the arguments among wanted values."""
    return [a for w in wanted if w.setting == CMDLINE for a in w.value.split()]


def _in_force(line: str, argument: str) -> bool:
    if key_of(argument) in OF_HUGEPAGES:
        return True  # the count at run time decides (settings/hugepages.py)
    return value_of(line, argument) == argument


def _update_grub(host: Host, arguments: Sequence[str]) -> str:
    drop_in = grub_drop_in(arguments) if arguments else None
    before = host.fs.find(GRUB_FILE)
    if before == (drop_in.strip() if drop_in else None):
        return ""
    path = host.fs.path(GRUB_FILE)
    if drop_in:
        host.disk.write(path, drop_in)
    else:
        host.disk.remove(path)
    host.processes.run([GRUB_UPDATE], timeout_s=120.0)
    result = host.fs.find(GRUB_RESULT) or ""
    missing = [a for a in arguments if a not in result.split()]
    if missing:
        raise HostError(f"update-grub ran, but {GRUB_RESULT} lacks {' '.join(missing)}")
    return f"staged in {STAGED_FILE} and {GRUB_FILE}"


def grub_drop_in(arguments: Sequence[str]) -> str:
    """Return a file for /etc/default/grub.d, which update-grub runs as shell.

    It takes other settings of the same keys out and ours in. The grammar of arguments has
    no character that means something to a shell.
    """
    keys = [key.replace("_", "[_-]") for key in dict.fromkeys(key_of(a) for a in arguments)]
    patterns = "|".join(f"{key}|{key}=*" for key in keys)
    lines = ["# Written by sidekick: the kernel arguments of the host's profile. Do not edit."]
    for name in ("GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT"):
        lines.append(
            f'{name}="$(set -f; for a in ${name}; do case "$a" in {patterns}) ;; '
            f'*) printf \'%s \' "$a" ;; esac; done)"'
        )
    lines.append(f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {" ".join(arguments)}"')
    return "\n".join(lines) + "\n"


def _why_not(argument: str) -> str:
    key, equals, value = argument.partition("=")
    if key.replace("-", "_") in OF_HUGEPAGES:
        return "belongs into [hugepages]"
    if key not in ALLOWED:
        return "is not among the arguments a profile may set"
    if equals and not _VALUE.fullmatch(value):
        return "has a value with characters that are not allowed, or none"
    return ""
