"""The past runs on this host: one line for each run, the newest last, old lines dropped.

The journal exists only during a run. The history is for users, and for the duration of switches.
Sidekick itself does not need it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from sidekick.report import ApplyOutcome, ProfileState, Report
from sidekick.state import StateFolder
from wire.errors import Forbidden, HostError

FILE = "history.jsonl"
KEPT = 500
"""Runs that are kept: about two years for a machine that changes its profile every other day."""
_CHANGED = {
    ApplyOutcome.APPLIED,
    ApplyOutcome.UNDONE,
    ApplyOutcome.PARTIAL,
    ApplyOutcome.PENDING_REBOOT,
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    at: float
    """Seconds since 1970."""
    command: str
    name: str
    state: ProfileState
    rolled_back: bool = False
    detail: str = ""
    took_ms: float = 0.0
    changed: dict[str, float] = {}
    """The written settings, each with its duration in ms."""


def entry_of(report: Report) -> Entry:
    """Return the history entry of a run."""
    return Entry(
        at=report.at,
        command=report.command,
        name=report.name,
        state=report.state,
        rolled_back=report.rolled_back,
        detail=report.detail,
        took_ms=report.took_ms,
        changed={
            s.setting: s.took_ms for s in report.settings if s.outcome in _CHANGED and s.took_ms
        },
    )


def append_run(state: StateFolder, report: Report) -> None:
    """Append a run to the history. A failing disk or a damaged line does not fail the run."""
    path = _path(state)
    with contextlib.suppress(HostError, OSError):
        data = path.read_bytes() if path.exists() else b""
        lines = data.decode(errors="replace").removesuffix("\n").split("\n")
        line = msgspec.json.encode(entry_of(report)).decode()
        is_torn = not data.endswith(b"\n") and data != b""
        if len(lines) < 2 * KEPT and not is_torn:
            state.disk.append(path, line)
        else:
            state.disk.write(path, "\n".join([*lines[-KEPT + 1 :], line]) + "\n")


def read_history(state: StateFolder) -> list[Entry]:
    """Return the recorded runs, the newest last; a damaged line is left out."""
    path, entries = _path(state), []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except PermissionError as e:
        raise Forbidden(f"cannot read {path}: {e.strerror}", hint="run as root") from e
    except OSError as e:
        raise HostError(f"cannot read {path}: {e.strerror}") from e
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            entries.append(msgspec.json.decode(line, type=Entry))
    return entries[-KEPT:]


def _path(state: StateFolder) -> Path:
    return state.folder / FILE
