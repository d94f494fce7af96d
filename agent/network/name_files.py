"""Writes the files for name resolution into a task's root (core/resolver_files.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.api import TaskSpec
from agent.machine import HostAccess
from agent.machine.beneath import put_file
from agent.network.core.resolver_files import HostNames, Resolver, files_of, resolver_of
from agent.runtime.core.records import TaskRecord
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from wire.errors import HostError

log = logging.getLogger(__name__)

_UPSTREAM = "/run/systemd/resolve/resolv.conf"
"""systemd-resolved's list of the servers behind its stub (systemd-resolved.service(8))."""


class NameFiles(TaskStage):
    """Writes the files before each start, when nothing runs in the root."""

    def __init__(
        self,
        root_of: Callable[[str], Path],
        machine: HostAccess,
        lanes: Lanes,
        region: Resolver,
        name: str,
    ) -> None:
        """`root_of` returns the folder of a task's root, `region` is from the agent's
        configuration, `name` is the host's name.
        """
        self._root_of, self._machine, self._lanes = root_of, machine, lanes
        self._region, self._name = region, name

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Write the files of a task whose addresses are known, in the lane of btrfs."""
        await self._lanes.run("btrfs", self._write, task.task_id, task.spec, task.addresses)
        return task

    def _write(self, task_id: str, spec: TaskSpec, addresses: Sequence[str]) -> None:
        """Update the files in a task's root; raises `HostError`.

        Nothing runs in the root now, so no link changes meanwhile.
        """
        host = self._host()
        if not resolver_of(spec, host, self._region).servers and host.resolv_conf:
            why = "tasks cannot reach the host's name servers; see dns_servers"
            log.warning("a task has no name server", extra={"task": task_id, "why": why})
        root = str(self._root_of(task_id))
        for path, data in files_of(task_id, spec, addresses, host, self._region).items():
            try:
                put_file(root, path, data)
            except OSError as e:
                raise HostError(
                    f"cannot write /{path} into the root of task {task_id}: {e.strerror}",
                    hint="the image may have a folder there, or a file instead of /etc",
                ) from e

    def _host(self) -> HostNames:
        read = self._machine.host_text
        return HostNames(
            name=self._name,
            address=self._machine.network.address(),
            resolv_conf=read("/etc/resolv.conf"),
            upstream=read(_UPSTREAM),
            hosts=read("/etc/hosts"),
        )
