"""The timer's check of an unchanged host: reads again what the last `verify` read.

The result of `verify` depends only on what it reads. If everything reads the same, the result is
the same, and only the times of the report change. If anything differs, or no record exists (any
other run of sidekick removes it), this process runs the full `verify`.

This is a script for a bare interpreter (`python -I -S look.py`). It imports only built-in modules,
because imports from the disk would take most of its time. `read_recorder.py` writes the record:

    look 1 STATE                         the folder of sidekick's state
    KIND LENGTH LENGTH                   kinds below, then the bytes of place and of answer
"""

import os
import sys
import time

HEAD = b"look 1 "
READS, STATUS, LOCK = "seen", "status.json", "lock"
AT, UPTIME = b"@at@", b"@uptime@"
"""Placeholders in the kept report for its two times."""
TEXT, MISSING, EXISTS, NAMES, REPORT = b"t", b"m", b"e", b"n", b"r"
WHOLE, BYTES, ANSWER = b"w", b"b", b"i"
"""Kinds of records: a file's text; no such file; whether a file exists; names in a folder; the
report to renew; all bytes of a file; bytes at an offset; the answer of a network interface."""
VOLATILE_LINES = (b"cpu MHz", b"bogomips")
"""Lines of /proc/cpuinfo that change all the time."""
COMPARED_LINES = (b"MemTotal", b"HugePages_Total")
"""Lines of /proc/meminfo that are compared. Free memory limits what can be set; it does not change
what is set."""


def decode_records(data: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """Return kind, place and answer of each record. Raises `ValueError` for a damaged file."""
    records, at = [], data.index(b"\n") + 1
    while at < len(data):
        end = data.index(b"\n", at)
        kind, *lengths = data[at:end].split()
        place, answer = map(int, lengths)
        at = end + 1 + place + answer
        if at > len(data):
            raise ValueError("torn")
        records.append((kind, data[end + 1 : at - answer], data[at - answer : at]))
    return records


def encode_record(kind: bytes, place: bytes, answer: bytes) -> bytes:
    """Return one record in the format of the file."""
    return b"%s %d %d\n%s%s" % (kind, len(place), len(answer), place, answer)


def read_again(kind: bytes, place: bytes) -> bytes | None:
    """Return what the place of a record reads now; None for any error except a missing file."""
    if kind == NAMES:
        try:
            return b"\n".join(sorted(os.listdir(place)))
        except (FileNotFoundError, NotADirectoryError):
            return b""
    if kind == EXISTS:
        return b"%d" % os.path.exists(place)
    if kind == ANSWER:
        return _query_interface(place)
    offset, size = 0, 1 << 20
    if kind == BYTES:
        place, first, last = place.rsplit(b" ", 2)
        offset, size = int(first), int(last)
    try:
        fd = os.open(place, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return b"" if kind == MISSING else None
    try:
        if kind == BYTES:
            return os.pread(fd, size, offset)
        data = _read_all(fd, size)
        return data if kind == WHOLE else None if kind == MISSING else comparable(place, data)
    finally:
        os.close(fd)


def comparable(place: bytes, text: bytes) -> bytes:
    """Return a file's text for the comparison: stripped, and without lines that always change."""
    if place.endswith(b"/proc/cpuinfo"):
        text = b"\n".join(line for line in text.splitlines() if not line.startswith(VOLATILE_LINES))
    if place.endswith(b"/proc/meminfo"):
        text = b"\n".join(line for line in text.splitlines() if line.startswith(COMPARED_LINES))
    return text.strip()


def _read_all(fd: int, size: int) -> bytes:
    data = part = os.read(fd, size)
    while part:
        part = os.read(fd, size)
        data += part
    return data


def _query_interface(place: bytes) -> bytes:
    """Query a network interface (`SIOCETHTOOL`); the place is `NIC COMMAND WORDS`."""
    import _socket
    import array
    import fcntl
    import struct

    nic, command, words = place.split()
    data = array.array("I", [int(command), *[0] * int(words)])
    request = struct.pack("16sP", nic, data.buffer_info()[0])
    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        fcntl.ioctl(sock.fileno(), 0x8946, request)
    except OSError:
        return b""
    finally:
        sock.close()
    return data[1:].tobytes()


def is_unchanged(folder: str) -> bool:
    """Return whether everything kept is unchanged; if so, renew the report."""
    import fcntl

    try:
        lock = os.open(f"{folder}/{LOCK}", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(f"{folder}/{READS}", "rb", buffering=0) as file:
            data = file.read()
        if not data.startswith(HEAD):
            return False
        *reads, (kind, _, report) = decode_records(data)
        if kind != REPORT or any(read_again(k, place) != answer for k, place, answer in reads):
            return False
        _renew_report(folder, report)
    except (OSError, ValueError):
        return False
    finally:
        os.close(lock)
    return True


def _renew_report(folder: str, report: bytes) -> None:
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    text = report.replace(AT, b"%.3f" % time.time()).replace(UPTIME, b"%.3f" % uptime_s)
    with open(f"{folder}/{STATUS}.new", "wb", buffering=0) as file:
        file.write(text)
        os.fsync(file.fileno())
    os.rename(f"{folder}/{STATUS}.new", f"{folder}/{STATUS}")


if __name__ == "__main__":
    _folder, _program, *_words = sys.argv[1:]
    if not is_unchanged(_folder):
        os.execv(_program, [_program, *_words])
