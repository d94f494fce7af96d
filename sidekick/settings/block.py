"""Queues of disks: scheduler, read-ahead, depth of the queue, throttling of writes.

A profile sets them for two classes of disks, rotating and flash, because names differ from host to
host. Source: Linux, Documentation/block/queue-sysfs.rst (ABI/stable/sysfs-block).
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from sidekick.cpulists import active_choice
from sidekick.facts import disk_names
from sidekick.profile import Profile
from sidekick.report import WantedSetting
from sidekick.setting import FileSetting, Host
from sidekick.settings.leading import LeadingSetting
from sidekick.settings.modules import installed_modules
from wire.errors import KernelFileError

SCHEDULER_MODULES = ("modules.mq_deadline", "modules.kyber_iosched", "modules.bfq")


class Disks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of one class of disks."""

    scheduler: Literal["none", "mq-deadline", "kyber", "bfq"] | None = None
    read_ahead_kb: Annotated[int, Meta(ge=0, le=65536)] | None = None
    nr_requests: Annotated[int, Meta(ge=4, le=65536)] | None = None
    wbt_lat_usec: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    """Bound on the wait of reads behind writes; 0 switches that throttling off."""
    rq_affinity: Literal[0, 1, 2] | None = None
    """Where a request is completed: anywhere, in the group, or on the processor that issued it."""


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [block] table."""

    flash: Disks = Disks()
    rotating: Disks = Disks()
    required: bool = False
    """Whether a host whose disks lack one of these cannot run the profile."""


class BlockSetting(LeadingSetting, FileSetting):
    """One attribute for each disk and key."""

    kind: ClassVar[str] = "block"
    section: ClassVar[type[Block]] = Block

    def merge(self, parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
        """Return the child's table over its parent's, key by key for either class of disks."""
        both = {**parent, **child}
        for disks in ("flash", "rotating"):
            if disks in parent and disks in child:
                both[disks] = {**parent[disks], **child[disks]}
        return both

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:
        """Return the values for the disks that this host has."""
        wanted = []
        for disk in disk_names(host.fs):
            rotates = host.fs.find(f"/sys/block/{disk}/queue/rotational") == "1"
            kind = "rotating" if rotates else "flash"
            disks: Disks = getattr(profile.sections[self.kind], kind)
            for key, value in msgspec.structs.asdict(disks).items():
                if value is not None:
                    name = f"block.{disk}.{key}"
                    if key == "scheduler" and not self._offers_scheduler(host, name, str(value)):
                        name += f":{value}"
                    wanted.append(self.value_of(profile, f"{kind}.{key}", str(value), name))
        return wanted

    def partners(self, setting: str) -> tuple[str, ...]:
        """Return the depth of the queue, which a scheduler changes."""
        disk, _, key = setting.removeprefix("block.").rpartition(".")
        return (f"block.{disk}.nr_requests",) if key == "scheduler" else ()

    def side_effects(self, setting: str) -> tuple[str, ...]:
        """Return the modules that the kernel loads when a scheduler is named."""
        return SCHEDULER_MODULES if setting.endswith(".scheduler") else ()

    def why_missing(self, setting: str) -> str:
        """Return why a host has none."""
        name, _, choice = setting.partition(":")
        path = self.path(name)
        return f"{path} offers no {choice}" if choice else f"there is no {path}"

    def device(self, host: Host, setting: str) -> str:
        """Return the kernel's number of the disk; a new medium in a drive changes it, too."""
        folder = self.path(setting).partition("/queue/")[0]
        is_drive = host.fs.find(f"{folder}/removable") == "1"
        return "" if is_drive else host.fs.find(f"{folder}/diskseq") or ""

    def read(self, host: Host, setting: str) -> str | None:
        """Return the value in force."""
        # Reading the throttling of a disk that has none fails (EINVAL).
        with contextlib.suppress(KernelFileError):
            found = None if ":" in setting else super().read(host, setting)
            return None if found is None else active_choice(found)
        return None

    def path(self, setting: str) -> str:
        """Return the attribute of a setting; names of disks may have dots."""
        disk, _, key = setting.removeprefix("block.").rpartition(".")
        return f"/sys/block/{disk}/queue/{key}"

    def _offers_scheduler(self, host: Host, setting: str, choice: str) -> bool:
        """Return whether a disk can have that scheduler.

        The kernel loads a scheduler that is a module when it is written (`<choice>-iosched`).
        """
        found = host.fs.find(self.path(setting))
        if found is None or choice in found.replace("[", "").replace("]", "").split():
            return True
        module = choice.replace("-", "_")
        installed = installed_modules(host)
        return module in installed or f"{module}_iosched" in installed
