"""Named relaxations of a task's sandbox → what becomes of its unit's properties (ADR 0092)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from agent.api import Relaxation

_CALLS: Mapping[Relaxation, str] = MappingProxyType(
    {Relaxation.SCHEDULING: "~@resources", Relaxation.DEBUG: "~@debug"}
)
"""What of the filter of system calls goes."""
_RAW_KEEPS = ("BPFProgram", "NetworkNamespacePath", "IPAddressDeny")
"""Not a sandbox: which ports and which network are this task's, and not another's."""

_SYS = tuple(
    f"-+/sys/{name}"
    for name in (
        *("block", "bus", "class", "dev", "devices", "firmware", "fs", "hypervisor"),
        *("kernel", "module", "power"),
    )
)
"""All there is in /sys: systemd 257 would not take `/sys` itself beside `ProtectKernelTunables`."""


def relaxed(
    properties: Mapping[str, object], sandbox: Collection[str], relaxations: Collection[Relaxation]
) -> dict[str, object]:
    """Return a unit's properties with a task's relaxations; `sandbox` names those of its hardening.

    Without relaxations nothing is another.
    """
    found = dict(properties)
    if Relaxation.RAW in relaxations:
        kept = {*_RAW_KEEPS}
        for name in ({*sandbox} | {"RestrictAddressFamilies"}) - kept:
            found.pop(name, None)
        return {**found, "User": "root"}
    if Relaxation.PROC in relaxations and "ProcSubset" in found:
        found["ProcSubset"] = "all"
        found["ProtectKernelTunables"] = True  # /proc/sys and its like are there now
        found["ReadOnlyPaths"] = _SYS  # it leaves /sys open in the host's network
    if Relaxation.NETLINK in relaxations:
        families = _texts(found.get("RestrictAddressFamilies"))
        found["RestrictAddressFamilies"] = (*families, "AF_NETLINK")
    allowed = {call for name, call in _CALLS.items() if name in relaxations}
    if allowed:
        calls = _texts(found.get("SystemCallFilter"))
        found["SystemCallFilter"] = tuple(call for call in calls if call not in allowed)
    return found


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(v) for v in value) if isinstance(value, list | tuple) else ()
