"""The user's side of a session: this terminal becomes the one inside the task."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from agent.api.exec import STDERR, STDIN, STDOUT, ExecEnd, ExecWord, Window
from agent.errors import TwineError, Unreachable, from_problem
from agent.wire.duplex import Duplex

_CHUNK = 32 << 10
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that are sent to the command where there is no terminal to do it."""


def window() -> Window:
    """Return the size of this terminal."""
    size = shutil.get_terminal_size()
    return Window(rows=max(1, size.lines), columns=max(1, size.columns))


def is_terminal() -> bool:
    """Return whether somebody sits before input and output."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def _raw(wanted: bool) -> Iterator[None]:
    """Pass on each key as it is; the terminal is as before afterwards."""
    if not wanted or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


async def attend(duplex: Duplex, *, terminal: bool, with_input: bool) -> int:
    """Carry input and output of a session; return the exit code for the shell.

    128 and the signal's number where a signal ended the command, like a shell. Raises what
    kept the command from running.
    """
    loop = asyncio.get_running_loop()
    words: set[asyncio.Task[None]] = set()

    def say(word: ExecWord) -> None:
        sending = asyncio.ensure_future(duplex.send(msgspec.json.encode(word).decode()))
        words.add(sending)
        sending.add_done_callback(words.discard)

    def send_signal(number: int) -> None:
        say(ExecWord(signal=number))

    with _raw(terminal):
        if terminal:
            loop.add_signal_handler(signal.SIGWINCH, lambda: say(ExecWord(window=window())))
        else:
            for number in _PASSED_ON:
                loop.add_signal_handler(number, send_signal, int(number))
        typing = asyncio.ensure_future(_type(duplex)) if with_input else None
        if typing is None and not terminal:
            say(ExecWord(end_of_input=True))
        try:
            end = await _read(duplex)
        finally:
            if typing is not None:
                typing.cancel()
            for number in (signal.SIGWINCH, *_PASSED_ON):
                loop.remove_signal_handler(number)
    if end.detail:
        sys.stderr.write(f"{end.detail}\n")
    return _code(end)


async def _type(duplex: Duplex) -> None:
    """Send what is typed or piped in, and that it is over."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[bytes](4)

    def pump() -> None:
        while True:
            try:
                data = os.read(0, _CHUNK)
            except OSError:
                data = b""
            with suppress(RuntimeError, asyncio.CancelledError):
                asyncio.run_coroutine_threadsafe(lines.put(data), loop).result()
            if not data or loop.is_closed():
                return

    threading.Thread(target=pump, name="stdin", daemon=True).start()
    while data := await lines.get():
        await duplex.send(bytes([STDIN]) + data)
    await duplex.send(msgspec.json.encode(ExecWord(end_of_input=True)).decode())


async def _read(duplex: Duplex) -> ExecEnd:
    """Write what comes; return the last word.

    Where nobody reads here any more, as before `head`, that is the end, and SIGPIPE its cause.
    """
    async for frame in duplex.frames():
        if isinstance(frame, str):
            return msgspec.json.decode(frame, type=ExecEnd)
        target = {STDOUT: 1, STDERR: 2}.get(frame[0] if frame else -1)
        data = frame[1:]
        try:
            while target is not None and data:
                data = data[os.write(target, data) :]
        except BrokenPipeError:
            return ExecEnd(signal="SIGPIPE")
    raise Unreachable("the session broke off before the command ended")


def _code(end: ExecEnd) -> int:
    if end.problem is not None:
        error: TwineError = from_problem(end.problem)
        raise error
    if end.signal is not None:
        return 128 + getattr(signal, end.signal, 0)
    return end.code or 0
