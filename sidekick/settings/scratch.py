"""A file system for scratch data: XFS or btrfs on a device, or in a file, for sidekick's use.

It is made only on an empty device: both ends of the device are zeros, or it has a file system with
sidekick's label. Any other content is foreign data, which no profile overwrites. The contents are
lost when another profile is applied.

With `share` only this part of the device is ever written. A flash device with unused space lasts
longer and has steadier write latency (paper, 2.6: profiles expose a fraction of flash).

Source of the places: Linux, fs/xfs/libxfs/xfs_format.h (sb_magicnum, sb_fname, sb_blocksize,
sb_dblocks) and include/uapi/linux/btrfs_tree.h (btrfs_super_block: total_bytes).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from sidekick.profile import Profile
from sidekick.report import Disruption, WantedSetting
from sidekick.setting import Host, Setting
from wire.errors import FieldError, HostError

LABEL = "twine"
"""Label of every file system that we make; at most 12 bytes fit into XFS."""
MIB = 1 << 20
MIN_BYTES = {"xfs": 300 * MIB, "btrfs": 110 * MIB}
"""The minimum size for mkfs, in bytes (mkfs.xfs 6.0, mkfs.btrfs 6.2)."""
_SUPER = {"xfs": (0, b"XFSB", 108, 12), "btrfs": (0x10040, b"_BHRfS_M", 0x1012B, 256)}
"""Where the magic bytes are, and the label with its length."""
_MKFS = {
    "xfs": ("/sbin/mkfs.xfs", "-q", "-f", "-L", LABEL),
    "btrfs": ("/sbin/mkfs.btrfs", "--quiet", "--force", "--label", LABEL),
}
LOOP_S, LOOP_POLL_S = 30.0, 0.1
"""How long the loop device of a file may exist after the unmount, because udev opens it."""
_SIZE_ARGUMENT = {"xfs": ("-d", "size={}m"), "btrfs": ("--byte-count", "{}m")}
WHOLE_SHARE = 0.97
"""A file system of more than this share counts as the whole device: mkfs leaves a small rest."""
EMPTY, FOREIGN = "empty", "foreign"
NAME = "scratch"

Device = Annotated[str, Meta(pattern=r"^/(dev|var)/[A-Za-z0-9_.:/+-]{1,200}\Z")]
Place = Annotated[str, Meta(pattern=r"^/(mnt|srv|scratch|var/lib)(/[A-Za-z0-9_-]{1,64}){0,3}\Z")]
Option = Annotated[str, Meta(pattern=r"^[a-z0-9_=:,.]{1,64}\Z")]


class Scratch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [scratch] table."""

    device: Device | None = None
    """A block device, better by /dev/disk/by-id, or a file that was made for it."""
    filesystem: Literal["xfs", "btrfs"] = "xfs"
    share: Annotated[float, Meta(ge=0.05, le=0.95)] | None = None
    """The part of the device that is used; by default all of it."""
    mount: Place = "/scratch"
    """An empty folder, made if it is not there."""
    options: list[Option] = []
    """For the mount, such as `noatime`."""
    required: bool = False
    """Whether a host whose device has other data, or is not there, cannot run the profile."""


