"""Sessions: interactive commands inside running tasks."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agent.api import TaskSpec
from agent.api.exec import STDIN, TAKEN, ExecEnd, ExecWord, Window, taken_frame
from agent.api.life import Command as HookCommand
from agent.machine import UnitState
from agent.machine.terminals import Streams
from agent.runtime.core.records import TaskRecord
from agent.runtime.units import Units
from agent.tasks.core.exits import STEPS
from agent.tasks.core.inside import InsideCommand, inside_unit, took_too_much
from agent.tasks.inside import Inside
from wire.duplex import Duplex, Frame
from wire.errors import Busy, InvalidInput, SystemdError, TwineError
from wire.flow import Inflow, Outflow
from wire.routes import decode_json
from wire.server import Call

PER_TASK, PER_HOST = 8, 32
"""Sessions at once. Each is a unit, a terminal and up to four descriptors."""
IDLE_S = 900.0
"""Seconds without data in either direction after which a session ends."""
LONGEST_S = 8 * 3600.0
_START_S = 60.0
OOM = "oom-kill"
"""systemd's word for the end of a unit after the kernel killed one of its processes for memory."""
_DRAIN_S = 0.25
"""Once a command has ended nothing more is waited for after so long without a word of it: another
process may hold its output. What it wrote is sent, however slowly the client reads it.
"""


@dataclass(frozen=True, slots=True)
class SessionWish:
    """What is to be run, and how."""

    argv: list[str]
    tty: bool
    window: Window
    term: str = "xterm"


def wish_of(call: Call) -> SessionWish:
    """Return what a request asks for."""
    text = call.query.get("command", "")
    argv = decode_json(text.encode(), HookCommand, "parameter command, a list of texts,")
    rows, columns = call.number("rows", 24), call.number("columns", 80)
    size = {"rows": int(rows or 24), "columns": int(columns or 80)}
    window = decode_json(msgspec.json.encode(size), Window, "the window")
    term = call.query.get("term", "xterm")
    if not re.fullmatch(r"[A-Za-z0-9._+-]{1,64}", term):
        raise InvalidInput(f"parameter term is no name of a terminal: {term[:80]!r}")
    assert isinstance(window, Window)
    return SessionWish(argv, call.flag("tty"), window, term)


class Sessions:
    """Runs commands for connected clients; no session outlives its connection."""

    def __init__(self, inside: Inside, units: Units, folder: Path, idle_s: float = IDLE_S) -> None:
        """Make pipes below `folder`; what an earlier agent left there is of no use."""
        self._inside, self._units, self._folder = inside, units, folder
        self._idle_s = idle_s
        self._of: Counter[str] = Counter()

    async def tidy(self) -> None:
        """Remove what sessions of an earlier agent left: no caller is connected to them."""
        for state in await self._units.all(inside_unit("*", "exec-*")):
            await self._units.stop(state.unit)
        if self._folder.exists():
            shutil.rmtree(self._folder)

    @contextmanager
    def _counted(self, task_id: str) -> Iterator[None]:
        if self._of[task_id] >= PER_TASK or self._of.total() >= PER_HOST:
            raise Busy(
                f"{self._of[task_id]} sessions run in task {task_id}, of {self._of.total()} on"
                " this host",
                hint=f"end some of them: at most {PER_TASK} of a task, {PER_HOST} of a host",
            )
        self._of[task_id] += 1
        try:
            yield
        finally:
            self._of[task_id] -= 1

    async def talk(self, task: TaskRecord, wish: SessionWish, duplex: Duplex) -> None:
        """Run a command to its end, or to that of the connection."""
        try:
            with self._counted(task.task_id):
                end = await self._session(task, wish, duplex)
        except TwineError as e:
            end = ExecEnd(problem=e.problem())
        await duplex.send(msgspec.json.encode(end).decode())

    async def _session(self, task: TaskRecord, wish: SessionWish, duplex: Duplex) -> ExecEnd:
        name = f"exec-{secrets.token_hex(4)}"
        unit = inside_unit(task.task_id, name)
        streams = Streams.terminal() if wish.tty else Streams.pipes(self._folder / name)
        streams.resize(wish.window.rows, wish.window.columns)
        command = InsideCommand(
            tuple(wish.argv),
            LONGEST_S,
            terminal=streams.path,
            pipes=streams.paths,
            environment=(f"TERM={wish.term}",) if wish.tty else (),
        )
        session = _Session(self._units, unit, streams, duplex, self._idle_s)
        try:
            await self._units.start(unit, self._inside.properties(task, unit, command))
            return _told_why(await session.run(), task.spec)
        finally:
            streams.close()
            with contextlib.suppress(TwineError):
                await asyncio.shield(self._units.stop(unit))


