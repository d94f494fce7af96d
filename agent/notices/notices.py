"""Writes each task's notices to a file that it can read, and sends them to its hook.

    <run>/notices/.host.json            the latest notices from the control plane
    <run>/notices/<task>/notice.json    the notices of one task, replaced atomically
    <run>/notices/.told-<task>          the notices that its hook accepted last, for a new agent

These files are in memory (`/run`) and outlive the agent. After a reboot the control plane sends
the notices again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp
import msgspec

from agent.api import TaskState
from agent.api.notices import HostNotices, NoticeSettings
from agent.notices.core import FILE, NO_NOTICES, notice_binds, pause_s, text_for
from agent.runtime.core.records import TaskRecord
from agent.runtime.offload import Lanes
from agent.runtime.poll_timers import InterruptiblePause
from agent.runtime.stage import TaskStage
from wire.durable import swap
from wire.error_text import why
from wire.errors import Conflict, HostError

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""A task gets its notices at most this long after its start; a change is sent at once."""
_LANE = "notices"
_HOST = ".host.json"
LOOPBACK = "127.0.0.1"


class TaskNotices(TaskStage):
    """The only writer of notices, and the only caller of the hooks for them."""

    def __init__(self, folder: Path, lanes: Lanes) -> None:
        """Load the notices that an earlier agent of this boot received."""
        self._folder, self._lanes = folder, lanes
        self._pause = InterruptiblePause()
        self._calls: dict[str, tuple[bytes, asyncio.Task[None]]] = {}
        """Task → the notices that its hook is called with now, and the running call."""
        self._session: aiohttp.ClientSession | None = None
        try:
            self._held = msgspec.json.decode((folder / _HOST).read_bytes(), type=HostNotices)
        except (OSError, msgspec.DecodeError, UnicodeError):
            self._held = HostNotices()

    # -- a stage of the tasks

    def properties(self, task: TaskRecord, unit: dict[str, object]) -> dict[str, object]:
        """Return the unit with the folder of the task's notices, where it asks for them."""
        binds = notice_binds(task.task_id, task.spec, str(self._folder))
        known = unit.get("BindReadOnlyPaths")
        before = known if isinstance(known, list) else []
        return unit | {"BindReadOnlyPaths": [*before, *binds]} if binds else unit

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Write the task's file with the current notices before it starts."""
        if task.spec.life.notice is not None:
            await self._lanes.run(_LANE, self._write, task.task_id, text_for(task.spec, self._held))
        return task

    async def ended(self, task_id: str) -> None:
        """Stop calling the hook of an ended task; its next start gets all notices again."""
        self._stop_calling(task_id)
        await self._lanes.run(_LANE, self._accepted_file(task_id).unlink, missing_ok=True)

    async def release(self, task_id: str) -> None:
        """Remove the files of a task; missing files are no error."""
        await self.ended(task_id)
        await self._lanes.run(_LANE, shutil.rmtree, self._folder / task_id, ignore_errors=True)

    # -- requests of the control plane

    async def put(self, notices: HostNotices) -> HostNotices:
        """Replace all notices; raises `Conflict` if a later term has already sent notices."""
        if notices.epoch < self._held.epoch:
            raise Conflict(
                f"notices of term {notices.epoch} are old: term {self._held.epoch} is known"
            )
        if notices != self._held:
            await self._lanes.run(_LANE, self._keep, msgspec.json.encode(notices))
            self._held = notices
            self._pause.end()
        return self._held

    async def watch(self, tasks: Callable[[], Mapping[str, TaskRecord]]) -> None:
        """Keep files and hooks up to date until cancelled. `tasks` returns all tasks."""
        try:
            while True:
                await self.update(tasks())
                await self._pause.until_round(CHECK_S)
        finally:
            for task_id in [*self._calls]:
                self._stop_calling(task_id)
            if self._session is not None:
                await self._session.close()

    async def update(self, tasks: Mapping[str, TaskRecord]) -> None:
        """Update the files of all tasks once, and call the hooks that have new notices."""
        run = {name: task for name, task in tasks.items() if task.state is TaskState.RUNNING}
        for task_id in [name for name in self._calls if name not in run]:
            self._stop_calling(task_id)
        for task in run.values():
            if (request := task.spec.life.notice) is not None:
                try:
                    await self._update(task, request)
                except HostError as e:  # the notices of all other tasks are still delivered
                    log.warning("a notice is not delivered", extra={"why": str(e)})

    async def _update(self, task: TaskRecord, request: NoticeSettings) -> None:
        text = text_for(task.spec, self._held)
        await self._lanes.run(_LANE, self._write, task.task_id, text)
        if request.port is not None:
            await self._notify(task, request, text)

    async def _notify(self, task: TaskRecord, request: NoticeSettings, text: bytes) -> None:
        """Start calling a task's hook with notices that it has not accepted yet."""
        known = self._calls.get(task.task_id)
        if known is not None and known[0] == text:
            return  # the hook is being called with this text, or has accepted it
        accepted = await self._lanes.run(_LANE, self._accepted, task.task_id)
        self._stop_calling(task.task_id)
        if accepted != text:
            at = task.addresses[0] if task.addresses else LOOPBACK
            call = self._call(task.task_id, request, at, text)
            self._calls[task.task_id] = text, asyncio.create_task(call)

    def _stop_calling(self, task_id: str) -> None:
        known = self._calls.pop(task_id, None)
        if known is not None:
            known[1].cancel()

    # -- the hook

    async def _call(self, task_id: str, request: NoticeSettings, at: str, text: bytes) -> None:
        """Call a task's hook until it accepts the notices."""
        failures = 0
        while problem := await self._post(request, at, text):
            failures += 1
            if failures in (1, 10):
                log.warning("task %s: its notice was not accepted: %s", task_id, problem)
            await asyncio.sleep(pause_s(failures))
        log.info("task %s accepted its notice", task_id)
        try:
            await self._lanes.run(_LANE, swap, self._accepted_file(task_id), text, 0o600)
        except OSError as e:
            log.warning(
                "a restarted agent will send task %s its notice again: that it was accepted "
                "cannot be stored: %s",
                task_id,
                e.strerror,
            )

    async def _post(self, request: NoticeSettings, at: str, text: bytes) -> str:
        """Return why the hook did not accept the notices, empty if it did."""
        if self._session is None:
            # No limits for all hooks together: a hook that hangs must not delay the others.
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None)
            )
        host = f"[{at}]" if ":" in at else at
        try:
            async with (
                asyncio.timeout(request.timeout_s),
                self._session.post(
                    f"http://{host}:{request.port}{request.path}",
                    data=text,
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                ) as response,
            ):
                return "" if 200 <= response.status < 300 else f"HTTP {response.status}"
        except TimeoutError:
            return f"no answer within {request.timeout_s:g} s"
        except (OSError, aiohttp.ClientError) as e:
            return why(e)

    # -- files, in their lane

    def _accepted_file(self, task_id: str) -> Path:
        return self._folder / f".told-{task_id}"

    def _accepted(self, task_id: str) -> bytes:
        """Return the notices that a hook accepted last; `NO_NOTICES` before the first."""
        try:
            return self._accepted_file(task_id).read_bytes()
        except FileNotFoundError:
            return NO_NOTICES
        except OSError as e:
            reason = f"cannot read which notices task {task_id} has accepted: {e.strerror}"
            raise HostError(reason) from e

    def _keep(self, data: bytes) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            swap(self._folder / _HOST, data, 0o600)
        except OSError as e:
            raise HostError(f"notices cannot be stored: {e.strerror}", hint="is /run full?") from e

    def _write(self, task_id: str, text: bytes) -> None:
        path = self._folder / task_id / FILE
        try:
            if path.exists() and path.read_bytes() == text:
                return
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(exist_ok=True)
            path.parent.chmod(0o755)
            swap(path, text, 0o444)
        except OSError as e:
            reason = f"the notices of task {task_id} cannot be stored: {e.strerror}"
            raise HostError(reason, hint="is /run full?") from e
