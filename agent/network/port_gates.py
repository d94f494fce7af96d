"""Restricts tasks in the host's network to their ports, by a BPF gate for each set of ports.

A gate must exist before a unit that names it starts, because systemd ignores a missing one (ADR
0112). Running tasks get the gate a second time, because `daemon-reload` removes systemd's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from agent.api import TaskSpec, TaskState
from agent.machine import NetworkAccess
from agent.netplan import Gates, NetRequest
from agent.network.core.network import gate_for, is_private, ports_of
from agent.runtime.core.records import TaskRecord
from agent.runtime.core.slices import cgroup_of
from agent.runtime.offload import Lanes
from wire.errors import HostError

log = logging.getLogger(__name__)

_LANE = "ports"
SETTLE_S = 2.0
"""Seconds to wait for more starting tasks, so that one request serves all of them."""
RETRY_S = 10.0


class PortGates:
    """Makes the gates of this host's tasks, and attaches them to running tasks."""

    def __init__(self, network: NetworkAccess, lanes: Lanes) -> None:
        self._network, self._lanes = network, lanes
        self._specs: dict[str, TaskSpec] = {}
        self._runs: dict[str, str] = {}
        """Task → invocation id of the run that has, or will get, its gate."""
        self._pending: set[str] = set()
        self._unreadable = False
        self._wake = asyncio.Event()

    def expect(self, specs: Mapping[str, TaskSpec], unreadable: Iterable[str]) -> None:
        """Set the tasks on the host, before any of them starts; running ones get their gates again.

        The gates of `unreadable` tasks are unknown, so while there are any, no gate is removed.
        """
        self._unreadable = bool(list(unreadable))
        self._specs = {t: spec for t, spec in specs.items() if not is_private(spec)}
        self._pending = set(self._specs)
        if self._pending:
            self._wake.set()

    async def ensure(self, task_id: str, spec: TaskSpec) -> None:
        """Make the gate that a task's unit names. Raises `HostError`."""
        self._specs[task_id] = spec
        name = gate_for(spec)
        if self._network.has_gate(name):  # reads a file system in memory, so does not block
            return
        await self._ask({})
        if not self._network.has_gate(name):
            raise HostError(f"the port program of task {task_id} was created but does not exist")

    def changed(self, task: TaskRecord) -> None:
        """Record a changed task state: a task that has started will get its gate."""
        if task.state is not TaskState.RUNNING or is_private(task.spec):
            return
        if self._runs.get(task.task_id) != task.invocation_id:
            self._specs[task.task_id] = task.spec
            self._runs[task.task_id] = task.invocation_id
            self._pending.add(task.task_id)
            self._wake.set()

    def forget(self, task_id: str) -> None:
        """Forget a removed task; the next request removes its gate."""
        for known in (self._specs, self._runs):
            known.pop(task_id, None)
        self._pending.discard(task_id)

    async def watch(self) -> None:
        """Attach gates to the cgroups of starting tasks until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(SETTLE_S)
            self._wake.clear()
            tasks = {t: self._specs[t] for t in sorted(self._pending) if t in self._specs}
            self._pending -= tasks.keys()
            if not tasks:
                continue
            try:
                await self._ask({cgroup_of(t, spec): ports_of(spec) for t, spec in tasks.items()})
            except HostError as e:
                log.warning("cannot restrict tasks to their ports", extra={"why": str(e)})
                self._pending |= tasks.keys() & self._specs.keys()
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _ask(self, hold: dict[str, list[int]]) -> None:
        wanted = sorted({tuple(ports_of(spec)) for spec in self._specs.values()} | {()})
        gates = Gates(wanted=[list(p) for p in wanted], alone=not self._unreadable, hold=hold)
        await self._lanes.run(_LANE, self._network.ask, NetRequest(gates=gates))
