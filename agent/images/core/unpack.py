"""Properties of the sandboxed units that fetch images and turn streams into subvolumes.

Archives are hostile input. They are only read in a unit with one writable folder, no network, no
devices, and limits. GNU tar, `btrfs receive` or, for layers of OCI images, `agent.machine.layer`
reads them. The unit that fetches has a network and no capabilities.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence

from agent.api import ImageFormat
from agent.images.core.oci import Layer
from agent.runtime.core.unit_parts import NO_RINGS

_S = 1_000_000
UNPACK_TIMEOUT_S = 900
FETCH_IDLE_S = 300.0
"""Seconds without a byte after which a fetch is given up: skopeo itself never gives up. On a host
with one overloaded emulated CPU, nine fetches at once took 140 s until the first image came."""
UNPACK_MEMORY_BYTES = 512 << 20
FILL_BYTES_PER_S = 1_000_000_000
"""The highest rate at which unpacking fills a disk."""
CHECK_MIN_S, CHECK_MAX_S = 0.1, 1.0

NO_TMP = ("-/tmp", "-/var/tmp")
"""No program here needs these folders. systemd would make and remove private ones on disk for each
unit. That takes a fifth of a second in an emulated guest."""

_SANDBOX: dict[str, object] = {
    "Type": "oneshot",
    "RemainAfterExit": True,
    "CollectMode": "inactive",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateNetwork": True,
    "InaccessiblePaths": NO_TMP,
    "PrivateDevices": True,
    "ProtectKernelTunables": True,
    "ProtectKernelModules": True,
    "ProtectControlGroups": True,
    "ProtectProc": "invisible",
    "NoNewPrivileges": True,
    "RestrictNamespaces": True,
    "RestrictAddressFamilies": ("AF_UNIX",),
    "LockPersonality": True,
    "SystemCallArchitectures": ("native",),
    "SystemCallFilter": ("@system-service", "~@keyring", "~@memlock", "~@resources", *NO_RINGS),
    "SystemCallErrorNumber": errno.EPERM,
    "UMask": 0o022,
    "MemoryMax": UNPACK_MEMORY_BYTES,
    "MemorySwapMax": 0,
    "TasksMax": 64,
    "CPUWeight": 20,
    "TimeoutStartUSec": UNPACK_TIMEOUT_S * _S,
    "Slice": "system.slice",
}

_TAR_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER")
"""Enough to set the owners in the archive; without CAP_MKNOD a device node fails."""
_RECEIVE_CAPABILITIES = (
    *_TAR_CAPABILITIES, "CAP_SYS_ADMIN", "CAP_FSETID", "CAP_SETFCAP",
)  # fmt: skip
"""`btrfs receive` sets received_uuid by an ioctl that needs CAP_SYS_ADMIN. The system call filter
refuses other uses of that capability, mounts above all."""

_NOTHING_IS_FLUSHED = "~@sync:0"
"""fsync(2) and similar calls return success without effect. skopeo flushes each blob. A blob exists
for a few seconds, is compared with its digest, and need not survive a power cut."""

FIND_SETUID = (
    "-xdev", "-type", "f", "-perm", "/6000",
    "-exec", "/usr/bin/chmod", "ug-s", "{}", "+",
)  # fmt: skip
"""Arguments of find(1) that remove set-uid and set-gid bits."""


def until_next_check_s(free_bytes: int, reserve_bytes: int) -> float:
    """Return the seconds until the next check of the free space while an image is unpacked.

    Until then unpacking uses at most `CHECK_MIN_S` worth of the reserve. The pause grows with the
    free space, because ten checks a second slow down unpacking on a small host.
    """
    room_s = (free_bytes - reserve_bytes) / FILL_BYTES_PER_S
    return min(max(room_s, CHECK_MIN_S), CHECK_MAX_S)


def unpack_properties(
    stream: str, target: str, format_: ImageFormat, mount: str
) -> dict[str, object]:
    """Return the properties of the unit that unpacks `stream` into the folder `target`.

    Files of a tar are unpacked into `target` itself, the subvolume of a btrfs stream below it.
    `btrfs receive` leaves it read-only. The agent makes it writable and must then drop set-uid
    bits (`drop_setuid_properties`). Entries below /dev are left out, because the task gets its own
    /dev. Other device nodes cause a failure, set-uid bits are dropped. `mount` is the mount point
    of the file system, below which the parent of an incremental stream is searched.
    """
    if format_ is ImageFormat.BTRFS:
        # Without -m it takes the writable folder, which is a mount here, for the whole file
        # system, and finds no parent.
        receive = ["/usr/bin/btrfs", "receive", "-q", "-m", mount, "-f", stream, target]
        return _sandbox(f"unpacks an image into {target}", [receive], target, _RECEIVE_CAPABILITIES)
    tar = [
        "/usr/bin/tar", "-x", "-f", stream, "-C", target, "--numeric-owner",
        "--same-owner", "--same-permissions", "--delay-directory-restore",
        "--exclude=./dev/*", "--exclude=dev/*",
    ]  # fmt: skip
    commands = [tar, ["/usr/bin/find", target, *FIND_SETUID]]
    return _sandbox(f"unpacks an image into {target}", commands, target, _TAR_CAPABILITIES)


def drop_setuid_properties(target: str) -> dict[str, object]:
    """Return the properties of the unit that removes set-uid bits of all files below `target`."""
    commands = [["/usr/bin/find", target, *FIND_SETUID]]
    return _sandbox(f"drops set-uid bits below {target}", commands, target, _TAR_CAPABILITIES)


def layer_properties(
    python: str, folder: str, layers: Sequence[Layer], tree: str, pipes: tuple[str, str]
) -> dict[str, object]:
    """Return the properties of the unit that applies layers to a tree; blobs are below `folder`.

    One process applies all layers, because starting one takes longer than applying a small layer.
    `pipes` are the paths of its input and output. A line on the input starts the next layer.
    """
    apply = [python, "-I", "-m", "agent.machine.layer", folder, tree]
    for layer in layers:
        blob = layer.blob
        apply += [blob.path, blob.compression, blob.digest, layer.diff_id]
    return {
        **_sandbox(f"applies layers to {tree}", [apply], tree, _TAR_CAPABILITIES),
        "StandardInputFile": pipes[0],
        "StandardOutputFile": pipes[1],
        "StandardError": "journal",  # else it follows the output (systemd.exec(5))
        "TimeoutStartUSec": UNPACK_TIMEOUT_S * len(layers) * _S,
    }


def fetch_properties(
    arguments: Sequence[str], target: str, secrets: Sequence[str], output: str = ""
) -> dict[str, object]:
    """Return the properties of a unit that runs skopeo, which writes only to `target`.

    It has a network, so it must not see `secrets`. /sys is bound read-only here: for
    `ProtectKernelTunables` systemd 257 does this only with a private network (docs/adr/0115).
    Its output goes to the file `output`. Its errors go to the journal, where the agent reads them.
    """
    command = ["/usr/bin/skopeo", "--insecure-policy", *arguments]
    calls = _SANDBOX["SystemCallFilter"]
    assert isinstance(calls, tuple)
    return {
        **_sandbox("fetches an image", [command], target, ()),
        "PrivateNetwork": False,
        "BindReadOnlyPaths": ("/sys",),
        "SystemCallFilter": (*calls, _NOTHING_IS_FLUSHED),
        "RestrictAddressFamilies": ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"),
        "InaccessiblePaths": [*NO_TMP, *(f"-{path}" for path in secrets)],
        "Environment": [f"TMPDIR={target}", "HOME=/nonexistent"],
        "StandardError": "journal",  # else it follows the output (systemd.exec(5))
        **({"StandardOutput": "file", "StandardOutputFile": output} if output else {}),
    }


_LOGGED = re.compile(r'\blevel=\w+ msg="((?:[^"\\]|\\.)*)"')
"""skopeo's format of errors without a terminal: a line of key=value pairs."""


def logged_message(line: str) -> str:
    """Return the message of a log line, without its time and level."""
    match = _LOGGED.search(line)
    return line if match is None else re.sub(r"\\(.)", r"\1", match[1])


def _sandbox(
    what: str, commands: list[list[str]], writable: str, capabilities: tuple[str, ...]
) -> dict[str, object]:
    return {
        **_SANDBOX,
        "Description": f"Twine {what}",
        "ExecStart": commands,
        "ReadWritePaths": (writable,),
        "CapabilityBoundingSet": capabilities,
    }
