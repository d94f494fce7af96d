"""Contents of a task's files for name resolution: /etc/hosts, /etc/resolv.conf, /etc/hostname.

Pure. Every container runtime makes these three, so images are built without them. Sources:
hosts(5), resolv.conf(5), hostname(5). Name servers that a network namespace cannot reach are left
out, as in other runtimes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.api import TaskSpec
from agent.network.core.network import is_private
from agent.runtime.core.records import has_own_init

SERVERS_MAX = 3
"""The C library uses no more (resolv.conf(5), MAXNS)."""
_REFUSED = ipaddress.ip_network("169.254.0.0/16")
"""No task may send anything there (tasks/core/unit_properties.py)."""
_OWN = ("localhost", "ip6-localhost", "ip6-loopback")


@dataclass(frozen=True, slots=True)
class HostNames:
    """Name resolution of the host itself."""

    name: str
    address: str = ""
    """Address by which other hosts reach it; empty if there is none."""
    resolv_conf: str = ""
    """The text of its /etc/resolv.conf."""
    upstream: str = ""
    """The text of systemd-resolved's list of servers, empty without systemd-resolved. Then
    /etc/resolv.conf has a stub on the loopback, which other network namespaces cannot reach."""
    hosts: str = ""
    """The text of its /etc/hosts."""


@dataclass(frozen=True, slots=True)
class Resolver:
    """The settings of a resolv.conf."""

    servers: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def read_resolver(text: str) -> Resolver:
    """Return the settings of a resolv.conf; lines without a known keyword are skipped."""
    servers, search, options = list[str](), tuple[str, ...](), list[str]()
    for line in text.splitlines():
        match line.split():
            case ["nameserver", address, *_]:
                servers.append(address)
            case ["search" | "domain", *names]:
                search = tuple(names)
            case ["options", *words]:
                options += words
    return Resolver(tuple(servers), search, tuple(options))


def resolver_of(spec: TaskSpec, host: HostNames, region: Resolver) -> Resolver:
    """Return the resolver settings of a task: its own, else the region's, else the host's.

    `region` is from the agent's configuration. Of the host's servers, unreachable ones are left
    out: in a private network those on the loopback, and everywhere those in 169.254.0.0/16.
    """
    dns, of_host = spec.network.dns, read_resolver(host.resolv_conf)
    servers: Iterable[str] = dns.servers or region.servers
    if not servers:
        servers = _reachable(of_host.servers, spec)
        servers = servers or _reachable(read_resolver(host.upstream).servers, spec)
    return Resolver(
        tuple(servers)[:SERVERS_MAX],
        tuple(dns.search or region.search or of_host.search),
        tuple(dns.options or of_host.options),
    )


def _reachable(servers: Iterable[str], spec: TaskSpec) -> list[str]:
    return [server for server in servers if _is_reachable(server, is_private(spec))]


def _is_reachable(server: str, private: bool) -> bool:
    try:
        address = ipaddress.ip_address(server.partition("%")[0])
    except ValueError:
        return False
    if address.version == 4 and address in _REFUSED:
        return False
    return not private or not (address.is_loopback or address.is_link_local)


def resolver_file(resolver: Resolver) -> str:
    """Return the text of a task's /etc/resolv.conf."""
    lines = ["# Written by twine-agent at each start of the task (docs/network.md)."]
    if not resolver.servers:
        lines.append("# This task can reach no known name server.")
    lines += [f"nameserver {server}" for server in resolver.servers]
    lines += [f"search {' '.join(resolver.search)}"] if resolver.search else []
    lines += [f"options {' '.join(resolver.options)}"] if resolver.options else []
    return "\n".join(lines) + "\n"


def host_name(task_id: str, spec: TaskSpec, host: HostNames) -> str:
    """Return the host name in a task: its id if it has its own init, else the host's name."""
    return task_id if has_own_init(spec) else host.name


def hosts_file(task_id: str, spec: TaskSpec, addresses: Sequence[str], host: HostNames) -> str:
    """Return the text of a task's /etc/hosts.

    `addresses` are those of its private network. In the host's network the host's own entries
    follow, and the task's name maps to the host's address.
    """
    lines = ["127.0.0.1\tlocalhost", f"::1\t{' '.join(_OWN)}"]
    lines += [f"{address}\t{name}" for name, address in sorted(spec.network.dns.hosts.items())]
    mine = list(addresses) or [host.address or "127.0.0.1"]
    names = [task_id] if host.name == task_id else [task_id, host_name(task_id, spec, host)]
    lines += [f"{address}\t{' '.join(dict.fromkeys(names))}" for address in mine]
    if not is_private(spec):
        lines += [line for line in host.hosts.splitlines() if _is_entry(line)]
    return "\n".join(lines) + "\n"


def _is_entry(line: str) -> bool:
    """Return whether a line of the host's /etc/hosts names nothing that the task's has already."""
    fields = line.partition("#")[0].split()
    return len(fields) > 1 and not {*fields[1:]} & {*_OWN}


def files_of(
    task_id: str,
    spec: TaskSpec,
    addresses: Sequence[str],
    host: HostNames,
    region: Resolver,
) -> dict[str, bytes]:
    """Return the files to write into a task's root before it starts: path → content."""
    return {
        "etc/hosts": hosts_file(task_id, spec, addresses, host).encode(),
        "etc/resolv.conf": resolver_file(resolver_of(spec, host, region)).encode(),
        "etc/hostname": f"{host_name(task_id, spec, host)}\n".encode(),
    }
