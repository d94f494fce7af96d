"""What the agent asks of the program that may change the network (agent/netd.py); a firewall as
values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

GATES = "/sys/fs/bpf/twine-ports"
"""Folder of the kernel's programs for ports, one folder for each set of them (ADR 0112)."""
BOUND = ("bind4", "bind6")
"""Where such a program is asked: at a `bind` of an IPv4 and of an IPv6 socket."""
_NAME_MAX = 64
TUNNEL = "twine6"
"""The link to private tasks of other hosts."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What all private networks of a host share."""

    prefix6: str
    """/32 of the region, of unique local addresses (RFC 4193)."""
    host4: str
    """The host's own address, by which other hosts send it their tasks' packets."""
    prefix4: str
    """Prefix of the tasks' IPv4 addresses; the same on every host, and behind the host's (NAT)."""
    agent_port: int
    tasks_group: str = "workload.slice"
    """Cgroup of all tasks, below the root."""


class TaskNet(msgspec.Struct, frozen=True, kw_only=True):
    """The private network of one task."""

    task_id: str
    job: str = ""
    namespace: str
    """Path of the namespace's mount."""
    veth: str
    """Name of the host's end; the task's is `eth0`."""
    address4: str
    address6: str
    egress_bps: int | None = None
    allow_from: list[str] = []


class Gates(msgspec.Struct, frozen=True, kw_only=True):
    """Which ports tasks in the host's network may bind (docs/adr/0112)."""

    wanted: list[list[int]]
    """Every set of ports that a task of this host has, rising."""
    alone: bool
    """Whether all others go."""
    hold: dict[str, list[int]] = {}
    """Cgroup of a task, below the root of the hierarchy → the ports it is held to."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request: what is set is done, in this order; the answer has what there is after it."""

    gates: Gates | None = None
    """With these it is a request for them alone."""
    site: Site | None = None
    ensure: TaskNet | None = None
    remove: list[str] = []
    """Ids of tasks whose network goes."""
    unlink: list[str] = []
    """Host ends of links of no task, which go."""
    allowed: list[TaskNet] | None = None
    """All private networks, for the firewall; None leaves it as it is."""


class NetAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request."""

    networks: list[TaskNet] = []
    """Read back from the kernel; without rates and permissions."""
    held: list[str] = []
    """Cgroups that are held to their ports; those that are not there are not among them."""
    lacks: str = ""
    """What this host cannot do, in words: it goes on without."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """One condition: `what` is an nft expression in words, `value` what it has to be."""

    what: str
    value: str | int | bytes
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """When all matches hold, the verdict: accept, drop, reject, masquerade."""

    matches: tuple[Match, ...]
    verdict: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Rules at one place of the kernel's way of packets."""

    name: str
    hook: str
    kind: str
    priority: int
    rules: tuple[Rule, ...]


def gate_of(ports: Collection[int]) -> str:
    """Return the name of what lets a task bind these ports; tasks with the same ports share it."""
    name = "-".join(map(str, sorted(ports))) or "none"
    return name if len(name) <= _NAME_MAX else hashlib.sha256(name.encode()).hexdigest()[:32]
