"""A task with an init of its own: systemd-nspawn boots its root as a container (docs/adr/0106).

Pure. The plain unit of a task becomes a unit that runs systemd-nspawn. It has the same slice,
cgroup, limits and network. Sources: systemd-nspawn(1) of systemd 257,
user_namespaces(7), capabilities(7).
"""

from __future__ import annotations

import errno
import hashlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from agent.api import Relaxation, TaskSpec
from agent.api.volumes import VolumeKind
from agent.identity.core import INSIDE as IDENTITY
from agent.notices.core import INSIDE as NOTICE
from agent.runtime.core.unit_parts import (
    HOST_SHELL,
    NO_CORES,
    NO_RINGS,
    UNLIMITED,
    in_memory,
    texts,
)
from agent.tasks.core.unit_properties import TASK_HARDENING
from agent.volumes.core.volumes import OWNER, path_of

NSPAWN = "/usr/bin/systemd-nspawn"
ID_COUNT = 65_536
"""Number of user and group ids per container, as systemd assigns them (UIDS-GIDS.md)."""
FIRST_ID = 29_184 * ID_COUNT
SLOTS = 3_500
"""Number of id ranges, from 1912602624 to 2141978623. systemd assigns none of these ids
(UIDS-GIDS.md: 1879048192 to 2147352575 are unused). The owner of files in volumes
(`volumes.OWNER`) is below."""
CREDENTIALS = "/run/host/credentials"
"""Folder where systemd-nspawn puts credentials of the container (Container Interface)."""
VISIBLE = "/run/twine-nested"
"""Folder where a container with `nested` has a /proc and a /sys without any mounts over them.
Only if these exist, the kernel allows a nested namespace its own /proc and /sys (docs/adr/0113)."""

