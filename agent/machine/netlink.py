"""Sets up namespaces, links, addresses, routes and rate limits of tasks, with pyroute2.

Every call only creates missing objects, so it may be repeated after a crash.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from ipaddress import IPv6Network
from pathlib import Path
from typing import Any

from pyroute2 import AsyncIPRoute, netns
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import TC_H_ROOT

from agent.netplan import TUNNEL, TaskNet
from wire.errors import HostError

INSIDE = "eth0"
_NODAD = 2
"""IFA_F_NODAD: no duplicate address detection, because no other host can have the address."""
_SCOPE_LINK = 253
"""RT_SCOPE_LINK: the kernel itself assigns these addresses."""
_HOST_LINK_LOCAL = "fe80::1"
_SYSCTLS = Path("/proc/sys/net")
_LATENCY = "50ms"
"""How long a packet may wait under a rate limit; then it is dropped."""


async def ensure_host(host4: str, host6: str, prefix6: str) -> str:
    """Enable forwarding on the host, and make its tunnel to the tasks of other hosts.

    Returns why there is no tunnel (for instance a kernel without `sit`); empty: there is one.
    """
    for path in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        _write_sysctl(path, "1", accept_ra=path.startswith("ipv6"))
    async with _netlink(f"cannot add the address {host6} to the host") as ipr:
        (index,) = await ipr.link_lookup(ifname="lo")
        await ipr.addr("replace", index=index, address=host6, prefixlen=128, flags=_NODAD)
    try:
        await _tunnel(host4, prefix6)
    except HostError as e:
        return str(e)
    return ""


async def _tunnel(host4: str, prefix6: str) -> None:
    region = IPv6Network(prefix6)
    async with _netlink(f"cannot create the tunnel {TUNNEL} to tasks of other hosts") as ipr:
        for index in await ipr.link_lookup(ifname=TUNNEL):
            (link,) = await ipr.link("get", index=index)
            if _settings_of(link) != (host4, str(region.network_address), region.prefixlen):
                await ipr.link("del", index=index)  # the host or the region has another address
        if not await ipr.link_lookup(ifname=TUNNEL):
            await ipr.link(
                "add",
                ifname=TUNNEL,
                kind="sit",
                sit_local=host4,
                sit_ttl=64,
                sit_6rd_prefix=str(region.network_address),
                sit_6rd_prefixlen=region.prefixlen,
            )
        (index,) = await ipr.link_lookup(ifname=TUNNEL)
        await ipr.link("set", index=index, state="up")
        await ipr.route("replace", dst=prefix6, oif=index)


def _settings_of(tunnel: Any) -> tuple[str | None, str | None, int | None]:
    """Return the local address, the prefix and the length of the prefix of a 6rd tunnel."""
    data = "IFLA_LINKINFO", "IFLA_INFO_DATA"
    names = "IFLA_SIT_LOCAL", "IFLA_SIT_6RD_PREFIX", "IFLA_SIT_6RD_PREFIXLEN"
    local, prefix, length = (tunnel.get_nested(*data, name) for name in names)
    return local, prefix, length


def _write_sysctl(path: str, value: str, *, accept_ra: bool) -> None:
    file = _SYSCTLS / path
    if file.read_text().strip() == value:
        return
    if accept_ra:
        # A host that forwards ignores router advertisements, unless this is 2 (ip-sysctl.rst).
        for one in _SYSCTLS.glob("ipv6/conf/*/accept_ra"):
            if one.read_text().strip() == "1":
                one.write_text("2")
    file.write_text(value)


async def ensure(net: TaskNet, gateway4: str, alias: str) -> None:
    """Make a task's private network, or its missing parts."""
    path = Path(net.namespace)
    if not _is_namespace(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        netns.create(net.namespace)
    _open_low_ports(net)
    async with _netlink(f"cannot create the network of task {net.task_id}") as ipr:
        if not await ipr.link_lookup(ifname=net.veth):
            peer = {"ifname": INSIDE, "net_ns_fd": net.namespace}
            await ipr.link("add", ifname=net.veth, kind="veth", peer=peer)
        await _inside(net, gateway4)
        (index,) = await ipr.link_lookup(ifname=net.veth)
        await ipr.link("set", index=index, state="up")
        await ipr.addr("replace", index=index, address=gateway4, prefixlen=32)
        await ipr.addr("replace", index=index, address=_HOST_LINK_LOCAL, prefixlen=64, flags=_NODAD)
        await ipr.route("replace", dst=f"{net.address4}/32", oif=index)
        await ipr.route("replace", dst=f"{net.address6}/128", oif=index)
        await ipr.link("set", index=index, ifalias=alias)  # last: a link with it is complete


def _open_low_ports(net: TaskNet) -> None:
    """Allow a task to bind ports below 1024 in its own network (ip-sysctl.rst).

    Programs of images listen on 80 and 53, and no task has CAP_NET_BIND_SERVICE. This runs in a
    thread of its own, because entering the namespace also changes the thread's /proc/sys/net.
    """
    failed: list[OSError] = []

    def write() -> None:
        try:
            netns.setns(net.namespace, flags=0)
            (_SYSCTLS / "ipv4/ip_unprivileged_port_start").write_text("0")
        except OSError as e:
            failed.append(e)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    if failed:
        why = failed[0].strerror
        raise HostError(f"cannot open all ports to task {net.task_id} in its network: {why}")


async def _inside(net: TaskNet, gateway4: str) -> None:
    attempt = f"cannot set up the inside of the network of task {net.task_id}"
    async with _netlink(attempt, net.namespace) as ipr:
        (loopback,) = await ipr.link_lookup(ifname="lo")
        (index,) = await ipr.link_lookup(ifname=INSIDE)
        for each in (loopback, index):
            await ipr.link("set", index=each, state="up")
        await ipr.addr("replace", index=index, address=net.address4, prefixlen=32)
        await ipr.addr("replace", index=index, address=net.address6, prefixlen=128, flags=_NODAD)
        await ipr.route("replace", dst=f"{gateway4}/32", oif=index, scope="link")
        await ipr.route("replace", dst="0.0.0.0/0", gateway=gateway4, oif=index)
        await ipr.route("replace", dst="::/0", gateway=_HOST_LINK_LOCAL, oif=index)
        await _remove_addresses(ipr, index, but=(net.address4, net.address6))
        await _shape(ipr, index, net.egress_bps)


async def _remove_addresses(ipr: Any, index: int, but: Collection[str]) -> None:
    """Remove all other addresses of a link, for instance that of an earlier address of the host.

    The firewall drops packets from them.
    """
    for entry in [a async for a in await ipr.get_addr(index=index)]:
        address = entry.get_attr("IFA_ADDRESS")
        if entry["scope"] != _SCOPE_LINK and address not in but:
            await ipr.addr("del", index=index, address=address, prefixlen=entry["prefixlen"])


async def _shape(ipr: Any, index: int, bps: int | None) -> None:
    """Limit the rate at which a link sends, or lift the limit. Idempotent."""
    limits = [q async for q in await ipr.get_qdiscs(index=index) if q.get_attr("TCA_KIND") == "tbf"]
    if bps is not None:
        burst = max(1600, bps // 8 // 100)  # bytes sent in 10 ms, at least one frame
        await ipr.tc("replace", "tbf", index, rate=f"{bps}bit", burst=burst, latency=_LATENCY)
    elif limits:
        await ipr.tc("del", index=index, parent=TC_H_ROOT)


async def remove(namespace: str, veth: str) -> None:
    """Remove a task's private network; missing parts are ignored."""
    await unlink(veth)
    path = Path(namespace)
    try:
        if _is_namespace(path):
            netns.remove(namespace)
        path.unlink(missing_ok=True)
    except OSError as e:
        raise HostError(f"cannot remove {namespace}: {e.strerror}") from e


async def unlink(veth: str) -> None:
    """Remove a link and its other end; does nothing if it is missing."""
    async with _netlink(f"cannot remove {veth}") as ipr:
        for index in await ipr.link_lookup(ifname=veth):
            await ipr.link("del", index=index)


def _is_namespace(path: Path) -> bool:
    """Return whether a namespace is mounted at a path; the mount point is a plain file."""
    try:
        return path.stat().st_dev != path.parent.stat().st_dev
    except FileNotFoundError:
        return False


async def links(read: Callable[[str, str], TaskNet | None]) -> list[TaskNet]:
    """Return the complete networks. `read` decodes name and alias of a link."""
    async with _netlink("cannot list links") as ipr:
        networks = [
            read(link.get_attr("IFLA_IFNAME"), link.get_attr("IFLA_IFALIAS") or "")
            async for link in await ipr.get_links()
        ]
    return sorted((net for net in networks if net is not None), key=lambda net: net.task_id)


def namespaces(folder: str) -> list[str]:
    """Return the names of the namespaces that are kept in a folder, sorted."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


@asynccontextmanager
async def _netlink(attempt: str, namespace: str | None = None) -> AsyncIterator[Any]:
    try:
        async with AsyncIPRoute(**({} if namespace is None else {"netns": namespace})) as ipr:
            yield ipr
    except (NetlinkError, OSError) as e:
        number = e.code if isinstance(e, NetlinkError) else e.errno or 0
        raise HostError(f"{attempt}: {os.strerror(number)}") from e
