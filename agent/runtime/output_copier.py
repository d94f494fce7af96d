"""Copies what tasks write from their pipes to the journal (docs/adr/0196).

The output of a task is a FIFO, `/run/twine/output/ENTITLEMENT/TASK`, which the agent makes and
removes. systemd keeps a reading end of each: while this program is restarted no task is ended by
SIGPIPE, and what was written stays in the pipe. A journal that takes nothing holds tasks up for
`PATIENCE_S`; from then on lines are dropped and counted until it takes some again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections import deque
from pathlib import Path

from agent.machine.notify import all_kept, keep_descriptor, let_go, notify
from agent.runtime.core.output_lines import DROPPED, OutputLines, entry

FOLDER = Path("/run/twine/output")
WAKE = ".wake"
"""Socket that the agent sends a byte to after it made or removed a pipe."""
TOTALS = ".lost"
"""File with the numbers of lines that were lost since boot."""
JOURNAL = "/run/systemd/journal.twine-{}/socket"
INVOCATION = Path("/run/systemd/units")
"""Where systemd links the names of units to their invocation ids; journald reads it, too."""
LOOK_S = 10.0
"""Seconds between two scans of the folder, if no byte came."""
PATIENCE_S = 10.0
RETRY_S = 0.05
TELL_S = 1.0
_READ_BYTES = 65536
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def totals(folder: Path) -> list[int]:
    """Return how many lines were lost since boot: above the rate, not taken by a journal."""
    with contextlib.suppress(OSError, ValueError):
        suppressed, lost = json.loads((folder / TOTALS).read_bytes())
        return [int(suppressed), int(lost)]
    return [0, 0]


class JournalSocket:
    """The journal of one entitlement, and what it has not taken yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._waiting: deque[tuple[OutputPipe, bytes]] = deque()
        self._refuses_since: float | None = None

    def is_full(self) -> bool:
        """Return whether tasks have to wait."""
        return bool(self._waiting)

    def fileno(self) -> int:
        """Return the descriptor that can be waited for, -1 where there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def send(self, pipe: OutputPipe, entries: list[bytes], now: float) -> None:
        """Send entries of a pipe, after those that wait."""
        self._waiting.extend((pipe, data) for data in entries)
        self.flush(now)

    def flush(self, now: float) -> None:
        """Send what waits, or count it as lost once the journal has refused for too long."""
        while self._waiting and self.takes(self._waiting[0][1]):
            self._waiting.popleft()
            self._refuses_since = None
        if not self._waiting:
            return
        if self._refuses_since is None:
            self._refuses_since = now
        if now - self._refuses_since >= PATIENCE_S:
            for pipe, _ in self._waiting:
                pipe.lost += 1
            self._waiting.clear()

    def takes(self, data: bytes) -> bool:
        """Send one datagram, and return whether the journal took it."""
        try:
            if self._socket is None:
                kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
                self._socket = socket.socket(socket.AF_UNIX, kind)
                self._socket.connect(self._path)
            self._socket.send(data)
        except BlockingIOError:
            return False
        except OSError:  # a journald that is started again may have another socket
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close the socket; it is opened again where it is needed."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None


class OutputPipe:
    """The output of one task."""

    def __init__(self, path: Path, fd: int, journal: JournalSocket, units: Path) -> None:
        self.path, self.fd, self.journal = path, fd, journal
        self.inode = os.fstat(fd).st_ino
        self.name = f"{path.parent.name}/{path.name}/{self.inode}"
        """What systemd calls the descriptor that it keeps."""
        self.lost = 0
        """Lines that the journal refused since the last report of lost lines."""
        self._suppressed = 0
        self._told_lost = 0
        self._unit = f"twine-task-{path.name}.service"
        self._invocation = units / f"invocation:{self._unit}"
        self._lines = OutputLines()
        self._fields = b""

    def is_linked(self) -> bool:
        """Return whether the agent still has this pipe."""
        try:
            return self.path.stat().st_ino == self.inode
        except OSError:
            return False

    def copy(self, now: float) -> bool:
        """Pass one piece on; False where all was read and no program has the pipe open."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            self.pass_rest(now)
            self._fields = b""  # what comes next is another run's
            return False
        self._pass(self._lines.take(data, now), now)
        return True

    def pass_rest(self, now: float) -> None:
        """Pass on what was read after the last whole line."""
        self._pass(self._lines.end(now), now)

    def _pass(self, lines: list[bytes], now: float) -> None:
        if lines:
            fields = self._of_run()
            self.journal.send(self, [entry(fields, line) for line in lines], now)

    def open_again(self) -> None:
        """Read through a new descriptor: the old one reports a hang-up from now on."""
        again = os.open(f"/proc/self/fd/{self.fd}", _READ)
        os.close(self.fd)
        self.fd = again

    def owes(self) -> bool:
        """Return whether lines are missing that the log does not report yet."""
        return bool(self.lost or self._suppressed or self._lines.dropped)

    def tell(self, now: float) -> tuple[int, int]:
        """Log how many lines are missing.

        Returns how many lines were lost since the last call: above the rate, or refused.
        """
        more, lost = self._lines.told(now), self.lost - self._told_lost
        self._suppressed += more
        self._told_lost = self.lost
        if not (self._suppressed or self.lost) or self.journal.is_full():
            return more, lost
        said = []
        if self._suppressed:
            said.append(f"Suppressed {self._suppressed} lines: more than 10,000 in 10 s")
        if self.lost:
            said.append(f"Lost {self.lost} lines: the journal took none for 10 s")
        number = self._suppressed + self.lost
        fields = self._of_run() + f"MESSAGE_ID={DROPPED}\nN_DROPPED={number}\n".encode()
        if self.journal.takes(entry(fields, "; ".join(said).encode())):
            self.lost = self._told_lost = self._suppressed = 0
        return more, lost

    def _of_run(self) -> bytes:
        if not self._fields:
            fields = {
                "PRIORITY": "6",
                "SYSLOG_IDENTIFIER": self.path.name,
                "OBJECT_SYSTEMD_UNIT": self._unit,
            }
            with contextlib.suppress(OSError):
                fields["OBJECT_SYSTEMD_INVOCATION_ID"] = os.readlink(self._invocation)
            self._fields = "".join(f"{k}={v}\n" for k, v in fields.items()).encode()
        return self._fields