class _Session:
    def __init__(
        self, units: Units, unit: str, streams: Streams, duplex: Duplex, idle_s: float
    ) -> None:
        self._units, self._unit, self._streams, self._duplex = units, unit, streams, duplex
        self._idle_s = idle_s
        self._said = asyncio.get_running_loop().time()
        self._input, self._output = Inflow(), Outflow()
        self._in_hand = 0
        """Pieces of output that were read and are not yet sent."""

    async def run(self) -> ExecEnd:
        hearing = asyncio.ensure_future(self._hear())
        telling = [asyncio.ensure_future(self._tell(s)) for s in self._streams.outputs]
        feeding = asyncio.ensure_future(self._feed())
        ending = asyncio.ensure_future(self._ended())
        idling = asyncio.ensure_future(self._idle())
        try:
            await asyncio.wait({hearing, ending, idling}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                hearing.result() if hearing.done() else None
                why = (
                    "the client does not listen any more"
                    if hearing.done()
                    else "nothing was said for long"
                )
                return ExecEnd(problem=Busy(f"the session was ended: {why}").problem())
            end = ending.result()
            self._streams.opened()
            await self._told(telling, {hearing, idling})
            return _end_of(end)
        finally:
            running = [hearing, feeding, ending, idling, *telling]
            for future in running:
                future.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _told(
        self, telling: Sequence[asyncio.Future[None]], over: set[asyncio.Future[None]]
    ) -> None:
        """Return once the caller has all output of the command, or has gone."""
        left = set(telling)
        while left and not any(future.done() for future in over):
            said = self._said
            _, left = await asyncio.wait(left, timeout=_DRAIN_S)
            if not self._in_hand and self._said == said:
                return

    async def _hear(self) -> None:
        async for frame in self._duplex.frames():
            self._said = asyncio.get_running_loop().time()
            await self._take(frame)

    async def _take(self, frame: Frame) -> None:
        if isinstance(frame, bytes):
            if frame[:1] == bytes([STDIN]):
                await self._input.put(frame[1:])
            elif frame[:1] == bytes([TAKEN]):
                if not self._output.is_counted:
                    await self._duplex.send(taken_frame(self._input.took(0)))
                self._output.taken(int.from_bytes(frame[1:], "big"))
            return
        word = decode_json(frame.encode(), ExecWord, "a word of a session")
        assert isinstance(word, ExecWord)
        if word.window is not None:
            self._streams.resize(word.window.rows, word.window.columns)
        if word.end_of_input:
            await self._input.put(None)
        if word.signal is not None:
            await self._units.kill(self._unit, word.signal)

    async def _feed(self) -> None:
        """Pass input to the command as it reads; report the bytes taken to a client that counts."""
        while (data := await self._input.get()) is not None:
            await self._streams.write(data)
            total = self._input.took(len(data))
            if self._output.is_counted:
                await self._duplex.send(taken_frame(total))
        await self._streams.end_input()

    async def _tell(self, stream: int) -> None:
        while data := await self._streams.read(stream):
            self._said = asyncio.get_running_loop().time()
            self._in_hand += 1
            await self._output.room(len(data))
            await self._duplex.send(bytes([stream]) + data)
            self._in_hand -= 1

    async def _idle(self) -> None:
        clock = asyncio.get_running_loop().time
        while (left_s := self._said + self._idle_s - clock()) > 0:
            await asyncio.sleep(left_s)

    async def _ended(self) -> UnitState:
        end = await self._units.until_end(self._unit, self._streams.opened, start_s=_START_S)
        if end is None:
            raise Busy(
                "the command has ended with its task, which was stopped, restarted or replaced",
                hint="look how the task is (show), then try again; see journalctl -u " + self._unit,
            )
        return end


def _told_why(end: ExecEnd, spec: TaskSpec) -> ExecEnd:
    """Return how a command ended with the reason, where the kernel ended it for its memory."""
    if end.detail != OOM:
        return end
    return replace(
        end, detail=f"the command was ended: {took_too_much(spec.limits.memory_max_bytes)}"
    )


def _end_of(end: UnitState) -> ExecEnd:
    if end.result == "timeout":
        return ExecEnd(problem=Busy(f"the command ran for {LONGEST_S:g} s and was ended").problem())
    if end.exit_code is None and end.exit_signal is None:
        return ExecEnd(problem=SystemdError(f"it could not be run: {end.result}").problem())
    detail = OOM if end.result == OOM else ""
    if end.exit_code in STEPS:
        detail = f"exit code {end.exit_code} is systemd's where a command never started: "
        detail += STEPS[end.exit_code]
    return ExecEnd(code=end.exit_code, signal=end.exit_signal, detail=detail)
