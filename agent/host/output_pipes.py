"""The pipes that tasks write to and `twine-output.service` reads (docs/adr/0196)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

from agent.api import Stdout, TaskSpec
from agent.runtime.core.records import TaskRecord, has_own_init
from agent.runtime.offload import Lanes
from agent.runtime.output_copier import WAKE, totals
from agent.runtime.stage import TaskStage
from wire.errors import HostError

log = logging.getLogger(__name__)

_MODE = 0o622
"""A task opens its pipe by name for writing, as a user other than root. No task can enter the
folder."""


def is_piped(spec: TaskSpec) -> bool:
    """Return whether a task's output goes through a pipe, which is the default."""
    return spec.stdout is not Stdout.JOURNAL and not has_own_init(spec)


class OutputPipes(TaskStage):
    """Makes a pipe for each task before it starts."""

    def __init__(self, run_dir: Path, lanes: Lanes) -> None:
        """Pipes are below `run_dir`, which is cleared at each boot."""
        self._folder, self._lanes = run_dir / "output", lanes

    def lost(self) -> list[int]:
        """Return the lines of tasks lost since boot: above the rate, and refused by the journal."""
        return totals(self._folder)

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Make the pipe; without the service that reads it, the output goes to a socket."""
        if is_piped(task.spec):
            await self._lanes.run("files", self._make, task)
        return task

    def properties(self, task: TaskRecord, unit: dict[str, object]) -> dict[str, object]:
        """Return the unit with its output set to the pipe, if there is one."""
        path = self._path(task)
        if not is_piped(task.spec) or not path.exists():
            return unit
        return {**unit, "StandardOutputFile": str(path), "StandardErrorFile": str(path)}

    async def ended(self, task_id: str) -> None:
        """Remove the pipe; the service still reads its remaining content."""
        await self._lanes.run("files", self._remove, task_id)

    async def release(self, task_id: str) -> None:
        """Remove the pipe."""
        await self.ended(task_id)

    def _path(self, task: TaskRecord) -> Path:
        return self._folder / task.spec.entitlement / task.task_id

    def _make(self, task: TaskRecord) -> None:
        path = self._path(task)
        is_new = not path.exists()
        if is_new and not (self._folder / WAKE).exists():
            log.warning(
                "no pipe for the output of task %s: twine-output.service is missing", task.task_id
            )
            return
        try:
            if is_new:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                os.mkfifo(path)
            path.chmod(_MODE)  # each time: an earlier agent may have died before it
        except OSError as e:
            raise HostError(
                f"cannot make the pipe for the output of task {task.task_id}: {e.strerror}",
                hint=f"does {self._folder} exist? systemctl status twine-output.service",
            ) from e
        if is_new:
            self._wake()

    def _remove(self, task_id: str) -> None:
        pipes = list(self._folder.glob(f"*/{task_id}"))
        for path in pipes:
            path.unlink(missing_ok=True)
        if pipes:
            self._wake()

    def _wake(self) -> None:
        """Wake the copier service, which scans for pipes. A stopped one scans when it starts."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.setblocking(False)
            s.sendto(b"x", str(self._folder / WAKE))
