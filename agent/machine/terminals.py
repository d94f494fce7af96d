"""Input and output of a command: a pseudo terminal, or three named pipes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Sequence
from pathlib import Path

from wire.errors import HostError

_CHUNK = 64 << 10


class Streams:
    """Descriptors connected to one command; made by `terminal` or `pipes`.

    Until `close_command_ends` this process holds the command's ends open, so that readers wait for
    the command.
    """

    def __init__(self) -> None:
        self.path = ""
        """Path of the terminal; empty with pipes."""
        self.paths: tuple[str, str, str] | None = None
        self.outputs: dict[int, int] = {}
        """Descriptor to read from, by stream: 1 output, 2 error."""
        self._input: int | None = None
        self._command_ends: list[int] = []
        self._folder: Path | None = None

    @classmethod
    def terminal(cls) -> Streams:
        """Return the streams of a new pseudo terminal. Raises `HostError` if there is none."""
        streams = cls()
        try:
            master, slave = os.openpty()
        except OSError as e:
            raise HostError(f"a terminal cannot be opened: {e.strerror}") from e
        os.set_blocking(master, False)
        streams.path = os.ttyname(slave)
        streams.outputs, streams._input, streams._command_ends = {1: master}, master, [slave]
        return streams

    @classmethod
    def pipes(cls, folder: Path) -> Streams:
        """Return the streams of three named pipes, made in a folder that `close` removes.

        Raises `HostError` if they cannot be made, for instance for lack of descriptors.
        """
        streams = cls()
        try:
            folder.mkdir(mode=0o700, parents=True)
            streams._folder = folder
            streams._open([folder / name for name in ("in", "out", "err")])
        except OSError as e:
            streams.close()
            raise HostError(f"pipes for a command cannot be made: {e.strerror}") from e
        return streams

    def _open(self, paths: Sequence[Path]) -> None:
        for path in paths:
            os.mkfifo(path, 0o600)
        for path in paths:
            for access in (os.O_RDONLY, os.O_WRONLY):
                # Held at once, so that `close` finds it if the next one cannot be opened.
                self._command_ends.append(os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC))
        reader, writer, output, its_writer, errors, their_writer = self._command_ends
        # Opening a pipe for reading blocks forever once the pipe has lost its writer.
        again = os.dup(writer)
        self._command_ends = [reader, its_writer, their_writer, again]
        self.outputs, self._input = {1: output, 2: errors}, writer
        self.paths = (str(paths[0]), str(paths[1]), str(paths[2]))

    def close_command_ends(self) -> None:
        """Close our copies of the command's ends: it has opened them, or never will."""
        for fd in self._command_ends:
            os.close(fd)
        self._command_ends = []

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal; does nothing for pipes."""
        if self.path and self._input is not None:
            fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def read(self, stream: int) -> bytes:
        """Return the next output of the command; empty at its end."""
        fd = self.outputs[stream]
        while True:
            try:
                return os.read(fd, _CHUNK)
            except BlockingIOError:
                await _ready(fd, write=False)
            except OSError:
                return b""  # EIO: no process holds the terminal any more

    async def write(self, data: bytes) -> None:
        """Pass input to the command; it is lost if the command has stopped reading."""
        while data and self._input is not None:
            try:
                data = data[os.write(self._input, data) :]
            except BlockingIOError:
                await _ready(self._input, write=True)
            except OSError:
                return

    async def end_input(self) -> None:
        """End the input: close the pipe, or send ^D to a terminal."""
        if self.path:
            await self.write(b"\x04")
        elif self._input is not None:
            os.close(self._input)
            self._input = None

    def close(self) -> None:
        """Close everything; a terminal hangs up."""
        self.close_command_ends()
        ends = {*self.outputs.values(), *([self._input] if self._input is not None else [])}
        for fd in ends:
            os.close(fd)
        self.outputs, self._input = {}, None
        if self._folder is not None:
            for path in self._folder.iterdir():
                path.unlink()
            self._folder.rmdir()


async def _ready(fd: int, *, write: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    (loop.add_writer if write else loop.add_reader)(fd, set_ready)
    try:
        await ready
    finally:
        (loop.remove_writer if write else loop.remove_reader)(fd)