_CAPABILITIES = (
    *("AUDIT_CONTROL", "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER"),
    *("FSETID", "IPC_OWNER", "KILL", "LEASE", "LINUX_IMMUTABLE", "MKNOD", "NET_BIND_SERVICE"),
    *("NET_BROADCAST", "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN"),
    *("SYS_BOOT", "SYS_CHROOT", "SYS_NICE", "SYS_PTRACE", "SYS_RESOURCE", "SYS_TTY_CONFIG"),
)
"""Capabilities that systemd-nspawn keeps for a container without a network of its own
(systemd-nspawn(1), --capability=). They apply only to objects of the container itself."""
SANDBOX: Mapping[str, object] = MappingProxyType(
    {
        "CapabilityBoundingSet": _CAPABILITIES,
        "DevicePolicy": "closed",
        "DeviceAllow": ("char-pts rw",),
        "IPAddressDeny": ("169.254.0.0/16",),
        "KeyringMode": "private",
        **NO_CORES,
        "PrivateMounts": True,
        "PrivateTmp": True,
        "ProtectHome": "yes",
        "ProtectKernelModules": True,
        "ProtectSystem": "strict",
        "RestrictAddressFamilies": ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"),
        "RestrictRealtime": True,
        "SystemCallArchitectures": ("native",),
        "SystemCallErrorNumber": errno.EPERM,
        "SystemCallFilter": (
            "~@clock",
            "~@cpu-emulation",
            "~@keyring",
            "~@module",
            "~@obsolete",
            "~@raw-io",
            "~@swap",
            "~bpf",
            "~kexec_file_load",
            "~kexec_load",
            "~perf_event_open",
            *NO_RINGS,
        ),
        "UMask": 0o022,
    }
)
"""Sandbox of systemd-nspawn, of everything in the container, and of commands that the host runs
inside it. The container isolates in addition: its users do not exist outside, and it has its own
mounts, processes, host name and network."""
_REPLACED_PROPERTIES = frozenset(
    (
        *("BindReadOnlyPaths", "Environment", "ExecSearchPath", "ExecStartPre", "ExecStopPost"),
        *("KillSignal", "LoadCredential", "ReadWritePaths", "RootDirectory", "SetCredential"),
        *("RootDirectoryStartOnly", "User", "WorkingDirectory"),
    )
)
"""Properties of a plain unit that systemd-nspawn gets in another way or does not get."""
_CONTAINER_ONLY = (
    *("Delegate", "ExecCondition", "ExecStartPre", "ExecStopPost"),
    *("LoadCredential", "SetCredential", "NetworkNamespacePath", "TemporaryFileSystem"),
)
"""Properties of a container's unit that commands inside the container do not get."""
ROOT, NESTED = ".root", ".nested"
"""Mount points for the root of a container, in the folder of its volumes; the name of a volume has
no dot. Writes to the root go to an overlay in memory; the container cannot change the task's root.
`NESTED` is for containers inside."""
_MOUNT_SCRIPT = (
    "owner=$1; ids=$2; count=$3; at=$4; root=$5; size=$6; shift 6; "
    'off() { while umount -l "$1" 2>/dev/null; do :; done; mkdir -p -m 0700 "$1"; }; '
    'on() { mount --bind -o "X-mount.idmap=b:$1:$ids:$count" "$2" "$3"; }; '
    'for name in .root .below .memory; do off "$at/$name" || exit 1; done; '
    'on 0 "$root" "$at/.below" && '
    'mount -t tmpfs -o "mode=0700,size=$size" tmpfs "$at/.memory" && cd "$at/.memory" && '
    'mkdir -m 0755 upper work && chown "$ids:$ids" upper && mount -t overlay '
    '-o "lowerdir=$at/.below,upperdir=upper,workdir=work" overlay "$at/.root" || exit 1; '
    'while [ $# -gt 0 ]; do off "$at/$1" && has=$(stat -c %u "$2") || exit 1; '
    '[ "$has" -ge "$owner" ] && [ "$has" -lt $((owner + count)) ] || '
    'chown "$owner:$owner" "$2" || exit 1; on "$owner" "$2" "$at/$1" || exit 1; shift 2; done'
)
"""Script that mounts the root of a container, and volumes given as pairs of name and source path.
It maps the first user id of the root and of the volumes' files to the container's first user id."""
_MOUNT_NESTED_SCRIPT = (
    'at=$1/.nested; while umount -l "$at" 2>/dev/null; do :; done; mkdir -p -m 0700 "$at" && '
    'mount -t tmpfs -o mode=0700,size=4k tmpfs "$at" && mkdir "$at/proc" "$at/sys" && '
    'mount -o remount,ro "$at" && mount -t sysfs -o nosuid,nodev,noexec sysfs "$at/sys" && '
    'exec unshare --pid --fork mount -t proc -o nosuid,nodev,noexec proc "$at/proc"'
)
"""Script that mounts a /proc without processes: it belongs to a namespace whose only process is the
mount command. It also mounts the /sys of the task's network. Both are in a folder that only the
kernel may enter from inside the container."""
_UNMOUNT_SCRIPT = (
    'at=$1; shift; for name in .root .below .memory "$@"; do '
    'while umount -l "$at/$name" 2>/dev/null; do :; done; rmdir "$at/$name"; done 2>/dev/null; '
    'rmdir "$at" 2>/dev/null; true'
)
_ENTER_PROGRAM = (sys.executable, "-I", "-m", "agent.machine.enter")
SHM = "/dev/shm"
_LOGIN_ENVIRONMENT = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    *("HOME=/root", "USER=root", "LOGNAME=root", "LANG=C.UTF-8"),
)


def missing(is_on: bool, has_program: Callable[[str], bool]) -> str:
    """Return why a host cannot start containers, empty if it can."""
    if not is_on:
        return "own-init is off on this host: its agent's configuration has own_init = false"
    if not has_program(NSPAWN):
        return "own-init needs systemd-nspawn (Debian: systemd-container), which this host lacks"
    return ""


def choose_ids(task_id: str, taken: Collection[int]) -> int:
    """Return the first user id of a container; `taken` are those of the host's other containers.

    The search starts at a slot that depends on the task's id. So two tasks get different ids even
    if one of their records was lost. If all ranges are taken, containers share one.
    """
    first = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8]) % SLOTS
    slots = ((first + n) % SLOTS for n in range(SLOTS))
    free = (FIRST_ID + slot * ID_COUNT for slot in slots)
    return next((ids for ids in free if ids not in taken), FIRST_ID + first * ID_COUNT)


