"""The private networks of this host's tasks, and the firewall of the host.

The agent stores no networks: each answer of the network program has those of the kernel. A
starting agent installs the firewall for the known tasks, and removes networks of unknown tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from agent.api import TaskSpec
from agent.machine import NetworkAccess
from agent.netplan import NetAnswer, NetRequest, Site, TaskNet
from agent.network.core.addresses import plan
from agent.network.core.network import is_private
from agent.network.port_gates import PortGates
from agent.runtime.core.records import TaskRecord
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from wire.errors import HostError

log = logging.getLogger(__name__)

_LANE = "network"
RETRY_S = 10.0


class Networks(TaskStage):
    """Makes and removes networks, one after the other."""

    def __init__(self, network: NetworkAccess, lanes: Lanes, site: Callable[[str], Site]) -> None:
        """`site` makes the host's address plan from its address."""
        self._network, self._lanes, self._site = network, lanes, site
        self._wanted: dict[str, TaskNet] = {}
        self._known: dict[str, TaskNet] = {}
        self._expected: dict[str, TaskSpec] = {}
        self._unreadable: set[str] = set()
        self._turn = asyncio.Lock()
        self.gates = PortGates(network, lanes)
        """Gates for the ports of tasks in the host's network."""
        self.in_force = asyncio.Event()
        """Set once the firewall is in force."""
        self.problem = ""
        """Why the firewall is not in force, or what the host lacks."""

    def expect(self, specs: Mapping[str, TaskSpec], unreadable: Iterable[str]) -> None:
        """Set the tasks of the host, before any of them starts.

        Records of `unreadable` tasks cannot be read; their networks stay unchanged.
        """
        self._expected, self._unreadable = dict(specs), set(unreadable)
        self.gates.expect(specs, self._unreadable)

    async def adopt(self) -> None:
        """Put the firewall in force and remove leftovers; repeat until this succeeds."""
        while True:
            try:
                async with self._turn:
                    return await self._install_firewall()
            except HostError as e:
                self.problem = f"the firewall is not in force: {e}"
                log.warning("cannot put the firewall in force", extra={"why": str(e)})
            await asyncio.sleep(RETRY_S)

    async def _install_firewall(self) -> None:
        """Put the firewall in force once, before any other change.

        So no task loses a permission because another task starts.
        """
        if self.in_force.is_set():
            return
        site = await self._find_site()
        there = await self._ask(NetRequest(site=site))
        for task_id, spec in self._expected.items():
            if is_private(spec) and task_id in self._known:
                net = plan(site, task_id, spec, self._known.values())
                # A task keeps its address until its next start, even if the host's has changed.
                self._wanted[task_id] = replace(net, address6=self._known[task_id].address6)
        unknown = [
            net.task_id
            for net in there.networks
            if net.task_id not in self._wanted and net.task_id not in self._unreadable
        ]
        for task_id in unknown:
            log.warning("removing a network without a task", extra={"task": task_id})
        await self._ask(NetRequest(site=site, remove=unknown, allowed=list(self._wanted.values())))
        self.in_force.set()

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Make the private network of a task, or remove one that it no longer wants.

        Returns the task with its addresses, IPv6 first; without addresses in the host's network.
        """
        if is_private(task.spec):
            return replace(task, addresses=await self._connect(task.task_id, task.spec))
        await self.release(task.task_id)
        await self.gates.ensure(task.task_id, task.spec)
        return replace(task, addresses=[])

    async def _connect(self, task_id: str, spec: TaskSpec) -> list[str]:
        async with self._turn:
            await self._install_firewall()
            site = await self._find_site()
            net = plan(site, task_id, spec, self._known.values())
            others = {t: n for t, n in self._wanted.items() if t != task_id}
            allowed = [*others.values(), net]
            # The request installs the rules first: no packet passes before.
            await self._ask(NetRequest(site=site, ensure=net, allowed=allowed))
            if task_id not in self._known:
                raise HostError(f"the network of task {task_id} was created but does not exist")
            self._wanted[task_id] = net
            return [net.address6, net.address4]

    def changed(self, task: TaskRecord) -> None:
        """Restrict a task that has started to its ports."""
        self.gates.changed(task)

    async def release(self, task_id: str) -> None:
        """Remove the network of a task; does nothing if it has none."""
        self.gates.forget(task_id)
        async with self._turn:
            if task_id not in self._wanted and task_id not in self._known:
                return
            site = await self._find_site()
            left = [net for t, net in self._wanted.items() if t != task_id]
            await self._ask(NetRequest(site=site, remove=[task_id], allowed=left))
            self._wanted.pop(task_id, None)

    async def clear(self, *, namespace: str = "", veth: str = "") -> None:
        """Remove a namespace or link that belongs to no task; raises `HostError`."""
        async with self._turn:
            if namespace in self._wanted or namespace in self._unreadable:
                return
            site = await self._find_site()
            names, links = [namespace] if namespace else [], [veth] if veth else []
            await self._ask(NetRequest(site=site, remove=names, unlink=links))

    async def _find_site(self) -> Site:
        address = await self._lanes.run(_LANE, self._network.address)
        return self._site(address)

    async def _ask(self, ask: NetRequest) -> NetAnswer:
        answer = await self._lanes.run(_LANE, self._network.ask, ask)
        self._known = {net.task_id: net for net in answer.networks if net.address4}
        if ask.allowed is not None:
            self.problem = answer.lacks
        return answer


def site_with(
    prefix6: str, prefix4: str, own_address: str, agent_port: int
) -> Callable[[str], Site]:
    """Return a function that makes the site of this host from its detected address."""
    site = Site(prefix6=prefix6, prefix4=prefix4, host4="127.0.0.1", agent_port=agent_port)

    def made(found: str) -> Site:
        return replace(site, host4=own_address or found or site.host4)

    return made