class OutputCopier:
    """Copies all pipes of a folder to the journals of their entitlements."""

    def __init__(self, folder: Path, journal: str = JOURNAL, units: Path = INVOCATION) -> None:
        self._folder, self._journal, self._units = folder, journal, units
        self._pipes: dict[int, OutputPipe] = {}
        self._journals: dict[str, JournalSocket] = {}
        self._held: list[OutputPipe] = []
        """Pipes that are not read while their journal is full."""
        self._poll = select.poll()
        self._next_look = self._next_tell = 0.0
        self._owing = False
        self.totals = totals(folder)
        (folder / WAKE).unlink(missing_ok=True)
        self._wake = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._wake.bind(str(folder / WAKE))
        self._poll.register(self._wake, select.POLLIN)

    def adopt(self, kept: list[tuple[str, int]]) -> None:
        """Go on with the descriptors that systemd kept, with their names."""
        for name, fd in kept:
            entitlement, _, rest = name.partition("/")
            self._add(self._folder / entitlement / rest.rpartition("/")[0], fd)

    def turn(self) -> None:
        """Wait for words, and pass one piece of each task on."""
        full = [j.fileno() for j in self._journals.values() if j.is_full() and j.fileno() >= 0]
        for fd in full:  # it takes more once journald has read some
            self._poll.register(fd, select.POLLOUT)
        ready = {fd for fd, _ in self._poll.poll(1000 * self._wait_s(time.monotonic()))}
        for fd in full:
            self._poll.unregister(fd)
        now = time.monotonic()
        if self._wake.fileno() in ready or now >= self._next_look:
            self._look(now)
        for fd in ready & self._pipes.keys():
            self._read(self._pipes[fd], now)
        self._go_on(now)
        if self._owing and now >= self._next_tell:
            self._tell(now)

    def wake(self) -> None:
        """Wake a waiting turn, as a byte from the agent does."""
        with contextlib.suppress(BlockingIOError):
            self._wake.sendto(b"x", str(self._folder / WAKE))

    def close(self) -> None:
        """Pass on what was read of lines that go on; their rest is a line of its own."""
        for pipe in self._pipes.values():
            pipe.pass_rest(time.monotonic())
            os.close(pipe.fd)
        for journal in self._journals.values():
            journal.close()
        self._wake.close()

    def _wait_s(self, now: float) -> float:
        if self._held or any(journal.is_full() for journal in self._journals.values()):
            return RETRY_S
        until = min(self._next_look, self._next_tell if self._owing else self._next_look)
        return max(0.0, until - now)

    def _look(self, now: float) -> None:
        """Open pipes that are new, and close those that were removed and read to their end."""
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(16):
                pass
        self._next_look = now + LOOK_S
        have = {pipe.inode for pipe in self._pipes.values()}
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):
                if path.is_fifo() and path.stat().st_ino not in have:
                    pipe = self._add(path, os.open(path, _READ))
                    keep_descriptor(pipe.name, pipe.fd)
        for pipe in [p for p in self._pipes.values() if not p.is_linked()]:
            self._read(pipe, now)

    def _add(self, path: Path, fd: int) -> OutputPipe:
        at = self._journal.format(path.parent.name)
        journal = self._journals.setdefault(at, JournalSocket(at))
        pipe = self._pipes[fd] = OutputPipe(path, fd, journal, self._units)
        self._poll.register(fd, select.POLLIN)
        return pipe

    def _read(self, pipe: OutputPipe, now: float) -> None:
        if pipe.journal.is_full():
            if pipe not in self._held:
                self._held.append(pipe)
                self._poll.unregister(pipe.fd)
            return
        goes_on = pipe.copy(now)
        self._owing |= pipe.owes()
        if goes_on:
            return
        self._poll.unregister(pipe.fd)
        del self._pipes[pipe.fd]
        if pipe.is_linked():
            pipe.open_again()
            self._pipes[pipe.fd] = pipe
            self._poll.register(pipe.fd, select.POLLIN)
            return
        self._count(pipe, now + LOOK_S)
        os.close(pipe.fd)
        let_go(pipe.name)

    def _go_on(self, now: float) -> None:
        full = [journal for journal in self._journals.values() if journal.is_full()]
        for journal in full:
            journal.flush(now)
        if full:
            self._owing |= any(pipe.lost for pipe in self._pipes.values())
        for pipe in [p for p in self._held if not p.journal.is_full()]:
            self._held.remove(pipe)
            self._poll.register(pipe.fd, select.POLLIN)

    def _tell(self, now: float) -> None:
        self._next_tell = now + TELL_S
        for pipe in self._pipes.values():
            if pipe.owes():
                self._count(pipe, now)
        self._owing = any(pipe.owes() for pipe in self._pipes.values())

    def _count(self, pipe: OutputPipe, now: float) -> None:
        before = list(self.totals)
        self.totals = [a + b for a, b in zip(self.totals, pipe.tell(now), strict=True)]
        if self.totals != before:
            new = self._folder / f"{TOTALS}.new"
            new.write_text(json.dumps(self.totals))
            new.replace(self._folder / TOTALS)


def main() -> None:
    """Copy until the service is stopped."""
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    copier = OutputCopier(FOLDER)
    copier.adopt(all_kept())
    ended: list[int] = []

    def end(number: int, _: object) -> None:
        ended.append(number)
        copier.wake()

    signal.signal(signal.SIGTERM, end)
    notify("READY=1")
    while not ended:
        copier.turn()
    copier.close()


if __name__ == "__main__":
    main()
