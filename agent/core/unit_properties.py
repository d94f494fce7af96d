"""A task's specification → properties of its transient unit.

Names and units are those of systemd's D-Bus interface (org.freedesktop.systemd1(5)), where
times are in microseconds. The hardening is the default of every task; what each property
costs and blocks is in docs/adr/0011.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType

from agent.api import UMASK, OomPolicy, TaskSpec
from agent.core.exits import START_TIMEOUT_S
from agent.core.huge_pages import asks as asks_for_pages
from agent.core.limits import limit_properties
from agent.core.network import network_properties, port_variables
from agent.core.records import key_of, unit_of, user_of
from agent.core.relaxations import relaxed
from agent.core.system_calls import NO_RINGS
from agent.core.task_identity import INSIDE

_S = 1_000_000
PAGE = 4096

TASK_HARDENING: Mapping[str, object] = MappingProxyType(
    {
        "DynamicUser": True,
        "PrivateUsers": True,
        "MountAPIVFS": True,
        "PrivateDevices": True,
        "PrivateIPC": True,
        "PrivateMounts": True,
        "DevicePolicy": "closed",
        "ProtectSystem": "strict",
        "ProtectKernelModules": True,
        "ReadOnlyPaths": ("-+/sys",),
        "ProtectKernelLogs": True,
        "ProtectControlGroups": True,
        "ProtectClock": True,
        "ProtectHostname": True,
        "ProtectProc": "invisible",
        "ProcSubset": "pid",
        "NoNewPrivileges": True,
        "CapabilityBoundingSet": (),
        "AmbientCapabilities": (),
        "RestrictNamespaces": True,
        "RestrictRealtime": True,
        "RestrictSUIDSGID": True,
        "LockPersonality": True,
        "RestrictAddressFamilies": ("AF_INET", "AF_INET6", "AF_UNIX"),
        "SystemCallArchitectures": ("native",),
        "SystemCallFilter": (
            "~@clock",
            "~@cpu-emulation",
            "~@debug",
            "~@module",
            "~@mount",
            "~@obsolete",
            "~@privileged",
            "~@raw-io",
            "~@reboot",
            "~@resources",
            "~@swap",
            *NO_RINGS,
            "@setuid",
            "@chown",
        ),
        "SystemCallErrorNumber": errno.EPERM,
        "KeyringMode": "private",
        "UMask": int(UMASK, 8),
        "LimitCORE": 0,
        "NotifyAccess": "none",
        "IPAddressDeny": ("169.254.0.0/16",),
    }
)
"""What a task may not do (trust promise: a task sees neither host nor neighbours).

`DynamicUser` implies PrivateTmp, `ProtectHome=read-only` and RemoveIPC (systemd.exec(5)). /home and
/root of a task's root are its image's own, so they are read, like all of it (docs/adr/0126).
`ReadOnlyPaths` with `ProcSubset=pid` is what `ProtectKernelTunables` comes to, for a tenth of its
mounts; a task that may read all of /proc has that instead (core/relaxations.py, docs/adr/0115).

A refused system call answers EPERM instead of killing the task, and the calls that change
owner or user stay: daemons make them out of habit, and without capabilities the kernel
refuses all that matter.
"""


def slice_of(entitlement: str) -> str:
    r"""Return the slice of an entitlement; a dash would be a level of its own, so `\x2d`."""
    return "workload-" + entitlement.replace("-", r"\x2d") + ".slice"


def slice_for(spec: TaskSpec) -> str:
    """Return the slice that a task runs in.

    Those with CPUs or huge pages of their own are beside the others, who are kept off these by
    their slice; no entitlement's name has a `_`.
    """
    own = "_own" if spec.resources.exclusive_cpus else ""
    huge = "_huge" if asks_for_pages(spec) else ""
    return slice_of(spec.entitlement).replace(".slice", f"{own}{huge}.slice")


def _marks(name: str) -> list[str]:
    return name.removesuffix(".slice").split("_")[1:]


def _is_of_tasks(name: str) -> bool:
    return name.startswith("workload-") and name.endswith(".slice")


def is_shared_slice(name: str) -> bool:
    """Return whether a cgroup below `workload.slice` is of tasks that share CPUs."""
    return _is_of_tasks(name) and "own" not in _marks(name)


def is_without_pages(name: str) -> bool:
    """Return whether a cgroup below `workload.slice` is of tasks without huge pages."""
    return _is_of_tasks(name) and "huge" not in _marks(name)


def journal_of(entitlement: str) -> str:
    """Return the journal namespace of an entitlement's tasks (docs/adr/0081).

    Each has files and limits of its own, so a noisy task rotates out only its own kind's logs.
    """
    return f"twine-{entitlement}"


TASKS_SLICE = "/workload.slice"
"""The cgroup of all tasks, below the root of the hierarchy (systemd.slice(5))."""


def cgroup_of(task_id: str, spec: TaskSpec) -> str:
    """Return the cgroup of a task, below the root of the hierarchy."""
    return f"{TASKS_SLICE}/{slice_for(spec)}/{unit_of(task_id)}"


def describe_unit(task_id: str, spec: TaskSpec) -> str:
    """Return the unit's description: what it is, and the key it was started from."""
    return f"Twine task {task_id} [key {key_of(spec)}]"


