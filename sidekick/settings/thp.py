"""Transparent huge pages: for which heaps the kernel uses huge pages.

Source: Linux, Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from sidekick.cpulists import active_choice
from sidekick.setting import FileSetting, Host

FOLDER = "/sys/kernel/mm/transparent_hugepage"
Count = Annotated[int, Meta(ge=0, le=10_000_000)]


class TransparentHugepages(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The [thp] table."""

    enabled: Literal["always", "madvise", "never"] | None = None
    """Which heaps get huge pages: all, those with `madvise`, none."""
    defrag: Literal["always", "defer", "defer+madvise", "madvise", "never"] | None = None
    """Which heaps wait for memory to be compacted when there is no huge page free."""
    shmem_enabled: Literal["always", "within_size", "advise", "never"] | None = None
    """The same for shared memory. `deny` and `force` are for tests of the kernel."""
    khugepaged_scan_sleep_millisecs: Count | None = None
    """How long the collapsing thread rests between two passes."""
    khugepaged_pages_to_scan: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    """How many pages it scans in one pass."""
    khugepaged_max_ptes_none: Annotated[int, Meta(ge=0, le=511)] | None = None
    """How many empty pages it may fill; with 0 a sparse heap never grows."""
    required: bool = False
    """Whether a kernel without it cannot run the profile."""


class TransparentHugepagesSetting(FileSetting):
    """One attribute for each key."""

    kind: ClassVar[str] = "thp"
    section: ClassVar[type[TransparentHugepages]] = TransparentHugepages

    def side_effects(self, setting: str) -> tuple[str, ...]:
        """Return the reserve of free memory, which the kernel sizes for its collapsing thread."""
        return ("sysctl.vm.min_free_kbytes",) if setting == "thp.enabled" else ()

    def why_missing(self, setting: str) -> str:
        """Return why a host has none."""
        return f"this kernel has no {self.path(setting)}"

    def read(self, host: Host, setting: str) -> str | None:
        """Return the value in force."""
        found = super().read(host, setting)
        return None if found is None else active_choice(found)

    def path(self, setting: str) -> str:
        """Return the attribute of a setting."""
        key = setting.removeprefix("thp.")
        if key.startswith("khugepaged_"):
            return f"{FOLDER}/khugepaged/{key.removeprefix('khugepaged_')}"
        return f"{FOLDER}/{key}"