def container_unit(
    task_id: str, spec: TaskSpec, unit: Mapping[str, object], ids: int, state: str, run: str
) -> dict[str, object]:
    """Return the unit that runs a task as a container, made from its plain unit.

    `ids` is its first user id, `state` and `run` are the agent's folders. The unit keeps the
    properties that bound every task: slice, limits, network, journal, timeouts.
    """
    stage = f"{run}/machines/{task_id}"
    is_nested = Relaxation.NESTED in spec.relaxations
    command = [
        *_nspawn_command(task_id, f"{stage}/{ROOT}", ids),
        *_rlimit_arguments(unit),
        *_volume_arguments(spec, stage),
        *_credential_arguments(spec, unit),
        *([f"--bind={stage}/{NESTED}:{VISIBLE}"] if is_nested else []),
        "--boot",
        "--",
        *_init_arguments(unit),
    ]
    properties: dict[str, object] = {
        **{
            n: v
            for n, v in unit.items()
            if n not in TASK_HARDENING and n not in _REPLACED_PROPERTIES
        },
        **SANDBOX,
        "Delegate": True,
        "KillMode": "mixed",
        "Environment": ["SYSTEMD_NSPAWN_LOCK=0"],
        "TemporaryFileSystem": ["/run/systemd/nspawn"],
        "ReadWritePaths": [f"-{stage}"],
        "ExecStart": [command],
        **_mount_steps(task_id, spec, str(unit["RootDirectory"]), ids, state, stage),
    }
    if spec.credentials:
        properties["LoadCredential"] = unit["LoadCredential"]
    if spec.configuration:
        properties["SetCredential"] = unit["SetCredential"]
    if is_nested:  # the container handles a nested container that is killed at its own limit
        properties["OOMPolicy"] = "continue"
    return properties