def key_in(description: str) -> str:
    """Return the key in a unit's description, empty where there is none."""
    _, _, rest = description.partition("[key ")
    return rest.rstrip("]")


_NOT_AFTER = 'read up rest </proc/uptime && [ "${up%.*}" -lt "$1" ]'
"""Succeeds before a second since boot; the first number there counts suspend (proc(5))."""


def not_after(boot_s: float) -> dict[str, object]:
    """Return the properties of a unit that must not be started from this second since boot on.

    systemd asks just before the start. So a request that an agent or a bus held back for long
    starts nothing, even if the agent thought before that it may (docs/adr/0024).
    """
    command = ["/bin/sh", "-c", _NOT_AFTER, "sh", str(int(boot_s))]
    return {"ExecCondition": [command], "RootDirectoryStartOnly": True}


def unit_properties(
    task_id: str, spec: TaskSpec, root: str, hardening: Mapping[str, object] = TASK_HARDENING
) -> dict[str, object]:
    """Return all properties of a task's unit, whose root file system is at `root`.

    `RemainAfterExit` and `CollectMode=inactive` keep an ended unit, with its exit code,
    until the agent has seen it, even if the agent is down at that moment (F-03).
    """
    environment = {
        "LANG": "C",  # the host's own locale need not be in the image (BUG-UX9)
        "TWINE_TASK": task_id,
        "TWINE_JOB": spec.job,
        "TWINE_ENTITLEMENT": spec.entitlement,
        **port_variables(spec),
        **({"TWINE_IDENTITY": INSIDE} if spec.identity else {}),
        **spec.environment,
    }
    properties: dict[str, object] = {
        "Description": describe_unit(task_id, spec),
        "Type": "exec",
        "ExecStart": [list(spec.command)],
        "RootDirectory": root,
        "User": user_of(task_id),
        "Slice": slice_for(spec),
        "Environment": [f"{k}={v}" for k, v in environment.items()],
        "SyslogIdentifier": task_id,
        "SyslogLevelPrefix": False,
        "LogNamespace": journal_of(spec.entitlement),
        "RemainAfterExit": True,
        "CollectMode": "inactive",
        "KillMode": "control-group",
        "TimeoutStartUSec": START_TIMEOUT_S * _S,
        "TimeoutStopUSec": round(spec.stop_timeout_s * _S),
        "OOMPolicy": "kill" if spec.oom is OomPolicy.TASK else "continue",
        "LogRateLimitIntervalUSec": 10 * _S,
        "LogRateLimitBurst": 10_000,
        "TemporaryFileSystem": [in_memory("/dev/shm", spec.limits.memory_max_bytes)],
        **_run_time(spec.life.max_run_s),
        **limit_properties(spec),
        **hardening,
        **network_properties(task_id, spec),
    }
    return {**relaxed(properties, hardening, spec.relaxations), **_of_processes(spec)}


def _of_processes(spec: TaskSpec) -> dict[str, object]:
    """Return what a specification says of each process; the hardening has the defaults."""
    more = spec.ulimits
    named = {
        "LimitNOFILE": more.nofile,
        "LimitNPROC": more.nproc,
        "LimitMEMLOCK": more.memlock_bytes,
        "LimitSTACK": more.stack_bytes,
        "LimitCORE": more.core_bytes,
    }
    found: dict[str, object] = {name: value for name, value in named.items() if value is not None}
    umask = int(spec.umask, 8)
    return found | ({} if umask == int(UMASK, 8) else {"UMask": umask})


def in_memory(path: str, memory_bytes: int) -> str:
    """Return the mount of a task's own folder in memory: half of its memory, and a file a page.

    `PrivateDevices` alone binds the host's /dev/shm into the task's /dev.
    """
    size = memory_bytes // 2
    return f"{path}:mode=1777,nosuid,nodev,size={size},nr_inodes={size // PAGE}"


def _run_time(seconds: float | None) -> dict[str, object]:
    return {} if seconds is None else {"RuntimeMaxUSec": max(1, round(seconds * _S))}
