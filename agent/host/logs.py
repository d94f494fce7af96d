"""Reads the output of tasks from the host's journal."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from agent.machine import Lines, Processes
from agent.runtime.core.records import task_of
from agent.tasks.core.inside import inside_unit, step_unit
from wire.errors import ProgramError

_QUEUE_CHUNKS = 64
"""Chunks that wait for a slow reader; then the program that reads the journal waits, too."""


COPIER = "twine-output.service"
"""Writes entries of output from pipes; the unit is in `OBJECT_SYSTEMD_UNIT`."""
_DROPPED = ("_TRANSPORT=driver", "MESSAGE_ID=a596d6fe7bfa4994828e72309e95d61e")
"""journald's own message after it dropped lines of a unit that wrote too fast
(sd-messages.h, SD_MESSAGE_JOURNAL_DROPPED). No task can write as the driver."""
EVERYWHERE = "*"
"""All journal namespaces, because the entitlement of a removed task is unknown."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """Selects log lines of a unit in a journal namespace, optionally of one run."""

    unit: str
    namespace: str = EVERYWHERE
    invocation: str = ""
    """Empty: all runs."""


def journal_command(
    run: LoggedRun, *, follow: bool = False, since: float | None = None, tail: int | None = None
) -> list[str]:
    """Return the command that prints the output of a task's processes, and nothing else.

    This includes its init steps and its pre-stop hook, unless one run of the task is selected.
    Output from before the task had a namespace is in the host's own journal, which is also read
    (`+`).

    With `--follow` alone journalctl reads the boot id from /proc/sys, which the agent's unit does
    not have (`ProcSubset=pid`), and ends at once. With `--merge` it does not need the boot id.
    """
    at = run.namespace if run.namespace == EVERYWHERE else f"+{run.namespace}"
    command = ["journalctl", "--no-pager", "--quiet", "--output=cat", f"--namespace={at}"]
    if since is not None:
        command.append(f"--since=@{since:.6f}")
    if tail is not None:
        command.append(f"--lines={tail}")
    elif follow:
        command.append("--lines=all")
    if follow:
        command += ["--follow", "--merge"]
    ours = ["+", f"_SYSTEMD_UNIT={COPIER}", f"OBJECT_SYSTEMD_UNIT={run.unit}"]
    dropped = ["+", *_DROPPED, f"OBJECT_SYSTEMD_UNIT={run.unit}"]
    if run.invocation:
        one = f"_SYSTEMD_INVOCATION_ID={run.invocation}"
        of_run = f"OBJECT_SYSTEMD_INVOCATION_ID={run.invocation}"
        return [*command, f"_SYSTEMD_UNIT={run.unit}", one, *ours, of_run, *dropped, of_run]
    task = task_of(run.unit)
    units = (run.unit, step_unit(task), inside_unit(task, "pre-stop"))
    return [*command, *(f"_SYSTEMD_UNIT={name}" for name in units), *ours, *dropped]


class Logs:
    """Reads the journal with `journalctl`, one process per reader."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    async def read(
        self,
        run: LoggedRun,
        *,
        follow: bool = False,
        since: float | None = None,
        tail: int | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield the lines; closing the iterator ends the journalctl process."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[bytes | ProgramError | None] = asyncio.Queue(_QUEUE_CHUNKS)
        free_slots = threading.Semaphore(_QUEUE_CHUNKS)
        command = journal_command(run, follow=follow, since=since, tail=tail)
        lines = await self._started(command)
        closed = threading.Event()

        def pump() -> None:
            for line in _lines_and_failure(lines):
                free_slots.acquire()
                if closed.is_set():
                    return
                loop.call_soon_threadsafe(queue.put_nowait, line)

        thread = threading.Thread(target=pump, name=f"logs-{run.unit}", daemon=True)
        thread.start()
        try:
            while (line := await queue.get()) is not None:
                free_slots.release()
                if isinstance(line, ProgramError):
                    raise line  # a journal that cannot be read is not an empty one
                yield line
        finally:
            closed.set()
            free_slots.release()
            await asyncio.to_thread(lines.close)

    async def _started(self, command: list[str]) -> Lines:
        starting = asyncio.ensure_future(asyncio.to_thread(self._processes.lines, command))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_close)  # the process that is being started has no reader
            raise


def _lines_and_failure(lines: Lines) -> Iterator[bytes | ProgramError | None]:
    """Yield the lines, then the error if the program failed, and None at last."""
    try:
        yield from lines
    except ProgramError as e:
        yield e
    yield None


def _close(started: asyncio.Future[Lines]) -> None:
    if not started.cancelled() and started.exception() is None:
        started.result().close()
