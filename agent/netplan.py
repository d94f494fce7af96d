"""Requests to the program that may change the network (agent/netd.py); firewall rules as data."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

GATES = "/sys/fs/bpf/twine-ports"
"""Folder of the BPF programs for ports, with one folder for each set of ports (ADR 0112)."""
BIND_HOOKS = ("bind4", "bind6")
"""Attachment points of these programs: `bind` of an IPv4 and of an IPv6 socket."""
_NAME_MAX = 64
TUNNEL = "twine6"
"""Name of the link to private tasks of other hosts."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all private networks of a host share."""

    prefix6: str
    """/32 of the region, with unique local addresses (RFC 4193)."""
    host4: str
    """The host's own address, to which other hosts send packets for its tasks."""
    prefix4: str
    """Prefix of the tasks' IPv4 addresses; the same on every host, behind the host's NAT."""
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
    """Name of the link's end on the host; the task's end is `eth0`."""
    address4: str
    address6: str
    egress_bps: int | None = None
    allow_from: list[str] = []


class Gates(msgspec.Struct, frozen=True, kw_only=True):
    """Which ports tasks in the host's network may bind (docs/adr/0112)."""

    wanted: list[list[int]]
    """Every set of ports that a task of this host has, each in ascending order."""
    alone: bool
    """Whether programs for all other sets are removed."""
    hold: dict[str, list[int]] = {}
    """Cgroup of a task, below the root of the hierarchy → the only ports that it may bind."""


class NetRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. The fields that are set are carried out; the answer has the resulting state."""

    gates: Gates | None = None
    """If set, all other fields are ignored."""
    site: Site | None = None
    ensure: TaskNet | None = None
    remove: list[str] = []
    """Ids of tasks whose network is removed."""
    unlink: list[str] = []
    """Names of links without a task, which are removed."""
    allowed: list[TaskNet] | None = None
    """All private networks, for the firewall; None does not change the firewall."""


class NetAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request."""

    networks: list[TaskNet] = []
    """Read back from the kernel, without rates and permissions."""
    held: list[str] = []
    """Cgroups of `hold` whose ports are now limited; without cgroups that do not exist."""
    lacks: str = ""
    """What this host cannot do, as text; the request is carried out without it."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """One condition: the value that an expression, named as in nft's language, must have."""

    what: str
    value: str | int | bytes
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The verdict if all matches hold: accept, drop, reject or masquerade."""

    matches: tuple[Match, ...]
    verdict: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Rules at one hook of the kernel's packet processing."""

    name: str
    hook: str
    kind: str
    priority: int
    rules: tuple[Rule, ...]


def gate_of(ports: Collection[int]) -> str:
    """Return the name of the program for these ports; tasks with the same ports share it."""
    name = "-".join(map(str, sorted(ports))) or "none"
    return name if len(name) <= _NAME_MAX else hashlib.sha256(name.encode()).hexdigest()[:32]
