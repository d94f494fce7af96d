"""Properties of the sandboxed units that turn an image's stream into a subvolume.

Archives are hostile input: no code of ours reads them. GNU tar and `btrfs receive` do, in a
unit that sees one writable folder, no network, no devices, and ends at its limits.
"""

from __future__ import annotations

from agent.api import ImageFormat

_S = 1_000_000
UNPACK_TIMEOUT_S = 900
UNPACK_MEMORY_BYTES = 512 << 20

_SANDBOX: dict[str, object] = {
    "Type": "oneshot",
    "RemainAfterExit": True,
    "CollectMode": "inactive",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateNetwork": True,
    "PrivateTmp": True,
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
    "UMask": 0o022,
    "MemoryMax": UNPACK_MEMORY_BYTES,
    "MemorySwapMax": 0,
    "TasksMax": 64,
    "CPUWeight": 20,
    "TimeoutStartUSec": UNPACK_TIMEOUT_S * _S,
    "Slice": "system.slice",
}

_TAR_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER")
"""Enough to own files as the archive says; without CAP_MKNOD a device node fails."""
_RECEIVE_CAPABILITIES = (
    *_TAR_CAPABILITIES, "CAP_SYS_ADMIN", "CAP_FSETID", "CAP_SETFCAP", "CAP_MKNOD",
)  # fmt: skip
"""`btrfs receive` sets received_uuid by an ioctl that asks for CAP_SYS_ADMIN."""


def unpack_properties(stream: str, target: str, format_: ImageFormat) -> dict[str, object]:
    """Return the properties of the unit that unpacks `stream` into the folder `target`.

    Afterwards a tar's files lie in `target` itself, a btrfs stream's subvolume below it.
    Static entries below /dev are left out (the task gets a /dev of its own), other device
    nodes make it fail, set-uid bits are dropped.
    """
    if format_ is ImageFormat.BTRFS:
        commands = [["/usr/bin/btrfs", "receive", "-q", "-f", stream, target]]
        capabilities: tuple[str, ...] = _RECEIVE_CAPABILITIES
    else:
        commands = [
            [
                "/usr/bin/tar", "-x", "-f", stream, "-C", target, "--numeric-owner",
                "--same-owner", "--same-permissions", "--delay-directory-restore",
                "--exclude=./dev/*", "--exclude=dev/*",
            ],
            [
                "/usr/bin/find", target, "-xdev", "-type", "f", "-perm", "/6000",
                "-exec", "/usr/bin/chmod", "ug-s", "{}", "+",
            ],
        ]  # fmt: skip
        capabilities = _TAR_CAPABILITIES
    return {
        **_SANDBOX,
        "Description": f"Twine unpacks an image into {target}",
        "ExecStart": commands,
        "ReadWritePaths": (target,),
        "CapabilityBoundingSet": capabilities,
    }
