"""A task's network: the host's or its own, its ports, and which tasks may connect to it."""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from agent.api.ranges import END, Name, Port, Written

EGRESS_MBPS_MAX = 34_359
"""The kernel's token bucket is set in bytes per second, with 32 bits (tc-tbf(8))."""


class NetworkMode(StrEnum):
    """Which network a task uses."""

    HOST = "host"
    """The host's network. The task may bind only the ports that it was given."""
    PRIVATE = "private"
    """A network namespace with its own addresses, in which every port is free."""


DnsName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?" + END,
        description="a name such as db.example.org, of at most 253 characters",
    ),
]
IpAddress = Annotated[
    str, Meta(pattern=r"^[0-9a-fA-F:.]{2,45}" + END, description="an IPv4 or IPv6 address")
]
ResolverOption = Annotated[
    str,
    Meta(pattern=r"^[a-z0-9-]{1,32}(:[0-9]{1,5})?" + END, description="a word such as ndots:2"),
]


class Dns(Written, frozen=True, kw_only=True):
    """Name resolution of a task; empty fields keep the host's settings."""

    servers: Annotated[list[IpAddress], Meta(max_length=3)] = []
    """Name servers, in the order of use."""
    search: Annotated[list[DnsName], Meta(max_length=32)] = []
    """Domains in which a short name is searched."""
    options: Annotated[list[ResolverOption], Meta(max_length=16)] = []
    """Options of resolv.conf(5), for instance `ndots:2`."""
    hosts: Annotated[dict[DnsName, IpAddress], Meta(max_length=256)] = {}
    """Further entries of /etc/hosts: name → address."""


class Reach(Written, frozen=True, kw_only=True):
    """Network settings that an owner gives for each of a job's tasks."""

    mode: NetworkMode = NetworkMode.HOST
    egress_mbps: Annotated[float, Meta(ge=0.1, le=1_000_000)] | None = None
    """Most it may send, in millions of bits per second; `private` only."""
    allow_from: Annotated[list[Name], Meta(max_length=64)] = []
    """Tasks, or jobs with all their tasks, of the same entitlement that may open connections to
    it; `private` only. Tasks of other machines are recognised by address: see docs/network.md."""
    unix_sockets: bool = False
    """Whether it may open sockets of the family AF_UNIX in `host` mode. They reach the abstract
    sockets of the whole host. In a private network they are always allowed."""
    dns: Dns = Dns()


class Network(Reach, frozen=True, kw_only=True):
    """The network of one task: its owner's settings, and the ports that it was given."""

    ports: Annotated[dict[Name, Port], Meta(max_length=64)] = {}
    """Port by name; each is also in the environment, for instance as `TWINE_PORT_HTTP`."""


def contradiction(reach: Reach) -> str:
    """Return the first contradiction in the settings of a network; empty for none."""
    for address in (*reach.dns.servers, *reach.dns.hosts.values()):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            return f"network.dns: {address!r} is not an IP address"
    if reach.egress_mbps is not None and reach.egress_mbps > EGRESS_MBPS_MAX:
        return f"network.egress_mbps {reach.egress_mbps:g} is above {EGRESS_MBPS_MAX}, the maximum"
    if reach.mode is NetworkMode.PRIVATE:
        return ""
    asked = {"egress_mbps": reach.egress_mbps, "allow_from": reach.allow_from}
    names = [name for name, value in asked.items() if value]
    if not names:
        return ""
    return f"network.{names[0]} needs a network of its own (network.mode = private)"


def port_variable(name: str) -> str:
    """Return the environment variable that a task reads one of its ports from."""
    return f"TWINE_PORT_{name.upper().replace('-', '_')}"