class ScratchSetting(Setting):
    """What is on a device and where it is mounted: `empty`, `xfs`, `xfs at /scratch`; where it is
    only a share of the device its size in MiB as well, `xfs:5120 at /scratch`.
    """

    kind: ClassVar[str] = NAME
    section: ClassVar[type[Scratch]] = Scratch

    def check(self, profile: Profile) -> list[FieldError]:
        """Return an error for a path with `..`."""
        table: Scratch = profile.sections[self.kind]
        paths = {"device": table.device or "", "mount": table.mount}
        return [
            FieldError(field=f"scratch.{key}", reason=f"{path!r} contains ..")
            for key, path in paths.items()
            if ".." in path.split("/")
        ]

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:
        """Return the one value; the device is part of its name."""
        table: Scratch = profile.sections[self.kind]
        if table.device is None:
            return []
        kind: str = table.filesystem
        if table.share is not None:
            kind += f":{int(_size(host, table.device) * table.share) // MIB}"
        value = " ".join([kind, "at", table.mount, *sorted(set(table.options))])
        return [self.value_of(profile, "device", value, f"{NAME}.{table.device}")]

    def needs(self, setting: str) -> Disruption:  # noqa: ARG002
        """Return that tasks may have files open on it."""
        return Disruption.DRAIN

    def why_missing(self, setting: str) -> str:
        """Return why a host cannot have it."""
        return (
            f"{device_of(setting)} is missing, in use, or holds foreign data (only an empty "
            f"device or one with the label {LABEL!r} is used)"
        )

    def outlives_boot(self, setting: str, booted_with: Sequence[str]) -> bool:  # noqa: ARG002
        """Return that a file system stays on its device; only the mount is made again."""
        return True

    def read(self, host: Host, setting: str) -> str | None:
        """Return the content of the device, None if it does not belong to sidekick."""
        device = device_of(setting)
        mounts = [m for m in _mounts(host) if m[0] in _device_names(host, device)]
        kind = _content(host, device)
        if kind in (None, FOREIGN) or (kind == EMPTY and mounts) or len(mounts) > 1:
            return None
        if not mounts:
            return None if _is_in_use(host, device) else kind
        return " ".join([f"{kind} at {mounts[0][1]}", *_requested_options(host, setting)])

    def write(self, host: Host, setting: str, value: str) -> None:
        """Format and mount the device, or release it. `read` has just shown that it is ours."""
        device = device_of(setting)
        now = (self.read(host, setting) or "").split()
        target = value.split()
        if not now:
            raise HostError(f"cannot use {device} for scratch: it no longer belongs to sidekick")
        run = host.processes.run
        maker = _MKFS[target[0].partition(":")[0]][0] if target[0] not in (EMPTY, now[0]) else ""
        if maker and not host.fs.exists(maker):
            raise HostError(f"cannot make {target[0]} on {device}: the host has no {maker}")
        if "at" in now:
            run(["/bin/umount", now[2]])
        _wait_for_loop_removal(host, device)
        if now[0] not in (EMPTY, target[0]):
            _wipe(host, device)  # a mkfs may leave signatures of the other file system
        if target[0] not in (EMPTY, now[0]):
            kind, _, share_mib = target[0].partition(":")
            size = int(share_mib) * MIB if share_mib else _size(host, device)
            if size < MIN_BYTES[kind]:
                least = MIN_BYTES[kind] // MIB
                raise HostError(
                    f"{device} is too small for {target[0]}: the minimum is {least} MiB"
                )
            sized = [w.format(share_mib) for w in _SIZE_ARGUMENT[kind]] if share_mib else []
            run([*_MKFS[kind], *sized, device], timeout_s=300.0)
        if "at" in target:
            _mount(host, device, target)
        _store_options(host, setting, target[3:] if "at" in target else [])


def device_of(setting: str) -> str:
    """Return the device of a setting."""
    return setting.removeprefix(f"{NAME}.")


def _mount(host: Host, device: str, words: Sequence[str]) -> None:
    place = host.fs.path(words[2])
    place.mkdir(parents=True, exist_ok=True)
    if any(place.iterdir()):
        raise HostError(f"cannot mount {device} at {words[2]}: the folder is not empty")
    options = ["nosuid", "nodev", *words[3:]]
    if stat.S_ISREG(os.stat(host.fs.path(device)).st_mode):
        options.append("loop")
    host.processes.run(
        ["/bin/mount", "-t", words[0].partition(":")[0], "-o", ",".join(options), device, words[2]]
    )


def _wait_for_loop_removal(host: Host, device: str) -> None:
    """Wait until a file has no loop device: a remaining one would be mounted again, with cached
    data of the earlier file system.
    """
    until = host.monotonic() + LOOP_S
    while loops := _device_names(host, device) - {_real_path(host, device)}:
        if host.monotonic() >= until:
            raise HostError(f"{device} is still behind {', '.join(sorted(loops))}, which is in use")
        host.sleep(LOOP_POLL_S)


