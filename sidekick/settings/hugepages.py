"""Explicit huge pages of 1 GiB and of 2 MiB, by NUMA node.

The kernel accepts a request for more pages than it has memory for, without an error, and skips
nodes whose memory is fragmented. Only the count that is read back shows the result. On a shortfall
sidekick drops caches and compacts memory for a limited time. What is short after that waits for the
next boot, is accepted, or fails the profile. Large pages are requested before small ones, which
would break up the free memory that large ones need.
Source: Linux, Documentation/admin-guide/mm/hugetlbpage.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from sidekick.bootline import HUGEPAGES, group_in
from sidekick.profile import Profile
from sidekick.report import ApplyOutcome, Disruption, SettingChange, SettingReport, WantedSetting
from sidekick.setting import (
    RUNNING,
    STAGED,
    Applied,
    Contribution,
    FileSetting,
    Host,
    Observed,
)
from sidekick.settings.hugepages_line import SIZES, PageArguments, total_pages
from wire.errors import FieldError, KernelFileError, Unprocessable

PREFIX = "hugepages."
AVAILABLE = "hugepages.available"
"""Observed in addition to the pools: how many bytes can be taken while tasks run."""
NODES = "/sys/devices/system/node"
POOLS = "/sys/kernel/mm/hugepages"
WHOLE_HOST = "all"
"""Stands for the node on kernels without NUMA."""

BUDGET_S = 60.0
"""Seconds for which one run tries to get memory, for all pools, before it leaves the rest to a
reboot."""
MIN_REST_BYTES = 512 << 20
MIN_REST_SHARE = 0.2
"""A profile must leave at least the larger of the two to everything else."""
SPARE_BYTES = 96 << 20
SPARE_SHARE = 0.05
"""The memory that must stay available while pages are taken: the larger of the two. With less
memory the host swaps program text in and out, and stops responding (observed on a guest of 1 GiB
with 26 MiB left)."""

Pages = Annotated[int, Meta(ge=0)] | dict[str, Annotated[int, Meta(ge=0)]]


class Hugepages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Explicit huge pages, taken out of general use."""

    pages_1g: Pages | None = None
    pages_2m: Pages | None = None
    """The total, spread evenly over the NUMA nodes; or by node: `{ node0 = 16, node1 = 0 }`."""
    percent_of_memory: Annotated[float, Meta(ge=0, le=80)] | None = None
    """Instead of `pages_2m`: this share of the memory, rounded down to whole pages of 2 MiB."""
    required: bool = True
    if_short: Literal["reboot", "keep", "undo"] = "reboot"
    """What to do if memory is too fragmented: leave the rest to the next boot, keep the pages that
    there are, or fail and undo the whole switch."""
    budget_s: Annotated[float, Meta(ge=0, le=600)] = BUDGET_S
    """How long to try to get memory."""


def nodes_of(host: Host) -> list[str]:
    """Return the nodes that can hold huge pages, in order of their number."""
    names = [n for n in host.fs.names(NODES) if re.fullmatch(r"node\d+", n)]
    names.sort(key=lambda name: int(name.removeprefix("node")))
    return [n for n in names if host.fs.names(f"{NODES}/{n}/hugepages")] or [WHOLE_HOST]