def _mount_steps(
    task_id: str, spec: TaskSpec, root: str, ids: int, state: str, stage: str
) -> dict[str, object]:
    """Return the steps that mount root and volumes at `stage`, and that unmount them afterwards."""
    on_disk = {n: v for n, v in spec.volumes.items() if v.kind is not VolumeKind.TMPFS}
    mounted = [
        word
        for name, volume in on_disk.items()
        for word in (name, f"{state}/{path_of(task_id, spec.entitlement, name, volume)}")
    ]
    size = str(spec.limits.memory_max_bytes // 2)
    numbers = (str(OWNER), str(ids), str(ID_COUNT))
    before = [[*HOST_SHELL, _MOUNT_SCRIPT, "sh", *numbers, stage, root, size, *mounted]]
    after = [*HOST_SHELL, _UNMOUNT_SCRIPT, "sh", stage, *on_disk]
    if Relaxation.NESTED in spec.relaxations:
        before.append([*HOST_SHELL, _MOUNT_NESTED_SCRIPT, "sh", stage])
        after.append(NESTED)
    return {"ExecStartPre": before, "ExecStopPost": [after]}


def _nspawn_command(task_id: str, root: str, ids: int) -> list[str]:
    """Return the command line that starts a container, without the program that runs in it.

    It is not registered with systemd-machined. Its machine id is the same at each start.
    """
    return [
        NSPAWN,
        "--quiet",
        "--settings=no",
        "--keep-unit",
        "--register=no",
        f"--machine={task_id}",
        f"--uuid={hashlib.sha256(f'twine machine {task_id}'.encode()).hexdigest()[:32]}",
        f"--directory={root}",
        f"--private-users={ids}:{ID_COUNT}",
        "--private-users-ownership=off",
        "--link-journal=no",
        "--resolv-conf=off",
        "--timezone=off",
        "--console=read-only",
    ]


def _rlimit_arguments(unit: Mapping[str, object]) -> list[str]:
    """Return the arguments for process limits, because systemd-nspawn resets inherited limits."""
    limits = {n: v for n, v in {**NO_CORES, **unit}.items() if n.startswith("Limit")}
    texts = {n: "infinity" if v == UNLIMITED else str(v) for n, v in limits.items()}
    return [
        f"--rlimit={name.removeprefix('Limit')}={texts.get(f'{name}Soft', hard)}:{hard}"
        for name, hard in texts.items()
        if not name.endswith("Soft")
    ]


def _volume_arguments(spec: TaskSpec, stage: str) -> list[str]:
    """Return the arguments for volumes; volumes on disk are already mounted at `stage`.

    Without an argument systemd-nspawn creates a /dev/shm as large as half of the host's memory.
    """
    arguments = []
    if all(volume.path != SHM for volume in spec.volumes.values()):
        arguments.append(f"--tmpfs={in_memory(SHM, spec.limits.memory_max_bytes)}")
    for name, volume in spec.volumes.items():
        if volume.kind is VolumeKind.TMPFS:
            size = f"size={volume.max_bytes}"
            arguments.append(f"--tmpfs={volume.path}:mode=1777,nosuid,nodev,{size}")
        else:
            word = "--bind-ro" if volume.kind is VolumeKind.SHARED else "--bind"
            arguments.append(f"{word}={stage}/{name}:{volume.path}")
    return arguments


def _credential_arguments(spec: TaskSpec, unit: Mapping[str, object]) -> list[str]:
    """Return the arguments for credentials, the identity and the notices of a task."""
    has_folders = spec.identity or spec.life.notice is not None
    binds = texts(unit.get("BindReadOnlyPaths")) if has_folders else ()
    return [
        *(
            f"--load-credential={name}:{name}"
            for name in sorted({*spec.credentials, *spec.configuration})
        ),
        *(f"--bind-ro={bind}" for bind in binds if bind.endswith((f":{IDENTITY}", f":{NOTICE}"))),
    ]


def _init_arguments(unit: Mapping[str, object]) -> list[str]:
    """Return the arguments of the container's init.

    Its log goes to the task's log, and its services get the task's environment variables
    (systemd(1): in a container kernel command line options are arguments).
    """
    return [
        "systemd.show_status=no",
        "systemd.journald.forward_to_console=1",
        *(f"systemd.setenv={pair}" for pair in texts(unit.get("Environment"))),
    ]


def is_container_unit(task_unit: Mapping[str, object]) -> bool:
    """Return whether the unit of a task runs systemd-nspawn."""
    commands = task_unit.get("ExecStart")
    return isinstance(commands, list) and bool(commands) and commands[0][0] == NSPAWN


def unmount_unit(task_unit: Mapping[str, object], task_id: str) -> dict[str, object]:
    """Return the unit that unmounts the mounts of a container, if its own unit could not.

    The container's unit unmounts within the task's memory limit. If killed processes still fill
    that memory, the kernel also kills the unmount command. This unit is outside of that limit.
    """
    command = _command(task_unit, "ExecStopPost")
    return {
        "Description": f"Twine task {task_id}: what it had mounted",
        "Type": "exec",
        "ExecStart": [[*HOST_SHELL[-2:], *command[len(HOST_SHELL) :]]],
        "RemainAfterExit": True,
        "CollectMode": "inactive",
        "Slice": "system.slice",
        "CapabilityBoundingSet": ("CAP_SYS_ADMIN",),
        "NoNewPrivileges": True,
    }


def step_command(task_unit: Mapping[str, object], command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command in the container instead of its init."""
    words = _command(task_unit)
    return [*words[: words.index("--boot")], "--as-pid2", "--", *command]


def container_command_properties(
    task_unit: Mapping[str, object],
    cgroup: str,
    unit: str,
    command: Sequence[str],
    more: Sequence[str],
) -> dict[str, object]:
    """Return the unit properties that run a command inside the container of a task.

    The command has the sandbox of the container and runs as its root user. `more` are variables in
    addition to the task's.
    """
    arguments = _command(task_unit)
    given = [
        *_LOGIN_ENVIRONMENT,
        *(a.partition("=")[2] for a in arguments if a.startswith("systemd.setenv=")),
    ]
    if any(a.startswith("--load-credential=") for a in arguments):
        given.append(f"CREDENTIALS_DIRECTORY={CREDENTIALS}")
    own = unit.removesuffix(".service")
    return {
        **{name: value for name, value in task_unit.items() if name not in _CONTAINER_ONLY},
        "Environment": [],
        "KillMode": "control-group",
        "ExecStart": [[*_ENTER_PROGRAM, cgroup, own, *given, *more, "--", *command]],
    }


def _command(task_unit: Mapping[str, object], step: str = "ExecStart") -> list[str]:
    commands = task_unit[step]
    assert isinstance(commands, list)
    return list(commands[0])
