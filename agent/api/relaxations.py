"""Relaxations of a task's sandbox: each has a name and a price (docs/security.md, ADR 0092).

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
    """Ask the kernel for interfaces, addresses and routes of its host's network (AF_NETLINK); in a
    network of its own every task may."""
    SCHEDULING = "scheduling"
    """Choose processors, priority and memory nodes of its own processes."""
    DEBUG = "debug"
    """Trace its own processes: debuggers and profilers."""
    OWN_INIT = "own-init"
    """Run the init of its image (systemd) as a system container, with a range of user ids that is
    used nowhere else on the host; only where its entitlement allows it (docs/agent.md)."""
    NESTED = "nested"
    """Run containers inside such a task; only together with `own-init`, and only where its
    entitlement has it among its `relaxations`, too."""
    RAW = "raw"
    """No sandbox: root on the machine, with all capabilities, in the folder of its image. Only for
    users with the role `host-admin`."""


TO_BE_ALLOWED = (Relaxation.OWN_INIT, Relaxation.NESTED)
"""Only jobs of entitlements that allow them have these (`EntitlementSpec.relaxations`)."""
Relaxations = Annotated[list[Relaxation], Meta(max_length=8)]

_BITS = (Relaxation.PROC, Relaxation.NETLINK, Relaxation.SCHEDULING, Relaxation.DEBUG)
EXPOSURE = (1.5, 1.3, 1.5, 1.3, 1.6, 1.5, 1.6, 1.5, 1.7, 1.5, 1.7, 1.5, 1.8, 1.6, 1.8, 1.6)
"""The place of a set of relaxations is the sum of 1 for `proc`, 2 for `netlink`, 4 for `scheduling`
and 8 for `debug`. It is that of the kind of network with the highest, with or without unix sockets.
Those with `proc` have 0.1 or 0.2 less: systemd counts `ProtectKernelTunables`, which has no effect
without /proc/sys.
"""
OWN_INIT_EXPOSURE = 5.5
"""Exposure of the unit of a task with `own-init`. The unit runs systemd-nspawn, which gives its
processes users, mounts and process ids of their own; systemd does not see these. With `nested` it
is the same unit: what that opens is inside (docs/adr/0113)."""
RAW_EXPOSURE = 9.4
"""Exposure of a task with `raw`, whatever else it asks for."""


def exposure_of(relaxations: Collection[Relaxation]) -> float:
    """Return how exposed a task with these is: from 0 to 10, 10 is worst."""
    if Relaxation.RAW in relaxations:
        return RAW_EXPOSURE
    if Relaxation.OWN_INIT in relaxations:
        return OWN_INIT_EXPOSURE
    return EXPOSURE[sum(1 << n for n, bit in enumerate(_BITS) if bit in relaxations)]
