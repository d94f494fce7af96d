"""Copies the output of tasks from their pipes to the journal (docs/adr/0196).

The output of a task goes to a FIFO, `/run/twine/output/ENTITLEMENT/TASK`, which the agent creates
and removes. systemd keeps a reading end of each FIFO. So while this program restarts, no task gets
SIGPIPE and the output stays in the pipe. A journal that accepts nothing blocks tasks for
`PATIENCE_S`; after that, lines are dropped and counted until it accepts some again.
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

from agent.machine.notify import all_stored, drop_descriptor, store_descriptor
from agent.runtime.core.output_lines import DROPPED, OutputLines, entry
from wire.notify import notify

FOLDER = Path("/run/twine/output")
WAKE = ".wake"
"""Socket to which the agent sends a byte after it created or removed a pipe."""
TOTALS = ".lost"
"""File with the numbers of lines lost since boot."""
JOURNAL = "/run/systemd/journal.twine-{}/socket"
INVOCATION = Path("/run/systemd/units")
"""Folder with systemd's links from unit names to invocation ids; journald reads it, too."""
SCAN_S = 10.0
"""Seconds between two scans of the folder, if no byte arrived."""
PATIENCE_S = 10.0
"""How long a journal may accept nothing before its lines are dropped."""
RETRY_S = 0.05
"""Pause between two attempts to send to a full journal."""
REPORT_S = 1.0
"""Seconds between two reports of missing lines."""
REMOVED_S = 60.0
"""How long the copier tries to log the missing lines of a pipe that was removed."""
_READ_BYTES = 65536
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def totals(folder: Path) -> list[int]:
    """Return two counts of lines lost since boot: those above the rate, and those not accepted by
    a journal.
    """
    with contextlib.suppress(OSError, ValueError):
        suppressed, lost = json.loads((folder / TOTALS).read_bytes())
        return [int(suppressed), int(lost)]
    return [0, 0]


class JournalSocket:
    """Connection to the journal of one entitlement, with the entries not accepted yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._waiting: deque[tuple[OutputPipe, bytes]] = deque()
        self._refuses_since: float | None = None

    def is_full(self) -> bool:
        """Return whether tasks have to wait."""
        return bool(self._waiting)

    def fileno(self) -> int:
        """Return the socket's descriptor for `poll`, -1 if it is closed."""
        return -1 if self._socket is None else self._socket.fileno()

    def send(self, pipe: OutputPipe, entries: list[bytes], now: float) -> None:
        """Send entries of a pipe after all waiting entries."""
        self._waiting.extend((pipe, data) for data in entries)
        self.flush(now)

    def flush(self, now: float) -> None:
        """Send waiting entries; count them as lost once the journal refused for `PATIENCE_S`."""
        while self._waiting and self.send_one(self._waiting[0][1]):
            self._waiting.popleft()
            self._refuses_since = None
        if not self._waiting:
            return
        if self._refuses_since is None:
            self._refuses_since = now
        if now - self._refuses_since >= PATIENCE_S:
            self.drop_waiting()

    def drop_waiting(self) -> None:
        """Drop all waiting entries, and count them as lost."""
        for pipe, _ in self._waiting:
            pipe.lost += 1
        self._waiting.clear()

    def send_one(self, data: bytes) -> bool:
        """Send one datagram, and return whether the journal accepted it."""
        try:
            if self._socket is None:
                kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
                self._socket = socket.socket(socket.AF_UNIX, kind)
                self._socket.connect(self._path)
            self._socket.send(data)
        except BlockingIOError:
            return False
        except OSError:  # a restarted journald may have another socket
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close the socket; the next entry opens it again."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None


