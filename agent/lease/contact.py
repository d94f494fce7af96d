"""When the control plane was last in contact with this host, and which tasks depend on that.

Files below `/run/twine/fence` outlive the agent: `heard` (one number, seconds since boot)
and a file per bound task. `agent.fence` reads them and nothing else; it ends overdue tasks,
whether or not there is an agent. Files are replaced whole. They are written in the event loop:
the folder is in memory, and a request may not be answered before its file is there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from agent.api import TaskSpec
from agent.lease.core.lease import (
    Bond,
    LeaseMoment,
    answered_at,
    is_bound,
    name_answer,
    read_bond,
    read_numbers,
)
from agent.runtime.core.records import TaskRecord
from agent.runtime.journal import Replay
from wire.errors import Busy, Conflict, HostError, Unprocessable

log = logging.getLogger(__name__)

HEARD, ALIVE, EPOCH, BOOT = ".heard", ".alive", ".epoch", ".boot"
"""Files that belong to no task: ids of tasks do not begin with a dot."""
WRITE_EVERY_S = 1.0
"""Seconds by which the file may be older than the state in memory: the safe side."""
FENCE_SILENT_S = 5.0
"""Seconds without a sign of the fence, which gives one twice a second."""
POLLS = 4
"""Polls that fit into the time of the most impatient task."""


class Contact:
    """The lease of this host, in memory and where the fence sees it."""

    def __init__(self, folder: Path, boot_id: str, boottime_s: Callable[[], float]) -> None:
        """Load what an earlier agent of this boot left in `folder`."""
        self._folder, self._boot_id, self._boottime_s = folder, boot_id, boottime_s
        self._heard_s: float | None = None
        self._written_s: float | None = None
        self._epoch = self.said = 0
        """The latest term that counts; the latest term of a control plane's request."""
        self._bonds: dict[str, Bond] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._read(BOOT) != boot_id:
            for path in folder.iterdir():
                path.unlink()
            self._write(BOOT, boot_id)
        self._take_up()

    def _take_up(self) -> None:
        heard = read_numbers(self._read(HEARD))
        self._heard_s = self._written_s = min(heard[0], self.now_s()) if heard else None
        self._epoch = self.said = int(next(iter(read_numbers(self._read(EPOCH))), 0))
        for path in self._folder.iterdir():
            if not path.name.startswith("."):
                self._bonds[path.name] = read_bond(path.read_text(errors="replace"))

    def now_s(self) -> float:
        """Return seconds since boot, suspend included."""
        return self._boottime_s()

    def moment(self, task_id: str) -> LeaseMoment:
        """Return now, for a decision about a task."""
        return LeaseMoment(time.time(), self.now_s(), self._heard_s, self._has_lapsed(task_id))

    def _has_lapsed(self, task_id: str) -> bool:
        bond = self._bonds.get(task_id)
        return bond is not None and bond.kill_at_s is not None

    # Requests of the control plane.

    def answer(self) -> str:
        """Return the name of an answer that is given now."""
        return name_answer(self._boot_id, self.now_s())

    def heard(self, name: str, epoch: int) -> None:
        """Record a request of the control plane, which names the newest of our answers it got.

        One of an older term counts for nothing: that control plane decides no longer. A task
        whose time ran out before this request came stays cut off: it may not have been looked at.
        """
        if epoch < self._epoch:
            return
        if epoch > self.said:
            self._epoch = self.said = epoch
            self._write(EPOCH, f"{epoch}\n")
        now = self.now_s()
        at = answered_at(name, self._boot_id, now)
        if at is None or (self._heard_s is not None and at <= self._heard_s):
            return
        self._mark_lapsed(now)
        self._heard_s = at
        if self._bonds and (self._written_s is None or at - self._written_s >= WRITE_EVERY_S):
            self._write_heard()

    def _mark_lapsed(self, now: float) -> None:
        for task_id, bond in self._bonds.items():
            if bond.kill_at_s is None and now >= bond.ends_at(self._heard_s):
                self._put(task_id, bond.lapsed(self._heard_s))

    def wait_s(self, wanted_s: float) -> float:
        """Return how long a poll may wait, so that the next one comes in time."""
        bonds = [bond.after_s for bond in self._bonds.values() if bond.kill_at_s is None]
        return min(wanted_s, min(bonds) / POLLS) if bonds else wanted_s

    def check_command(self, task_id: str, spec: TaskSpec, name: str | None, epoch: int) -> None:
        """Raise unless a bound task may be started because of this request.

        `name` is the answer that the control plane received last, None where a user on the
        host asks. A request that was delayed for long is refused: meanwhile the task may have
        been given to another host.
        """
        if not is_bound(spec):
            return
        now, after_s = self.now_s(), spec.disconnect.after_s
        if name is None:
            if self._heard_s is None or now - self._heard_s >= after_s:
                raise Unprocessable(
                    f"task {task_id} would be ended at once: this host has not been heard by a "
                    f"control plane for {after_s:g} s",
                    hint='join one, or ask with disconnect = { policy = "keep" }',
                )
            return
        if epoch < self._epoch:
            raise Conflict(
                f"task {task_id} is not changed: epoch {epoch} is older than {self._epoch}, the "
                "term of the control plane now in charge"
            )
        at = answered_at(name, self._boot_id, now)
        if at is None or now - at >= after_s:
            raise Busy(
                f"task {task_id} is not changed: the request does not show that this host was "
                f"heard in the last {after_s:g} s",
                hint="ask for its events, then again",
            )

    @property
    def term(self) -> int:
        """Return the latest term: of the control plane's requests, or of a task's record."""
        return self._epoch

    def recount(self, epochs: Iterable[int]) -> None:
        """Recompute the term from the remaining tasks; one that no control plane sent may go."""
        self._epoch = max([self.said, *epochs])

    # Files for the fence.

    def adopt(self, replay: Replay) -> None:
        """Bring the files in line with the records, which are what was promised.

        A task whose record cannot be read stays as bound as it was.
        """
        for record in replay.tasks.values():
            self.bind(record)
        self.recount(record.spec.epoch for record in replay.tasks.values())
        for task_id in set(self._bonds) - set(replay.tasks) - set(replay.unreadable):
            self.release(task_id)

    def bind(self, record: TaskRecord, *, renewed: bool = False) -> None:
        """Have the fence watch a task if its specification asks for it; `renewed`: its time may
        have run out before. Raises `HostError` where that cannot be written down.
        """
        task_id = record.task_id
        if not is_bound(record.spec):
            self.release(task_id)
            return
        bond, held = Bond.of(record.spec), self._bonds.get(task_id)
        if held is not None and held.kill_at_s is not None and not renewed:
            return
        if record.cut_off:
            bond = bond.lapsed(self._heard_s)
        if held != bond:
            self._write_heard()
            self._put(task_id, bond)

    def release(self, task_id: str) -> None:
        """Let the fence forget a task."""
        if self._bonds.pop(task_id, None) is not None:
            (self._folder / task_id).unlink(missing_ok=True)

    def may_start(self, task_id: str) -> float:
        """Return until when a bound task may be started, in seconds since boot.

        Raises `HostError` unless the fence is there to end it in our place.
        """
        alive = read_numbers(self._read(ALIVE))
        if not alive or self.now_s() - alive[0] > FENCE_SILENT_S:
            raise HostError(
                "nothing would end the task if the agent died: twine-fence.service does not run",
                hint="systemctl status twine-fence",
            )
        bond = self._bonds[task_id]
        return 0.0 if self._has_lapsed(task_id) else bond.ends_at(self._heard_s)

    def _put(self, task_id: str, bond: Bond) -> None:
        self._write(task_id, bond.line())
        self._bonds[task_id] = bond

    def _write_heard(self) -> None:
        if self._heard_s is not None and self._heard_s != self._written_s:
            self._write(HEARD, f"{self._heard_s!r}\n")
            self._written_s = self._heard_s

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _write(self, name: str, text: str) -> None:
        path, new = self._folder / name, self._folder / f".new{name}"
        try:
            new.write_text(text)
            os.replace(new, path)
        except OSError as e:
            raise HostError(f"cannot write {path}: {e.strerror}", hint="is /run full?") from e
