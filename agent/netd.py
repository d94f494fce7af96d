"""The only program of a host that may change its network and the ports that tasks may bind.

systemd starts it at a request, and it ends when it is idle. The agent itself has no such right. All
state is in the kernel, so the program may end at any time. systemd holds the socket
(`twine-network.socket`). Each connection carries one request: a line of JSON in each direction.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from agent.netplan import Gates, NetAnswer, NetRequest, TaskNet
from agent.network.core.addresses import (
    VETH,
    alias_of,
    gateway4,
    host6,
    netns_of,
    read_alias,
    veth_of,
)
from agent.network.core.firewall import TABLE, table
from agent.network.core.network import NAMESPACES
from agent.runtime.core.slices import TASKS_SLICE
from wire.errors import HostError

log = logging.getLogger(__name__)

CGROUPS = Path("/sys/fs/cgroup")
IDLE_S = 60.0
"""The program ends after this time without a request; systemd starts it at the next one."""
_REQUEST_MAX = 16 << 20
_SYSTEMDS_SOCKET = 3
_KEEP_SOCKET: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""From Python 3.13 on a server removes its socket when it ends; this socket belongs to systemd."""


async def answer(ask: NetRequest) -> NetAnswer:
    """Carry out a request, and return the networks that exist afterwards."""
    if ask.gates is not None:
        return set_gates(ask.gates)
    if ask.site is None:
        raise HostError("a network request must name its site")
    from agent.machine import netlink, nft

    site, lacks = ask.site, ""
    for task_id in ask.remove:
        await netlink.remove(netns_of(task_id), veth_of(task_id))
    for link in ask.unlink:
        if not VETH.fullmatch(link):
            raise HostError(f"{link} is not a link of a task: it is not changed")
        await netlink.unlink(link)
    if ask.allowed is not None:
        if ask.allowed:  # only private networks need forwarding
            lacks = await netlink.ensure_host(site.host4, str(host6(site)), site.prefix6)
        chains = table(site, ask.allowed)
        wanted = sum(len(chain.rules) for chain in chains)
        if (found := await nft.replace_table(TABLE, chains)) != wanted:
            raise HostError(f"the firewall has {found} rules instead of {wanted}")
    if ask.ensure is not None:
        await netlink.ensure(ask.ensure, str(gateway4(site)), alias_of(ask.ensure))
    networks = await netlink.links(read_alias)
    whole = {net.task_id for net in networks}
    halves = [t for t in netlink.namespaces(NAMESPACES) if t not in whole]
    networks += [_incomplete_network(task_id) for task_id in halves]
    return NetAnswer(networks=networks, lacks=lacks)


def set_gates(gates: Gates) -> NetAnswer:
    """Load the BPF programs for ports, and attach them to cgroups of tasks."""
    from agent.machine import port_gates

    for cgroup in gates.hold:
        if not cgroup.startswith(f"{TASKS_SLICE}/") or ".." in cgroup:
            raise HostError(f"{cgroup} is not the cgroup of a task: it is not changed")
    port_gates.make_gates([*gates.wanted, *gates.hold.values()], alone=gates.alone)
    held = [
        cgroup
        for cgroup, ports in gates.hold.items()
        if port_gates.attach(CGROUPS / cgroup.lstrip("/"), ports)
    ]
    return NetAnswer(held=held)


def _incomplete_network(task_id: str) -> TaskNet:
    """Return the network of a task whose namespace exists without a complete link."""
    return TaskNet(
        task_id=task_id,
        namespace=netns_of(task_id),
        veth=veth_of(task_id),
        address4="",
        address6="",
    )


class NetService:
    """Answers requests one after the other."""

    def __init__(self, do: Callable[[NetRequest], Awaitable[NetAnswer]] = answer) -> None:
        self._do = do
        self._turn = asyncio.Lock()
        self.called = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        self.called.set()
        try:
            line = await reader.readline()
            async with self._turn:
                result = await self._answer(line)
            writer.write(msgspec.json.encode(result) + b"\n")
            await writer.drain()
        except OSError:
            pass  # the caller is gone; its request was carried out
        finally:
            self.called.set()
            writer.close()

    async def _answer(self, line: bytes) -> NetAnswer:
        try:
            return await self._do(msgspec.json.decode(line, type=NetRequest))
        except (HostError, msgspec.MsgspecError, OSError) as e:
            return NetAnswer(error=str(e))
        except Exception as e:
            log.exception("a request failed; this is a bug")
            return NetAnswer(error=f"{type(e).__name__}: {e}")


async def main(listener: socket.socket) -> None:
    """Serve until there was no request for `IDLE_S`."""
    service = NetService()
    server = await asyncio.start_unix_server(
        service.serve, sock=listener, limit=_REQUEST_MAX, **_KEEP_SOCKET
    )
    async with server:
        while True:
            service.called.clear()
            try:
                async with asyncio.timeout(IDLE_S):
                    await service.called.wait()
            except TimeoutError:
                return


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    asyncio.run(main(socket.socket(fileno=_SYSTEMDS_SOCKET)))