class HugepagesSetting(FileSetting):
    """The [hugepages] section of a profile."""

    kind = "hugepages"
    section = Hugepages

    def merge(self, parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the child's table: the parent's pages do not apply any more."""
        return child

    def check(self, profile: Profile) -> list[FieldError]:
        """Return the contradictions of the table."""
        table: Hugepages = profile.sections[self.kind]
        errors = []
        given = [table.pages_1g, table.pages_2m, table.percent_of_memory]
        if given == [None] * 3 or (given[1] is not None and given[2] is not None):
            reason = "give pages_1g, or one of pages_2m and percent_of_memory, or both"
            errors.append(FieldError(field="hugepages", reason=reason))
        for name, pages in (("pages_1g", table.pages_1g), ("pages_2m", table.pages_2m)):
            errors += [
                FieldError(field=f"hugepages.{name}.{node}", reason="is not of the form node0")
                for node in (pages if isinstance(pages, dict) else ())
                if not re.fullmatch(r"node\d{1,4}", node)
            ]
        return errors

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:
        """Return the number of pages of each size and node."""
        table: Hugepages = profile.sections[self.kind]
        memory = host.hardware.memory_bytes
        pages = _pages_by_pool(table, nodes_of(host), memory)
        taken = sum(count * SIZES[name.split(".")[1]] for name, count in pages.items())
        _check_rest_of_memory(f"profile {profile.name}", taken, memory)
        options = {
            "if_short": table.if_short,
            "budget_s": str(table.budget_s),
            "memory_bytes": str(memory),
        }
        return [
            WantedSetting(
                setting=name,
                value=str(count),
                required=table.required,
                source=profile.source_of("hugepages"),
                options=options,
            )
            for name, count in pages.items()
        ]

    def boot(self, wanted: Sequence[WantedSetting], own: str) -> list[Contribution]:
        """Return the pairs of size and count that make the next boot reserve these pages.

        Pages of other sizes on the host's own line stay: a count without a size would apply to the
        size before it. Raises `Unprocessable` if the sum is too much for the host.
        """
        if not any(int(w.value) for w in wanted):
            return []
        ours = {size: _count_argument(wanted, size) for size in SIZES}
        named = {w.setting.split(".")[1] for w in wanted}
        pairs = PageArguments.of(group_in(own, HUGEPAGES))
        others = {s: c for s, c in pairs.counts.items() if s not in {SIZES[n] for n in named}}
        counts = {**others, **{SIZES[size]: text for size, text in ours.items() if text}}
        taken = sum(size * total_pages(text) for size, text in counts.items())
        memory = int(wanted[0].options.get("memory_bytes", "0"))
        if memory:
            _check_rest_of_memory("the boot line with the host's own huge pages", taken, memory)
        return [
            Contribution(
                settings=tuple(w.setting for w in wanted),
                group=HUGEPAGES,
                arguments=PageArguments(pairs.default, counts).arguments(),
                source=wanted[0].source,
                late=True,
            )
        ]

    def path(self, setting: str) -> str:
        """Return the file that holds the number of pages of a node."""
        _, size, node = setting.split(".")
        pool = f"hugepages-{SIZES[size] >> 10}kB/nr_hugepages"
        return f"{POOLS}/{pool}" if node == WHOLE_HOST else f"{NODES}/{node}/hugepages/{pool}"

    def outlives_boot(self, setting: str, booted_with: Sequence[str]) -> bool:  # noqa: ARG002
        """Return whether our command line reserved pages: these are not the host's own."""
        return any(argument.startswith("hugepages=") for argument in booted_with)

    def read(self, host: Host, setting: str) -> str | None:
        """Return the number of pages, or what can be taken."""
        if setting == AVAILABLE:
            available = _available_bytes(host)
            return None if available is None else str(available)
        return super().read(host, setting)

    def observe(self, host: Host, settings: Iterable[str]) -> dict[str, str | None]:
        """Return the number of pages each node has, and how much more can be taken."""
        names = [name for name in settings if self.owns(name)]
        return super().observe(host, [*names, AVAILABLE] if names else [])

    def plan(
        self, wanted: Sequence[WantedSetting], observed: Observed, originals: Observed
    ) -> list[SettingChange]:
        """Return pools that shrink before pools that grow, so that their memory is free by then.

        More than the available memory can only be taken while no task runs.
        """
        changes = super().plan(wanted, observed, originals)
        growing = [c for c in changes if int(c.after) > int(c.before)]
        bytes_more = sum(_added_bytes(c) for c in changes)
        available = observed.get(AVAILABLE)
        exceeds_memory = available is not None and bytes_more > int(available)
        needs = Disruption.DRAIN if exceeds_memory else Disruption.LIVE
        order = list(SIZES)
        growing.sort(key=lambda c: order.index(c.setting.split(".")[1]))
        shares = {
            c.setting: {**c.options, "budget_s": str(_budget_s(c) / len(growing))} for c in growing
        }
        return [c for c in changes if c not in growing] + [
            replace(c, needs=needs, options=shares[c.setting]) for c in growing
        ]

    def apply(self, host: Host, change: SettingChange) -> Applied:
        """Request the pages until the kernel has them or the time is over."""
        goal = int(change.after)
        began, pause_s, tries = host.monotonic(), 0.25, 1
        actual, refused = self._request_pages(host, change.setting, goal)
        while actual < goal and host.monotonic() - began + pause_s <= _budget_s(change):
            host.sleep(pause_s)
            pause_s = min(pause_s * 2, 8.0)
            _free_and_compact(host)
            actual, refused = self._request_pages(host, change.setting, goal)
            tries += 1
        if actual == goal:
            detail = f"after {tries} tries with compaction" if tries > 1 else ""
            return Applied(ApplyOutcome.APPLIED, str(actual), detail)
        if actual > goal:
            return Applied(
                ApplyOutcome.FAILED, str(actual), f"{actual - goal} excess pages are still in use"
            )
        short = f"{actual} of {goal} pages after {tries} tries with compaction{refused}"
        return _result_of_shortfall(host, change, actual, short)

    def verify(self, wanted: WantedSetting, observed: Observed) -> SettingReport:
        """Return whether the node has its pages, or will have them after the staged boot."""
        report = super().verify(wanted, observed)
        if report.outcome is not ApplyOutcome.DRIFTED or report.actual == "-":
            return report
        if int(report.actual) < int(wanted.value):
            if _is_staged(wanted, observed):
                detail = "reserved by the staged command line"
                return replace(report, outcome=ApplyOutcome.PENDING_REBOOT, detail=detail)
            if wanted.options.get("if_short") == "keep":
                detail = f"{report.actual} of {wanted.value} pages; the profile accepts that"
                return replace(report, outcome=ApplyOutcome.PARTIAL, detail=detail)
        return report

    def why_missing(self, setting: str) -> str:
        """Return that there is no such pool."""
        return f"this host has no {self.path(setting)}"

    def undo(self, host: Host, change: SettingChange) -> None:
        """Restore the number of pages."""
        goal = int(change.before)
        if host.fs.read(self.path(change.setting)) == change.before:
            return
        actual, _ = self._request_pages(host, change.setting, goal)
        if actual < goal:
            _free_and_compact(host)
            actual, _ = self._request_pages(host, change.setting, goal)
        if actual != goal:
            raise KernelFileError(
                f"cannot restore {change.setting} to {change.before} pages: it has {actual}"
            )

    def _request_pages(self, host: Host, setting: str, pages: int) -> tuple[int, str]:
        """Request as many pages as the available memory allows; return how many there are, and the
        error of the kernel, if any.
        """
        path, available = self.path(setting), _available_bytes(host)
        now = int(host.fs.read(path))
        if available is not None and pages > now:
            pages = min(pages, now + available // _page_bytes(setting))
        try:
            host.fs.write(path, str(pages))
        except KernelFileError as e:
            if pages < now:
                raise
            return now, f" ({e})"
        return int(host.fs.read(path)), ""


def _count_argument(wanted: Iterable[WantedSetting], size: str) -> str:
    """Return the pages of one size as the command line has them, "" for none."""
    pages = {
        node: int(w.value) for w in wanted for _, s, node in [w.setting.split(".")] if s == size
    }
    if not any(pages.values()):
        return ""
    if len(pages) == 1:
        return str(sum(pages.values()))
    return ",".join(f"{node.removeprefix('node')}:{count}" for node, count in pages.items())


def _pages_by_pool(wanted: Hugepages, nodes: Sequence[str], memory_bytes: int) -> dict[str, int]:
    small = wanted.pages_2m
    if small is None and wanted.percent_of_memory is not None:
        small = int(memory_bytes * wanted.percent_of_memory / 100) // SIZES["2m"]
    pages: dict[str, int] = {}
    for size, total in (("1g", wanted.pages_1g), ("2m", small)):
        if total is None:
            continue
        if isinstance(total, int):
            each, rest = divmod(total, len(nodes))
            total = {node: each + (i < rest) for i, node in enumerate(nodes)}
        by_node = {**dict.fromkeys(nodes, 0), **total}
        pages |= {f"{PREFIX}{size}.{node}": count for node, count in by_node.items()}
    return pages


def _check_rest_of_memory(whose: str, taken: int, memory: int) -> None:
    """Raise `Unprocessable` if too little memory is left for everything else."""
    keep = max(MIN_REST_BYTES, int(memory * MIN_REST_SHARE))
    if taken and memory - taken < keep:
        raise Unprocessable(
            f"{whose} reserves {taken >> 20} MiB of {memory >> 20} MiB as huge pages; "
            f"{keep >> 20} MiB must stay for everything else",
            hint=f"at most {max(0, memory - keep) // SIZES['2m']} pages of 2 MiB fit this host",
        )


def _page_bytes(setting: str) -> int:
    return SIZES[setting.split(".")[1]]


def _added_bytes(change: SettingChange) -> int:
    return (int(change.after) - int(change.before)) * _page_bytes(change.setting)


def _budget_s(change: SettingChange) -> float:
    return float(change.options.get("budget_s", BUDGET_S))


def _available_bytes(host: Host) -> int | None:
    """Return how many bytes may be taken now."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", host.fs.find("/proc/meminfo") or "", re.M)
    if not found:
        return None
    spare = max(SPARE_BYTES, int(host.hardware.memory_bytes * SPARE_SHARE))
    return max(0, int(found[1]) * 1024 - spare)


def _free_and_compact(host: Host) -> None:
    """Drop clean caches and compact free memory (sysctl/vm.rst)."""
    for action, value in (("drop_caches", "3"), ("compact_memory", "1")):
        if host.fs.exists(f"/proc/sys/vm/{action}"):
            host.fs.write(f"/proc/sys/vm/{action}", value)


def _result_of_shortfall(host: Host, change: SettingChange, actual: int, short: str) -> Applied:
    """Return the result of a lasting shortfall, by the profile's `if_short`."""
    policy = change.options.get("if_short", "undo")
    if policy == "keep":
        return Applied(ApplyOutcome.PARTIAL, str(actual), f"{short}; the profile accepts that")
    if policy == "undo":
        return Applied(ApplyOutcome.FAILED, str(actual), short)
    _, size, node = change.setting.split(".")
    line = host.fs.find("/proc/cmdline") or ""
    booted = PageArguments.of(group_in(line, HUGEPAGES)).reserved(
        SIZES[size], node, len(nodes_of(host))
    )
    if booted >= int(change.after):
        detail = f"{short}, although the kernel was booted with {booted}"
        return Applied(ApplyOutcome.FAILED, str(actual), detail)
    return Applied(ApplyOutcome.PENDING_REBOOT, str(actual), f"{short}; it waits for the next boot")


def _is_staged(wanted: WantedSetting, observed: Observed) -> bool:
    """Return whether the staged line reserves pages that this boot's line does not."""
    size = SIZES[wanted.setting.split(".")[1]]
    lines = [group_in(observed.get(name) or "", HUGEPAGES) for name in (STAGED, RUNNING)]
    staged, running = (PageArguments.of(line).counts.get(size, "0") for line in lines)
    return staged not in ("0", running)
