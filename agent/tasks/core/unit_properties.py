"""Translates a task's specification into properties of its transient unit.

Names and units are those of systemd's D-Bus interface (org.freedesktop.systemd1(5)), where times
are in microseconds. The hardening is the default of every task. docs/adr/0011 explains what each
property costs and blocks.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from types import MappingProxyType

from agent.api import UMASK, OomPolicy, Relaxation, TaskSpec
from agent.identity.core import INSIDE
from agent.network.core.network import network_properties, port_variables
from agent.notices.core import FILE
from agent.notices.core import INSIDE as NOTICE
from agent.resources.core.limits import limit_properties
from agent.runtime.core.records import key_of, user_of
from agent.runtime.core.slices import slice_for
from agent.runtime.core.unit_parts import NO_CORES, NO_RINGS, in_memory, texts
from agent.tasks.core.exits import START_TIMEOUT_S

_S = 1_000_000

NO_PRIORITY = "~setpriority:0"
"""The call does nothing and succeeds, because PAM sessions fail if it fails (docs/adr/0212)."""

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
            NO_PRIORITY,
            "~@swap",
            *NO_RINGS,
            "@setuid",
            "@chown",
        ),
        "SystemCallErrorNumber": errno.EPERM,
        "KeyringMode": "private",
        "UMask": int(UMASK, 8),
        **NO_CORES,
        "NotifyAccess": "none",
        "IPAddressDeny": ("169.254.0.0/16",),
    }
)
"""The sandbox of a task (trust promise: a task sees neither host nor neighbours).

`DynamicUser` implies PrivateTmp, `ProtectHome=read-only` and RemoveIPC (systemd.exec(5)). /home and
/root of a task belong to its image and are readable, like the rest of its root (docs/adr/0126).
`ReadOnlyPaths` with `ProcSubset=pid` has the effect of `ProtectKernelTunables` with a tenth of its
mounts. A task that may read all of /proc has that property instead (`relaxed`, docs/adr/0115).

A refused system call returns EPERM instead of killing the task. Calls that change the owner or user
are allowed, because daemons make them by default; without capabilities the kernel refuses all that
matter.
"""


def journal_of(entitlement: str) -> str:
    """Return the journal namespace of an entitlement's tasks (docs/adr/0081).

    Each namespace has its own files and limits, so a noisy task rotates out only logs of its own
    entitlement.
    """
    return f"twine-{entitlement}"


def describe_unit(task_id: str, spec: TaskSpec) -> str:
    """Return the unit's description: the task, and the key of its specification."""
    return f"Twine task {task_id} [key {key_of(spec)}]"


def key_in(description: str) -> str:
    """Return the key in a unit's description, empty if there is none."""
    _, _, rest = description.partition("[key ")
    return rest.rstrip("]")


_NOT_AFTER_SCRIPT = 'read up rest </proc/uptime && [ "${up%.*}" -lt "$1" ]'
"""Succeeds before a given second since boot. The first number in the file includes suspend
(proc(5))."""


def not_after(boot_s: float) -> dict[str, object]:
    """Return the properties of a unit that must not start after this second since boot.

    systemd checks the condition directly before the start. So a start that the agent or D-Bus
    delayed for too long has no effect, even if it was allowed when requested (docs/adr/0024).
    """
    command = ["/bin/sh", "-c", _NOT_AFTER_SCRIPT, "sh", str(int(boot_s))]
    return {"ExecCondition": [command], "RootDirectoryStartOnly": True}


def unit_properties(task_id: str, spec: TaskSpec, root: str) -> dict[str, object]:
    """Return the properties of a task's unit with its root file system at `root`.

    `RemainAfterExit` and `CollectMode=inactive` keep an ended unit with its exit code until the
    agent has read it, even if no agent runs at that moment (F-03).
    """
    environment = {
        "LANG": "C",  # the host's own locale need not be in the image (BUG-UX9)
        "TWINE_TASK": task_id,
        "TWINE_JOB": spec.job,
        "TWINE_ENTITLEMENT": spec.entitlement,
        **port_variables(spec),
        **({"TWINE_IDENTITY": INSIDE} if spec.identity else {}),
        **({"TWINE_NOTICE": f"{NOTICE}/{FILE}"} if spec.life.notice is not None else {}),
        **spec.environment,
    }
    longest_s = spec.life.max_run_s
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
        **({} if longest_s is None else {"RuntimeMaxUSec": max(1, round(longest_s * _S))}),
        **limit_properties(spec),
        **TASK_HARDENING,
        **network_properties(task_id, spec),
    }
    return {**relaxed(properties, spec.relaxations), **_process_properties(spec)}


def _process_properties(spec: TaskSpec) -> dict[str, object]:
    """Return the properties that a specification sets for each process; others have defaults."""
    more = spec.ulimits
    named = {
        "LimitNOFILE": more.nofile,
        "LimitNPROC": more.nproc,
        "LimitMEMLOCK": more.memlock_bytes,
        "LimitSTACK": more.stack_bytes,
        "LimitCORE": more.core_bytes,
        "LimitCORESoft": more.core_bytes,
    }
    properties: dict[str, object] = {
        name: value for name, value in named.items() if value is not None
    }
    umask = int(spec.umask, 8)
    return properties | ({} if umask == int(UMASK, 8) else {"UMask": umask})


_CALLS_ALLOWED_BY: Mapping[Relaxation, tuple[str, ...]] = MappingProxyType(
    {Relaxation.SCHEDULING: ("~@resources", NO_PRIORITY), Relaxation.DEBUG: ("~@debug",)}
)
"""Entries of the system call filter that a relaxation removes."""
_KEPT_BY_RAW = ("BPFProgram", "NetworkNamespacePath", "IPAddressDeny")
"""Properties that `raw` keeps: they separate the ports and networks of tasks."""

_SYS_FOLDERS = tuple(
    f"-+/sys/{name}"
    for name in (
        *("block", "bus", "class", "dev", "devices", "firmware", "fs", "hypervisor"),
        *("kernel", "module", "power"),
    )
)
"""All folders of /sys: systemd 257 refuses `/sys` itself together with `ProtectKernelTunables`."""


def relaxed(
    properties: Mapping[str, object], relaxations: Collection[Relaxation]
) -> dict[str, object]:
    """Return a unit's properties after applying a task's relaxations."""
    result = dict(properties)
    if Relaxation.RAW in relaxations:
        for name in {*TASK_HARDENING, "RestrictAddressFamilies"} - {*_KEPT_BY_RAW}:
            result.pop(name, None)
        return {**result, "User": "root"}
    if Relaxation.PROC in relaxations and "ProcSubset" in result:
        result["ProcSubset"] = "all"
        result["ProtectKernelTunables"] = True  # /proc/sys and similar files are visible now
        result["ReadOnlyPaths"] = (
            _SYS_FOLDERS  # that property leaves /sys writable in the host's network
        )
    if Relaxation.NETLINK in relaxations:
        families = dict.fromkeys((*texts(result.get("RestrictAddressFamilies")), "AF_NETLINK"))
        result["RestrictAddressFamilies"] = (*families,)
    allowed = {c for name, calls in _CALLS_ALLOWED_BY.items() if name in relaxations for c in calls}
    if allowed:
        calls = texts(result.get("SystemCallFilter"))
        result["SystemCallFilter"] = tuple(call for call in calls if call not in allowed)
    return result
