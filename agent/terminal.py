"""The client's side of a session: connects this terminal with a command inside a task."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from queue import SimpleQueue

import msgspec

from agent.api.exec import STDERR, STDIN, STDOUT, TAKEN, ExecEnd, ExecWord, Window, taken_frame
from wire.duplex import Duplex
from wire.errors import HostError, TwineError, Unreachable, from_problem
from wire.flow import ReceiveQueue, SendWindow

_CHUNK = 32 << 10
_SIGNAL = re.compile(r"SIG(?:(?P<number>\d+)|(?P<name>[A-Z0-9]+)(?:\+(?P<above>\d+))?)")
"""Names of signals as agents report them: SIGKILL, SIGRTMIN+6, SIG32."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that are forwarded to the command if no terminal sends them."""


def window() -> Window:
    """Return the size of this terminal."""
    size = shutil.get_terminal_size()
    return Window(rows=max(1, size.lines), columns=max(1, size.columns))


def is_terminal() -> bool:
    """Return whether input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def _raw(wanted: bool) -> Iterator[None]:
    """Switch the terminal to raw mode, if wanted, and restore it afterwards."""
    if not wanted or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


async def run_session(duplex: Duplex, *, terminal: bool, with_input: bool) -> int:
    """Transfer input and output of a session; return the exit code for the shell.

    If a signal ended the command, the exit code is 128 plus its number, as in a shell. Raises the
    error that prevented the command from running.
    """
    loop = asyncio.get_running_loop()
    messages: set[asyncio.Task[None]] = set()
    sending, shown = SendWindow(), ReceiveQueue()

    def send_message(word: ExecWord) -> None:
        sending = asyncio.ensure_future(duplex.send(msgspec.json.encode(word).decode()))
        messages.add(sending)
        sending.add_done_callback(messages.discard)

    def send_signal(number: int) -> None:
        send_message(ExecWord(signal=number))

    with _raw(terminal):
        if terminal:
            loop.add_signal_handler(
                signal.SIGWINCH, lambda: send_message(ExecWord(window=window()))
            )
        else:
            for number in _PASSED_ON:
                loop.add_signal_handler(number, send_signal, int(number))
        typing = asyncio.ensure_future(_send_input(duplex, sending)) if with_input else None
        if typing is None and not terminal:
            send_message(ExecWord(end_of_input=True))
        showing = asyncio.ensure_future(_write_output(duplex, shown))
        receiving = asyncio.ensure_future(_receive(duplex, shown, sending))
        try:
            await asyncio.wait({receiving, showing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for number in (signal.SIGWINCH, *_PASSED_ON):
                loop.remove_signal_handler(number)
        try:
            end = await _outcome(receiving, showing, shown)
        finally:
            for future in (typing, receiving, showing):
                if future is not None:
                    future.cancel()
    if end.detail:
        sys.stderr.write(f"{end.detail}\n")
    return _exit_code(end)


async def _outcome(
    receiving: asyncio.Future[ExecEnd], showing: asyncio.Future[None], shown: ReceiveQueue
) -> ExecEnd:
    """Return the session's last message, after all earlier output is written.

    If the reader of this program's output has ended (`| head`), the result is an end by SIGPIPE.
    """
    if receiving.done():
        await shown.put(None)
    try:
        await showing
    except BrokenPipeError:
        return ExecEnd(signal="SIGPIPE")
    except OSError as e:
        raise HostError(f"cannot write the command's output here: {e.strerror}") from e
    return await receiving


async def _send_input(duplex: Duplex, sending: SendWindow) -> None:
    """Send standard input as fast as the command reads it, then the end of input."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[bytes](4)

    def pump() -> None:
        while True:
            try:
                data = os.read(0, _CHUNK)
            except OSError:
                data = b""
            try:
                asyncio.run_coroutine_threadsafe(lines.put(data), loop).result()
            except (RuntimeError, CancelledError):
                return  # the session is over
            if not data:
                return

    threading.Thread(target=pump, name="stdin", daemon=True).start()
    while data := await lines.get():
        await sending.reserve(len(data))
        await duplex.send(bytes([STDIN]) + data)
    await duplex.send(msgspec.json.encode(ExecWord(end_of_input=True)).decode())


async def _receive(duplex: Duplex, shown: ReceiveQueue, sending: SendWindow) -> ExecEnd:
    """Pass received output to `_write_output`; return the session's last message."""
    async for frame in duplex.frames():
        if isinstance(frame, str):
            return msgspec.json.decode(frame, type=ExecEnd)
        if frame[:1] == bytes([TAKEN]):
            sending.acknowledge(int.from_bytes(frame[1:], "big"))
        else:
            await shown.put(frame)
    raise Unreachable("the session ended before the command did")


async def _write_output(duplex: Duplex, shown: ReceiveQueue) -> None:
    """Write the received output, and report the number of written bytes to the agent."""
    output = _Output()
    await duplex.send(taken_frame(0))
    while (frame := await shown.get()) is not None:
        target = {STDOUT: 1, STDERR: 2}.get(frame[0] if frame else -1)
        if target is not None:
            await output.write(target, frame[1:])
            await duplex.send(taken_frame(shown.add_read(len(frame) - 1)))


class _Output:
    """Writes in a thread of its own, so that a slow reader does not block the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[int, bytes, asyncio.Future[None]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="output", daemon=True).start()

    async def write(self, target: int, data: bytes) -> None:
        """Return once all data is written; raise `OSError`."""
        written: asyncio.Future[None] = self._loop.create_future()
        self._queue.put((target, data, written))
        await written

    def _serve(self) -> None:
        while True:
            target, data, written = self._queue.get()
            failed: OSError | None = None
            try:
                while data:
                    data = data[os.write(target, data) :]
            except OSError as e:
                failed = e
            try:
                self._loop.call_soon_threadsafe(_settle, written, failed)
            except RuntimeError:
                return  # the session is over


def _settle(written: asyncio.Future[None], failed: OSError | None) -> None:
    if written.done():
        return
    if failed is None:
        written.set_result(None)
    else:
        written.set_exception(failed)


def _exit_code(end: ExecEnd) -> int:
    if end.problem is not None:
        error: TwineError = from_problem(end.problem)
        raise error
    if end.signal is not None:
        return 128 + _signal_number(end.signal)
    return end.code or 0


def _signal_number(name: str) -> int:
    """Return the number of a signal, 0 for an unknown name."""
    found = _SIGNAL.fullmatch(name)
    if found is None:
        return 0
    if found["number"]:
        return int(found["number"])
    known = signal.Signals.__members__.get(f"SIG{found['name']}")
    return 0 if known is None else known + int(found["above"] or 0)
