"""The identities of this host's tasks: made before a start, renewed, and removed with the task.

    <run>/identities/<task>/identity.pem    key and certificates, replaced in one step
    <run>/identities/<task>/bundle.pem      the trusted authorities
    <run>/identities/<task>.json            when the next one is due; no secret

All files are in memory (`/run`), below a folder that only root may enter. The folder of a task is
mounted read-only into the units of that task only (docs/adr/0105).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from agent.api import TaskSpec
from agent.identity.core import (
    BUNDLE,
    IDENTITY,
    RENEW_FROM,
    RENEW_TO,
    StoredIdentity,
    identity_properties,
    is_due,
    is_usable,
)
from agent.identity.identity import HostIdentity
from agent.runtime.core.records import TaskRecord, unit_of
from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from agent.runtime.poll_timers import pause
from agent.runtime.stage import TaskStage
from wire.durable import swap
from wire.errors import HostError, TwineError, Unreachable

log = logging.getLogger(__name__)

CHECK_S = 10.0
"""Seconds between two checks for due renewals, removed tasks and new authorities."""
_RETRY_S = 60.0
"""Pause after a renewal that failed."""
_LANE = "identities"


class TaskIdentities(TaskStage):
    """The only writer of tasks' keys and certificates."""

    def __init__(
        self,
        folder: Path,
        certifier: HostIdentity,
        lanes: Lanes,
        events: HostEvents,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Identities are below `folder`, which must be in memory; `certifier` signs them."""
        self._folder = folder
        self._certifier = certifier
        self._lanes = lanes
        self._events = events
        self._clock = clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._not_before: dict[str, float] = {}
        """Task → when to repeat a failed renewal."""
        self._is_empty = False
        """Whether the folder was found empty; no other component writes to it."""
        self._warned: set[str] = set()

    def properties(self, task: TaskRecord, unit: dict[str, object]) -> dict[str, object]:
        """Return the unit with the folder of the task's identity, if it has one."""
        return unit | identity_properties(task.task_id, task.spec, str(self._folder))

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Make or renew the identity of a task before it starts.

        Raises `HostError` if this fails and the present identity is not valid for `USABLE_S`.
        """
        if task.spec.identity:
            await self._ensure(task.task_id, task.spec)
        return task

    async def _ensure(self, task_id: str, spec: TaskSpec) -> None:
        async with self._lock(task_id):
            held = await self._lanes.run(_LANE, self._find, task_id)
            if not is_due(held, spec, self._clock()):
                return await self._lanes.run(_LANE, self._refresh, task_id)
            try:
                await self._renew(task_id, spec)
            except TwineError as e:
                if not is_usable(held, spec, self._clock()):
                    raise HostError(
                        f"{unit_of(task_id)} is not started: it has no identity: {e}",
                        hint=(
                            "the control plane issues one only to the host on which it "
                            "placed the task"
                        ),
                    ) from e
                log.warning("task %s keeps its present identity: %s", task_id, e)
                await self._lanes.run(_LANE, self._refresh, task_id)

    async def release(self, task_id: str) -> None:
        """Remove the identity of a task; a missing one is no error."""
        async with self._lock(task_id):
            await self._lanes.run(_LANE, self._remove, task_id)

    async def watch(self, wanted: Callable[[], Mapping[str, TaskSpec]]) -> None:
        """Renew the identities of wanted tasks until cancelled; remove those of no task."""
        while True:
            await pause(CHECK_S)
            try:
                await self.maintain(wanted)
            except (TwineError, OSError) as e:
                log.warning("cannot maintain the identities of tasks", extra={"why": str(e)})

    async def maintain(self, wanted: Callable[[], Mapping[str, TaskSpec]]) -> None:
        """Renew and remove identities once. `wanted` returns the tasks that must run."""
        if self._is_empty:
            return
        for task_id in await self._lanes.run(_LANE, self._known):
            if not _has_identity(wanted(), task_id):
                await self.release(task_id)
        for task_id, spec in wanted().items():
            if not spec.identity:
                continue
            async with self._lock(task_id):
                held = await self._lanes.run(_LANE, self._find, task_id)
                if held is None or not _has_identity(wanted(), task_id):
                    continue  # never started, or just ended
                await self._lanes.run(_LANE, self._refresh, task_id)
                now = self._clock()
                if not is_due(held, spec, now) or now < self._not_before.get(task_id, 0.0):
                    continue
                try:
                    await self._renew(task_id, spec)
                except TwineError as e:
                    self._record_failure(task_id, held, e)
                    if isinstance(e, Unreachable):
                        return  # requests for other tasks would fail, too

    def _record_failure(self, task_id: str, held: StoredIdentity, error: TwineError) -> None:
        """Record a failed renewal; add an event only if the identity ends soon."""
        now = self._clock()
        self._not_before[task_id] = now + _RETRY_S * random.uniform(0.5, 1.5)
        log.warning("task %s: its identity cannot be renewed yet: %s", task_id, error)
        left_s = held.not_after - now
        if left_s < now - held.renew_at and task_id not in self._warned:
            self._warned.add(task_id)
            event = f"its identity ends in {max(0.0, left_s) / 3600:.1f} h and is not renewed"
            self._events.add("agent", task_id, f"{event}: {error}")

    async def _renew(self, task_id: str, spec: TaskSpec) -> None:
        key_pem, csr_pem = await self._lanes.run(_LANE, _new_key, task_id)
        answer = await self._certifier.certify_task(task_id, csr_pem)
        now = self._clock()
        share = random.uniform(RENEW_FROM, RENEW_TO)
        held = StoredIdentity(
            entitlement=spec.entitlement,
            job=spec.job,
            identity=answer.identity,
            not_after=answer.not_after,
            renew_at=now + max(0.0, answer.not_after - now) * share,
        )
        await self._lanes.run(_LANE, self._keep, task_id, key_pem + answer.certificate_pem, held)
        self._not_before.pop(task_id, None)
        self._warned.discard(task_id)
        fields = {"task": task_id, "identity": held.identity, "not_after": held.not_after}
        log.info("task %s has a new identity", task_id, extra=fields)

    # -- files, in their lane

    def _lock(self, task_id: str) -> asyncio.Lock:
        return self._locks.setdefault(task_id, asyncio.Lock())

    def _known(self) -> list[str]:
        names = {path.stem for path in self._folder.iterdir()} if self._folder.is_dir() else set()
        self._is_empty = not names
        return sorted(name for name in names if not name.startswith("."))

    def _find(self, task_id: str) -> StoredIdentity | None:
        try:
            data = (self._folder / f"{task_id}.json").read_bytes()
            held = msgspec.json.decode(data, type=StoredIdentity)
        except (OSError, msgspec.DecodeError, UnicodeError):
            return None
        return held if (self._folder / task_id / IDENTITY).exists() else None

    def _keep(self, task_id: str, pem: str, held: StoredIdentity) -> None:
        self._is_empty = False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            (self._folder / task_id).mkdir(exist_ok=True)
            (self._folder / task_id).chmod(0o755)
            self._refresh(task_id)
            swap(self._folder / task_id / IDENTITY, pem.encode(), 0o444)
            swap(self._folder / f"{task_id}.json", msgspec.json.encode(held), 0o600)
        except OSError as e:
            raise HostError(
                f"the identity of task {task_id} cannot be stored: {e.strerror}",
                hint="is /run full?",
            ) from e

    def _refresh(self, task_id: str) -> None:
        """Write the authorities that the host trusts now for a task. Raises `HostError`."""
        path, pem = self._folder / task_id / BUNDLE, self._certifier.trusted().encode()
        try:
            with contextlib.suppress(FileNotFoundError):
                if path.read_bytes() == pem:
                    return
            swap(path, pem, 0o444)
        except OSError as e:
            reason = f"the trusted authorities of task {task_id} cannot be stored: {e.strerror}"
            raise HostError(reason, hint="is /run full?") from e

    def _remove(self, task_id: str) -> None:
        shutil.rmtree(self._folder / task_id, ignore_errors=True)
        (self._folder / f"{task_id}.json").unlink(missing_ok=True)
        self._not_before.pop(task_id, None)
        self._warned.discard(task_id)


def _has_identity(wanted: Mapping[str, TaskSpec], task_id: str) -> bool:
    return task_id in wanted and wanted[task_id].identity


def _new_key(task_id: str) -> tuple[str, str]:
    from agent.identity import keys

    key_pem = keys.new_key()
    return key_pem, keys.signing_request(key_pem, task_id)