class OutputPipe:
    """The pipe with the output of one task."""

    def __init__(self, path: Path, fd: int, journal: JournalSocket, units: Path) -> None:
        self.path, self.fd, self.journal = path, fd, journal
        self.inode = os.fstat(fd).st_ino
        self.name = f"{path.parent.name}/{path.name}/{self.inode}"
        """Name of the descriptor in systemd's file descriptor store."""
        self.lost = 0
        """Lines that the journal refused since the last report of lost lines."""
        self._suppressed = 0
        self._counted_lost = 0
        self._unit = f"twine-task-{path.name}.service"
        self._invocation = units / f"invocation:{self._unit}"
        self._lines = OutputLines()
        self._fields = b""

    def is_linked(self) -> bool:
        """Return whether this pipe still exists at its path."""
        try:
            return self.path.stat().st_ino == self.inode
        except OSError:
            return False

    def copy(self, now: float) -> bool:
        """Copy one chunk; False if all output was read and no program has the pipe open."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            self.send_rest(now)
            self._fields = b""  # later output belongs to another run of the task
            return False
        self._send(self._lines.add(data, now), now)
        return True

    def send_rest(self, now: float) -> None:
        """Send the output after the last complete line."""
        self._send(self._lines.end(now), now)

    def _send(self, lines: list[bytes], now: float) -> None:
        if lines:
            fields = self._run_fields()
            self.journal.send(self, [entry(fields, line) for line in lines], now)

    def open_again(self) -> None:
        """Replace the descriptor, because the old one reports a hang-up from now on."""
        again = os.open(f"/proc/self/fd/{self.fd}", _READ)
        os.close(self.fd)
        self.fd = again

    def has_unreported(self) -> bool:
        """Return whether lines are missing that the log does not mention yet."""
        return bool(self.lost or self._suppressed or self._lines.dropped)

    def report_missing(self, now: float) -> tuple[int, int]:
        """Log how many lines are missing.

        Returns the numbers of lines lost since the last call: above the rate, and refused.
        """
        more, lost = self._lines.take_dropped(now), self.lost - self._counted_lost
        self._suppressed += more
        self._counted_lost = self.lost
        if not (self._suppressed or self.lost) or self.journal.is_full():
            return more, lost
        parts = []
        if self._suppressed:
            parts.append(f"Suppressed {self._suppressed} lines: more than 10,000 in 10 s")
        if self.lost:
            parts.append(f"Lost {self.lost} lines: the journal did not accept any for 10 s")
        number = self._suppressed + self.lost
        fields = self._run_fields() + f"MESSAGE_ID={DROPPED}\nN_DROPPED={number}\n".encode()
        if self.journal.send_one(entry(fields, "; ".join(parts).encode())):
            self.lost = self._counted_lost = self._suppressed = 0
        return more, lost

    def _run_fields(self) -> bytes:
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
    """Copies the output from all pipes of a folder to the journals of their entitlements."""

    def __init__(self, folder: Path, journal: str = JOURNAL, units: Path = INVOCATION) -> None:
        self._folder, self._journal, self._units = folder, journal, units
        self._pipes: dict[int, OutputPipe] = {}
        self._journals: dict[str, JournalSocket] = {}
        self._removed: dict[OutputPipe, float] = {}
        """Removed pipes with entries not sent, or missing lines not logged → when to give up."""
        self._paused: list[OutputPipe] = []
        """Pipes that are not read at present because their journal is full."""
        self._poll = select.poll()
        self._next_scan = self._next_report = 0.0
        self._unreported = False
        self.totals = totals(folder)
        (folder / WAKE).unlink(missing_ok=True)
        self._wake = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._wake.bind(str(folder / WAKE))
        self._poll.register(self._wake, select.POLLIN)

    def adopt(self, kept: list[tuple[str, int]]) -> None:
        """Continue with the descriptors that systemd kept, given with their names."""
        for name, fd in kept:
            entitlement, _, rest = name.partition("/")
            self._add(self._folder / entitlement / rest.rpartition("/")[0], fd)

    def run_once(self) -> None:
        """Wait for output, and copy one chunk of each task that has some."""
        full = [j.fileno() for j in self._journals.values() if j.is_full() and j.fileno() >= 0]
        for fd in full:  # writable again once journald has read some entries
            self._poll.register(fd, select.POLLOUT)
        ready = {fd for fd, _ in self._poll.poll(1000 * self._wait_s(time.monotonic()))}
        for fd in full:
            self._poll.unregister(fd)
        now = time.monotonic()
        if self._wake.fileno() in ready or now >= self._next_scan:
            self._scan(now)
        for fd in ready & self._pipes.keys():
            self._read(self._pipes[fd], now)
        self._resume(now)
        if self._unreported and now >= self._next_report:
            self._report(now)

    def wake(self) -> None:
        """Wake a waiting `run_once`, as a byte from the agent does."""
        with contextlib.suppress(BlockingIOError):
            self._wake.sendto(b"x", str(self._folder / WAKE))

    def close(self) -> None:
        """Send incomplete lines and close all pipes; the rest of a line becomes its own entry.

        Entries that a journal does not accept now are counted as lost.
        """
        now = time.monotonic()
        for pipe in self._pipes.values():
            pipe.send_rest(now)
        for journal in self._journals.values():
            journal.flush(now)
            journal.drop_waiting()
        for pipe in self._all_pipes():
            self._add_totals(pipe, now + SCAN_S)
        for pipe in self._pipes.values():
            os.close(pipe.fd)
        for journal in self._journals.values():
            journal.close()
        self._wake.close()

    def _wait_s(self, now: float) -> float:
        if self._paused or any(journal.is_full() for journal in self._journals.values()):
            return RETRY_S
        until = min(self._next_scan, self._next_report if self._unreported else self._next_scan)
        return max(0.0, until - now)

    def _scan(self, now: float) -> None:
        """Open new pipes, and close removed pipes whose output was read completely."""
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(16):
                pass
        self._next_scan = now + SCAN_S
        known = {pipe.inode for pipe in self._pipes.values()}
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):
                if path.is_fifo() and path.stat().st_ino not in known:
                    pipe = self._add(path, os.open(path, _READ))
                    store_descriptor(pipe.name, pipe.fd)
        for pipe in [p for p in self._pipes.values() if not p.is_linked()]:
            self._read(pipe, now)
        self._forget_removed(now)

    def _forget_removed(self, now: float) -> None:
        """Forget removed pipes with nothing left to send, and journals without pipes."""
        for pipe, until in list(self._removed.items()):
            if not pipe.journal.is_full() and (now >= until or not pipe.has_unreported()):
                del self._removed[pipe]
        used = {pipe.journal for pipe in self._all_pipes()}
        for path, journal in list(self._journals.items()):
            if journal not in used:
                journal.close()
                del self._journals[path]

    def _all_pipes(self) -> list[OutputPipe]:
        return [*self._pipes.values(), *self._removed]

    def _add(self, path: Path, fd: int) -> OutputPipe:
        at = self._journal.format(path.parent.name)
        journal = self._journals.setdefault(at, JournalSocket(at))
        pipe = self._pipes[fd] = OutputPipe(path, fd, journal, self._units)
        self._poll.register(fd, select.POLLIN)
        return pipe

    def _read(self, pipe: OutputPipe, now: float) -> None:
        if pipe.journal.is_full():
            if pipe not in self._paused:
                self._paused.append(pipe)
                self._poll.unregister(pipe.fd)
            return
        is_open = pipe.copy(now)
        self._unreported |= pipe.has_unreported()
        if is_open:
            return
        self._poll.unregister(pipe.fd)
        del self._pipes[pipe.fd]
        if pipe.is_linked():
            pipe.open_again()
            self._pipes[pipe.fd] = pipe
            self._poll.register(pipe.fd, select.POLLIN)
            return
        self._add_totals(pipe, now + SCAN_S)
        if pipe.journal.is_full() or pipe.has_unreported():
            self._removed[pipe] = now + REMOVED_S
        os.close(pipe.fd)
        drop_descriptor(pipe.name)

    def _resume(self, now: float) -> None:
        """Send to full journals again, and read the pipes of those that have room."""
        full = [journal for journal in self._journals.values() if journal.is_full()]
        for journal in full:
            journal.flush(now)
        if full:
            self._unreported |= any(pipe.lost for pipe in self._all_pipes())
        for pipe in [p for p in self._paused if not p.journal.is_full()]:
            self._paused.remove(pipe)
            self._poll.register(pipe.fd, select.POLLIN)

    def _report(self, now: float) -> None:
        self._next_report = now + REPORT_S
        for pipe in self._all_pipes():
            if pipe.has_unreported():
                self._add_totals(pipe, now)
        self._unreported = any(pipe.has_unreported() for pipe in self._all_pipes())

    def _add_totals(self, pipe: OutputPipe, now: float) -> None:
        before = list(self.totals)
        self.totals = [a + b for a, b in zip(self.totals, pipe.report_missing(now), strict=True)]
        if self.totals != before:
            new = self._folder / f"{TOTALS}.new"
            with contextlib.suppress(OSError):  # a full /run must not end the copying of output
                new.write_text(json.dumps(self.totals))
                new.replace(self._folder / TOTALS)


def main() -> None:
    """Copy until the service is stopped."""
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    copier = OutputCopier(FOLDER)
    copier.adopt(all_stored())
    ended: list[int] = []

    def end(number: int, _: object) -> None:
        ended.append(number)
        copier.wake()

    signal.signal(signal.SIGTERM, end)
    notify("READY=1")
    while not ended:
        copier.run_once()
    copier.close()


if __name__ == "__main__":
    main()
