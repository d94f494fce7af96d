"""Names and addresses of tasks' private networks, derived from the host and the task.

An IPv6 address has four parts of 32 bits: the region's prefix, the host's IPv4 address, a hash of
the job and a hash of the task. So any host can derive the destination host and the sending task of
a packet from its addresses. The tunnel is 6rd's (RFC 5969), the firewall compares the hashes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from agent.api import TaskSpec
from agent.netplan import Site, TaskNet
from agent.network.core.network import NAMESPACES
from wire.errors import HostError

HASH_BITS = 32
_LABEL = "twine"


def netns_of(task_id: str) -> str:
    """Return the path of a task's network namespace."""
    return f"{NAMESPACES}/{task_id}"


VETH = re.compile(r"tw[0-9a-f]{11}")
"""Names of the host's ends of tasks' links."""


def veth_of(task_id: str) -> str:
    """Return the name of the host's end of a task's link: 13 characters; the kernel allows 15."""
    return "tw" + hashlib.sha256(task_id.encode()).hexdigest()[:11]


def alias_of(net: TaskNet) -> str:
    """Return the alias of a link, from which the whole network can be read back."""
    return f"{_LABEL} {net.task_id} {net.address4} {net.address6}"


def read_alias(veth: str, alias: str) -> TaskNet | None:
    """Return the network of a link, None if the link is not one of Twine."""
    label, *words = alias.split() or [""]
    if label != _LABEL or len(words) != 3:
        return None
    task_id, address4, address6 = words
    return TaskNet(
        task_id=task_id,
        namespace=netns_of(task_id),
        veth=veth,
        address4=address4,
        address6=address6,
    )


def digest(name: str) -> int:
    """Return the hash of a job's or a task's name for addresses."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[: HASH_BITS // 8])


def host_prefix6(site: Site) -> IPv6Network:
    """Return the /64 of this host, the longest prefix of 6rd (RFC 5969)."""
    region = IPv6Network(site.prefix6)
    first = int(region.network_address) | int(IPv4Address(site.host4)) << 2 * HASH_BITS
    return IPv6Network((first, region.prefixlen + 32))


def host6(site: Site) -> IPv6Address:
    """Return the host's own address in the network of its tasks."""
    return host_prefix6(site).network_address + 1


def address6(site: Site, task_id: str, job: str) -> IPv6Address:
    """Return a task's address; a task without a job uses its id as the job."""
    suffix = digest(job or task_id) << HASH_BITS | digest(task_id)
    return host_prefix6(site).network_address + suffix


def gateway4(site: Site) -> IPv4Address:
    """Return the IPv4 address of the host that its tasks use as gateway."""
    return IPv4Network(site.prefix4).network_address + 1


def address4(site: Site, task_id: str, taken: Collection[str]) -> IPv4Address:
    """Return a task's address on this host: by its hash, or the next free one."""
    network = IPv4Network(site.prefix4)
    usable = network.num_addresses - 3
    start = digest(task_id) % usable
    for step in range(usable):
        address = network.network_address + 2 + (start + step) % usable
        if str(address) not in taken:
            return address
    raise HostError(
        f"no address of {site.prefix4} is free for task {task_id}",
        hint="set a larger network_prefix4",
    )


def plan(site: Site, task_id: str, spec: TaskSpec, known: Collection[TaskNet]) -> TaskNet:
    """Return the private network of a task; an existing one keeps its IPv4 address."""
    existing = next((net for net in known if net.task_id == task_id), None)
    taken = {net.address4 for net in known}
    rate = spec.network.egress_mbps
    return TaskNet(
        task_id=task_id,
        job=spec.job,
        namespace=netns_of(task_id),
        veth=veth_of(task_id),
        address4=existing.address4 if existing else str(address4(site, task_id, taken)),
        address6=str(address6(site, task_id, spec.job)),
        egress_bps=None if rate is None else round(rate * 1e6),
        allow_from=list(spec.network.allow_from),
    )
