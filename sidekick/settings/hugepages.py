"""Explicit huge pages of 2 MiB, by NUMA node.

The kernel takes a wish for more pages than it can find memory for, without an error, and
skips nodes whose memory is fragmented: only the count that is read back tells. A shortfall
is met with compaction for a while, then left to the next boot, when memory is still whole.
Source: Linux, Documentation/admin-guide/mm/hugetlbpage.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.errors import FieldError, KernelFileError, Unprocessable
from sidekick.profile import Hugepages, Profile
from sidekick.report import Change, Outcome, SettingReport, Wanted
from sidekick.setting import Applied, Host, Observed

PREFIX = "hugepages.2m."
PAGE_BYTES = 2 << 20
NODES = "/sys/devices/system/node"
POOL = "hugepages/hugepages-2048kB/nr_hugepages"
WHOLE = "all"
"""Stands for the node on kernels without NUMA."""

BUDGET_S = 60.0
"""How long one run looks for memory, over all nodes, before it leaves it to a reboot."""
KEEP_BYTES = 512 << 20
KEEP_SHARE = 0.2
"""A profile must leave at least the larger of the two to everything else."""
SPARE_BYTES = 96 << 20
SPARE_SHARE = 0.05
"""What must stay available while pages are taken: the larger of the two. Below it the host
has no memory left to keep programs in and stands still (seen on a guest of 1 GiB that had
26 MiB left)."""


def path_of(setting: str) -> str:
    """Return the file that holds the number of pages of a node."""
    node = setting.removeprefix(PREFIX)
    return f"/sys/kernel/mm/{POOL}" if node == WHOLE else f"{NODES}/{node}/{POOL}"


def nodes_of(host: Host) -> list[str]:
    """Return the nodes that can hold huge pages, in order of their number."""
    names = [n for n in host.fs.names(NODES) if re.fullmatch(r"node\d+", n)]
    names.sort(key=lambda name: int(name.removeprefix("node")))
    return [n for n in names if host.fs.exists(path_of(PREFIX + n))] or [WHOLE]


def boot_argument(wanted: Sequence[Wanted]) -> str:
    """Return the argument that makes the next boot reserve these pages, "" for none."""
    pages = {w.setting.removeprefix(PREFIX): int(w.value) for w in wanted if _is_ours(w.setting)}
    if not any(pages.values()):
        return ""
    if len(pages) == 1:
        return f"hugepages={sum(pages.values())}"
    counts = (f"{node.removeprefix('node')}:{count}" for node, count in pages.items())
    return "hugepages=" + ",".join(counts)


def _is_ours(setting: str) -> bool:
    return setting.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class HugepagesSetting:
    """The [hugepages] section of a profile."""

    kind: str = "hugepages"

    def check(self, profile: Profile) -> list[FieldError]:
        """Return what contradicts itself."""
        wanted = profile.hugepages
        if wanted is None:
            return []
        errors = []
        if (wanted.pages_2m is None) == (wanted.percent_of_memory is None):
            reason = "give exactly one of pages_2m and percent_of_memory"
            errors.append(FieldError(field="hugepages", reason=reason))
        if isinstance(wanted.pages_2m, dict):
            errors += [
                FieldError(field=f"hugepages.pages_2m.{node}", reason="is not of the form node0")
                for node in wanted.pages_2m
                if not re.fullmatch(r"node\d{1,4}", node)
            ]
        return errors

    def wanted(self, profile: Profile, host: Host) -> list[Wanted]:
        """Return the number of pages of each node."""
        if profile.hugepages is None:
            return []
        memory = host.hardware.memory_bytes
        pages = _spread(profile.hugepages, nodes_of(host), memory)
        taken = sum(pages.values()) * PAGE_BYTES
        keep = max(KEEP_BYTES, int(memory * KEEP_SHARE))
        if taken and memory - taken < keep:
            raise Unprocessable(
                f"profile {profile.name} reserves {taken >> 20} MiB of {memory >> 20} MiB as huge "
                f"pages; {keep >> 20} MiB must stay for everything else",
                hint=f"at most {max(0, memory - keep) // PAGE_BYTES} pages of 2 MiB fit this host",
            )
        return [
            Wanted(
                setting=PREFIX + node,
                value=str(count),
                required=profile.hugepages.required,
                source=profile.source_of("hugepages"),
            )
            for node, count in pages.items()
        ]

    def observe(self, host: Host, settings: Iterable[str]) -> dict[str, str | None]:
        """Return the number of pages each node has."""
        return {s: host.fs.find(path_of(s)) for s in dict.fromkeys(settings) if _is_ours(s)}

    def plan(
        self, wanted: Sequence[Wanted], observed: Observed, originals: Observed
    ) -> list[Change]:
        """Return what shrinks before what grows, so that memory is free when it is wanted."""
        targets = {s: (value, "back to the original") for s, value in originals.items() if value}
        targets |= {w.setting: (w.value, w.source) for w in wanted}
        changes = []
        for setting, (value, why) in targets.items():
            now = observed.get(setting)
            if now is not None and now != value:
                changes.append(Change(setting=setting, before=now, after=value, why=why))
        return sorted(changes, key=lambda c: int(c.after) > int(c.before))

    def apply(self, host: Host, change: Change) -> Applied:
        """Ask for the pages until they are there or the budget is used up."""
        path, goal = path_of(change.setting), int(change.after)
        budget_s = BUDGET_S / len(nodes_of(host))
        began, pause_s, tries = host.monotonic(), 0.25, 1
        actual = _ask(host, path, goal)
        while actual < goal and host.monotonic() - began + pause_s <= budget_s:
            host.sleep(pause_s)
            pause_s = min(pause_s * 2, 8.0)
            _make_room(host)
            actual = _ask(host, path, goal)
            tries += 1
        if actual == goal:
            detail = f"after {tries} tries with compaction" if tries > 1 else ""
            return Applied(Outcome.APPLIED, str(actual), detail)
        if actual > goal:
            return Applied(
                Outcome.FAILED, str(actual), f"{actual - goal} pages too many are still in use"
            )
        short = f"{actual} of {goal} pages after {tries} tries with compaction"
        return _left_to_boot(host, change, actual, short)

    def verify(self, wanted: Wanted, observed: Observed) -> SettingReport:
        """Say whether the node has its pages, or will have them after the staged boot."""
        actual = observed.get(wanted.setting)
        outcome, detail = Outcome.DRIFTED, ""
        if actual is None:
            detail = "this host has no such pool of pages"
            outcome = Outcome.UNSUPPORTED if not wanted.required else Outcome.DRIFTED
        elif actual == wanted.value:
            outcome = Outcome.APPLIED
        elif int(actual) < int(wanted.value) and _is_staged(observed):
            outcome, detail = Outcome.PENDING_REBOOT, "reserved by the staged command line"
        return SettingReport(
            setting=wanted.setting,
            outcome=outcome,
            wanted=wanted.value,
            actual=actual or "-",
            detail=detail,
        )

    def undo(self, host: Host, change: Change) -> None:
        """Bring the number of pages back."""
        path = path_of(change.setting)
        if host.fs.read(path) == change.before:
            return
        actual = _ask(host, path, int(change.before))
        if actual < int(change.before):
            _make_room(host)
            actual = _ask(host, path, int(change.before))
        if actual != int(change.before):
            raise KernelFileError(
                f"cannot bring {change.setting} back to {change.before} pages: it has {actual}"
            )


def _spread(wanted: Hugepages, nodes: Sequence[str], memory_bytes: int) -> dict[str, int]:
    if isinstance(wanted.pages_2m, dict):
        return {**dict.fromkeys(nodes, 0), **wanted.pages_2m}
    total = wanted.pages_2m
    if total is None:
        total = int(memory_bytes * (wanted.percent_of_memory or 0) / 100) // PAGE_BYTES
    each, rest = divmod(total, len(nodes))
    return {node: each + (i < rest) for i, node in enumerate(nodes)}


def _ask(host: Host, path: str, pages: int) -> int:
    """Ask for as many pages as the memory in use allows; return how many there are."""
    now = int(host.fs.read(path))
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", host.fs.find("/proc/meminfo") or "", re.M)
    if found and pages > now:
        spare = max(SPARE_BYTES, int(host.hardware.memory_bytes * SPARE_SHARE))
        room = (int(found[1]) * 1024 - spare) // PAGE_BYTES
        pages = min(pages, now + max(0, room))
    host.fs.write(path, str(pages))
    return int(host.fs.read(path))


def _make_room(host: Host) -> None:
    """Give back clean caches and let the kernel join free pages (sysctl/vm.rst)."""
    for action, value in (("drop_caches", "3"), ("compact_memory", "1")):
        if host.fs.exists(f"/proc/sys/vm/{action}"):
            host.fs.write(f"/proc/sys/vm/{action}", value)


def _left_to_boot(host: Host, change: Change, actual: int, short: str) -> Applied:
    meminfo = host.fs.find("/proc/meminfo") or ""
    size = re.search(r"^Hugepagesize:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if size and size[1] != "2048":
        detail = f"{short}; the boot cannot help: this kernel's default size is {size[1]} KiB"
        return Applied(Outcome.FAILED, str(actual), detail)
    node = change.setting.removeprefix(PREFIX)
    booted_with = reserved(host.fs.find("/proc/cmdline") or "", node, len(nodes_of(host)))
    if booted_with >= int(change.after):
        detail = f"{short}, although the kernel was told at boot to reserve {booted_with}"
        return Applied(Outcome.FAILED, str(actual), detail)
    return Applied(Outcome.PENDING_REBOOT, str(actual), f"{short}; left to the next boot")


def reserved(line: str, node: str, nodes: int) -> int:
    """Return how many pages of a node a kernel command line reserves.

    A plain count is spread evenly by the kernel, `0:16,1:32` is by node.
    """
    value = next((a[10:] for a in reversed(line.split()) if a.startswith("hugepages=")), "0")
    if ":" not in value:
        return int(value) // nodes if value.isdigit() else 0
    counts = dict(part.partition(":")[::2] for part in value.split(","))
    count = counts.get(node.removeprefix("node"), "0")
    return int(count) if count.isdigit() else 0


def _keys(line: str) -> set[str]:
    return {argument.partition("=")[0] for argument in line.split()}


def _is_staged(observed: Observed) -> bool:
    staged, running = observed.get("kernel.staged"), observed.get("kernel.cmdline")
    return "hugepages" in _keys(staged or "") and "hugepages" not in _keys(running or "")
