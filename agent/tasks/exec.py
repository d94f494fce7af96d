"""Sessions: commands inside running tasks, connected to a client."""

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

from agent.api import TaskSpec
from agent.api.exec import STDIN, TAKEN, ExecEnd, ExecWord, Window, taken_frame
from agent.api.life import Command as HookCommand
from agent.machine import UnitState
from agent.machine.terminals import Streams
from agent.runtime.core.records import TaskRecord
from agent.runtime.units import Units
from agent.tasks.core.exits import OOM_KILL, STEPS
from agent.tasks.core.inside import InsideCommand, describe_memory_kill, inside_unit
from agent.tasks.inside import Inside
from wire.duplex import Duplex, Frame
from wire.errors import Busy, InvalidInput, SystemdError, TwineError
from wire.flow import ReceiveQueue, SendWindow
from wire.routes import decode_json
from wire.server import Call

PER_TASK, PER_HOST = 8, 32
"""Maximum number of sessions of a task, and of the host. Each takes a unit, a terminal and up to
four descriptors."""
IDLE_S = 900.0
"""A session ends after this time without data in either direction."""
LONGEST_S = 8 * 3600.0
"""Longest time that a command may run."""
_START_S = 60.0
_DRAIN_S = 0.25
"""Seconds without output after which the agent stops reading, once the command has ended: another
process may keep the pipe open. All output that was read is sent, even to a slow client."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The command of a session, and how to run it."""

    argv: list[str]
    tty: bool
    window: Window
    term: str = "xterm"


def request_of(call: Call) -> SessionRequest:
    """Return the session that an API call requests."""
    text = call.query.get("command", "")
    argv = decode_json(text.encode(), HookCommand, "parameter command, a list of texts,")
    size = {"rows": call.whole("rows") or 24, "columns": call.whole("columns") or 80}
    window = decode_json(msgspec.json.encode(size), Window, "the window")
    term = call.query.get("term", "xterm")
    if not re.fullmatch(r"[A-Za-z0-9._+-]{1,64}", term):
        raise InvalidInput(f"parameter term is not the name of a terminal: {term[:80]!r}")
    assert isinstance(window, Window)
    return SessionRequest(argv, call.flag("tty"), window, term)


