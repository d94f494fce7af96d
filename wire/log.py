"""Logging of all programs: a sentence for people, and fields for programs.

`configure` sends records to journald with native fields where journald listens, to stderr
as JSON lines, and as plain text on a terminal. Where a person reads
(a terminal, `journalctl -u`), the sentence contains the fields, see `one_line`.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

_JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
_PLAIN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_WHY = ("why", "reason")
"""Fields that hold a sentence of their own."""
_SYSLOG_LEVELS = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return what was passed as `extra` to the logging call."""
    return {k: v for k, v in vars(record).items() if k not in _PLAIN_ATTRIBUTES}


def one_line(record: logging.LogRecord) -> str:
    """Return a record as one line for a person: what happened, to what, why.

    Fields whose value the message already contains are left out.
    """
    message, fields = record.getMessage(), fields_of(record)
    why = [str(fields.pop(name)) for name in _WHY if name in fields]
    shown = [f"{k.replace('_', ' ')} {v}" for k, v in fields.items() if str(v) not in message]
    about = f" ({', '.join(shown)})" if shown else ""
    return message + about + "".join(f": {w}" for w in why if w and w not in message)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        import json  # here, because most commands log nothing

        return json.dumps(line, default=str)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{record.levelname.lower():7} {one_line(record)}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Journald(logging.Handler):
    """Sends records over journald's native protocol, so that fields can be queried.

    Source of the format: systemd, docs/JOURNAL_NATIVE_PROTOCOL.md.
    """

    def __init__(self, identifier: str) -> None:
        import socket  # a command on a terminal needs none

        super().__init__()
        self._identifier = identifier
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._lost = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        message = one_line(record)
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        fields = {
            "MESSAGE": message,
            "PRIORITY": _SYSLOG_LEVELS[record.levelname],
            "SYSLOG_IDENTIFIER": self._identifier,
            "LOGGER": record.name,
        }
        fields |= {f"TWINE_{k.upper()}": v for k, v in fields_of(record).items()}
        if self._lost:
            fields["TWINE_LINES_LOST"] = self._lost
            fields["MESSAGE"] = f"{message} [{self._lost} lines before this one are lost]"
        try:
            self._socket.sendto(_journal_datagram(fields), str(_JOURNAL_SOCKET))
            self._lost = 0
        except BlockingIOError:
            self._lost += 1  # a journald that hangs must not block the event loop
        except OSError:
            self.handleError(record)


def _journal_datagram(fields: dict[str, object]) -> bytes:
    out = bytearray()
    for key, value in fields.items():
        data = str(value).encode("utf-8", "replace")
        if b"\n" in data:
            out += key.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
        else:
            out += key.encode() + b"=" + data + b"\n"
    return bytes(out)


def configure(program: str, level: str = "info") -> None:
    """Send all log records of this process to journald, or to stderr as JSON or plain text."""
    handler: logging.Handler
    if os.environ.get("JOURNAL_STREAM") and _JOURNAL_SOCKET.exists():
        handler = _Journald(program)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Plain() if sys.stderr.isatty() else _Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.access").setLevel("WARNING")
