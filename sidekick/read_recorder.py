"""Records what a `verify` read, so that `look.py` can read it again.

The record exists only if the host matches its profile, and if `look.py` can repeat every read:
files, names, bytes at an offset, answers of network interfaces. Otherwise each check of the timer
is a full `verify`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agent.machine import Completed, Lines
from agent.machine.kernelfs import KernelFs
from sidekick import look
from sidekick.report import ProfileState, Report
from sidekick.setting import Host
from sidekick.state import StateFolder
from wire.errors import KernelFileError, ProgramError


class RecordingFs(KernelFs, frozen=True):
    """The kernel's files; records what is read."""

    plain: KernelFs = msgspec.field(default_factory=KernelFs)
    """The files without the recording."""
    reads: dict[tuple[bytes, bytes], bytes] = msgspec.field(default_factory=dict)
    unrecorded: list[str] = msgspec.field(default_factory=list)
    """Accesses that cannot be recorded."""

    def path(self, path: str) -> Path:
        """Return the path of a file, which the caller reads without a record."""
        self.unrecorded.append(path)
        return self.plain.path(path)

    def exists(self, path: str) -> bool:
        """Return whether the kernel has this attribute."""
        exists = self.plain.exists(path)
        self._record(look.EXISTS, path, b"%d" % exists)
        return exists

    def read(self, path: str) -> str:
        """Return the attribute without surrounding white space."""
        try:
            text = self.plain.read(path)
        except KernelFileError as e:
            if isinstance(e.__cause__, FileNotFoundError | NotADirectoryError):
                self._record(look.MISSING, path, b"")
            else:
                self.unrecorded.append(path)
            raise
        self._record(look.TEXT, path, look.comparable(path.encode(), text.encode()))
        return text

    def find_bytes(self, path: str) -> bytes | None:
        """Return the bytes of a file."""
        data = self.plain.find_bytes(path)
        if data is None:
            self._record(look.MISSING, path, b"")
        else:
            self._record(look.WHOLE, path, data)
        return data

    def find_at(self, path: str, offset: int, size: int) -> bytes | None:
        """Return `size` bytes at an offset of a file."""
        data = self.plain.find_at(path, offset, size)
        if data is None:
            self.unrecorded.append(path)
        else:
            self._record(look.BYTES, f"{path} {offset} {size}", data)
        return data

    def noticed(self, interface: str, command: int, answer: bytes) -> None:
        """Record the answer of a network interface."""
        if answer:
            place = f"{interface} {command} {len(answer) // 4}"
            self.reads[look.ANSWER, place.encode()] = answer
        else:
            self.unrecorded.append(interface)

    def write(self, path: str, value: str) -> None:
        """Set the attribute; the earlier reads are then out of date."""
        self.unrecorded.append(path)
        self.plain.write(path, value)

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder."""
        names = self.plain.names(path)
        self._record(look.NAMES, path, "\n".join(names).encode())
        return names

    def _record(self, kind: bytes, path: str, answer: bytes) -> None:
        place = os.fsencode(self.plain.path(path))
        if self.reads.setdefault((kind, place), answer) != answer:
            self.unrecorded.append(path)  # its value changes between two reads


class _RecordedPrograms:
    """Runs programs; their output cannot be recorded."""

    def __init__(self, host: Host, fs: RecordingFs) -> None:
        self._processes, self._fs = host.processes, fs

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        """Run a program, which `look.py` cannot repeat."""
        self._fs.unrecorded.append(argv[0])
        return self._processes.run(argv, timeout_s=timeout_s, check=check)

    def lines(self, argv: Sequence[str]) -> Lines:
        """Refuse: sidekick reads no program line by line."""
        raise ProgramError(f"sidekick reads no lines of {argv[0]}")


def with_recorder(host: Host) -> tuple[Host, RecordingFs]:
    """Return the host with recording files, and these files."""
    fs = RecordingFs(host.fs.root, host.fs)
    return replace(host, fs=fs, processes=_RecordedPrograms(host, fs)), fs


def store_reads(state: StateFolder, report: Report, fs: RecordingFs) -> bool:
    """Store what was read for a report; return whether `look.py` can read it again.

    The caller holds the lock, and has found neither an interrupted run nor a trial.
    """
    if report.state is not ProfileState.VERIFIED or fs.unrecorded:
        return False
    fs.read("/proc/sys/kernel/random/boot_id")
    stamped = replace(report, at=-1.0, uptime_s=-2.0)
    text = msgspec.json.format(msgspec.json.encode(stamped), indent=2)
    for number, word in ((b"-1.0", look.AT), (b"-2.0", look.UPTIME)):
        key = b'"at"' if word == look.AT else b'"uptime_s"'
        head, found, tail = text.partition(b"\n  %s: %s" % (key, number))
        if not found:
            return False
        text = head + b"\n  %s: %s" % (key, word) + tail
    parts = [look.encode_record(kind, place, answer) for (kind, place), answer in fs.reads.items()]
    parts.append(look.encode_record(look.REPORT, b"", text + b"\n"))
    state.save_reads(look.HEAD + bytes(state.folder) + b"\n" + b"".join(parts))
    return True