class Sessions:
    """Runs commands for connected clients; no session outlives its connection."""

    def __init__(self, inside: Inside, units: Units, folder: Path, idle_s: float = IDLE_S) -> None:
        """Create pipes below `folder`, which `tidy` empties first."""
        self._inside, self._units, self._folder = inside, units, folder
        self._idle_s = idle_s
        self._sessions_of: Counter[str] = Counter()

    async def tidy(self) -> None:
        """Remove units and pipes of an earlier agent's sessions; their clients are disconnected."""
        for state in await self._units.all(inside_unit("*", "exec-*")):
            await self._units.stop(state.unit)
        if self._folder.exists():
            shutil.rmtree(self._folder)

    @contextmanager
    def _counted(self, task_id: str) -> Iterator[None]:
        if self._sessions_of[task_id] >= PER_TASK or self._sessions_of.total() >= PER_HOST:
            raise Busy(
                f"task {task_id} has {self._sessions_of[task_id]} sessions, and this host "
                f"{self._sessions_of.total()}",
                hint=(
                    f"end some of them: the maximum is {PER_TASK} for a task and {PER_HOST} "
                    "for a host"
                ),
            )
        self._sessions_of[task_id] += 1
        try:
            yield
        finally:
            self._sessions_of -= Counter([task_id])  # drops the entry with the last session

    async def talk(self, task: TaskRecord, request: SessionRequest, duplex: Duplex) -> None:
        """Run a command until it or the connection ends."""
        try:
            with self._counted(task.task_id):
                end = await self._session(task, request, duplex)
        except TwineError as e:
            end = ExecEnd(problem=e.problem())
        await duplex.send(msgspec.json.encode(end).decode())

    async def _session(self, task: TaskRecord, request: SessionRequest, duplex: Duplex) -> ExecEnd:
        name = f"exec-{secrets.token_hex(4)}"
        unit = inside_unit(task.task_id, name)
        streams = Streams.terminal() if request.tty else Streams.pipes(self._folder / name)
        streams.resize(request.window.rows, request.window.columns)
        command = InsideCommand(
            tuple(request.argv),
            LONGEST_S,
            terminal=streams.path,
            pipes=streams.paths,
            environment=(f"TERM={request.term}",) if request.tty else (),
        )
        session = _Session(self._units, unit, streams, duplex, self._idle_s)
        try:
            await self._units.start(unit, self._inside.properties(task, unit, command))
            end = await session.run()
            return end if isinstance(end, ExecEnd) else _exec_end(end, task.spec)
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
        self._last_data_s = asyncio.get_running_loop().time()
        self._input, self._output = ReceiveQueue(), SendWindow()
        self._unsent = 0
        """Number of chunks of output that were read and not yet sent."""

    async def run(self) -> ExecEnd | UnitState:
        """Return how the command ended, or why the session ended before it."""
        receiving = asyncio.ensure_future(self._receive())
        sending = [asyncio.ensure_future(self._send_output(s)) for s in self._streams.outputs]
        feeding = asyncio.ensure_future(self._forward_input())
        ending = asyncio.ensure_future(self._wait_for_end())
        idling = asyncio.ensure_future(self._wait_until_idle())
        try:
            await asyncio.wait({receiving, ending, idling}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                receiving.result() if receiving.done() else None
                why = (
                    "the client no longer reads" if receiving.done() else "it was idle for too long"
                )
                return ExecEnd(problem=Busy(f"the session was ended: {why}").problem())
            end = ending.result()
            self._streams.close_command_ends()
            await self._drain(sending, {receiving, idling})
            return end
        finally:
            running = [receiving, feeding, ending, idling, *sending]
            for future in running:
                future.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _drain(
        self, sending: Sequence[asyncio.Future[None]], over: set[asyncio.Future[None]]
    ) -> None:
        """Return once the client has all output of the command, or is gone."""
        left = set(sending)
        while left and not any(future.done() for future in over):
            before = self._last_data_s
            _, left = await asyncio.wait(left, timeout=_DRAIN_S)
            if not self._unsent and self._last_data_s == before:
                return

    async def _receive(self) -> None:
        async for frame in self._duplex.frames():
            self._last_data_s = asyncio.get_running_loop().time()
            await self._handle_frame(frame)

    async def _handle_frame(self, frame: Frame) -> None:
        if isinstance(frame, bytes):
            if frame[:1] == bytes([STDIN]):
                await self._input.put(frame[1:])
            elif frame[:1] == bytes([TAKEN]):
                if not self._output.is_acknowledged:
                    await self._duplex.send(taken_frame(self._input.add_read(0)))
                self._output.acknowledge(int.from_bytes(frame[1:], "big"))
            return
        word = decode_json(frame.encode(), ExecWord, "a word of a session")
        assert isinstance(word, ExecWord)
        if word.window is not None:
            self._streams.resize(word.window.rows, word.window.columns)
        if word.end_of_input:
            await self._input.put(None)
        if word.signal is not None:
            await self._units.kill(self._unit, word.signal)

    async def _forward_input(self) -> None:
        """Pass input to the command as it reads; acknowledge it to a client that counts bytes."""
        while (data := await self._input.get()) is not None:
            await self._streams.write(data)
            total = self._input.add_read(len(data))
            if self._output.is_acknowledged:
                await self._duplex.send(taken_frame(total))
        await self._streams.end_input()

    async def _send_output(self, stream: int) -> None:
        while data := await self._streams.read(stream):
            self._last_data_s = asyncio.get_running_loop().time()
            self._unsent += 1
            await self._output.reserve(len(data))
            await self._duplex.send(bytes([stream]) + data)
            self._unsent -= 1

    async def _wait_until_idle(self) -> None:
        clock = asyncio.get_running_loop().time
        while (left_s := self._last_data_s + self._idle_s - clock()) > 0:
            await asyncio.sleep(left_s)

    async def _wait_for_end(self) -> UnitState:
        end = await self._units.until_end(
            self._unit, self._streams.close_command_ends, start_s=_START_S
        )
        if end is None:
            raise Busy(
                "the command has ended with its task, which was stopped, restarted or replaced",
                hint="read the task's state (show), then try again; see journalctl -u "
                + self._unit,
            )
        return end


def _exec_end(end: UnitState, spec: TaskSpec) -> ExecEnd:
    if end.result == "timeout":
        return ExecEnd(problem=Busy(f"the command ran for {LONGEST_S:g} s and was ended").problem())
    if end.exit_code is None and end.exit_signal is None:
        return ExecEnd(problem=SystemdError(f"it could not be run: {end.result}").problem())
    detail = ""
    if end.result == OOM_KILL:
        detail = f"the command was ended: {describe_memory_kill(spec.limits.memory_max_bytes)}"
    if end.exit_code in STEPS:
        detail = f"exit code {end.exit_code} is systemd's for a command that never started: "
        detail += STEPS[end.exit_code]
    return ExecEnd(code=end.exit_code, signal=end.exit_signal, detail=detail)