def _content(host: Host, device: str) -> str | None:
    """Return `empty`, a file system of sidekick (with its size if that is a share), or `foreign`;
    None if there is no device.
    """
    path = host.fs.path(device)
    try:
        with path.open("rb") as file:
            head = file.read(MIB)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MIB))
            tail = file.read(MIB)
    except OSError:
        return None
    for kind, (at, magic, label_at, length) in _SUPER.items():
        label = head[label_at : label_at + length].split(b"\0")[0]
        if head[at : at + len(magic)] == magic:
            return _with_size(kind, head, size) if label == LABEL.encode() else FOREIGN
    return FOREIGN if any(head) or any(tail) or not size else EMPTY


def _with_size(kind: str, head: bytes, device_bytes: int) -> str:
    """Return a file system's name, with its size in MiB if it is smaller than the device."""
    if kind == "xfs":
        size = int.from_bytes(head[4:8]) * int.from_bytes(head[8:16])
    else:
        size = int.from_bytes(head[0x10070:0x10078], "little")
    return kind if size > device_bytes * WHOLE_SHARE else f"{kind}:{size // MIB}"


def _wipe(host: Host, device: str) -> None:
    """Write zeros to both ends, which identify an empty device."""
    last = _size(host, device) // MIB
    for at in dict.fromkeys((0, max(0, last - 1), last)):
        zeros = ["if=/dev/zero", f"of={device}", "bs=1M", "count=1", f"seek={at}"]
        beyond = at == last  # the rest of a device that is no whole number of MiB
        rest = _size(host, device) - last * MIB
        if beyond and rest == 0:
            continue
        if beyond:
            zeros = ["if=/dev/zero", f"of={device}", "bs=1", f"count={rest}", f"seek={last * MIB}"]
        host.processes.run(["/bin/dd", *zeros, "conv=notrunc,fsync", "status=none"])


def _size(host: Host, device: str) -> int:
    """Return the bytes of a device, 0 where there is none."""
    try:
        with host.fs.path(device).open("rb") as file:
            return file.seek(0, os.SEEK_END)
    except OSError:
        return 0


def _device_names(host: Host, device: str) -> set[str]:
    """Return the kernel's names of a device: the targets of udev's links; for a file all of its
    loop devices, including one that is being removed.
    """
    name = _real_path(host, device)
    loops = {
        f"/dev/{loop}"
        for loop in host.fs.names("/sys/block")
        if loop.startswith("loop") and host.fs.find(f"/sys/block/{loop}/loop/backing_file") == name
    }
    return {name, *loops}


def _real_path(host: Host, device: str) -> str:
    path = os.path.realpath(host.fs.path(device))
    return path.removeprefix(os.path.realpath(host.fs.root).rstrip("/")) or "/"


def _mounts(host: Host) -> list[tuple[str, str]]:
    lines = (line.split() for line in (host.fs.find("/proc/self/mounts") or "").splitlines())
    return [(words[0], words[1]) for words in lines if len(words) > 1]


def _is_in_use(host: Host, device: str) -> bool:
    """Return whether the kernel uses the device for another one, or for swap."""
    names = _device_names(host, device)
    swaps = {line.split()[0] for line in (host.fs.find("/proc/swaps") or "").splitlines() if line}
    holders = (host.fs.names(f"/sys/class/block/{n.rpartition('/')[2]}/holders") for n in names)
    return bool(names & swaps) or any(holders)


def _options_file(setting: str) -> str:
    return f"/run/twine/scratch{device_of(setting).replace('/', '-')}"


def _requested_options(host: Host, setting: str) -> list[str]:
    """Return the options of the mount as they were given; the kernel lists them in another form."""
    return (host.fs.find(_options_file(setting)) or "").split()


def _store_options(host: Host, setting: str, options: Sequence[str]) -> None:
    path = host.fs.path(_options_file(setting))
    if options:
        host.disk.write(path, " ".join(options) + "\n")
    else:
        host.disk.remove(path)
