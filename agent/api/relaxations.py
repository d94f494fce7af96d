"""Relaxations of a task's sandbox, and the resulting exposure (docs/security.md, ADR 0092).

The exposure is the score of `systemd-analyze security` for the task's unit; 10 is worst. Measured
on Debian 13, systemd 257.13; `tests/lab/test_2_relaxations.py` measures it again and compares.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated

from msgspec import Meta


class Relaxation(StrEnum):
    """What a task may do beyond its sandbox."""

    PROC = "proc"
    """Read all of /proc: the machine's memory, processors, statistics and sysctls."""
    NETLINK = "netlink"
    """Read interfaces, addresses and routes of the host's network from the kernel (AF_NETLINK). In
    a private network every task may."""
    SCHEDULING = "scheduling"
    """Choose processors, priority and memory nodes of its own processes."""
    DEBUG = "debug"
    """Trace its own processes: debuggers and profilers."""
    OWN_INIT = "own-init"
    """Run the init of its image (systemd) as a system container, with its own range of user ids on
    the host; only if its entitlement allows it (docs/agent.md)."""
    NESTED = "nested"
    """Run containers inside such a task; only together with `own-init`, and only if its
    entitlement also has it in `relaxations`."""
    RAW = "raw"
    """No sandbox: root on the machine, with all capabilities, in the folder of its image. Only for
    users with the role `host-admin`."""


TO_BE_ALLOWED = (Relaxation.OWN_INIT, Relaxation.NESTED)
"""Relaxations that an entitlement must allow (`EntitlementSpec.relaxations`)."""
Relaxations = Annotated[list[Relaxation], Meta(max_length=8)]

_BITS = (Relaxation.PROC, Relaxation.NETLINK, Relaxation.SCHEDULING, Relaxation.DEBUG)
EXPOSURE = (1.5, 1.3, 1.5, 1.3, 1.6, 1.5, 1.6, 1.5, 1.7, 1.5, 1.7, 1.5, 1.8, 1.6, 1.8, 1.6)
"""The index of a set of relaxations is the sum of 1 for `proc`, 2 for `netlink`, 4 for `scheduling`
and 8 for `debug`. Each value is the highest of all network modes, with and without unix sockets.
Sets with `proc` have 0.1 or 0.2 less: systemd counts `ProtectKernelTunables`, which has no effect
without /proc/sys.
"""
OWN_INIT_EXPOSURE = 5.5
"""Exposure of the unit of a task with `own-init`. The unit runs systemd-nspawn, which isolates the
users, mounts and process ids of its processes; systemd does not count this. `nested` has the same
value: it only changes the inside of the container (docs/adr/0113)."""
RAW_EXPOSURE = 9.4
"""Exposure of a task with `raw`, independent of its other relaxations."""


def exposure_of(relaxations: Collection[Relaxation]) -> float:
    """Return the exposure of a task with these relaxations: 0 to 10, 10 is worst."""
    if Relaxation.RAW in relaxations:
        return RAW_EXPOSURE
    if Relaxation.OWN_INIT in relaxations:
        return OWN_INIT_EXPOSURE
    return EXPOSURE[sum(1 << n for n, bit in enumerate(_BITS) if bit in relaxations)]
