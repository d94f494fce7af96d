"""When the control plane was last in contact with this host, and which tasks depend on that.

The files below `/run/twine/fence` outlive the agent: `.heard` with the moment of the last contact
(one number, seconds since boot), and one file per bound task. `agent.fence` reads only these files
and ends overdue tasks even if no agent runs. Files are replaced atomically. The event loop writes
them directly: the folder is in memory, and a request is answered only after its file exists.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from agent.api import TaskSpec
from agent.lease.core.lease import (
    LeaseMoment,
    TaskLease,
    answered_at,
    is_bound,
    name_answer,
    read_lease,
    read_numbers,
)
from agent.runtime.core.records import TaskRecord
from agent.runtime.journal import Replay
from wire.errors import Busy, Conflict, HostError, Unprocessable

CONTACT, ALIVE, EPOCH, BOOT = ".heard", ".alive", ".epoch", ".boot"
"""Names of files that belong to no task: a task id never begins with a dot."""
WRITE_EVERY_S = 1.0
"""The file may be this much older than the state in memory: an old file only ends tasks sooner."""
FENCE_SILENT_S = 5.0
"""After this time without an update of `.alive` the fence counts as stopped. It updates the file
twice a second."""
POLLS = 4
"""Number of polls within the shortest time that a bound task may run without contact."""


class Contact:
    """The lease of this host, in memory and in the files that the fence reads."""

    def __init__(self, folder: Path, boot_id: str, boottime_s: Callable[[], float]) -> None:
        """Load the files that an earlier agent of this boot left in `folder`."""
        self._folder, self._boot_id, self._boottime_s = folder, boot_id, boottime_s
        self._contact_s: float | None = None
        self._written_s: float | None = None
        self._epoch = self.request_epoch = 0
        """The latest term of a request or of a task's record; the latest term of a request."""
        self._leases: dict[str, TaskLease] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._read(BOOT) != boot_id:
            for path in folder.iterdir():
                path.unlink()
            self._write(BOOT, boot_id)
        self._load()

    def _load(self) -> None:
        numbers = read_numbers(self._read(CONTACT))
        self._contact_s = self._written_s = min(numbers[0], self.now_s()) if numbers else None
        self._epoch = self.request_epoch = int(next(iter(read_numbers(self._read(EPOCH))), 0))
        for path in self._folder.iterdir():
            if not path.name.startswith("."):
                self._leases[path.name] = read_lease(path.read_text(errors="replace"))

    def now_s(self) -> float:
        """Return seconds since boot, suspend included."""
        return self._boottime_s()

    def moment(self, task_id: str) -> LeaseMoment:
        """Return the current time and lease, for a decision about a task."""
        return LeaseMoment(time.time(), self.now_s(), self._contact_s, self._has_lapsed(task_id))

    def _has_lapsed(self, task_id: str) -> bool:
        lease = self._leases.get(task_id)
        return lease is not None and lease.kill_at_s is not None

    # Requests of the control plane.

    def answer(self) -> str:
        """Return the name of an answer that is sent now."""
        return name_answer(self._boot_id, self.now_s())

    def record_contact(self, name: str, epoch: int) -> None:
        """Record a request of the control plane. `name` is the newest answer that it received.

        A request of an older term is ignored: that control plane is no longer in charge. A task
        whose time ran out before this request stays cut off, even if no loop has ended it yet.
        """
        if epoch < self._epoch:
            return
        if epoch > self.request_epoch:
            # Written first: after a failed write the next request of this term writes it again.
            self._write(EPOCH, f"{epoch}\n")
            self._epoch = self.request_epoch = epoch
        now = self.now_s()
        at = answered_at(name, self._boot_id, now)
        if at is None or (self._contact_s is not None and at <= self._contact_s):
            return
        self._lapse_overdue(now)
        self._contact_s = at
        if self._leases and (self._written_s is None or at - self._written_s >= WRITE_EVERY_S):
            self._write_contact()

    def _lapse_overdue(self, now: float) -> None:
        for task_id, lease in self._leases.items():
            if lease.kill_at_s is None and now >= lease.ends_at(self._contact_s):
                self._put(task_id, lease.lapsed(self._contact_s))

    def wait_s(self, wanted_s: float) -> float:
        """Return how long a poll may wait so that the next one arrives within every lease."""
        present = [lease.after_s for lease in self._leases.values() if lease.kill_at_s is None]
        return min(wanted_s, min(present) / POLLS) if present else wanted_s

    def check_command(self, task_id: str, spec: TaskSpec, name: str | None, epoch: int) -> None:
        """Raise unless this request may start a bound task.

        `name` is the answer that the control plane received last, None for a request of a user on
        the host. A request that was delayed for too long is refused: meanwhile the control plane
        may have started the task on another host.
        """
        if not is_bound(spec):
            return
        now, after_s = self.now_s(), spec.disconnect.after_s
        if name is None:
            if self._contact_s is None or now - self._contact_s >= after_s:
                raise Unprocessable(
                    f"task {task_id} would be ended at once: this host had no contact with a "
                    f"control plane for {after_s:g} s",
                    hint='join a control plane, or set disconnect = { policy = "keep" }',
                )
            return
        if epoch < self._epoch:
            raise Conflict(
                f"task {task_id} is not changed: epoch {epoch} is older than "
                f"{self._epoch}, the term of the control plane now in charge"
            )
        at = answered_at(name, self._boot_id, now)
        if at is None or now - at >= after_s:
            raise Busy(
                f"task {task_id} is not changed: the request does not prove that the control "
                f"plane received an answer of this host in the last {after_s:g} s",
                hint="read the host's events, then try again",
            )

    @property
    def term(self) -> int:
        """Return the latest term of the control plane's requests and of the tasks' records."""
        return self._epoch

    def recompute_term(self, epochs: Iterable[int]) -> None:
        """Recompute the term from the requests and the remaining tasks.

        A term that came only from the record of a removed task no longer counts.
        """
        self._epoch = max([self.request_epoch, *epochs])

    # Files for the fence.

    def adopt(self, replay: Replay) -> None:
        """Make the files match the records; the file of an unreadable record does not change."""
        for record in replay.tasks.values():
            self.bind(record)
        self.recompute_term(record.spec.epoch for record in replay.tasks.values())
        for task_id in set(self._leases) - set(replay.tasks) - set(replay.unreadable):
            self.release(task_id)

    def bind(self, record: TaskRecord, *, renewed: bool = False) -> None:
        """Write the file that makes the fence watch a task, if its specification asks for it.

        With `renewed` a task whose time ran out before gets a new lease. Raises `HostError` if the
        file cannot be written.
        """
        task_id = record.task_id
        if not is_bound(record.spec):
            self.release(task_id)
            return
        lease, held = TaskLease.of(record.spec), self._leases.get(task_id)
        if held is not None and held.kill_at_s is not None and not renewed:
            return
        if record.cut_off:
            lease = lease.lapsed(self._contact_s)
        if held != lease:
            self._write_contact()
            self._put(task_id, lease)

    def release(self, task_id: str) -> None:
        """Remove a task's file, so that the fence no longer watches it."""
        if self._leases.pop(task_id, None) is not None:
            (self._folder / task_id).unlink(missing_ok=True)

    def start_deadline_s(self, task_id: str) -> float:
        """Return until when a bound task may be started, in seconds since boot.

        Raises `HostError` unless the fence runs: it must end the task if the agent cannot.
        """
        alive = read_numbers(self._read(ALIVE))
        if not alive or self.now_s() - alive[0] > FENCE_SILENT_S:
            raise HostError(
                "twine-fence.service does not run; without it no program would end the task "
                "if the agent died",
                hint="systemctl status twine-fence",
            )
        lease = self._leases[task_id]
        return 0.0 if self._has_lapsed(task_id) else lease.ends_at(self._contact_s)

    def _put(self, task_id: str, lease: TaskLease) -> None:
        self._write(task_id, lease.line())
        self._leases[task_id] = lease

    def _write_contact(self) -> None:
        if self._contact_s is not None and self._contact_s != self._written_s:
            self._write(CONTACT, f"{self._contact_s!r}\n")
            self._written_s = self._contact_s

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
