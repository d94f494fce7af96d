"""What tasks wrote, from the host's journal."""

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
"""Chunks in flight to a slow reader; then the program that reads the journal waits."""


COPIER = "twine-output.service"
"""Writes the entries of what came through pipes, of the unit in `OBJECT_SYSTEMD_UNIT`."""
_DROPPED = ("_TRANSPORT=driver", "MESSAGE_ID=a596d6fe7bfa4994828e72309e95d61e")
"""journald's own message where it dropped lines of a unit that wrote too fast
(sd-messages.h, SD_MESSAGE_JOURNAL_DROPPED). No task can write as the driver."""
EVERYWHERE = "*"
"""All journal namespaces: the owner of a task that is gone is not known."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """Selects log lines: of a unit in a namespace of the journal, optionally of one run."""

    unit: str
    namespace: str = EVERYWHERE
    invocation: str = ""
    """Empty: of all runs."""


def journal_command(
    run: LoggedRun, *, follow: bool = False, since: float | None = None, tail: int | None = None
) -> list[str]:
    """Return the command that prints what a task's processes wrote, and nothing else.

    Its init steps and its pre-stop hook are among them, unless one run of the task is asked for;
    journalctl takes any of the units. What was written before the task had a namespace is in the
    host's own journal, which is read, too (`+`).

    With `--follow` alone journalctl wants the boot id from /proc/sys, which the agent's unit does
    not show (`ProcSubset=pid`): it would end at once. With `--merge` it asks for no boot.
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
    beside = (step_unit(task), inside_unit(task, "pre-stop"))
    return [*command, *(f"_SYSTEMD_UNIT={name}" for name in (run.unit, *beside)), *ours, *dropped]


class Logs:
    """Reads the journal through `journalctl`, one process a reader."""

    def __init__(self, processes: Processes) -> None:
        """Start nothing yet."""
        self._processes = processes

    async def read(
        self,
        run: LoggedRun,
        *,
        follow: bool = False,
        since: float | None = None,
        tail: int | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield what was written; closing the iterator ends the program behind it."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[bytes | ProgramError | None] = asyncio.Queue(_QUEUE_CHUNKS)
        room = threading.Semaphore(_QUEUE_CHUNKS)
        command = journal_command(run, follow=follow, since=since, tail=tail)
        lines = await self._started(command)
        closed = threading.Event()

        def pump() -> None:
            for line in _to_the_end(lines):
                room.acquire()
                if closed.is_set():
                    return
                loop.call_soon_threadsafe(queue.put_nowait, line)

        thread = threading.Thread(target=pump, name=f"logs-{run.unit}", daemon=True)
        thread.start()
        try:
            while (line := await queue.get()) is not None:
                room.release()
                if isinstance(line, ProgramError):
                    raise line  # a journal that cannot be read is not an empty one
                yield line
        finally:
            closed.set()
            room.release()
            await asyncio.to_thread(lines.close)

    async def _started(self, command: list[str]) -> Lines:
        starting = asyncio.ensure_future(asyncio.to_thread(self._processes.lines, command))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_close)  # what is just being started has no reader
            raise


def _to_the_end(lines: Lines) -> Iterator[bytes | ProgramError | None]:
    """Yield the lines, how the program failed if it did, and None at last."""
    try:
        yield from lines
    except ProgramError as e:
        yield e
    yield None


def _close(started: asyncio.Future[Lines]) -> None:
    if not started.cancelled() and started.exception() is None:
        started.result().close()
