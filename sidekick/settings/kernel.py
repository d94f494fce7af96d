"""The kernel: arguments of its command line, and its version. In force after the next boot.

`sidekick/boot.py` stages them. This module checks what a profile may set, and whether it is in
force.
Source of the arguments: Linux, Documentation/admin-guide/kernel-parameters.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from sidekick.bootline import (
    GUARD,
    OF_HUGEPAGES,
    VERSION,
    group_in,
    group_of,
    in_force,
    key_of,
)
from sidekick.profile import Profile
from sidekick.report import ApplyOutcome, SettingChange, SettingReport, WantedSetting
from sidekick.setting import RUNNING, STAGED, Contribution, Host, Observed, Setting
from wire.errors import FieldError

CMDLINE = "kernel.cmdline"
RELEASE = "kernel.version"

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
CONTROLLERS_OF_LIMITS = frozenset({"memory", "cpuset", "pids", "io", "blkio", "hugetlb", "misc"})
"""Controllers that enforce the limits of tasks: without them a task has no limits."""
_VALUE = re.compile(r"[A-Za-z0-9_.,:+-]{1,256}")
_RELEASE = re.compile(r"[0-9][A-Za-z0-9._+~-]{0,63}")


class Kernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [kernel] table."""

    cmdline: list[str] = []
    """Arguments that the profile owns; others on the command line are left alone."""
    version: str | None = None
    """The release to boot, as `uname -r` prints it; it must be installed."""
    required: bool = True
    """Whether a host that has not installed that version cannot run the profile."""


class KernelSetting(Setting):
    """The [kernel] section of a profile."""

    kind = "kernel"
    section = Kernel

    def merge(self, parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of both; those of the child replace those with the same key."""
        merged = {**parent, **child}
        lines = [table.get("cmdline", []) for table in (parent, child)]
        if all(isinstance(line, list) for line in lines):
            by_key = {key_of(str(a)): a for line in lines for a in line}
            merged["cmdline"] = list(by_key.values())
        return merged

    def check(self, profile: Profile) -> list[FieldError]:
        """Return an error for each argument that is malformed or may not be set."""
        errors = []
        table: Kernel = profile.sections[self.kind]
        for argument in table.cmdline:
            reason = _why_refused(argument)
            if reason:
                where = profile.source_of(f"kernel.{argument}")
                text = f"{argument!r} {reason} (in {where})"
                errors.append(FieldError(field=CMDLINE, reason=text))
        if table.version is not None and not _RELEASE.fullmatch(table.version):
            reason = f"{table.version!r} is not a kernel release"
            errors.append(FieldError(field=RELEASE, reason=reason))
        return errors

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:  # noqa: ARG002
        """Return the arguments as one value, and the version."""
        table: Kernel = profile.sections[self.kind]
        wanted = []
        if table.cmdline:
            owners = [f"{a} of {profile.source_of(f'kernel.{a}')}" for a in table.cmdline]
            line = " ".join(table.cmdline)
            wanted.append(WantedSetting(setting=CMDLINE, value=line, source=", ".join(owners)))
        if table.version is not None:
            name = f"{RELEASE}.{table.version}"
            wanted.append(self.value_of(profile, "version", table.version, name))
        return wanted

    def boot(self, wanted: Sequence[WantedSetting], own: str) -> list[Contribution]:  # noqa: ARG002
        """Return each argument, and the version."""
        arguments = [
            Contribution(
                settings=(CMDLINE,),
                group=group_of(argument),
                arguments=(argument,),
                source=w.source,
            )
            for w in wanted
            if w.setting == CMDLINE
            for argument in w.value.split()
        ]
        return arguments + [
            Contribution(
                settings=(w.setting,), group=VERSION, arguments=(w.value,), source=w.source
            )
            for w in wanted
            if w.setting.startswith(RELEASE)
        ]

    def claims(self, setting: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return (): nothing is written at run time, so there is no original."""
        return ()

    def why_missing(self, setting: str) -> str:
        """Return that the kernel is not installed; a command line always exists."""
        return f"there is no {_kernel_image(setting)}"

    def observe(self, host: Host, settings: Iterable[str]) -> dict[str, str | None]:
        """Return the running line, and the running release where the wanted one is installed."""
        observed: dict[str, str | None] = {}
        for name in settings:
            if name == CMDLINE:
                observed[name] = host.fs.find("/proc/cmdline")
            elif name.startswith(RELEASE):
                release = host.hardware.kernel
                is_installed = name.endswith(f".{release}") or host.fs.exists(_kernel_image(name))
                observed[name] = release if is_installed else None
        return observed

    def plan(
        self,
        wanted: Sequence[WantedSetting],  # noqa: ARG002
        observed: Observed,  # noqa: ARG002
        originals: Observed,  # noqa: ARG002
    ) -> list[SettingChange]:
        """Return []: `sidekick/boot.py` stages the boot line."""
        return []

    def verify(self, wanted: WantedSetting, observed: Observed) -> SettingReport:
        """Compare the wanted value with the lines of this boot and of the next."""
        if wanted.setting.startswith(RELEASE):
            return self._verify_release(wanted, observed)
        running, staged = observed.get(RUNNING) or "", observed.get(STAGED) or ""
        arguments = wanted.value.split()
        wrong = [a for a in arguments if not in_force(running, group_of(a), (a,))]
        outcome, detail = ApplyOutcome.APPLIED, ""
        if wrong and all(in_force(staged, group_of(a), (a,)) for a in wrong):
            outcome = ApplyOutcome.PENDING_REBOOT
            detail = "after the next boot: " + ", ".join(wrong)
        elif wrong:
            outcome, detail = ApplyOutcome.DRIFTED, "neither in force nor staged"
        actual = [" ".join(group_in(running, group_of(a))) or f"no {key_of(a)}" for a in arguments]
        return SettingReport(
            setting=CMDLINE,
            outcome=outcome,
            wanted=wanted.value,
            actual=" ".join(actual),
            detail=detail,
        )

    def _verify_release(self, wanted: WantedSetting, observed: Observed) -> SettingReport:
        report = super().verify(wanted, observed)
        if report.outcome is ApplyOutcome.DRIFTED and observed.get(STAGED):
            detail = "after the next boot"
            return replace(report, outcome=ApplyOutcome.PENDING_REBOOT, detail=detail)
        return report


def _kernel_image(setting: str) -> str:
    return f"/boot/vmlinuz-{setting.removeprefix(RELEASE + '.')}"


def _why_refused(argument: str) -> str:
    key, equals, value = argument.partition("=")
    if key_of(argument) in OF_HUGEPAGES:
        return "belongs in [hugepages]"
    if key_of(argument) == GUARD:
        return "is set by sidekick itself"
    if key not in ALLOWED:
        return "is not among the arguments a profile may set"
    if equals and not _VALUE.fullmatch(value):
        return "has a value with characters that are not allowed, or none"
    voided = (
        sorted(CONTROLLERS_OF_LIMITS & set(value.split(","))) if key == "cgroup_disable" else []
    )
    if voided:
        return f"would void every limit of tasks: {', '.join(voided)} must stay"
    return ""
